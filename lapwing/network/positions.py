"""Outputs with positions: tokens (B, T, C), pixels (B, C, H, W), voxels (B, C, D, H, W).

The engine keeps outputs a matrix. `Positions` says where a network's outputs hold the C outputs of a position, and
makes of them a matrix (B, T C), position by position, or rows (B T, C). `Places` brings rows of one batch back to the
shape of the outputs, and targets to rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import Forward
from ..errors import LapwingError
from .invoke import invoke

EXACT_OUTPUTS = 1000
"""Up to so many outputs of an input, over all positions, every one gets a backward pass of its own."""


@dataclass(frozen=True)
class Places:
    """The positions of one batch of outputs.

    Attributes:
        samples: B.
        sizes: (T,), (H, W) or (D, H, W).
        axis: the dimension of the outputs that holds the C outputs of a position, 1 or -1.
    """

    samples: int
    sizes: tuple[int, ...]
    axis: int

    @property
    def count(self) -> int:
        """T, the number of positions of an input."""
        return prod(self.sizes)

    def shape(self, outputs: int) -> tuple[int, ...]:
        """Returns the shape of outputs, such as (B, C, H, W)."""
        if self.axis == 1:
            return (self.samples, outputs, *self.sizes)
        return (self.samples, *self.sizes, outputs)

    def targets(self, targets: Tensor, outputs: int) -> Tensor:
        """Returns targets of a batch as rows: (B T,) of one for each position, (B T, k) of several, as the outputs are.

        Raises:
            LapwingError: for targets of other positions.
        """
        each, shape = (self.samples, *self.sizes), tuple(targets.shape)
        if shape in (each, self.shape(1)):
            return targets.reshape(-1)
        if len(shape) == len(each) + 1 and shape == self.shape(shape[self.axis]):
            return targets.movedim(self.axis, -1).flatten(0, -2)
        line = f"Pass targets of shape {each}, one for each position, or of the shape of the outputs"
        finer = shape[-len(self.sizes) :]
        pairs = list(zip(finer, self.sizes, strict=False))
        maps = self.axis == 1 and len(shape) >= len(each) and shape[0] == self.samples and finer != self.sizes
        if maps and all(n and m and n % m == 0 for n, m in pairs):
            steps = ", ".join(f"::{n // m}" for n, m in pairs)
            line = (
                f"Upsample the outputs in forward=, by torch.nn.functional.interpolate(..., size={finer}), or pass "
                f"y[..., {steps}], which is far cheaper"
            )
        raise LapwingError(
            f"The targets have the shape {shape}, and the outputs {self.shape(outputs)}: {outputs} for each position "
            f"of {self.samples} samples. {line}."
        )

    def whole(self, rows: Tensor, lead: int = 0) -> Tensor:
        """Returns rows (lead..., B T, ...) in the shape of positions (lead..., B, *sizes, ...).

        A row of numbers (C,), one for each output, goes to the dimension where the outputs hold them.
        """
        values = rows.unflatten(lead, (self.samples, *self.sizes))
        one_each = rows.ndim == lead + 2
        return values.movedim(-1, lead + 1) if one_each and self.axis == 1 else values


@dataclass(frozen=True)
class Positions:
    """How a network is called whose outputs have positions, and where they hold the C outputs of each.

    Attributes:
        forward: `forward(model, inputs)`, or None.
        axis: the dimension of these C outputs, 1 or -1.
        dims: how many dimensions the outputs have.
        outputs: C.
        count: T, the number of positions on the first batch; others may have more or fewer.
        direct: whether the treated layer gives the outputs itself. Then each position is a sample of its own.
    """

    forward: Forward | None
    axis: int
    dims: int
    outputs: int
    count: int
    direct: bool = False

    @classmethod
    def of(cls, shape: tuple[int, ...], targets: tuple[int, ...] | None, forward: Forward | None) -> Positions:
        """Reads the positions off the shapes of the first outputs and targets.

        Outputs (B, T, C) hold the classes last, (B, C, H, W) and (B, C, D, H, W) on dimension 1, unless the targets fit
        the other dimension alone.
        """
        axis = -1 if len(shape) == 3 else 1
        one_place = len(shape) > 3 and prod(shape[2:]) == 1  # (B, C, 1, 1): targets of this shape fit both dimensions
        if targets is not None and not one_place and not _fits(shape, targets, axis) and _fits(shape, targets, -axis):
            axis = -axis
        outputs = shape[axis]
        return cls(forward, axis, len(shape), outputs, prod(shape[1:]) // max(1, outputs))

    def to_json(self) -> dict[str, Any]:
        """Returns all but `forward`, as JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "forward"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], forward: Forward | None) -> Positions:
        """Rebuilds positions from `to_json` and `forward`."""
        return cls(forward, **{f.name: data[f.name] for f in fields(cls) if f.name in data})

    def __call__(self, model: nn.Module, inputs: Any) -> Any:
        """Calls the network as the user does."""
        return invoke(model, inputs, self.forward)

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the sizes of the positions of outputs of this shape.

        Raises:
            LapwingError: for outputs of other dimensions, or another C, than on the first batch.
        """
        if len(shape) != self.dims or shape[self.axis] != self.outputs:
            raise LapwingError(
                f"The outputs have the shape {tuple(shape)}, and on the first batch they had {self.dims} dimensions, "
                f"with {self.outputs} outputs of a position on dimension {self.axis}. Pass inputs of the same kind: "
                "only the number of positions may change."
            )
        return tuple(shape[2:] if self.axis == 1 else shape[1:-1])

    def places(self, samples: int, sizes: tuple[int, ...]) -> Places:
        """Returns the positions of a batch."""
        return Places(samples, sizes, self.axis)

    def matrix(self, outputs: Tensor) -> Tensor:
        """Returns outputs as a matrix (B, T C), position by position."""
        self.sizes(outputs.shape)
        return outputs.movedim(self.axis, -1).flatten(1)

    def rows(self, outputs: Tensor) -> Tensor:
        """Returns outputs as rows (B T, C)."""
        self.sizes(outputs.shape)
        return outputs.movedim(self.axis, -1).flatten(0, -2)

    def cotangents_at(
        self, samples: int, places: int, which: int, like: Tensor, columns: Tensor | None = None
    ) -> Tensor:
        """Returns cotangents (B, T C, R) that are columns (C, R) at one position, those of its outputs without any."""
        if columns is None:
            columns = torch.eye(self.outputs, dtype=like.dtype, device=like.device)
        u = torch.zeros(samples, places, *columns.shape, dtype=like.dtype, device=like.device)
        u[:, which] = columns.to(u)
        return u.flatten(1, 2)


def _fits(shape: tuple[int, ...], targets: tuple[int, ...], axis: int) -> bool:
    """Whether targets, of any number of samples, have one number for each position with the classes at this axis."""
    sizes = shape[2:] if axis == 1 else shape[1:-1]
    return tuple(targets[1:]) in (sizes, (1, *sizes) if axis == 1 else (*sizes, 1))
