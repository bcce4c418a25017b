"""What public functions do at their entry and their end: they leave the caller's modes, and torch as it was.

The caller's autocast is for the network's own layers (`network_precision`). What lapwing contracts runs outside it, in
the dtype of its tensors (`full_precision`).

Ctrl-C may come between a context manager and its `with` block, in torch's own as well. Then its end never runs, or runs
only once the exception is forgotten: a function mode of ours would see the caller's calls, and the network would keep
what was set in it for a call. So what is open is closed, and torch's state put back, before the exception leaves
(`_put_back`).
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch

from ..errors import LapwingError
from ..jacobian.plain_functions import transformed
from .eager import LOCK

_functorch: Any = torch._C._functorch

_AUTOCAST: ContextVar[tuple[str, ...]] = ContextVar("devices_of_autocast", default=())
"""Devices for which the caller had switched autocast on, while `full_precision` is within it."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _State(NamedTuple):
    """What torch keeps for the thread that calls: modes, gradients, levels of torch.func."""

    functions: list[Any]
    dispatches: list[Any]
    gradients: bool
    transformations: int


def _state() -> _State:
    return _State(
        overrides._get_current_function_mode_stack(),
        dispatch._get_current_dispatch_mode_stack(),
        torch.is_grad_enabled(),
        _functorch.get_dynamic_layer_stack_depth(),
    )


def _put_back(before: _State, error: BaseException) -> None:
    """Closes what an interruption has left open, and puts torch's state back; an ordinary error leaves nothing open."""
    if isinstance(error, Exception) and before == _state():
        return
    traceback.clear_frames(error.__traceback__)  # closes generators, and with them the context managers that they are
    _functorch.pop_dynamic_layer_stack_and_undo_to_depth(before.transformations)
    for _ in range(torch._C._vmapmode_increment_nesting()):  # of batched gradients, within which nothing calls lapwing
        torch._C._vmapmode_decrement_nesting()
    _restore(before.functions, overrides._get_current_function_mode_stack, overrides._pop_mode, overrides._push_mode)
    _restore(before.dispatches, dispatch._get_current_dispatch_mode_stack, dispatch._pop_mode, dispatch._push_mode)
    torch.set_grad_enabled(before.gradients)


def _restore(before: list[Any], stack: Callable[[], list], pop: Callable[[], Any], push: Callable[[Any], None]) -> None:
    """Makes a stack of modes what it was."""
    while stack() != before[: len(stack())]:
        pop()
    for mode in before[len(stack()) :]:
        push(mode)


def full_precision(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Runs a function outside the caller's autocast, which `network_precision` takes up again for the network.

    Whatever it raises, torch's state is then what it was.
    """

    @functools.wraps(function)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        before = _state()
        devices = tuple(device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device))
        token = None
        try:
            if devices:
                token = _AUTOCAST.set(devices)
                _set_autocast(devices, False)
            return function(*args, **kwargs)
        except BaseException as error:
            _put_back(before, error)
            raise
        finally:
            _set_autocast(devices, True)
            if token is not None:
                _AUTOCAST.reset(token)

    return wrapped


def _set_autocast(devices: tuple[str, ...], enabled: bool) -> None:
    """Sets the switches; `torch.autocast` counts its blocks too, and an interruption would leave one counted."""
    for device in devices:
        torch.set_autocast_enabled(device, enabled)


def network_casts() -> bool:
    """Whether the caller had autocast switched on, so that the network computes in less precision than its weights."""
    return bool(_AUTOCAST.get())


@contextlib.contextmanager
def network_precision() -> Iterator[None]:
    """Runs a call of the network under the autocast that the caller had switched on, if any."""
    devices = tuple(device for device in _AUTOCAST.get() if not torch.is_autocast_enabled(device))
    try:
        _set_autocast(devices, True)
        yield
    finally:
        _set_autocast(devices, False)


def outside_modes(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Runs a function that needs a graph outside the caller's autocast and `torch.inference_mode()`.

    In the latter's place it is as under `torch.no_grad()`; the network itself keeps the caller's autocast.

    Raises:
        LapwingError: from the wrapped function, within a transformation of torch.func or forward-mode differentiation.
    """

    @functools.wraps(function)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with LOCK:  # levels of forward mode are those of all threads, and `jvp` holds the lock while it has one
            within = transformed()
        if within:
            raise LapwingError(
                "lapwing was called within a transformation of torch.func or forward-mode differentiation, which would "
                "mix with its own. Write x.requires_grad_() and "
                "torch.autograd.grad(posterior.latent(x).variance.sum(), x)."
            )
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return full_precision(wrapped)
