"""Runs a network operation by operation: no fused attention, no fast paths, no compiled graphs; leaves no trace.

The mode is local to the thread and to the `with` block. What is not (the stance of `torch.compile`, what a network
keeps of a pass in itself, parameters set for a call where `functional.py` must) is used under one lock and put back.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ..errors import LapwingError
from ..jacobian.plain_functions import INSTEAD, transformed
from . import recurrent

LOCK = threading.RLock()
"""Held while any network runs or its parameters are looked up: several threads may use one posterior."""

if hasattr(os, "register_at_fork"):  # so that no child waits for a thread that it does not have
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)


def uncompiled(model: nn.Module) -> nn.Module:
    """Returns the module inside a `torch.compile` wrapper, or the module itself."""
    return getattr(model, "_orig_mod", model)


def _transparent(function: Callable) -> Callable:
    """Returns a copy of a Python-level torch function that runs its body although a function mode is active."""
    assert isinstance(function, types.FunctionType)
    scope = {**function.__globals__, "has_torch_function": lambda _: False}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_attention_body = _transparent(F.multi_head_attention_forward)

TABLES = {F.embedding: (("scale_grad_by_freq", 5), ("sparse", 6)),
          F.embedding_bag: (("scale_grad_by_freq", 5), ("sparse", 7))}  # fmt: skip
"""Functions with arguments that make gradients sparse, or other than the derivative -> their names and places."""


def _without(flags: tuple[tuple[str, int], ...], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Returns the arguments of a call with flags off, each given by its name and place."""
    for name, place in flags:
        if len(args) > place:
            args = (*args[:place], False, *args[place + 1 :])
        elif name in kwargs:
            kwargs = {**kwargs, name: False}
    return args, kwargs


def swapped(arguments: Any, values: Mapping[int, Tensor]) -> Any:
    """Returns a call's arguments with values, known by id, in place of some, also in lists and tuples among them.

    The same object comes back where none is replaced.
    """
    get = values.get
    others = [get(id(x), x) if x.__class__ not in (list, tuple) else swapped(x, values) for x in arguments]
    return arguments if all(map(is_, others, arguments)) else type(arguments)(others)


RECURRENT = frozenset((*recurrent.LAYERS, *recurrent.CELLS))
"""Recurrent layers and cells, which a `Recorder` opens."""

REPLACED = frozenset((F.multi_head_attention_forward, Tensor.register_hook, *INSTEAD, *TABLES, *RECURRENT))
"""What `EagerMode` calls otherwise than the network does."""


@contextlib.contextmanager
def batching_quiet() -> Iterator[None]:
    """Silences torch's warning that it loops where there is no batching rule; filters are global, so locked."""
    with LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        yield


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the network's own parameters by name, not those that another thread has set for a call."""
    with LOCK:
        return dict(model.named_parameters())


class EagerMode(TorchFunctionMode):
    """Sees every torch function a network calls; opens `multi_head_attention_forward`, takes the math attention kernel.

    Gradients are derivatives: those of embeddings dense, as all arithmetic after them is, and not scaled; hooks that
    the network sets by `Tensor.register_hook` are not for our passes to call. An active function mode also keeps
    `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` off their fast paths.
    """

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Calls what is in `REPLACED` in its own way, and hands all functions but the attention's to `intercept`."""
        kwargs = kwargs or {}
        if function not in REPLACED:
            return self.intercept(function, args, kwargs)
        if function is F.multi_head_attention_forward:
            with self:
                return _attention_body(*args, **kwargs)
        if function in RECURRENT:
            return self.recurrent(function, args, kwargs)
        if function in TABLES:
            args, kwargs = _without(TABLES[function], args, kwargs)
        if function is Tensor.register_hook:
            return RemovableHandle(OrderedDict())
        return self.intercept(INSTEAD.get(function, function), args, kwargs)

    def intercept(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs the function; `Recorder` notes it first."""
        return function(*args, **kwargs)

    def recurrent(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a recurrent layer or cell; opens it where the fused kernel has no derivative.

        There is none in forward mode, and on a GPU none at all in eval mode.
        """
        others = self.stand_ins(args)
        values = recurrent.tensors_of(others)
        backward = torch.is_grad_enabled() and any(value.is_cuda and value.requires_grad for value in values)
        out = NotImplemented
        if not kwargs and (backward or transformed()):
            out = recurrent.opened(function, others, lambda _: False, self.intercept)
        return self.intercept(function, args, kwargs) if out is NotImplemented else out

    def stand_ins(self, args: tuple) -> tuple:
        """Returns the arguments as the function takes them: other tensors may stand in for some."""
        return args


class OperationMode(TorchDispatchMode):
    """Sees every operation that torch runs, by whatever code; used where nothing is compiled."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import it, for seconds


class Draws(EagerMode):
    """Notes the names of the functions called that draw from the CPU's global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str] = []

    def intercept(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs the function; notes its name where the generator moves."""
        name, before = getattr(function, "__name__", "").strip("_"), torch.get_rng_state()
        out = function(*args, **kwargs)
        if name not in self.functions and not torch.equal(before, torch.get_rng_state()):
            self.functions.append(name)
        return out


@contextlib.contextmanager
def without_compiled() -> Iterator[None]:
    """Runs the block under the lock and with compiled modules run eagerly; light in a process that never compiled."""
    with LOCK:
        if "torch._dynamo" not in sys.modules:
            yield
            return
        try:
            stance = torch.compiler.set_stance("force_eager")
        except RuntimeError as error:
            raise LapwingError(
                "lapwing was called within a function that torch.compile compiles. Call it outside of that "
                "function, or compile lw.deploy(posterior, x)."
            ) from error
        with stance:
            yield


@contextlib.contextmanager
def eager_math() -> Iterator[None]:
    """Runs the block with `EagerMode` and without compiled submodules."""
    with without_compiled(), EagerMode():
        yield
