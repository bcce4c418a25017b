"""Convolutions, plain and transposed (1d, 2d, 3d; stride, padding, dilation, groups), as linear layers on patches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from math import prod
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ..blocks import Matrix
from ..outer import Outer
from ..shared_outer import SharedOuter
from ..strips import Box, Strip, at, boxes
from .use import BatchAxis, Use, Watched, aten, by_name, outer_jacobian, register_reader, with_bias_column

Sizes = tuple[int, ...]
"""A number for each dimension of space."""


def unfold(x: Tensor, kernel: Sizes, stride: Sizes, padding: list[tuple[int, int]], dilation: Sizes) -> Tensor:
    """Cuts x (N, channels, *space) into patches (N, L, channels, prod(kernel)) with `padding` zeros before and after.

    L runs over output positions row by row. If rows of positions are longer than rows of the kernel, positions run
    fastest in memory: (channels, kernel, N, L).
    """
    if any(before or after for before, after in padding):
        x = F.pad(x, [p for pair in reversed(padding) for p in pair])
    space = len(kernel)
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(2 + dim, d * (k - 1) + 1, s)  # the window comes last
        x = x[..., ::d] if d > 1 else x
    samples, channels, out = x.shape[0], x.shape[1], x.shape[2 : 2 + space]
    pixels, places = range(2, 2 + space), range(2 + space, 2 + 2 * space)
    if out[-1] > kernel[-1]:  # copies run along rows of pixels
        x = x.permute(1, *places, 0, *pixels)
        return x.reshape(channels, prod(kernel), samples, prod(out)).permute(2, 3, 0, 1)
    return x.permute(0, *pixels, 1, *places).reshape(samples, prod(out), channels, prod(kernel))


def window(
    x: Tensor, box: Box, kernel: Sizes, stride: Sizes, padding: list[tuple[int, int]], dilation: Sizes
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Returns the part of x (N, channels, *space) on which a box of output positions depends, and its padding."""
    rest = []
    for dim, (part, k, s, (before, _), d) in enumerate(zip(box, kernel, stride, padding, dilation, strict=True)):
        size = x.shape[2 + dim]
        start, stop = part.start * s - before, (part.stop - 1) * s - before + d * (k - 1) + 1
        low, high = min(max(start, 0), size), min(max(stop, 0), size)
        x = x.narrow(2 + dim, low, high - low)
        rest.append((max(0, min(stop, 0) - start), max(0, stop - max(start, size))))
    return x, rest


class ConvUse(Use):
    """`out = W * a + b`. The T positions are the pixels of the output."""

    family = "conv"
    features = 1
    sample_dims = 1

    def __init__(
        self,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sizes,
        padding: list[tuple[int, int]],
        dilation: Sizes,
        groups: int,
    ) -> None:
        super().__init__(inputs, weight, bias)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def matrix(self) -> Matrix:
        """Returns (G, O, I), where I is the number of channels of a group times the number of kernel pixels."""
        return Matrix.of(self.parameters["weight"].shape, self.groups, self.transposed)

    def position_inputs(self, grid: Sequence[int], step: int) -> Iterator[Tensor] | None:
        """Yields the patches of consecutive positions of several small images, or of a part of a large image."""
        return (strip.patches() for _, strip in self._strips(grid, step)) if self.groups == 1 else None

    def position_uses(self, grid: Sequence[int], step: int) -> Iterator[tuple[int, Use]] | None:
        small = prod(self.parameters["weight"].shape[2:]) == 1  # a patch is a pixel
        if small or self.groups > 1 or self.inputs.device.type != "cpu":  # other devices may round convolutions (TF32)
            return None
        return self._strips(grid, step)

    def _strips(self, grid: Sequence[int], step: int) -> Iterator[tuple[int, ConvUse]]:
        """Yields the number of output positions of a part of the images, and the layer there."""
        for images in self.images().split(max(1, step // max(1, prod(grid)))):
            for box in boxes(grid, step // len(images)):
                yield len(images) * prod(side.stop - side.start for side in box), self._within(images, box)

    def _within(self, images: Tensor, box: Box) -> Self:
        """Returns the layer at the part of some images on which a box of outputs depends."""
        kernel = tuple(self.parameters["weight"].shape[2:])
        part, padding = window(images, box, kernel, self.stride, self.padding, self.dilation)
        strip = copy(self)
        strip.inputs, strip.padding = part, padding
        return strip

    def patches(self) -> Tensor:
        """Returns the patches of all positions (rows, I)."""
        kernel = tuple(self.parameters["weight"].shape[2:])
        patches = self.ordered(unfold(self.images(), kernel, self.stride, self.padding, self.dilation))
        return patches.flatten(0, 1).flatten(1)

    def turned(self, basis: Tensor, shift: Tensor | None) -> Tensor:
        """Returns the patches times U (I, K) plus a shift (K,): a convolution with the columns of U as its kernels."""
        images, kernel = self.images(), self.parameters["weight"].shape[2:]
        kernels = self.ordered(basis.T.reshape(1, basis.shape[1], images.shape[1], -1))[0]
        kernels = kernels.unflatten(-1, kernel)  # (K, channels, *kernel)
        images = F.pad(images, [p for pair in reversed(self.padding) for p in pair])
        if images.ndim == 4:  # so that the rows of the result are contiguous
            images = images.contiguous(memory_format=torch.channels_last)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[images.ndim - 3]
        turned = convolve(images, kernels, shift, stride=self.stride, dilation=self.dilation)
        return turned.movedim(1, -1).reshape(-1, basis.shape[1])

    def images(self) -> Tensor:
        """Returns the images from which patches are cut (N, channels, *space)."""
        return self.inputs

    def ordered(self, patches: Tensor) -> Tensor:
        """Returns patches (N, L, channels, kernel) with kernel pixels in the order of the weight."""
        return patches

    def jacobian(
        self, g: Tensor | None, axis: BatchAxis, samples: int, roles: frozenset[str], dtype: torch.dtype, limit: int
    ) -> Outer | SharedOuter:
        """Unfolds the input one strip of positions at a time, because patches at all positions may not fit.

        g=None means that positions are samples: a linear layer on patches.
        """
        if g is None:
            if "weight" in roles and dtype == self.inputs.dtype:
                return PatchOuter(self, samples, "bias" in roles)
            return Outer(with_bias_column(self.patches().to(dtype), roles), None, self.matrix().outputs)
        layout, space = self.matrix(), self.inputs.ndim - 2
        x = axis.front(self.images(), samples)  # (B, [k,] channels, *space)
        x = x if x.ndim > space + 2 else x.unsqueeze(1)
        g = axis.front(g.unflatten(2, (self.groups, layout.outputs)), samples, 1)  # (R, B, [k,] G, O, *space)
        gradients = g if g.ndim > space + 4 else g.unsqueeze(2)

        def part(box: Box) -> Strip:
            strip = self._within(x[:, box[0]].flatten(0, 1), box[1:])
            a = strip.patches().reshape(samples, -1, self.groups, layout.inputs)
            there = at(gradients[:, :, box[0]], box[1:], 5).flatten(5)  # (R, B, k, G, O, L)
            there = there.movedim(-1, 3).reshape(len(there), samples, -1, self.groups, layout.outputs)
            return a, there.transpose(0, 1)

        grid = (x.shape[1], *gradients.shape[5:])
        return outer_jacobian(part, grid, (samples, len(g)), layout, roles, dtype, limit)


class PatchOuter(Outer):
    """A convolution that gives the outputs. Its inputs are patches, which are formed only if a product needs them."""

    def __init__(self, use: ConvUse, samples: int, bias: bool) -> None:
        self._use, self._g, self._bias, self.is_output, layout = use, None, bias, True, use.matrix()
        self.batch, self.outputs, self.inputs = samples, layout.outputs, layout.inputs + bias
        self.size, self.cotangents = self.outputs * self.inputs, self.outputs

    @cached_property
    def _a(self) -> Tensor:  # type: ignore[override]
        return self._use.patches()

    def _turned(self, basis: Tensor) -> Tensor:
        return self._use.turned(basis[:-1], basis[-1]) if self._bias else self._use.turned(basis, None)


class TransposedConvUse(ConvUse):
    """A transposed convolution: a plain one with reversed kernels, over an input with zeros between its pixels.

    There are `gaps - 1` zeros, for the stride `gaps`. The weight is (G I, O, *kernel). Negative padding cuts. The other
    arguments are as in `ConvUse`.
    """

    transposed = True

    def __init__(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, gaps: Sizes, *rest: Any) -> None:
        super().__init__(inputs, weight, bias, (1,) * len(gaps), *rest)
        self.gaps = gaps

    def _within(self, images: Tensor, box: Box) -> Self:
        strip = super()._within(images, box)
        strip.gaps = (1,) * len(self.gaps)  # the images have the zeros already
        return strip

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


def _numbers(value: int | Sizes, space: int) -> Sizes:
    return (value,) * space if isinstance(value, int) else tuple(value) * (space if len(value) == 1 else 1)


def read_conv(args: tuple, kwargs: dict, watched: Watched | None = None) -> ConvUse | None:
    """Returns the use of a call of a convolution."""
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


def read_transposed_conv(args: tuple, kwargs: dict, watched: Watched | None = None) -> TransposedConvUse | None:
    """Returns the use of a call of a transposed convolution."""
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


register_reader(read_transposed_conv, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
register_reader(read_conv, torch.conv1d, torch.conv2d, torch.conv3d)
register_reader(read_conv, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
register_reader(read_conv, aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
