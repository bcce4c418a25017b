"""Terms: a covariance of the network's outputs is a sum of terms, whose factors are multiplied out only when needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import LapwingError
from ..jacobian.jacobian import Reads, reflect_
from ..linalg import SLICE_NUMBERS, nonnegative, psd_root, total


class Term(ABC):
    """A covariance (B, C, C) of the outputs of each of B samples. Subclasses are frozen dataclasses of tensors."""

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The tensors with one row per sample: all fields, unless a subclass says otherwise."""
        return tuple(value for value in vars(self).values() if value is not None)

    def with_rows(self, *rows: Tensor) -> Self:
        """Returns the same kind of term with these tensors instead of `rows`."""
        kind: Any = type(self)
        return kind(*rows)

    @property
    def layout(self) -> tuple[Any, ...]:
        """Kind, dtypes and shapes that two terms must share so that their rows can be joined."""
        return type(self), *((rows.dtype, rows.shape[1:]) for rows in self.rows)

    def to(self, outputs: Tensor) -> Self:
        """Returns the term in the dtype and on the device of the outputs. Some structures are contracted in float64."""
        kind: Any = type(self)
        if self.rows[0].dtype == outputs.dtype:
            return self
        return kind(*(value if value is None else value.to(outputs) for value in vars(self).values()))

    def marginals(self) -> MarginalTerm:
        """Returns only the variances, as a copy that does not keep the matrix in memory."""
        return MarginalTerm(self.variance().clone(), self.centred_variance())

    def read(self, reads: Reads) -> Term:
        """Returns the term reduced to the part that is read."""
        if reads == "covariances":
            return self
        return self.marginals() if reads == "variances" else ScaleTerm(self.centred_variance().mean(-1, keepdim=True))

    @abstractmethod
    def variance(self) -> Tensor:
        """Returns the diagonal (B, C)."""

    @abstractmethod
    def centred_variance(self) -> Tensor:
        """Returns the diagonal (B, C) of `H Σ H`, `H = I - 11ᵀ/C`: variances of the outputs minus their average."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Returns the covariance (B, C, C)."""

    def times(self, vectors: Tensor) -> Tensor:
        """Returns the covariance of each sample times its K vectors (B, K, C)."""
        return torch.bmm(vectors, self.dense())

    def scaled(self, factor: float) -> Self:
        """Returns the covariance multiplied by a factor: all rows, unless a subclass says otherwise."""
        return self.with_rows(*[rows * factor for rows in self.rows])

    def stretched(self, factors: Tensor) -> Term:
        """Returns the covariance of outputs that are multiplied by the factors (C,) or (B, C)."""
        return DenseTerm(self.dense() * factors.unsqueeze(-1) * factors.unsqueeze(-2))

    def selected(self, outputs: Tensor) -> Term:
        """Returns the covariance (B, k, k) of some outputs (B, k)."""
        return DenseTerm(selected(self.dense(), outputs))

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Returns draws (n, B, C), by default from an eigendecomposition, which works for singular matrices."""
        return FactoredTerm(psd_root(self.dense())).sample(count, generator)


Terms = tuple[Term, ...]
"""A covariance as the sum of its terms."""


@dataclass(frozen=True)
class FactoredTerm(Term):
    """`F diag(s) Fᵀ` for a factor F (B, C, K) and s (B, K); None means ones."""

    factor: Tensor
    scale: Tensor | None = None

    def variance(self) -> Tensor:
        """Returns `Σ_k s_k F_ck²`."""
        return self._by_slices(lambda part: part._weighted(part.factor.square()).sum(-1))

    def centred_variance(self) -> Tensor:
        return self._by_slices(
            lambda part: part._weighted((part.factor - part.factor.mean(1, keepdim=True)).square()).sum(-1)
        )

    def dense(self) -> Tensor:
        return self._by_slices(lambda part: torch.bmm(part._weighted(part.factor), part.factor.mT))

    def times(self, vectors: Tensor) -> Tensor:
        return torch.bmm(self._weighted(torch.bmm(vectors, self.factor)), self.factor.mT)

    def scaled(self, factor: float) -> FactoredTerm:
        """Returns the term with another s. F, which has C times as many entries, is shared."""
        scale = self.factor.new_ones(len(self.factor), self.factor.shape[-1]) if self.scale is None else self.scale
        return FactoredTerm(self.factor, scale * factor)

    def stretched(self, factors: Tensor) -> FactoredTerm:
        return FactoredTerm(self.factor * factors.unsqueeze(-1), self.scale)

    def multiplied_out(self) -> DenseTerm:
        """Returns the matrix, and the centred variance from the factor, since the matrix would lose digits."""
        return DenseTerm(self.dense(), self.centred_variance())

    def _weighted(self, values: Tensor) -> Tensor:
        """Returns `X diag(s)` for X (B, ..., K)."""
        return values if self.scale is None else values * self.scale.unsqueeze(1)

    def _by_slices(self, function: Callable[[FactoredTerm], Tensor]) -> Tensor:
        """Applies a function to slices of samples, to avoid a second factor for all samples."""
        samples, outputs, columns = self.factor.shape
        length = max(1, SLICE_NUMBERS // max(1, outputs * columns))
        if length >= samples:
            return function(self)
        slices = zip(*(rows.split(length) for rows in self.rows), strict=True)
        return torch.cat([function(FactoredTerm(*rows)) for rows in slices])

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        noise = standard_normal((count, len(self.factor), self.factor.shape[-1]), self.factor, generator)
        if self.scale is not None:
            noise = noise * standard_deviation(self.scale).unsqueeze(0)
        return torch.einsum("bck,sbk->sbc", self.factor, noise)  # one product per sample, not per draw


@dataclass(frozen=True)
class EigenTerm(Term):
    """`U diag(s) Uᵀ` for one U (C, C) and s (B, C), from a last layer. `basis=None` means the identity."""

    basis: Tensor | None
    scale: Tensor

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """Only s, because all samples share U."""
        return (self.scale,)

    def with_rows(self, *rows: Tensor) -> Self:
        return type(self)(self.basis, *rows)

    def variance(self) -> Tensor:
        """Returns the diagonal. Time O(B C²), or O(1) without U."""
        return self.scale if self.basis is None else F.linear(self.scale, self.basis.square())

    def centred_variance(self) -> Tensor:
        if self.basis is None:
            classes = self.scale.shape[-1]
            return (1 - 2 / classes) * self.scale + self.scale.sum(-1, keepdim=True) / classes**2
        return F.linear(self.scale, (self.basis - self.basis.mean(0)).square())

    def dense(self) -> Tensor:
        if self.basis is None:
            return torch.diag_embed(self.scale)
        return F.linear(self.basis * self.scale.unsqueeze(1), self.basis)

    def times(self, vectors: Tensor) -> Tensor:
        scale = self.scale.unsqueeze(1)
        return scale * vectors if self.basis is None else (scale * (vectors @ self.basis)) @ self.basis.T

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        noise = standard_normal((count, *self.scale.shape), self.scale, generator) * self.scale.sqrt()
        return noise if self.basis is None else F.linear(noise, self.basis)

    def selected(self, outputs: Tensor) -> Term:
        if self.basis is None:
            return EigenTerm(None, self.scale.gather(1, outputs))
        return _selected_rows(self.basis, self.scale, outputs).multiplied_out()

    def stretched(self, factors: Tensor) -> Term:
        if self.basis is None:
            return EigenTerm(None, self.scale * factors.square())
        return StretchedTerm(self.basis, self.scale, factors.expand_as(self.scale))


def _selected_rows(basis: Tensor, scale: Tensor, outputs: Tensor) -> FactoredTerm:
    """Returns `U diag(s) Uᵀ` for the rows of U (B, k, C) of some outputs (B, k)."""
    return FactoredTerm(basis.index_select(0, outputs.flatten()).view(*outputs.shape, -1), scale)


@dataclass(frozen=True)
class StretchedTerm(EigenTerm):
    """`D U diag(s) Uᵀ D` with D = diag(d): an `EigenTerm` of outputs that are multiplied by d (B, C)."""

    basis: Tensor
    factors: Tensor

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """Only s and d, because all samples share U."""
        return self.scale, self.factors

    def scaled(self, factor: float) -> StretchedTerm:
        return StretchedTerm(self.basis, self.scale * factor, self.factors)

    def variance(self) -> Tensor:
        return super().variance() * self.factors.square()

    def centred_variance(self) -> Tensor:
        """Returns `Σ_j s_j (d_c U_cj - ū_j)²` with `ū_j = Σ_k d_k U_kj / C`. Time O(B C²)."""
        # with U = V + 1 mᵀ and d = d̄ + e, the term in brackets is d_c V_cj + e_c m_j - v_j: exact if all d are equal
        mean, (classes, s) = self.basis.mean(0), (len(self.basis), self.scale)  # m (C,)
        centred = self.basis - mean  # V (C, C)
        rest = self.factors - self.factors.mean(1, keepdim=True)  # e (B, C)
        shift = rest @ centred / classes  # v (B, C)
        squares = self.factors.square() * F.linear(s, centred.square())
        cross = self.factors * (rest * F.linear(s * mean, centred) - F.linear(s * shift, centred))
        sums = s @ mean.square(), (s * shift) @ mean, (s * shift.square()).sum(-1)  # Σ s m², Σ s m v, Σ s v² (B,)
        of_mean, mixed, of_shift = (each.unsqueeze(-1) for each in sums)
        return nonnegative(squares + 2 * cross + rest.square() * of_mean - 2 * rest * mixed + of_shift)

    def dense(self) -> Tensor:
        return super().dense() * self.factors.unsqueeze(-1) * self.factors.unsqueeze(-2)

    def times(self, vectors: Tensor) -> Tensor:
        factors = self.factors.unsqueeze(1)
        return factors * super().times(factors * vectors)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        return self.factors * super().sample(count, generator)

    def stretched(self, factors: Tensor) -> StretchedTerm:
        return StretchedTerm(self.basis, self.scale, self.factors * factors)

    def selected(self, outputs: Tensor) -> Term:
        rows = _selected_rows(self.basis, self.scale, outputs)
        return rows.stretched(self.factors.gather(1, outputs)).multiplied_out()


@dataclass(frozen=True)
class DenseTerm(Term):
    """A matrix (B, C, C), and the centred variance (B, C) if it is known more precisely than from the matrix."""

    matrix: Tensor
    centred: Tensor | None = None

    def variance(self) -> Tensor:
        """Returns the diagonal, a view."""
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def centred_variance(self) -> Tensor:
        """Returns the stored value, or the diagonal minus twice the mean of each row plus the mean of all entries."""
        if self.centred is not None:
            return self.centred
        rows = self.matrix.mean(-1)  # (B, C)
        return self.variance() - 2 * rows + rows.mean(-1, keepdim=True)

    def dense(self) -> Tensor:
        return self.matrix

    def to(self, outputs: Tensor) -> DenseTerm:
        """Returns the term in the dtype of the outputs. The centred variance is computed before the cast."""
        if self.matrix.dtype == outputs.dtype:
            return self
        return DenseTerm(self.matrix.to(outputs), self.centred_variance().to(outputs))

    def __add__(self, other: DenseTerm) -> DenseTerm:
        known = self.centred is not None or other.centred is not None
        centred = self.centred_variance() + other.centred_variance() if known else None
        return DenseTerm(self.matrix + other.matrix, centred)


@dataclass(frozen=True)
class ReflectedSum:
    """`Q M Q` (B, C, C) of a covariance M, with the Q of `reflect_`: the sum over blocks is turned back once."""

    matrix: Tensor

    def __add__(self, other: ReflectedSum) -> ReflectedSum:
        return ReflectedSum(self.matrix + other.matrix)

    def term(self) -> DenseTerm:
        """Returns M and its centred variances. Overwrites the matrix."""
        differences = F.pad(self.matrix[:, 1:, 1:], (1, 0, 1, 0))  # without the row and column of the mean of outputs
        matrix, centred = (reflect_(reflect_(values, 1), 2) for values in (self.matrix, differences))
        return DenseTerm(matrix, nonnegative(centred.diagonal(dim1=-2, dim2=-1)))


Summand = Term | ReflectedSum
"""The part of one block in a sum over blocks."""


@dataclass(frozen=True)
class MarginalTerm(Term):
    """Variances (B, C) of the outputs and of the outputs minus their average, enough for a closed-form link."""

    plain: Tensor
    centred: Tensor

    def variance(self) -> Tensor:
        return self.plain

    def centred_variance(self) -> Tensor:
        return self.centred

    def stretched(self, factors: Tensor) -> MarginalTerm:
        """Returns the variances times squared factors; the centred ones are right for equal factors, as logits have."""
        squares = factors.square()
        squares_of_centred = squares[..., : self.centred.shape[-1]]  # (B, 0) if unread
        return MarginalTerm(self.plain * squares, self.centred * squares_of_centred)

    def dense(self) -> Tensor:
        raise LapwingError("This latent has only variances. Use a link in closed form: write link=lw.Probit().")

    def __add__(self, other: MarginalTerm) -> MarginalTerm:
        return MarginalTerm(self.plain + other.plain, self.centred + other.centred)


@dataclass(frozen=True)
class ScaleTerm(Term):
    """The mean centred variance of the outputs of each input (B, 1), which `Probit` reads."""

    mean: Tensor

    def centred_variance(self) -> Tensor:
        """Returns the mean (B, 1) instead of one variance per output."""
        return self.mean

    def variance(self) -> Tensor:
        raise LapwingError("This latent has one mean variance for each input. Use the default link, lw.Probit().")

    dense = variance

    def __add__(self, other: ScaleTerm) -> ScaleTerm:
        return ScaleTerm(self.mean + other.mean)


@dataclass(frozen=True)
class SelectedTerm(MarginalTerm):
    """Variances (B, C), and covariances (B, k, k) of k `outputs` minus their average: `SelectedLatent.of_classes`."""

    outputs: Tensor
    matrix: Tensor

    def scaled(self, factor: float) -> SelectedTerm:
        return SelectedTerm(self.plain * factor, self.centred * factor, self.outputs, self.matrix * factor)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Returns draws (n, B, C), with 0 for outputs that are not selected."""
        moved = DenseTerm(self.matrix).sample(count, generator)  # (n, B, k)
        index = self.outputs.expand(count, -1, -1)
        return moved.new_zeros(count, *self.plain.shape).scatter(-1, index, moved)


def selected(matrix: Tensor, outputs: Tensor) -> Tensor:
    """Returns the covariances (B, k, k) of some outputs (B, k) from the covariances of all (B, C, C)."""
    sample = torch.arange(len(outputs), device=outputs.device)[:, None, None]
    return matrix[sample, outputs[:, :, None], outputs[:, None]]


def add_term(terms: Sequence[Any], term: Any) -> tuple[Any, ...]:
    """Returns the sum with one more term. Matrices, or variances, are added up: a sum ends with at most one of them."""
    if not terms or not isinstance(terms[-1], (DenseTerm, ReflectedSum, MarginalTerm, ScaleTerm)):
        return (*terms, term)
    *factors, last = terms
    return (*factors, last + term) if type(term) is type(last) else (*factors, term, last)


def turned_back(terms: Iterable[Summand]) -> Terms:
    """Returns a sum of terms in which a `ReflectedSum` became a matrix."""
    return reduce(add_term, [term.term() if isinstance(term, ReflectedSum) else term for term in terms], ())


def multiplied_out(terms: Sequence[Term], times: int = 1) -> Terms:
    """Replaces the factors of a sum by one matrix (B, C, C) if they have more than `times * C` columns together."""
    factors = [term for term in terms if isinstance(term, FactoredTerm)]
    if not factors or sum(term.factor.shape[-1] for term in factors) <= times * factors[0].factor.shape[1]:
        return tuple(terms)
    matrices = (term.multiplied_out() if isinstance(term, FactoredTerm) else term for term in terms)
    return reduce(add_term, matrices, ())


def concatenate(parts: Sequence[Sequence[Term]]) -> Terms:
    """Joins the terms of consecutive chunks of samples. If their kinds differ (shorter texts), returns one matrix."""
    if len({tuple(type(term) for term in terms) for terms in parts}) > 1:
        return (_as_matrix(parts),)
    return tuple(map(_concatenated, zip(*parts, strict=True)))


def _concatenated(terms: Sequence[Term]) -> Term:
    """Joins one term of each chunk."""
    if len({term.layout for term in terms}) > 1:  # factors with different numbers of columns
        return _as_matrix([[term] for term in terms])
    return terms[0].with_rows(*map(torch.cat, zip(*(term.rows for term in terms), strict=True)))


def _as_matrix(parts: Sequence[Sequence[Term]]) -> DenseTerm:
    """Joins the terms of consecutive chunks of samples into one matrix with centred variances."""
    matrices = torch.cat([total(term.dense() for term in terms) for terms in parts])
    return DenseTerm(matrices, torch.cat([total(term.centred_variance() for term in terms) for terms in parts]))


def factored_or_dense(factor: Tensor) -> Term:
    """Returns `F Fᵀ` as the factor (B, C, K), or as a matrix if it has fewer entries."""
    term = FactoredTerm(factor)
    return term.multiplied_out() if factor.shape[-1] > factor.shape[-2] else term


def of_both(function: Callable[[Any], Any], first: Any, second: Any) -> tuple[Any, Any]:
    """Returns a function of two objects, computed once if they are the same object."""
    value = function(first)
    return value, value if second is first else function(second)


def cross_covariance(left: Tensor, right: Tensor) -> Tensor:
    """Returns `F F'ᵀ` (B, R, B', R') of factors (B, R, k) and (B', R', k)."""
    return F.linear(left.flatten(0, 1), right.flatten(0, 1)).view(*left.shape[:2], *right.shape[:2])


def standard_normal(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Returns standard normal numbers in the dtype and on the device of a tensor."""
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def standard_deviation(variance: Tensor) -> Tensor:
    """Returns the square root of variances, with gradient 0 at 0."""
    return variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
