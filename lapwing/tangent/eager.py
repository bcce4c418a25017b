"""Runs a network operation by operation: no fused attention, no fast paths, no compiled graphs, and nothing left switched.

The mode is local to the thread and to the `with` block; no global flag is touched.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def uncompiled(model: nn.Module) -> nn.Module:
    """Returns the module inside a `torch.compile` wrapper, or the module itself."""
    return getattr(model, "_orig_mod", model)


def _transparent(function: types.FunctionType) -> Callable:
    """Returns a copy of a Python-level torch function that runs its body although a function mode is active."""
    scope = {**function.__globals__, "has_torch_function": lambda _: False}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_attention_body = _transparent(F.multi_head_attention_forward)


def _math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes attention by plain products: fused kernels have no forward mode, second derivative or batching rule."""
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


class EagerMode(TorchFunctionMode):
    """Sees every torch function a network calls, opens `multi_head_attention_forward`, and takes the math attention kernel.

    An active function mode also keeps `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` off their fast paths.
    """

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Replaces the two attention functions, and hands all others to `intercept`."""
        kwargs = kwargs or {}
        if function is F.multi_head_attention_forward:
            with self:
                return _attention_body(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            return _math_attention(*args, **kwargs)
        return self.intercept(function, args, kwargs)

    def intercept(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs the function; `Recorder` notes it first."""
        return function(*args, **kwargs)


def without_compiled() -> contextlib.AbstractContextManager[None]:
    """Runs the block with compiled modules run eagerly; costs nothing in a process that never compiled."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def eager_math() -> Iterator[None]:
    """Runs the block with `EagerMode` and without compiled submodules."""
    with without_compiled(), EagerMode():
        yield
