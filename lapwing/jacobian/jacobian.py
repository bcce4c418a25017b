"""The Jacobian of one block of weights for one chunk of samples, and its contractions from rows.

Layout: B samples, R cotangents per sample (the C outputs, or the columns of a Fisher root), P weights in a block.
`J[n, r]` is the gradient of cotangent r of sample n. A layer family must only implement `row_slices`; every
contraction below follows from it. Overrides (`outer.py`, `shared_outer.py`, `layers/embedding.py`) are faster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ..linalg import joined, total
from .strips import Strips

SLICE_BYTES = 16 * 2**20
"""Target size of one slice of rows: large enough for fast products, small compared with the usual memory budget."""


Reads = Literal["covariances", "variances", "scale"]
"""The part of the outputs' covariances that is read: all, the variances, or their mean (one number per sample)."""


@dataclass(eq=False, repr=False)
class DiagonalWeights:
    """`diag(w)` of one block, with cached layouts. w is an elementwise function of the values; None is the identity."""

    values: Tensor
    function: Callable[[Tensor], Tensor] | None = None
    layouts: dict[tuple[int, int, bool], tuple[Tensor, Tensor | None]] = field(default_factory=dict, init=False)

    @cached_property
    def flat(self) -> Tensor:
        """The weights w (P,). If only `matrix` is used, they may have another shape."""
        return self.values if self.function is None else self.function(self.values)

    def at(self, pick: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the part of w (P,) that `pick` selects, without caching."""
        if self.function is None or "flat" in vars(self):
            return pick(self.flat)
        return self.function(pick(self.values))

    def matrix(self, outputs: int, inputs: int, bias: bool) -> tuple[Tensor, Tensor | None]:
        """Returns w as a matrix (O, I) without the column of the bias, and that column (O,), if there is a bias."""
        layout = outputs, inputs, bias
        if layout not in self.layouts:
            weights = self.at(lambda flat: flat.reshape(outputs, inputs)[:, : inputs - bias])
            # F.linear is five times slower with a bias that is not contiguous
            last = self.at(lambda flat: flat.reshape(outputs, inputs)[:, -1]).contiguous() if bias else None
            self.layouts[layout] = weights, last
        return self.layouts[layout]


Weightings = Iterable[DiagonalWeights]
"""Several weights w of one block, for example for several priors."""


def _squares(rows: Tensor, weights: Tensor, reads: Reads) -> Tensor:
    """Returns squares of J and H J times w (p, n): (2, B, R, n), or squares of H J summed over cotangents (B, n)."""
    centred = rows - rows.mean(1, keepdim=True)
    if reads == "scale":
        return centred.square_().sum(1) @ weights
    return torch.stack([rows.square() @ weights, centred.square_() @ weights])


def reflect_(values: Tensor, dim: int) -> Tensor:
    """Replaces X by its reflection `Q X` along a dimension of R entries, and returns it; `Q Q = I`.

    The first row of `Q X` is √R times the mean of the rows of X. The other rows depend on differences of the rows
    alone, so they keep their digits if the mean is large.
    """
    root = values.shape[dim] ** 0.5
    if root > 1:
        first = values.narrow(dim, 0, 1)
        step = torch.sub(values.mean(dim, keepdim=True), first, alpha=1 / root)  # from x_0 to the first row, over √R
        values.sub_(step, alpha=root / (root - 1))
        first.add_(step, alpha=root + root / (root - 1))
    return values


def materialised(candidates: Weightings) -> list[DiagonalWeights]:
    """Returns weightings, a single one with all of its w: the next chunk of samples meets it again."""
    several = list(candidates)
    if len(several) == 1:
        _ = several[0].flat
    return several


class BlockJacobian(ABC):
    """`J` (B, R, P) of one block, which only `rows` forms."""

    batch: int  # B
    cotangents: int  # R
    size: int  # P
    slice_bytes: int = SLICE_BYTES  # target size of one slice
    is_output: bool = False  # whether the layer gives the network's outputs, and their entries are the cotangents
    slopes: Tensor | None = None  # (B, O) of the network's tail, if the layer gives the outputs and steps follow it
    strips: Strips | None = None  # inputs a and output gradients g at all positions, if the rows are `Σ_t g aᵀ`

    def within(self, slice_bytes: int) -> Self:
        """Sets the target size of slices, and returns the same Jacobian."""
        self.slice_bytes = slice_bytes
        return self

    def step(self, bytes_per_item: int, items: int) -> int:
        """Returns the number of items that fit in one slice, at least 1 and at most `items`."""
        return max(1, min(items, self.slice_bytes // max(1, bytes_per_item)))

    @abstractmethod
    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields `(weights, J[:, :, weights])` for consecutive slices of the weights, each (B, R, p)."""

    def rows(self) -> Tensor:
        """Returns J (B, R, P). Memory O(B R P)."""
        return joined((rows for _, rows in self.row_slices()), -1)

    def weighted_gram(self, weights: Tensor) -> Tensor:
        """Returns `J diag(weights) Jᵀ` (B, R, R) for weights (P,)."""
        return reflect_(reflect_(self.weighted([DiagonalWeights(weights)], "covariances")[0], 1), 2)

    def weighted_factors(self, candidates: Weightings) -> tuple[Tensor | None, Iterator[Tensor]] | None:
        """Returns g (B, R, O) and scales s (B, O), with `J diag(w) Jᵀ = g diag(s) gᵀ` for several weights w.

        g is None if the layer gives the outputs: it is then diagonal. Returns None if J has no such factors.
        """
        return None

    def weighted(self, candidates: Weightings, reads: Reads) -> Sequence[Tensor] | Tensor:
        """Returns the part of `J diag(w) Jᵀ` that is read, one tensor for each of several weights w.

        - "covariances": the matrix `Q J diag(w) Jᵀ Q` (B, R, R) with the Q of `reflect_`.
        - "variances": the diagonals (2, B, R) of `J diag(w) Jᵀ` and of `H J diag(w) Jᵀ H`, with `H = I - 11ᵀ/R`.
        - "scale": the trace (B,) of `H J diag(w) Jᵀ H`.

        The rows are formed once for all candidates.
        """
        several = materialised(candidates)
        if reads == "covariances":
            grams: list = [0] * len(several)
            for part, rows in self.row_slices():
                for i, weighting in enumerate(several):
                    scaled = reflect_(rows * weighting.at(itemgetter(part)).sqrt(), 1)
                    grams[i] = grams[i] + scaled @ scaled.mT  # (B, R, R)
            return grams
        slices = (
            (rows, torch.stack([weighting.at(itemgetter(part)) for weighting in several], -1))
            for part, rows in self.row_slices()
        )
        return total(_squares(rows, weights, reads) for rows, weights in slices).movedim(-1, 0)

    def squared_sum(self) -> Tensor:
        """Returns `Σ_n,r J²` (P,), the diagonal of the GGN of these samples."""
        return joined(rows.square().sum((0, 1)) for _, rows in self.row_slices())

    def squared_norm(self) -> Tensor:
        """Returns `Σ_n,r,p J²` (), the trace of the GGN of these samples."""
        return self.squared_sum().sum()

    def sum_rows(self) -> Tensor:
        """Returns `Σ_n J[n]` (R, P)."""
        return joined((rows.sum(0) for _, rows in self.row_slices()), -1)

    def jvp(self, vectors: Tensor) -> Tensor:
        """Returns `J V` (B, R, K) for V given as rows (K, P)."""
        return total(F.linear(rows, vectors[:, part]) for part, rows in self.row_slices())

    def vjp(self, cotangents: Tensor) -> Tensor:
        """Returns `Σ_n J[n]ᵀ u[n]` (S, P) for u (B, R, S). Time O(B R S P) at most."""
        flat = cotangents.flatten(0, 1).T  # (S, B R)
        return joined((flat @ rows.flatten(0, 1) for _, rows in self.row_slices()), -1)

    def columns(self, index: Tensor, places: Sequence[int]) -> Iterator[Tensor]:
        """Yields `J[:, :, index]` in parts, for ascending indices, given as a tensor and as a list."""
        for part, rows in self.row_slices():
            first, stop = bisect_left(places, part.start), bisect_left(places, part.stop)
            if stop > first:
                yield rows[:, :, index[first:stop] - part.start]

    def plus(self, other_uses: Sequence[BlockJacobian]) -> BlockJacobian:
        """Returns the sum of this Jacobian and the Jacobians of other uses of the same weights."""
        return SumOfUses([self, *other_uses])

    def gram(self, other: BlockJacobian) -> Tensor:
        """Returns the block of the NTK `J J'ᵀ` (B, R, B', R')."""
        gram = total(F.linear(mine.flatten(0, 1), theirs.flatten(0, 1)) for _, mine, theirs in aligned(self, other))
        return gram.reshape(self.batch, self.cotangents, other.batch, other.cotangents)

    def joint_weighted_gram(self, weights: Tensor, other: BlockJacobian) -> Tensor:
        """Returns `J diag(weights) J'ᵀ` (B, R, B', R')."""
        parts: list[Tensor] = []
        for part, mine, theirs in aligned(self, other):
            root = weights[part].sqrt()
            left = (mine * root).flatten(0, 1)
            parts = [total([*parts, F.linear(left, left if theirs is mine else (theirs * root).flatten(0, 1))])]
        return parts[0].reshape(self.batch, self.cotangents, other.batch, other.cotangents)


def aligned(mine: BlockJacobian, theirs: BlockJacobian) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields rows (B, R, p) and (B', R', p) of two Jacobians for the same weights, cut at the ends of both slices."""
    if theirs is mine:
        yield from ((part, rows, rows) for part, rows in mine.row_slices())
        return
    right_slices = theirs.row_slices()
    there, right = slice(0, 0), torch.empty(0)
    for here, left in mine.row_slices():
        start = here.start
        while start < here.stop:
            if there.stop == start:
                there, right = next(right_slices)
            stop = min(here.stop, there.stop)
            first, second = (slice(start - part.start, stop - part.start) for part in (here, there))
            yield slice(start, stop), left[..., first], right[..., second]
            start = stop


class MatrixJacobian(BlockJacobian):
    """The Jacobian of a matrix weight in G groups of (O, I), which Kronecker factors rotate."""

    @abstractmethod
    def rotate(self, inputs: Tensor | None, outputs: Tensor | None) -> BlockJacobian:
        """Returns J in another basis, for U_in (G, I, I) and U_out (G, O, O); None is the identity."""

    def rotated_squared_sum(self, inputs: Tensor | None, outputs: Tensor | None) -> Tensor:
        """Returns `squared_sum` of `rotate(inputs, outputs)`."""
        return self.rotate(inputs, outputs).squared_sum()

    def rotate_inputs(self, basis: Tensor) -> MatrixJacobian | None:
        """Returns J for inputs [|a - U Uᵀ a|, Uᵀ a] with U (I, k) orthonormal, or None if the layer has no such form.

        It replaces J if all directions orthogonal to U have one weight.
        """
        return None

    @abstractmethod
    def add_kronecker_factors(
        self, reduce: bool, inputs: Tensor, outputs: Tensor, weights: Tensor | None = None
    ) -> int:
        """Adds `A = Σ a aᵀ` (G, I, I), or its diagonal, and `Γ = Σ g gᵀ` (G, O, O) to lower triangles, in place.

        With `reduce`, a is the mean and g the sum over positions, else every position is a sample. Position t of sample
        n counts `weights[n, t]` times in A, or the mean weight of the sample if there are not as many positions; g
        already contains the weight. Returns the number of positions.
        """


class Rows(BlockJacobian):
    """Explicit rows (B, R, P): norms, scales, shifts and everything generic."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self.batch, self.cotangents, self.size = rows.shape

    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, self.size), self._rows


class SumOfUses(MatrixJacobian):
    """The Jacobian of weights with several uses, `J = Σ_uses J_use`. Rows are summed before they are squared."""

    def __init__(self, uses: Sequence[BlockJacobian]) -> None:
        self._uses = uses
        self.batch, self.cotangents, self.size = uses[0].batch, uses[0].cotangents, uses[0].size

    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, self.size), total(use.rows() for use in self._uses)

    def rotate(self, inputs: Tensor | None, outputs: Tensor | None) -> SumOfUses:
        return SumOfUses([as_matrix(use).rotate(inputs, outputs) for use in self._uses]).within(self.slice_bytes)

    def add_kronecker_factors(
        self, reduce: bool, inputs: Tensor, outputs: Tensor, weights: Tensor | None = None
    ) -> int:
        return sum(as_matrix(use).add_kronecker_factors(reduce, inputs, outputs, weights) for use in self._uses)


class Sliced(MatrixJacobian):
    """`J = [J_1; J_2; ...]`: one block in slices of its cotangents, each computed when needed and freed after use.

    Products that add or join over cotangents need one sweep over the slices. Other products form rows of all
    cotangents, one sweep for each part of the weights whose rows have at most `limit` entries. `part` returns J of a
    slice of `step` cotangents, and `shape` is (B, R, P).
    """

    def __init__(
        self, part: Callable[[slice], BlockJacobian], shape: tuple[int, int, int], step: int, limit: int
    ) -> None:
        self.batch, self.cotangents, self.size = shape
        self._part, self._step, self._limit = part, step, limit
        self._cuts = [slice(r, min(r + step, self.cotangents)) for r in range(0, self.cotangents, step)]

    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        width = max(1, min(self.size, self._limit // (self.batch * self.cotangents)))
        for start in range(0, self.size, width):
            rows = self._rows(start, min(start + width, self.size))
            step = self.step(self.batch * self.cotangents * rows.element_size(), rows.shape[-1])
            for first in range(0, rows.shape[-1], step):
                some = rows[..., first : first + step].clone()  # a view would keep all rows
                yield slice(start + first, start + first + some.shape[-1]), some
            del rows, some

    def rows(self) -> Tensor:
        return self._rows(0, self.size)

    def rotate(self, inputs: Tensor | None, outputs: Tensor | None) -> Sliced:
        shape = self.batch, self.cotangents, self.size
        rotated = Sliced(lambda cut: as_matrix(self._part(cut)).rotate(inputs, outputs), shape, self._step, self._limit)
        return rotated.within(self.slice_bytes)

    def squared_sum(self) -> Tensor:
        return total(self._part(cut).squared_sum() for cut in self._cuts)

    def jvp(self, vectors: Tensor) -> Tensor:
        return torch.cat([self._part(cut).jvp(vectors) for cut in self._cuts], 1)

    def add_kronecker_factors(
        self, reduce: bool, inputs: Tensor, outputs: Tensor, weights: Tensor | None = None
    ) -> int:
        count = 0
        for cut in self._cuts:
            count = as_matrix(self._part(cut)).add_kronecker_factors(reduce, inputs, outputs, weights)
            inputs = torch.zeros_like(inputs)  # A and the count do not depend on the cotangents: add them once
        return count

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
            del some  # freed before the gradients of the next slice are computed
        assert rows is not None
        return rows


def as_matrix(jacobian: BlockJacobian) -> MatrixJacobian:
    """Returns the Jacobian of a block with a matrix layout, which has Kronecker factors."""
    assert isinstance(jacobian, MatrixJacobian)
    return jacobian
