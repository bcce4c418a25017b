"""One use of a layer's parameters in a forward pass: the protocol every layer family follows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from ..blocks import Matrix, kind_of
from ..jacobian import BlockJacobian
from ..outer import Outer
from ..shared_outer import SharedOuter
from ..strips import Box, Strip, Strips


@dataclass(frozen=True)
class BatchAxis:
    """Where a layer's tensors hold the samples: dimension `axis`, of size B k; samples run fastest if `inner`."""

    axis: int = 0
    inner: bool = False

    def front(self, tensor: Tensor, samples: int, lead: int = 0) -> Tensor:
        """Moves the samples to dimension `lead`: (lead..., B, rest...), the k positions kept among the rest."""
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

    A subclass is a family of layers. Its class attributes say what it can do; no code asks for its name.

    Attributes:
        family: the name of the family, for reports.
        is_product: the output is `inputs Wᵀ + b`, for the weight as it is stored or its transpose. Then `jacobian`
            takes g=None, and gradients may go back to the inputs by a product with the weight.
        features: the dimension of inputs and outputs that holds the features, where the function is linear in inputs,
            weight and bias; None otherwise. Mean field then draws outputs, or weights for each sample.
        normalises: the weights scale a normalised input. They are no candidates for a last layer.
        parameters: role ("weight", "bias") -> the parameter tensor itself, as the call got it.
        inputs: the layer's input.
        view: what the call got in place of the weight, where that is the weight transposed.
        sample_dims: how many leading dimensions of the output may hold the samples.
    """

    family: ClassVar[str]
    is_product: ClassVar[bool] = False
    features: ClassVar[int | None] = None
    normalises: ClassVar[bool] = False
    view: Tensor | None = None
    sample_dims: int

    def __init__(self, inputs: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> None:
        self.inputs = inputs
        self.parameters = {k: v for k, v in (("weight", weight), ("bias", bias)) if isinstance(v, Tensor)}

    @property
    def kind(self) -> str:
        """The family and the layout of the weight: what later batches must agree in."""
        return kind_of(self.family, self.matrix())

    def matrix(self) -> Matrix | None:
        """Returns the matrix layout of the weight, or None for a layer without one.

        With one, `jacobian` returns a `MatrixJacobian`, and KFAC gives the weight a Kronecker-factored block.
        """
        return None

    def position_inputs(self, grid: Sequence[int], step: int) -> Iterator[Tensor] | None:
        """Yields the inputs (rows, I) of positions, for B samples on the first dimension, in the order of outputs.

        Then the output at a position is `W a + b`. None for a layer that has no such form.

        Args:
            grid: the sizes of the positions of one sample, as the output has them.
            step: how many rows at once, where the grid can be cut so.
        """
        return None

    def position_uses(self, grid: Sequence[int], step: int) -> Iterator[tuple[int, Use]] | None:
        """Yields how many positions a part of the inputs has, and the layer there, in the order of outputs.

        For g=None the `jacobian` of such a layer has its positions as samples. None where `position_inputs` is all that
        there is; the arguments are the same.
        """
        return None

    @abstractmethod
    def jacobian(
        self, g: Tensor | None, axis: BatchAxis, samples: int, roles: frozenset[str], dtype: torch.dtype, limit: int
    ) -> BlockJacobian:
        """Returns the block Jacobian of this use.

        Args:
            g: (R, *out.shape), gradients of the cotangents at the layer's output; None where that is the network's
                output and the cotangents are its entries (only where `is_product`).
            axis: where the samples are.
            samples: B.
            roles: which of weight and bias are treated.
            dtype: the dtype to contract in.
            limit: how many numbers may be built for a strip of positions beside the activations.
        """


Watched = Callable[[object], bool]
"""Tells whether a tensor is one of the parameters that are recorded."""

Reader = Callable[[tuple, dict, Watched], Use | None]
"""`(args, kwargs, watched)` of a function's call -> its use, or None where the family does not cover the call."""

READERS: dict[object, Reader] = {}
"""Function -> the reader of its calls."""


def register(reader: Reader, *functions: object) -> None:
    """Registers the layers that functions compute.

    Args:
        reader: reads a call's arguments as a `Use`; None where it does not cover the call.
        *functions: the functions as the network calls them: those of torch, such as `F.prelu`, and operators of
            `torch.library`, such as `torch.ops.mylib.gain.default`.
    """
    for function in functions:
        READERS[function] = reader


def by_name(names: Sequence[str], args: tuple, kwargs: dict) -> dict:
    """Returns a call's arguments by name; those that were left out are missing."""
    return dict(zip(names, args, strict=False)) | kwargs


def with_bias_column(a: Tensor, roles: frozenset[str]) -> Tensor:
    """Returns inputs (..., I) with the homogeneous coordinate: [a, 1], a, or 1 as weight, bias or both are treated."""
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
    """Builds the Jacobian of a matrix weight used at a grid of positions, for (B, R) and up to `limit` numbers a strip.

    `part` gives inputs (B, t, G, I), without a bias column, and g (B, R, t, G, O) at a box of positions.
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
