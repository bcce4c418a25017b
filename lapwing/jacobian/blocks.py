"""A block: the parameters of one layer, or of several layers that share one, and their layout as one vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch
from torch import Tensor

Vectors = dict[str, Tensor]
"""A vector over the weights: block name -> (..., P_block)."""


@dataclass(frozen=True)
class Matrix:
    """The matrix layout of a weight: G groups of (O, I), the bias as one more input column (homogeneous coordinate).

    `W.flatten()` of one group without bias is row-major (O, I), so a Kronecker block on it is `torch.kron(Γ, A)`.
    """

    groups: int
    outputs: int
    inputs: int  # without the bias column
    transposed: bool = False  # stored inputs first: (I, O), or (G I', O, *kernel) in a transposed convolution
    one_hot: bool = False  # the inputs are one-hot, such as tokens, so that `A = Σ a aᵀ` is diagonal

    @classmethod
    def of(cls, shape: Sequence[int], groups: int = 1, transposed: bool = False, one_hot: bool = False) -> Matrix:
        """Returns the layout of a weight of this shape: (G O, I', *kernel), or (G I', O, *kernel) if transposed."""
        first, kernel = shape[0] // max(1, groups), prod(shape[2:])
        outputs, channels = (shape[1], first) if transposed else (first, shape[1])
        return cls(groups, outputs, channels * kernel, transposed, one_hot)


@dataclass(frozen=True)
class Block:
    """The parameters of one layer seen as one vector of P entries."""

    name: str  # of the module, or of a parameter outside any layer
    parameters: tuple[str, ...]  # names, weight before bias
    shapes: tuple[tuple[int, ...], ...]
    family: str  # the layer family (`Use.family`), or "generic"
    matrix: Matrix | None = None  # layout of weight (and bias); None if the vector is the plain concatenation
    bias: bool = False  # whether the matrix layout has a bias column

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Block:
        """Rebuilds a block from `dataclasses.asdict`, with its lists as tuples again."""
        layout, names = data["matrix"], [f.name for f in fields(Matrix)]
        matrix = None if layout is None else Matrix(**{name: layout[name] for name in names if name in layout})
        shapes = tuple(tuple(shape) for shape in data["shapes"])
        return cls(data["name"], tuple(data["parameters"]), shapes, data["family"], matrix, data["bias"])

    @property
    def size(self) -> int:
        """P, the number of weights."""
        return sum(prod(shape) for shape in self.shapes)

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """(G, O, I) with the bias column counted; (1, 1, P) for a plain vector."""
        if self.matrix is None:
            return 1, 1, self.size
        columns = self.matrix.inputs if self.has_weight else 0
        return self.matrix.groups, self.matrix.outputs, columns + self.bias

    @property
    def has_weight(self) -> bool:
        """Whether the matrix layout holds a weight (not only a bias)."""
        return len(self.parameters) > int(self.bias)

    def join(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Lays parameters (..., *shape) out as the block's vector (..., P)."""
        values = [parameters[name] for name in self.parameters]
        lead = values[0].shape[: values[0].ndim - len(self.shapes[0])]
        if self.matrix is None:
            return torch.cat([value.reshape(*lead, -1) for value in values], -1)
        m, columns = self.matrix, []
        if self.has_weight:
            weight = values[0]
            if m.transposed:
                kernel = prod(self.shapes[0][2:])
                weight = weight.reshape(*lead, m.groups, m.inputs // kernel, m.outputs, kernel).transpose(-3, -2)
            columns.append(weight.reshape(*lead, m.groups, m.outputs, m.inputs))
        if self.bias:
            columns.append(values[-1].reshape(*lead, m.groups, m.outputs, 1))
        return torch.cat(columns, -1).flatten(-3)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Cuts the block's vector (..., P) into its parameters (..., *shape); the inverse of `join`."""
        lead = vector.shape[:-1]
        if self.matrix is None:
            parts = vector.split([prod(shape) for shape in self.shapes], -1)
            return {n: p.reshape((*lead, *s)) for n, p, s in zip(self.parameters, parts, self.shapes, strict=True)}
        matrix, out = vector.reshape(*lead, *self.matrix_shape), {}
        if self.has_weight:
            weight = matrix[..., : self.matrix.inputs]
            if self.matrix.transposed:
                kernel = prod(self.shapes[0][2:])
                weight = weight.unflatten(-1, (self.matrix.inputs // kernel, kernel)).transpose(-3, -2)
            out[self.parameters[0]] = weight.reshape(*lead, *self.shapes[0])
        if self.bias:
            out[self.parameters[-1]] = matrix[..., -1].reshape(*lead, *self.shapes[-1])
        return out


def join(blocks: Sequence[Block], parameters: Mapping[str, Tensor]) -> Vectors:
    """Lays parameters out as one vector per block."""
    return {block.name: block.join(parameters) for block in blocks}


def split(blocks: Sequence[Block], vectors: Vectors) -> dict[str, Tensor]:
    """Cuts vectors, one per block, into parameters."""
    return {name: value for block in blocks for name, value in block.split(vectors[block.name]).items()}
