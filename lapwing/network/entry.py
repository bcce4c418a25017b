"""Public functions run outside the caller's autocast and inference mode.

The caller's autocast is for the network's own layers (`network_precision`). What lapwing contracts runs outside it, in
the dtype of its tensors (`full_precision`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch

from ..errors import LapwingError
from ..jacobian.plain_functions import transformed
from .eager import LOCK

_AUTOCAST: ContextVar[tuple[str, ...]] = ContextVar("devices_of_autocast", default=())
"""Devices for which the caller had switched autocast on, while `full_precision` is within it."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def full_precision(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Runs a function outside the caller's autocast; `network_precision` switches it on again for the network."""

    @functools.wraps(function)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        devices = tuple(device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device))
        if not devices:
            return function(*args, **kwargs)
        token = _AUTOCAST.set(devices)
        _set_autocast(devices, False)
        try:
            return function(*args, **kwargs)
        finally:
            _set_autocast(devices, True)
            _AUTOCAST.reset(token)

    return wrapped


def _set_autocast(devices: tuple[str, ...], enabled: bool) -> None:
    for device in devices:
        torch.set_autocast_enabled(device, enabled)


def network_casts() -> bool:
    """Whether the caller had autocast switched on, so that the network computes in less precision than its weights."""
    return bool(_AUTOCAST.get())


@contextlib.contextmanager
def network_precision() -> Iterator[None]:
    """Runs a call of the network under the autocast that the caller had switched on, if any."""
    devices = tuple(device for device in _AUTOCAST.get() if not torch.is_autocast_enabled(device))
    _set_autocast(devices, True)
    try:
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
