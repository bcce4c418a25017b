"""The Jacobian of one block of weights for one chunk of samples, and its contractions made of rows.

Layout: B samples, R cotangents a sample (the C outputs themselves, or the columns of a Fisher root), P weights of the block.
`J[n, r]` is the gradient of cotangent r of sample n. A layer family need only give `row_slices`; every contraction
below follows from it, and overrides (`outer.py`, `layers/embedding.py`) are speed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

SLICE_BYTES = 16 * 2**20
"""Aim for the size of one slice of rows: large enough for fast products, small beside any memory budget."""


class BlockJacobian(ABC):
    """`J` (B, R, P) of one block, never formed unless asked for.

    Attributes:
        batch: B.
        cotangents: R.
        size: P.
    """

    batch: int
    cotangents: int
    size: int

    @abstractmethod
    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields `(weights, J[:, :, weights])` for consecutive slices of the weights, each (B, R, p)."""

    def rows(self) -> Tensor:
        """Returns J (B, R, P) itself. Memory O(B R P)."""
        parts = [rows for _, rows in self.row_slices()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def weighted_factor(self, weights: Tensor) -> Tensor | None:
        """Returns a thin factor F (B, R, k) with `F Fᵀ = J diag(weights) Jᵀ`, or None where there is none."""
        return None

    def weighted_gram(self, weights: Tensor) -> Tensor:
        """Returns `J diag(weights) Jᵀ` (B, R, R) for weights (P,)."""
        return self.weighted_grams([weights])[0]

    def weighted_grams(self, candidates: Sequence[Tensor]) -> list[Tensor]:
        """Returns `J diag(weights) Jᵀ` (B, R, R) for several weights (P,), the rows formed once."""
        totals: list = [0] * len(candidates)
        for part, rows in self.row_slices():
            for i, weights in enumerate(candidates):
                scaled = rows * weights[part].sqrt()
                totals[i] = totals[i] + scaled @ scaled.mT  # (B, R, R)
        return totals

    def squared_sum(self) -> Tensor:
        """Returns `Σ_n,r J²` (P,), the diagonal of the GGN of these samples."""
        return torch.cat([rows.square().sum((0, 1)) for _, rows in self.row_slices()])

    def squared_norm(self) -> Tensor:
        """Returns `Σ_n,r,p J²` (), the trace of the GGN of these samples."""
        return self.squared_sum().sum()

    def sum_rows(self) -> Tensor:
        """Returns `Σ_n J[n]` (R, P), that is `Jᵀu` where the cotangents carry the weights u."""
        return torch.cat([rows.sum(0) for _, rows in self.row_slices()], -1)

    def jvp(self, vectors: Tensor) -> Tensor:
        """Returns `J V` (B, R, K) for V given as rows (K, P)."""
        total = 0
        for part, rows in self.row_slices():
            total = total + rows @ vectors[:, part].T
        return total

    def gram(self, other: BlockJacobian) -> Tensor:
        """Returns the block of the NTK `J J'ᵀ` (B, R, B', R')."""
        total = 0
        for (_, mine), (_, theirs) in zip(self.row_slices(), other.row_slices(), strict=True):
            total = total + mine.flatten(0, 1) @ theirs.flatten(0, 1).T
        return total.reshape(self.batch, self.cotangents, other.batch, other.cotangents)

    def joint_weighted_gram(self, weights: Tensor) -> Tensor:
        """Returns `J diag(weights) Jᵀ` across samples, (B, R, B, R)."""
        total = 0
        for part, rows in self.row_slices():
            scaled = (rows * weights[part].sqrt()).flatten(0, 1)
            total = total + scaled @ scaled.T
        shape = (self.batch, self.cotangents)
        return total.reshape(*shape, *shape)


class Rows(BlockJacobian):
    """Explicit rows (B, R, P): norms, scales, shifts and everything generic."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self.batch, self.cotangents, self.size = rows.shape

    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields all rows at once: they are there already."""
        yield slice(0, self.size), self._rows


class SumOfUses(BlockJacobian):
    """The Jacobian of weights used several times, `J = Σ_uses J_use`: rows are summed before anything quadratic."""

    def __init__(self, uses: list[BlockJacobian]) -> None:
        self._uses = uses
        self.batch, self.cotangents, self.size = uses[0].batch, uses[0].cotangents, uses[0].size

    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields the sum of the uses' rows."""
        total = self._uses[0].rows()
        for use in self._uses[1:]:
            total = total + use.rows()
        yield slice(0, self.size), total

    def jvp(self, vectors: Tensor) -> Tensor:
        """Sums the uses' products: linear in J."""
        return sum(use.jvp(vectors) for use in self._uses)

    def sum_rows(self) -> Tensor:
        """Sums the uses' products: linear in J."""
        return sum(use.sum_rows() for use in self._uses)
