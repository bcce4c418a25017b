"""Runs a network operation by operation, without fused attention, fast paths and compiled graphs.

Functions whose derivatives torch lacks or gets wrong are replaced by plain operations.

The function mode is local to the thread. Other changes are global, so they are made under one lock and undone after the
call: the stance of `torch.compile`, attributes that a network sets, and parameters that `functional.py` sets.
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
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..errors import LapwingError
from ..jacobian.layers import READERS, register_reader
from . import recurrent

LOCK = threading.RLock()
"""Held while a network runs or its parameters are read, because several threads may use one posterior."""

if hasattr(os, "register_at_fork"):  # a child process must not inherit a lock that another thread holds
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)


def transformed() -> bool:
    """Whether a transformation of torch.func or forward-mode differentiation is active."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def attention_products(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *more: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Returns the outputs of an attention and its probabilities, by plain products.

    Fused kernels lack forward mode, second derivatives and batching rules.
    """
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # this operation adds masks of any dtype to the scores
        attn_mask = query.new_zeros(attn_mask.shape).masked_fill(~attn_mask, -torch.inf)
    return torch.ops.aten._scaled_dot_product_attention_math.default(query, key, value, attn_mask, *more, **options)


def batch_norm(
    input: Tensor,  # noqa: A002 - `F.batch_norm` has these names
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Computes batch norm in eval mode as an affine map, if derivatives are needed.

    On a CPU, torch's batched backward pass of one sample reads permuted gradients in the wrong order.
    """
    has_graph = any(value is not None and value.requires_grad for value in (input, weight, bias))
    wanted = transformed() or (torch.is_grad_enabled() and has_graph)
    if training or running_mean is None or running_var is None or not wanted:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    dtype = torch.float32 if input.dtype.itemsize < 4 else input.dtype
    scale = (running_var.to(dtype) + eps).rsqrt()
    scale = scale if weight is None else scale * weight.to(dtype)
    mean = running_mean.to(dtype)
    shift = -mean * scale if bias is None else bias.to(dtype) - mean * scale
    channels = (-1, *[1] * (input.ndim - 2))
    return (input * scale.view(channels) + shift.view(channels)).to(input.dtype)


def instance_norm(
    input: Tensor,  # noqa: A002 - `F.instance_norm` has these names
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Computes instance norm as a group norm or an affine map, since torch computes it as batch norm of one sample."""
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is None and running_var is None:
        return torch.group_norm(input, input.shape[1], weight, bias, eps)
    return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


INSTEAD: dict[Callable, Callable] = {
    F.scaled_dot_product_attention: lambda *args, **kwargs: attention_products(*args, **kwargs)[0],
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
}
"""Function whose derivatives torch lacks or gets wrong -> the same function by plain operations."""

for _function in INSTEAD.keys() & READERS.keys():
    register_reader(READERS[_function], INSTEAD[_function])


def uncompiled(model: nn.Module) -> nn.Module:
    """Returns the module inside a `torch.compile` wrapper, or the module itself."""
    return getattr(model, "_orig_mod", model)


def _transparent(function: Callable) -> Callable:
    """Returns a copy of a torch function written in Python that runs its body even if a function mode is active."""
    assert isinstance(function, types.FunctionType)
    scope = {**function.__globals__, "has_torch_function": lambda _: False}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_attention_body = _transparent(F.multi_head_attention_forward)

TABLES = F.embedding, F.embedding_bag
"""Functions with flags that make gradients sparse or scale them. They pass all flags to a function mode by name."""


def swapped(arguments: Any, values: Mapping[int, Tensor]) -> Any:
    """Replaces arguments, also in lists and tuples, by values (id -> value), or returns the same object."""
    get = values.get
    replaced = [get(id(x), x) if x.__class__ not in (list, tuple) else swapped(x, values) for x in arguments]
    return arguments if all(map(is_, replaced, arguments)) else type(arguments)(replaced)


RECURRENT = frozenset((*recurrent.LAYERS, *recurrent.CELLS))
"""Recurrent layers and cells. A `Recorder` replaces them by plain operations."""

REPLACED = frozenset((F.multi_head_attention_forward, Tensor.register_hook, *INSTEAD, *TABLES, *RECURRENT))
"""Functions that `EagerMode` replaces, or calls with other arguments."""

AS_EXACT = frozenset((F.batch_norm, *TABLES))
"""Those of them that give the same outputs to the bit if no derivative is needed."""


@contextlib.contextmanager
def batching_quiet() -> Iterator[None]:
    """Silences torch's warning about operations without a batching rule. Holds the lock, as filters are global."""
    with LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        yield


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the modules, each once, with the prefix of the names of its tensors; faster than `named_modules`."""
    modules, met, left = [], set(), [("", model)]
    while left:
        prefix, module = left.pop()
        if module in met:
            continue
        met.add(module)
        modules.append((prefix, module))
        if module._modules:
            below = [(f"{prefix}{name}.", child) for name, child in module._modules.items() if child is not None]
            left += reversed(below)
    return modules


def own_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Returns name -> parameter of the network. The lock keeps out values that another thread sets for a call."""
    with LOCK:
        return dict(model.named_parameters())


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns name -> parameter of the network. A complex one is `real`, so that all weights are real numbers."""
    own = own_parameters(model)
    return {
        name: real(value.detach()).requires_grad_(value.requires_grad) if value.is_complex() else value
        for name, value in own.items()
    }


def real(value: Tensor) -> Tensor:
    """Returns the same tensor, or pairs (..., 2) of real and imaginary parts in the memory of a complex one."""
    return torch.view_as_real(value) if value.is_complex() else value


def native(values: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns values by name in the form of the network's own parameters: the inverse of `real`."""
    return {
        name: torch.complex(*value.unbind(-1)) if own[name].is_complex() else value for name, value in values.items()
    }


class EagerMode(TorchFunctionMode):
    """Function mode that sees every torch function of a network.

    It runs the body of `multi_head_attention_forward`, and attention as plain products. An active function mode also
    keeps `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` from their fast paths. Gradients of embeddings are
    dense and not scaled by frequency. Hooks of `Tensor.register_hook` are not called: they are meant for the user's
    backward passes.
    """

    rounds = False  # whether a function was replaced whose outputs without the mode would differ, at least in rounding

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function not in REPLACED:
            return self.intercept(function, args, kwargs)
        return self._replace(function, args, kwargs)

    def _replace(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs one of the functions of `REPLACED` in another way."""
        self.rounds = self.rounds or function not in AS_EXACT
        if function is F.multi_head_attention_forward:
            with self:
                return _attention_body(*args, **kwargs)
        if function in RECURRENT:
            return self.recurrent(function, args, kwargs)
        if function in TABLES:
            kwargs = {**kwargs, "scale_grad_by_freq": False, "sparse": False}
        if function is Tensor.register_hook:
            return RemovableHandle(OrderedDict())
        return self.intercept(INSTEAD.get(function, function), args, kwargs)

    def intercept(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs the function. `Recorder` overrides this to record it."""
        return function(*args, **kwargs)

    def recurrent(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a recurrent layer or cell, by plain operations if its fused kernel has no derivative.

        Fused kernels have no forward-mode derivative, and on a GPU no derivative at all in eval mode.
        """
        replaced = self.replaced(args)
        values = recurrent.tensors_of(replaced)
        backward = torch.is_grad_enabled() and any(value.is_cuda and value.requires_grad for value in values)
        out = NotImplemented
        if not kwargs and (backward or transformed()):
            out = recurrent.opened(function, replaced, lambda _: False, self.intercept)
        return self.intercept(function, args, kwargs) if out is NotImplemented else out

    def replaced(self, args: tuple) -> tuple:
        """Returns the arguments that the function gets. `StandIns` overrides this to replace parameters."""
        return args


@contextlib.contextmanager
def without_compiled() -> Iterator[None]:
    """Runs the block under the lock, with compiled modules run eagerly. Fast if the process never compiled."""
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
