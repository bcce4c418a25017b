"""Decorators of public functions: they run outside the caller's autocast, default device and inference mode.

Autocast and default device apply to the network (`network_precision`), and not to lapwing's contractions. Each warning
comes once for the network of the call: the first argument is the network, or has it as `model`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from ..display import CURRENT_NETWORK
from ..errors import LapwingError
from .eager import LOCK, transformed

_AUTOCAST: ContextVar[tuple[str, ...]] = ContextVar("devices_of_autocast", default=())
"""Devices for which the caller has autocast on; set while a `full_precision` function runs."""

_DEFAULT: ContextVar[torch.device | None] = ContextVar("default_device_of_the_caller", default=None)
"""The caller's default device unless it is the CPU; set while a `full_precision` function runs."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def full_precision(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Runs a function without the caller's autocast and default device; `network_precision` restores both."""
    return _decorated(function, needs_graph=False)


def outside_modes(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Runs a function that needs a graph as `full_precision` does, and outside of `torch.inference_mode()`.

    `torch.no_grad()` replaces inference mode. Within a transformation of torch.func it raises a LapwingError.
    """
    return _decorated(function, needs_graph=True)


def _decorated(function: Callable[Arguments, Result], needs_graph: bool) -> Callable[Arguments, Result]:
    @functools.wraps(function)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if needs_graph:
            with LOCK:  # all threads share the level of forward mode, and `jvp` holds the lock while it raises it
                within = transformed()
            if within:
                raise LapwingError(
                    "lapwing was called within a transformation of torch.func or forward-mode differentiation, which "
                    "would mix with its own. Write x.requires_grad_() and "
                    "torch.autograd.grad(posterior.latent(x).variance.sum(), x)."
                )
        default = torch.empty(0).device  # three times as fast as torch.get_default_device()
        devices = tuple([device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)])
        first = args[0] if args else kwargs.get("model", kwargs.get("posterior"))
        model = first if isinstance(first, nn.Module) else getattr(first, "model", None)
        with contextlib.ExitStack() as stack:
            if isinstance(model, nn.Module) and model is not CURRENT_NETWORK.get():
                stack.callback(CURRENT_NETWORK.reset, CURRENT_NETWORK.set(model))
            if needs_graph and torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            if default.type != "cpu":
                stack.callback(_DEFAULT.reset, _DEFAULT.set(default))
                stack.enter_context(torch.device("cpu"))
            if devices:
                stack.callback(_AUTOCAST.reset, _AUTOCAST.set(devices))
                for device in devices:
                    stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return wrapped


def network_casts() -> bool:
    """Whether the caller has autocast on. Then the network computes in less precision than its weights have."""
    return bool(_AUTOCAST.get())


def network_precision() -> contextlib.ExitStack:
    """Enters the caller's autocast, if it is on, and default device, and returns the context that leaves them again."""
    stack = contextlib.ExitStack()
    for device in _AUTOCAST.get():
        stack.enter_context(torch.autocast(device))
    if (default := _DEFAULT.get()) is not None:
        stack.enter_context(default)
    return stack
