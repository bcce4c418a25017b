"""Timing and memory of one run: ratios to a plain forward pass measured side by side, and JSON with what made them."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lapwing

RESULTS = Path(__file__).parent / "results"


def seconds(
    function: Callable[[], Any],
    reference: Callable[[], Any],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Times a function and its reference in turns; returns the fastest run of each.

    The fastest of many is what the machine can do; medians measure its other tenants. `time.process_time` as the clock
    leaves out what they take of a CPU.
    """
    best = [float("inf"), float("inf")]
    for _ in range(2):
        function(), reference()
    for _ in range(rounds):
        for i, call in enumerate((function, reference, reference, reference)):
            start = clock()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[min(i, 1)] = min(best[min(i, 1)], clock() - start)
    return best[0], best[1]


def ratio(
    function: Callable[[], Any],
    reference: Callable[[], Any],
    rounds: int = 30,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Returns milliseconds of both and their ratio."""
    mine, theirs = seconds(function, reference, rounds, clock)
    return {"milliseconds": 1e3 * mine, "reference_milliseconds": 1e3 * theirs, "ratio": mine / theirs}


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


def write(name: str, results: dict[str, Any], seed: int, folder: Path = RESULTS, **versions: str) -> Path:
    """Writes results with versions, commit, seed and device to `benchmarks/results/name.json`, or to another folder.

    Further versions are those of other packages that were measured.
    """
    folder.mkdir(exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    header = {
        "lapwing": lapwing.__version__,
        "torch": torch.__version__,
        **versions,
        "commit": commit(),
        "python": platform.python_version(),
        "device": device,
        "machine": platform.machine(),
        "seed": seed,
        "date": time.strftime("%Y-%m-%d"),
    }
    path = folder / f"{name}.json"
    path.write_text(compact({**header, "results": results}))
    return path


def write_studies(
    name: str, study: Callable[[str], dict[str, dict[str, float]]], cases: Iterable[str], seed: int
) -> None:
    """Runs a study of each case on one thread, prints its rows, and writes all results: case -> row -> numbers."""
    torch.set_num_threads(1)
    results = {}
    for case in cases:
        results[case] = study(case)
        for key, row in results[case].items():
            print(case, key, {k: round(v, 3) for k, v in row.items()}, flush=True)
    print(write(name, results, seed))


def commit() -> str:
    """Returns the commit of the checkout, with a plus if its code differs, or an empty string outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[1]), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "lapwing", "benchmarks/*.py", "papers/*.py")
    return git("rev-parse", "--short", "HEAD") + "+" * bool(changed)


def compact(values: Any) -> str:
    """Returns JSON with six digits a number and what nests no further on one line."""
    text = json.dumps(_rounded(values), indent=1)
    return re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda match: " ".join(match.group().split()), text) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, (list, tuple)) else value
