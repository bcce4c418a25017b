"""Functions whose derivatives torch lacks or gets wrong, written with plain operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F


def transformed() -> bool:
    """Whether a transformation of torch.func or forward-mode differentiation is active."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


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
    """Computes attention by plain products. Fused kernels lack forward mode, second derivatives and batching rules."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # this operation adds masks of any dtype to the scores
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


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
    F.scaled_dot_product_attention: _math_attention,
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
}
"""Function whose derivatives torch lacks or gets wrong -> the same function by plain operations."""
