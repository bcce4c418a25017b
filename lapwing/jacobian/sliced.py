"""Gradients that do not fit the memory budget at once: groups of blocks, and one block in slices of its cotangents.

Gradients are taken again where they are needed again: time for memory, the numbers stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..linalg import total
from .jacobian import BlockJacobian, MatrixJacobian, as_matrix


def grouped(loads: Sequence[tuple[int, int]], limit: int) -> list[range]:
    """Cuts blocks into consecutive groups with `Σ gradients + max scratch <= limit`; a larger block is a group alone.

    Args:
        loads: numbers (gradients, scratch) of each block, scratch being what a contraction needs beside the gradients.
        limit: numbers that fit.
    """
    groups, start, gradients, scratch = [], 0, 0, 0
    for i, (more, extra) in enumerate(loads):
        gradients, scratch = gradients + more, max(scratch, extra)
        if i > start and gradients + scratch > limit:
            groups.append(range(start, i))
            start, gradients, scratch = i, more, extra
    return [*groups, range(start, len(loads))]


class Sliced(MatrixJacobian):
    """`J = [J_1; J_2; ...]`, one block in slices of its cotangents, each computed when needed and freed after use.

    Products that add or join over cotangents take one sweep over the slices. Others form rows of all cotangents, for as
    many weights as the limit allows: one sweep for each such part of the weights, usually a single one.

    Args:
        part: gives the Jacobian of a slice of the cotangents.
        shape: (B, R, P).
        step: how many cotangents make a slice.
        limit: how many numbers the rows may have at once.
    """

    def __init__(
        self, part: Callable[[slice], BlockJacobian], shape: tuple[int, int, int], step: int, limit: int
    ) -> None:
        self.batch, self.cotangents, self.size = shape
        self._part, self._step, self._limit = part, step, limit
        self._cuts = [slice(r, min(r + step, self.cotangents)) for r in range(0, self.cotangents, step)]

    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields copies of parts of the rows, so that a caller who keeps one part does not keep all rows."""
        width = max(1, min(self.size, self._limit // (self.batch * self.cotangents)))
        for start in range(0, self.size, width):
            rows = self._rows(start, min(start + width, self.size))
            step = self.step(self.batch * self.cotangents * rows.element_size(), rows.shape[-1])
            for first in range(0, rows.shape[-1], step):
                some = rows[..., first : first + step].clone()
                yield slice(start + first, start + first + some.shape[-1]), some
            del rows, some

    def rows(self) -> Tensor:
        """Returns J (B, R, P) itself."""
        return self._rows(0, self.size)

    def rotate(self, inputs: Tensor | None, outputs: Tensor | None) -> Sliced:
        """Returns J in another basis, each slice rotated when it is needed."""
        shape = self.batch, self.cotangents, self.size
        rotated = Sliced(lambda cut: as_matrix(self._part(cut)).rotate(inputs, outputs), shape, self._step, self._limit)
        return rotated.within(self.slice_bytes)

    def squared_sum(self) -> Tensor:
        """Adds up `Σ J²` (P,)."""
        return total(self._part(cut).squared_sum() for cut in self._cuts)

    def squared_norm(self) -> Tensor:
        """Adds up `Σ J²` ()."""
        return total(self._part(cut).squared_norm() for cut in self._cuts)

    def sum_rows(self) -> Tensor:
        """Joins `Σ_n J[n]` (R, P)."""
        return torch.cat([self._part(cut).sum_rows() for cut in self._cuts])

    def jvp(self, vectors: Tensor) -> Tensor:
        """Joins `J V` (B, R, K)."""
        return torch.cat([self._part(cut).jvp(vectors) for cut in self._cuts], 1)

    def kronecker_factors(self, reduce: bool) -> tuple[Tensor, Tensor, int]:
        """Adds up Γ; A and the count do not depend on the cotangents."""
        inputs, gradients, count = as_matrix(self._part(self._cuts[0])).kronecker_factors(reduce)
        for cut in self._cuts[1:]:
            gradients = gradients + as_matrix(self._part(cut)).kronecker_factors(reduce)[1]
        return inputs, gradients, count

    def _rows(self, start: int, stop: int) -> Tensor:
        """Returns `J[:, :, start:stop]` in one sweep."""
        rows = None
        for cut in self._cuts:
            for weights, some in self._part(cut).row_slices():
                low, high = max(weights.start, start), min(weights.stop, stop)
                if low < high:
                    if rows is None:
                        rows = some.new_empty(self.batch, self.cotangents, stop - start)
                    rows[:, cut, low - start : high - start] = some[..., low - weights.start : high - weights.start]
            del some  # freed before the next slice's gradients are taken
        assert rows is not None
        return rows
