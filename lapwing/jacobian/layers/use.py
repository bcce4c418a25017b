"""One use of a layer's parameters in a forward pass: the protocol of every layer family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from ..blocks import Matrix
from ..jacobian import BlockJacobian
from ..outer import Outer
from ..shared_outer import SharedOuter
from ..strips import Box, Strip, Strips


@dataclass(frozen=True)
class BatchAxis:
    """The dimension of a layer's tensors that holds the samples, of size B k. Samples run fastest if `inner`."""

    axis: int = 0
    inner: bool = False

    def front(self, tensor: Tensor, samples: int, lead: int = 0) -> Tensor:
        """Moves the samples to dimension `lead`: (lead..., B, rest...). The k positions are part of the rest."""
        axis = self.axis + lead
        if tensor.shape[axis] == samples:
            return tensor if axis == lead else tensor.movedim(axis, lead)
        positions = tensor.shape[axis] // samples
        shape = (positions, samples) if self.inner else (samples, positions)
        return tensor.unflatten(axis, shape).movedim(axis + self.inner, lead)

    def fits(self, shape: torch.Size | tuple[int, ...], samples: int) -> bool:
        """Whether a tensor of this shape can hold the samples on this axis."""
        return self.axis < len(shape) and shape[self.axis] >= samples and shape[self.axis] % samples == 0


class Use(ABC):
    """One call of a layer: its input, its parameters, and their Jacobian.

    A subclass is a family of layers. Class attributes declare what a family can do. No other code tests for a
    particular family.

    Attributes:
        family: name of the family, for reports.
        is_product: whether the output is `inputs Wᵀ + b`, for the stored weight or its transpose. Then `jacobian`
            accepts g=None, and a product with the weight may send gradients back to the inputs.
        features: dimension of inputs and outputs that holds the features if the function is linear in inputs, weight
            and bias, else None. Mean field then draws outputs, or weights for each sample.
        normalises: whether the weights scale a normalised input. Such a layer cannot be the last layer.
        groups, transposed, one_hot: the layout of the weight, as in `Matrix`.
        parameters: role ("weight", "bias") -> parameter tensor of the call.
        inputs: input of the layer.
        view: transposed weight, if the call got that instead of the weight.
        sample_dims: number of leading dimensions of the output that may hold the samples.
    """

    family: str
    is_product: ClassVar[bool] = False
    features: ClassVar[int | None] = None
    normalises: bool = False
    groups: int = 1
    transposed: bool = False
    one_hot: ClassVar[bool] = False
    view: Tensor | None = None
    sample_dims: int

    def __init__(self, inputs: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> None:
        self.inputs = inputs
        self.parameters = {k: v for k, v in (("weight", weight), ("bias", bias)) if isinstance(v, Tensor)}

    @property
    def kind(self) -> str:
        """The family and the layout, such as "conv, 2 groups", which must be the same in later batches."""
        kind = self.family + ", transposed" * self.transposed + ", one-hot" * self.one_hot
        return kind if self.groups == 1 else f"{kind}, {self.groups} groups"

    def matrix(self) -> Matrix | None:
        """Returns the matrix layout of the weight, or None for a layer without one.

        If there is a layout, `jacobian` returns a `MatrixJacobian`, and KFAC uses a Kronecker-factored block.
        """
        return None

    def position_inputs(self, grid: Sequence[int], step: int) -> Iterator[Tensor] | None:
        """Yields the inputs a (rows, I) of positions in the order of the outputs, for samples on the first dimension.

        The output at a position is `W a + b`. Returns None for a layer that has no such form.

        Args:
            grid: sizes of the grid of positions in the output of one sample.
            step: maximum number of rows in one part, if the grid can be cut.
        """
        return None

    def position_uses(self, grid: Sequence[int], step: int) -> Iterator[tuple[int, Use]] | None:
        """Yields the number of positions of a part of the inputs, and the layer there, in the order of the outputs.

        For g=None, the `jacobian` of such a layer has positions as samples. Returns None if the layer only has
        `position_inputs`. Same arguments.
        """
        return None

    @abstractmethod
    def jacobian(
        self, g: Tensor | None, axis: BatchAxis, samples: int, roles: frozenset[str], dtype: torch.dtype, limit: int
    ) -> BlockJacobian:
        """Returns the block Jacobian of this use.

        Args:
            g: gradients `(R, *out.shape)` of the cotangents at the layer's output; None if that is the network's output
                and the cotangents are its entries (only if `is_product`, or for a layer of `position_uses`).
            axis: dimension of the samples.
            samples: B.
            roles: treated parameters, of "weight" and "bias".
            dtype: dtype of the contractions.
            limit: maximum number of entries built for a strip of positions, in addition to the activations.
        """


Watched = Callable[[object], bool]
"""Returns whether a tensor is one of the recorded parameters."""

Reader = Callable[[tuple, dict, Watched], Use | None]
"""`(args, kwargs, watched)` of a function call -> its use, or None if the family does not cover the call."""

aten = torch.ops.aten
"""Operators that an exported program calls instead of torch functions."""

READERS: dict[object, Reader] = {}
"""Function -> the reader of its calls."""


def register_reader(reader: Reader, *functions: object) -> None:
    """Registers the reader of calls of some functions.

    Args:
        reader: returns the `Use` of a call's arguments, or None if it does not cover the call.
        *functions: functions as the network calls them: torch functions such as `F.prelu`, or operators of
            `torch.library` such as `torch.ops.mylib.gain.default`.
    """
    for function in functions:
        READERS[function] = reader


def by_name(names: Sequence[str], args: tuple, kwargs: dict) -> dict:
    """Returns the arguments of a call by name, without omitted arguments."""
    return dict(zip(names, args, strict=False)) | kwargs


def with_bias_column(a: Tensor, roles: frozenset[str]) -> Tensor:
    """Returns [a, 1] for inputs a (..., I) if weight and bias are treated, a for the weight, 1 for the bias."""
    if "bias" not in roles:
        return a
    ones = a.new_ones(*a.shape[:-1], 1)
    if "weight" not in roles:
        return ones
    if a.stride(-1) == 1:
        return torch.cat([a, ones], -1)
    return torch.cat([a.movedim(-1, 0), ones.movedim(-1, 0)]).movedim(0, -1)  # the positions of patches run fastest


def outer_jacobian(
    part: Callable[[Box], Strip],
    grid: Sequence[int],
    sizes: tuple[int, int],
    matrix: Matrix,
    roles: frozenset[str],
    dtype: torch.dtype,
    limit: int,
) -> Outer | SharedOuter:
    """Builds the Jacobian of a matrix weight at a grid of positions, for sizes (B, R) and `limit` entries per strip.

    `part` returns inputs (B, t, G, I), without a bias column, and g (B, R, t, G, O) at a box of positions.
    """

    def strip(box: Box) -> Strip:
        a, g = part(box)
        return with_bias_column(a.to(dtype), roles), g.to(dtype)

    columns = ("weight" in roles) * matrix.inputs + ("bias" in roles)
    strips = Strips.cut(strip, grid, (*sizes, matrix.groups, matrix.outputs, columns), dtype, limit)
    if prod(grid) == matrix.groups == 1:
        ((a, g),) = strips
        return Outer(a[:, 0, 0], g[:, :, 0, 0], matrix.outputs)
    return SharedOuter(strips)
