"""Convolutions (1d, 2d, 3d; stride, padding, dilation, groups) as linear layers on unfolded patches."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from ..blocks import Matrix
from ..outer import Outer, SharedOuter
from .use import BatchAxis, Handler, Use, Watched, outer_jacobian, with_bias_column


def unfold(
    x: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: list[tuple[int, int]],
    dilation: tuple[int, ...],
) -> Tensor:
    """Cuts x (N, channels, *space) into patches (N, L, channels, prod(kernel)), in the order of a weight's columns.

    Args:
        x: input of any number of spatial dimensions.
        kernel: kernel size a dimension.
        stride: step a dimension.
        padding: zeros before and after, a dimension.
        dilation: spacing a dimension.

    Returns:
        Patches; L runs over output positions row by row.
    """
    if any(before or after for before, after in padding):
        x = F.pad(x, [p for pair in reversed(padding) for p in pair])
    space = len(kernel)
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(2 + dim, d * (k - 1) + 1, s)  # the window comes last
        x = x[..., ::d] if d > 1 else x
    order = (0, *range(2, 2 + space), 1, *range(2 + space, 2 + 2 * space))
    x = x.permute(order)  # (N, *out, channels, *kernel)
    return x.reshape(x.shape[0], prod(x.shape[1 : 1 + space]), x.shape[1 + space], -1)


class ConvUse(Use):
    """`out = W * a + b`: positions T are the pixels of the output."""

    family = "conv"
    sample_dims = 1

    def __init__(
        self,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, ...],
        padding: list[tuple[int, int]],
        dilation: tuple[int, ...],
        groups: int,
    ) -> None:
        super().__init__(inputs, weight, bias)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def matrix(self) -> Matrix:
        """(G, O, I) with I the channels of a group times the kernel's pixels."""
        weight = self.parameters["weight"]
        return Matrix(self.groups, weight.shape[0] // self.groups, prod(weight.shape[1:]))

    def jacobian(
        self, g: Tensor | None, axis: BatchAxis, samples: int, roles: frozenset[str], dtype: torch.dtype
    ) -> Outer | SharedOuter:
        """Unfolds the input now and not before: patches of all layers at once would not fit."""
        layout = self.matrix()
        kernel = tuple(self.parameters["weight"].shape[2:])
        patches = unfold(self.inputs.to(dtype), kernel, self.stride, self.padding, self.dilation)  # (N, L, channels, k)
        patches = patches.unflatten(2, (self.groups, -1)).flatten(3)  # (N, L, G, I)
        a = axis.front(patches, samples).reshape(samples, -1, *patches.shape[2:])
        assert g is not None  # a feature map is no output
        g = g.flatten(3).unflatten(2, (self.groups, layout.outputs))  # (R, N, G, O, L)
        g = axis.front(g, samples, 1)  # (R, B, [k,] G, O, L)
        g = g.movedim(-1, -3).reshape(g.shape[0], samples, -1, self.groups, layout.outputs)
        return outer_jacobian(with_bias_column(a, roles), g.transpose(0, 1).to(dtype), layout.outputs)


def _numbers(value: int | tuple[int, ...], space: int) -> tuple[int, ...]:
    return (value,) * space if isinstance(value, int) else tuple(value) * (space if len(value) == 1 else 1)


def _conv(args: tuple, kwargs: dict, watched: Watched) -> Use | None:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = dict(zip(names, args, strict=False)) | kwargs
    inputs, weight = given["input"], given["weight"]
    space = weight.ndim - 2
    if inputs.ndim != weight.ndim:  # an unbatched call
        return None
    stride, dilation = (_numbers(given.get(name, 1), space) for name in ("stride", "dilation"))
    padding = given.get("padding", 0)
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(weight.shape[2:], dilation, strict=True)]
        pairs = [(t // 2, t - t // 2) for t in total]
    else:
        pairs = [(p, p) for p in _numbers(0 if padding == "valid" else padding, space)]
    return ConvUse(inputs, weight, given.get("bias"), stride, pairs, dilation, given.get("groups", 1))


HANDLERS: dict[object, Handler] = {function: _conv for function in (torch.conv1d, torch.conv2d, torch.conv3d)}
