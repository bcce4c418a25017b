"""Convolutions, plain and transposed (1d, 2d, 3d; stride, padding, dilation, groups), as linear layers on patches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from ..blocks import Matrix
from ..outer import Outer, SharedOuter
from ..strips import Box, Strip, at, boxes
from .use import BatchAxis, Use, Watched, by_name, outer_jacobian, register


def unfold(
    x: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: list[tuple[int, int]],
    dilation: tuple[int, ...],
) -> Tensor:
    """Cuts x (N, channels, *space) into patches (N, L, channels, prod(kernel)), in the order of a weight's columns.

    L runs over output positions row by row; `padding` holds the zeros before and after, a dimension. In memory the
    positions run fastest where their rows are longer than the kernel's: (channels, prod(kernel), N, L).
    """
    if any(before or after for before, after in padding):
        x = F.pad(x, [p for pair in reversed(padding) for p in pair])
    space = len(kernel)
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(2 + dim, d * (k - 1) + 1, s)  # the window comes last
        x = x[..., ::d] if d > 1 else x
    samples, channels, out = x.shape[0], x.shape[1], x.shape[2 : 2 + space]
    pixels, places = range(2, 2 + space), range(2 + space, 2 + 2 * space)
    if out[-1] > kernel[-1]:  # copies run along rows of pixels, which are longer than those of the kernel
        x = x.permute(1, *places, 0, *pixels)
        return x.reshape(channels, prod(kernel), samples, prod(out)).permute(2, 3, 0, 1)
    return x.permute(0, *pixels, 1, *places).reshape(samples, prod(out), channels, prod(kernel))


def window(
    x: Tensor,
    box: Box,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: list[tuple[int, int]],
    dilation: tuple[int, ...],
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Returns the part of x (N, channels, *space) that a box of output positions sees, and the padding it needs."""
    rest = []
    for dim, (part, k, s, (before, _), d) in enumerate(zip(box, kernel, stride, padding, dilation, strict=True)):
        size = x.shape[2 + dim]
        start, stop = part.start * s - before, (part.stop - 1) * s - before + d * (k - 1) + 1
        low, high = min(max(start, 0), size), min(max(stop, 0), size)
        x = x.narrow(2 + dim, low, high - low)
        rest.append((max(0, min(stop, 0) - start), max(0, stop - max(start, size))))
    return x, rest


class ConvUse(Use):
    """`out = W * a + b`: positions T are the pixels of the output."""

    family = "conv"
    features = 1
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
        return Matrix.of(self.parameters["weight"].shape, self.groups)

    def position_inputs(self, grid: Sequence[int], step: int) -> Iterator[Tensor] | None:
        """Yields the patches of consecutive positions, of several small images or of a part of a large one."""
        return self._patches(grid, step) if self.groups == 1 else None

    def _patches(self, grid: Sequence[int], step: int) -> Iterator[Tensor]:
        kernel = tuple(self.parameters["weight"].shape[2:])
        for images in self.images().split(max(1, step // max(1, prod(grid)))):
            for box in boxes(grid, step // len(images)):
                part, padding = window(images, box, kernel, self.stride, self.padding, self.dilation)
                patches = self.ordered(unfold(part, kernel, self.stride, padding, self.dilation))
                yield patches.flatten(0, 1).flatten(1)

    def images(self) -> Tensor:
        """Returns what patches are cut from (N, channels, *space)."""
        return self.inputs

    def ordered(self, patches: Tensor) -> Tensor:
        """Returns patches (N, L, channels, kernel) with the kernel's pixels in the order of the weight's."""
        return patches

    def jacobian(
        self, g: Tensor | None, axis: BatchAxis, samples: int, roles: frozenset[str], dtype: torch.dtype, limit: int
    ) -> Outer | SharedOuter:
        """Unfolds the input now and not before, at some positions: patches of everything at once would not fit."""
        assert g is not None  # a feature map is not an output
        layout, space = self.matrix(), self.inputs.ndim - 2
        kernel = tuple(self.parameters["weight"].shape[2:])
        x = axis.front(self.images(), samples)  # (B, [k,] channels, *space)
        x = x if x.ndim > space + 2 else x.unsqueeze(1)
        g = axis.front(g.unflatten(2, (self.groups, layout.outputs)), samples, 1)  # (R, B, [k,] G, O, *space)
        gradients = g if g.ndim > space + 4 else g.unsqueeze(2)

        def part(box: Box) -> Strip:
            images = x[:, box[0]].flatten(0, 1)
            images, padding = window(images, box[1:], kernel, self.stride, self.padding, self.dilation)
            patches = self.ordered(unfold(images, kernel, self.stride, padding, self.dilation))
            a = patches.reshape(samples, -1, self.groups, layout.inputs)
            there = at(gradients[:, :, box[0]], box[1:], 5).flatten(5)  # (R, B, k, G, O, L)
            there = there.movedim(-1, 3).reshape(len(there), samples, -1, self.groups, layout.outputs)
            return a, there.transpose(0, 1)

        grid = (x.shape[1], *gradients.shape[5:])
        return outer_jacobian(part, grid, (samples, len(g)), layout, roles, dtype, limit)


class TransposedConvUse(ConvUse):
    """A transposed convolution: the plain one of its weights in reverse, over an input with zeros between its pixels.

    Args:
        inputs: x (N, channels, *space).
        weight: W (G I, O, *kernel).
        bias: b, if any.
        gaps: the stride, s - 1 zeros between pixels.
        padding: zeros before and after, a dimension; negative ones cut.
        dilation: that of the kernel.
        groups: G.
    """

    def __init__(
        self,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gaps: tuple[int, ...],
        padding: list[tuple[int, int]],
        dilation: tuple[int, ...],
        groups: int,
    ) -> None:
        super().__init__(inputs, weight, bias, (1,) * len(gaps), padding, dilation, groups)
        self.gaps = gaps

    def matrix(self) -> Matrix:
        """(G, O, I) with the weight stored inputs first."""
        return Matrix.of(self.parameters["weight"].shape, self.groups, transposed=True)

    def images(self) -> Tensor:
        x, space = self.inputs, self.inputs.shape[2:]
        if all(gap == 1 for gap in self.gaps):
            return x
        spread = x.new_zeros(*x.shape[:2], *((n - 1) * gap + 1 for n, gap in zip(space, self.gaps, strict=True)))
        places: list[slice] = [slice(None)] * 2 + [slice(None, None, gap) for gap in self.gaps]
        spread[tuple(places)] = x
        return spread

    def ordered(self, patches: Tensor) -> Tensor:
        return patches.flip(-1)


def _numbers(value: int | tuple[int, ...], space: int) -> tuple[int, ...]:
    return (value,) * space if isinstance(value, int) else tuple(value) * (space if len(value) == 1 else 1)


def _conv(args: tuple, kwargs: dict, watched: Watched) -> Use | None:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    named = by_name(names, args, kwargs)
    inputs, weight = named["input"], named["weight"]
    space = weight.ndim - 2
    if inputs.ndim != weight.ndim:  # an unbatched call
        return None
    stride, dilation = (_numbers(named.get(name, 1), space) for name in ("stride", "dilation"))
    padding = named.get("padding", 0)
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(weight.shape[2:], dilation, strict=True)]
        pairs = [(t // 2, t - t // 2) for t in total]
    else:
        pairs = [(p, p) for p in _numbers(0 if padding == "valid" else padding, space)]
    return ConvUse(inputs, weight, named.get("bias"), stride, pairs, dilation, named.get("groups", 1))


def _transposed_conv(args: tuple, kwargs: dict, watched: Watched) -> Use | None:
    names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
    named = by_name(names, args, kwargs)
    inputs, weight = named["input"], named["weight"]
    if inputs.ndim != weight.ndim or weight.ndim < 3:  # an unbatched call
        return None
    stride, padding, more, dilation = (
        _numbers(named.get(name, default), weight.ndim - 2)
        for name, default in (("stride", 1), ("padding", 0), ("output_padding", 0), ("dilation", 1))
    )
    reach = [d * (k - 1) for k, d in zip(weight.shape[2:], dilation, strict=True)]
    pairs = [(r - p, r - p + extra) for r, p, extra in zip(reach, padding, more, strict=True)]
    return TransposedConvUse(inputs, weight, named.get("bias"), stride, pairs, dilation, named.get("groups", 1))


register(_transposed_conv, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
register(_conv, torch.conv1d, torch.conv2d, torch.conv3d)
