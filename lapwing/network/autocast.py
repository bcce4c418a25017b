"""The caller's autocast is for the network's own layers: what lapwing contracts runs in the dtype of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

DEVICES = ("cpu", "cuda")

_CALLERS: ContextVar[tuple[tuple[str, torch.dtype], ...]] = ContextVar("callers_autocast", default=())

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def full_precision(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Runs a function outside the caller's autocast, which `network_precision` takes up again for the network."""

    @wraps(function)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        devices = [device for device in DEVICES if torch.is_autocast_enabled(device)]
        if not devices:
            return function(*args, **kwargs)
        token = _CALLERS.set(tuple((device, torch.get_autocast_dtype(device)) for device in devices))
        try:
            with ExitStack() as stack:
                for device in devices:
                    stack.enter_context(torch.autocast(device, enabled=False))
                return function(*args, **kwargs)
        finally:
            _CALLERS.reset(token)

    return wrapped


def network_casts() -> bool:
    """Whether the caller had autocast switched on, so that the network computes in less precision than its weights."""
    return bool(_CALLERS.get())


def network_precision() -> AbstractContextManager[object]:
    """Returns a context for a call of the network: the autocast that the caller had switched on, if any."""
    active = _CALLERS.get()
    if not active:
        return nullcontext()
    stack = ExitStack()
    for device, dtype in active:
        stack.enter_context(torch.autocast(device, dtype=dtype))
    return stack
