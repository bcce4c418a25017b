"""Time and memory: seconds of calls in turns, ratios to a plain forward pass measured next to them, live tensors."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = Callable[[], float]


def timed(call: Callable[[], Any], clock: Clock = time.perf_counter) -> tuple[Any, float]:
    """Returns what a call returns, and its seconds, on a GPU after its work is done."""
    _wait()
    start = clock()
    out = call()
    _wait()
    return out, clock() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def least(call: Callable[[], Any], rounds: int = 3, limit: float = 20.0) -> tuple[Any, float]:
    """Returns what a call returns, and its least CPU seconds in some rounds, fewer if they exceed a limit."""
    times: list[float] = []
    while len(times) < rounds and sum(times) < limit:
        out, seconds = timed(call, time.process_time)
        times.append(seconds)
    return out, min(times)


def fastest(calls: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Returns the least CPU time of each call in milliseconds, run in turns for about as long as given."""
    best = [float("inf")] * len(calls)
    for call in calls:
        call(), call()
    end, rounds = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or rounds < 5:
        rounds += 1
        for place, call in enumerate(calls):
            start = time.process_time_ns()
            call()
            best[place] = min(best[place], (time.process_time_ns() - start) / 1e6)
    return best


def ratio(
    function: Callable[[], Any], reference: Callable[[], Any], rounds: int = 30, clock: Clock = time.perf_counter
) -> dict[str, float]:
    """Times a function and its reference in turns; returns the milliseconds of both and their ratio.

    The fastest of many is what the machine can do; medians measure its other tenants. `time.process_time` as the clock
    leaves out what they take of a CPU.
    """
    best = [float("inf"), float("inf")]
    for _ in range(2):
        function(), reference()
    for _ in range(rounds):
        for i, call in enumerate((function, reference, reference, reference)):
            best[min(i, 1)] = min(best[min(i, 1)], timed(call, clock)[1])
    return {"milliseconds": 1e3 * best[0], "reference_milliseconds": 1e3 * best[1], "ratio": best[0] / best[1]}


class LiveBytes(TorchDispatchMode):
    """Adds up the bytes of all tensors made within the block while they live; `.peak` is the most at once."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import it, for seconds

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, weakref.ref] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        arguments = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in arguments:
                self._note(leaf.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or storage.device.type == "meta":  # a tensor of a trace has no memory
            return

        def free(_: Any) -> None:
            self._known.pop(key, None)
            self.now -= size

        self._known[key] = weakref.ref(storage, free)
        self.now += size
        self.peak = max(self.peak, self.now)
