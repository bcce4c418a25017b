"""Outputs with positions: tokens (B, T, C), pixels (B, C, H, W), voxels (B, C, D, H, W). Outputs (B, C) have T = 1.

The rest of lapwing handles outputs as a matrix (B, T C), position by position, or as rows (B T, C). `Positions` says
which dimension holds the C outputs. `Places` gives rows of one batch the shape of the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from math import prod
from typing import Any

from torch import Tensor

from ..errors import LapwingError

EXACT_OUTPUTS = 1000
"""Maximum number of outputs of an input, over all positions, for which each output gets its own backward pass."""

FILE_KEYS = "axis", "dims", "outputs", "count", "direct", "joined"
"""Keys of the fields of `Positions` in files, in order."""


@dataclass(frozen=True)
class Places:
    """The positions of one batch of outputs."""

    samples: int  # B
    sizes: tuple[int, ...]  # (T,), (H, W) or (D, H, W); () for outputs (B, C)
    axis: int  # the dimension of the outputs that holds the C outputs of a position, 1 or -1
    flattened: bool = False  # as in `Positions`

    @property
    def count(self) -> int:
        """T, the number of rows of an input: its positions, or 1 if they are flattened."""
        return 1 if self.flattened else prod(self.sizes)

    def shape(self, outputs: int) -> tuple[int, ...]:
        """Returns the shape of outputs, such as (B, C, H, W)."""
        if self.axis == 1:
            return (self.samples, outputs, *self.sizes)
        return (self.samples, *self.sizes, outputs)

    def targets(self, targets: Tensor, outputs: int) -> Tensor:
        """Returns targets as rows: (B T,), or (B T, k) for k per position; (B, T k) if positions are flattened.

        If outputs are (B, C), targets stay.
        """
        if not self.sizes:
            return targets
        each, shape = (self.samples, *self.sizes), tuple(targets.shape)
        if shape in (each, self.shape(1)):
            return targets.reshape(self.samples, -1) if self.flattened else targets.reshape(-1)
        if len(shape) == len(each) + 1 and shape == self.shape(shape[self.axis]):
            return targets.movedim(self.axis, -1).flatten(*((1, -1) if self.flattened else (0, -2)))
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
        """Returns rows (lead..., B T, ...) in the shape of positions. In rows (C,), C gets its place in the outputs."""
        values = rows.unflatten(lead, (self.samples, *self.sizes))
        one_each = rows.ndim == lead + 2
        return values.movedim(-1, lead + 1) if one_each and self.axis == 1 else values


@dataclass(frozen=True)
class Positions:
    """Says which dimension of a network's outputs holds the C outputs of a position."""

    axis: int  # the dimension of the C outputs, 1 or -1
    dims: int  # number of dimensions of the outputs, 2 for outputs (B, C)
    outputs: int  # C
    count: int  # T on the first batch; later batches may have another T
    rows_are_positions: bool = False  # the treated layer gives outputs with positions: each position is a sample
    flattened: bool = False  # all positions of an input are one sample with T C outputs

    @classmethod
    def of(cls, shape: tuple[int, ...], targets: tuple[int, ...] | None) -> Positions:
        """Finds the axis from the shapes of the first outputs and targets.

        It is -1 for (B, T, C) and 1 for (B, C, H, W) and (B, C, D, H, W), unless the targets fit only the other one.
        """
        axis = -1 if len(shape) == 3 else 1
        one_place = len(shape) > 3 and prod(shape[2:]) == 1  # (B, C, 1, 1): targets of this shape fit both dimensions
        if targets is not None and not one_place and not _fits(shape, targets, axis) and _fits(shape, targets, -axis):
            axis = -axis
        outputs = shape[axis]
        return cls(axis, len(shape), outputs, prod(shape[1:]) // max(1, outputs))

    @property
    def several(self) -> bool:
        """Whether the outputs have dimensions of positions that are rows of their own."""
        return self.dims > 2 and not self.flattened

    def to_json(self) -> dict[str, Any]:
        return dict(zip(FILE_KEYS, astuple(self), strict=True))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Positions:
        return cls(*(data[key] for key in FILE_KEYS if key in data))

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the sizes of the positions of outputs. Raises if C or the number of dimensions has changed."""
        if len(shape) != self.dims or shape[self.axis] != self.outputs:
            raise LapwingError(
                f"The outputs have the shape {tuple(shape)}, and on the first batch they had {self.dims} dimensions, "
                f"with {self.outputs} outputs of a position on dimension {self.axis}. Pass inputs of the same kind: "
                "only the number of positions may change."
            )
        return tuple(shape[2:] if self.axis == 1 else shape[1:-1])

    def places(self, samples: int, sizes: tuple[int, ...]) -> Places:
        """Returns the positions of a batch."""
        return Places(samples, sizes, self.axis, self.flattened)

    def matrix(self, outputs: Tensor) -> Tensor:
        """Returns outputs as a matrix (B, T C), position by position."""
        self.sizes(outputs.shape)
        return outputs.movedim(self.axis, -1).flatten(1)

    def rows(self, outputs: Tensor) -> Tensor:
        """Returns outputs as rows (B T, C), or (B, T C) if positions are flattened."""
        if self.flattened:
            return self.matrix(outputs)
        self.sizes(outputs.shape)
        return outputs.movedim(self.axis, -1).flatten(0, -2)


def _fits(shape: tuple[int, ...], targets: tuple[int, ...], axis: int) -> bool:
    """Whether targets have one entry for each position if the classes are on this axis. B may differ."""
    sizes = shape[2:] if axis == 1 else shape[1:-1]
    return tuple(targets[1:]) in (sizes, (1, *sizes) if axis == 1 else (*sizes, 1))
