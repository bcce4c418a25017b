"""Ctrl-C where a context manager opens or closes: the network, torch and lapwing's lock are as they were.

A signal's exception comes where a function of Python begins, or one of C has ended. A profile function raises one at
each such place in turn.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import lapwing as lw
from lapwing.network.eager import LOCK
from tests.network.test_untouched import assert_same, snapshot, switches

FILES = (
    "contextlib.py", "torch/overrides.py", "torch/autograd/grad_mode.py", "torch/autograd/forward_ad.py",
    "torch/_vmap_internals.py", "torch/_functorch/eager_transforms.py", "torch/_functorch/vmap.py",
    "torch/nn/utils/stateless.py", "torch/utils/_python_dispatch.py", "torch/amp/autocast_mode.py",
    "lapwing/network/eager.py",
)  # fmt: skip
"""Where context managers are."""

MOST = 200
"""So many places are tried of an action at most, evenly spread."""


class Own(nn.Module):
    """Parameters of no known layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Seen(TorchFunctionMode):
    """A mode of the caller's."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return function(*args, **(kwargs or {}))


class Interrupter:
    """A profile that counts where functions of `FILES` begin, or come back from C, and raises at one such place."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.count = at, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        generator = frame.f_code.co_flags & inspect.CO_GENERATOR  # which a profile would end without its handlers
        if not frame.f_code.co_filename.endswith(FILES) or (event != "c_return" and (event != "call" or generator)):
            return
        self.count += 1
        if self.count == self.at:
            sys.setprofile(None)
            raise KeyboardInterrupt


def profiled(action: Callable[[], Any], profile: Interrupter) -> None:
    former = sys.getprofile()
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(former)


def interruptions(model: nn.Module, action: Callable[[], Any]) -> None:
    """Interrupts the action at each place, and compares everything while the exception and its traceback live."""
    action()  # what is imported and traced once
    places = Interrupter()
    profiled(action, places)
    assert places.count > 10
    before, torch_before = snapshot(model), switches()
    for place in range(1, places.count + 1, -(-places.count // MOST)):
        caught = None
        try:
            profiled(action, Interrupter(place))
        except KeyboardInterrupt as error:
            caught = error
        assert caught is not None, place
        where = "".join(traceback.format_tb(caught.__traceback__)[-2:])
        assert_same(torch_before, switches(), where)
        assert_same(before, snapshot(model), where)
        assert not LOCK._is_owned(), where
    action()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).eval()


X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1, 1, 0])
ALL = lw.matching("*")

ACTIONS: dict[str, tuple[Callable[[], nn.Module], lw.Method, Any, Callable[[lw.Posterior], Any]]] = {
    "last layer": (network, lw.Full(), lw.last_layer, lambda posterior: posterior.predict(X)),
    "all weights": (network, lw.KFAC(), ALL, lambda posterior: posterior.predict(X)),
    "draws": (network, lw.Diagonal(), ALL, lambda posterior: posterior.predict(X, via=lw.MonteCarlo(2))),
    "streamlined": (network, lw.Diagonal(), ALL, lambda posterior: posterior.predict(X, via=lw.Streamlined())),
    "any parameters": (Own, lw.ELLA(rank=2, rows=4), ALL, lambda posterior: posterior.predict(X)),
}
"""Name -> network, method, its parameters and what is interrupted."""


@pytest.mark.parametrize("name", ACTIONS)
def test_predictions(name: str) -> None:
    build, method, params, predict = ACTIONS[name]
    torch.manual_seed(0)
    model = build()
    posterior = lw.fit(model, [(X, Y)], method, params=params, progress=False)
    interruptions(model, lambda: predict(posterior))


def test_comparisons_and_scale_factors() -> None:
    model = network()
    posterior = lw.fit(model, [(X, Y)], lw.Diagonal(), params=ALL, progress=False)
    interruptions(model, lambda: lw.compare({"Diagonal": posterior, "network": model}, [(X, Y)], progress=False))
    interruptions(model, lambda: lw.scale_factor(posterior, [(X, Y)], lw.Linearized(), points=5))


@pytest.mark.parametrize("params", [lw.last_layer, ALL])
def test_fits(params: Any) -> None:
    model = network()
    interruptions(model, lambda: lw.fit(model, [(X, Y)], lw.Diagonal(), params=params, progress=False))


def test_modes_of_the_caller_stay() -> None:
    model = network()
    posterior = lw.fit(model, [(X, Y)], lw.KFAC(), params=ALL, progress=False)
    with torch.autocast("cpu", torch.bfloat16), Seen() as mode:
        interruptions(model, lambda: posterior.predict(X))
        assert torch.overrides._get_current_function_mode_stack() == [mode]
        assert torch.is_autocast_enabled("cpu")
