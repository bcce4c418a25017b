"""The latent Gaussian at the network's outputs: its covariance kept as a sum of factors, expanded only when read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Integral
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..errors import LapwingError, shown
from ..linalg import SLICE_NUMBERS, check_memory, is_finite, linear, nonnegative, psd_root, total
from ..network.autocast import full_precision


@dataclass(frozen=True)
class Thin:
    """`F diag(s) Fᵀ` for a factor F (B, C, K) and s (B, K), ones when None."""

    factor: Tensor
    scale: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Thin:
        """Returns the term in another dtype: some structures are contracted in float64."""
        if self.factor.dtype == dtype:
            return self
        return Thin(self.factor.to(dtype), None if self.scale is None else self.scale.to(dtype))

    def variance(self) -> Tensor:
        """Returns the diagonal (B, C)."""
        return self._by_slices(lambda part: part._sums(part.factor.square()))

    def centred_variance(self) -> Tensor:
        """Returns the diagonal (B, C) of `H F diag(s) Fᵀ H`, `H = I - 11ᵀ/C`."""
        return self._by_slices(lambda part: part._sums((part.factor - part.factor.mean(1, keepdim=True)).square()))

    def dense(self) -> Tensor:
        """Returns (B, C, C)."""
        return self._by_slices(lambda part: torch.bmm(part._scaled(part.factor), part.factor.mT))

    def _scaled(self, values: Tensor) -> Tensor:
        """Returns `X diag(s)` for X (B, C, K)."""
        return values if self.scale is None else values * self.scale.unsqueeze(1)

    def _sums(self, squares: Tensor) -> Tensor:
        """Returns `Σ_k s_k q_k` (B, C)."""
        return self._scaled(squares).sum(-1)

    def _by_slices(self, function: Callable[[Thin], Tensor]) -> Tensor:
        """Applies a function to slices of samples, so that no second factor of all of them is held."""
        samples, outputs, columns = self.factor.shape
        length = max(1, SLICE_NUMBERS // max(1, outputs * columns))
        if length >= samples:
            return function(self)
        factors = self.factor.split(length)
        scales = [None] * len(factors) if self.scale is None else self.scale.split(length)
        return torch.cat([function(Thin(*part)) for part in zip(factors, scales, strict=True)])

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Returns draws (n, B, C) from K normals each."""
        shape = (count, self.factor.shape[0], self.factor.shape[-1])
        noise = torch.randn(shape, generator=generator, dtype=self.factor.dtype, device=self.factor.device)
        if self.scale is not None:
            noise = noise * _root(self.scale).unsqueeze(0)
        return torch.einsum("bck,sbk->sbc", self.factor, noise)  # one product a sample, not one a draw


@dataclass(frozen=True)
class Rotated:
    """`U diag(s) Uᵀ` for one U (C, C), the identity when None, and s (B, C): a last layer of any number of classes."""

    basis: Tensor | None
    scale: Tensor

    def to(self, dtype: torch.dtype) -> Rotated:
        """Returns the term in another dtype: some structures are contracted in float64."""
        if self.scale.dtype == dtype:
            return self
        return Rotated(None if self.basis is None else self.basis.to(dtype), self.scale.to(dtype))

    def variance(self) -> Tensor:
        """Returns the diagonal (B, C): time O(B C²), or nothing without rotation."""
        return self.scale if self.basis is None else linear(self.scale, self.basis.square())

    def centred_variance(self) -> Tensor:
        """Returns the diagonal (B, C) of `H U diag(s) Uᵀ H`, `H = I - 11ᵀ/C`."""
        if self.basis is None:
            classes = self.scale.shape[-1]
            return (1 - 2 / classes) * self.scale + self.scale.sum(-1, keepdim=True) / classes**2
        return linear(self.scale, (self.basis - self.basis.mean(0)).square())

    def dense(self) -> Tensor:
        """Returns (B, C, C): time O(B C³) with a rotation."""
        if self.basis is None:
            return torch.diag_embed(self.scale)
        return linear(self.basis * self.scale.unsqueeze(1), self.basis)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Returns draws (n, B, C)."""
        shape = (count, *self.scale.shape)
        noise = torch.randn(shape, generator=generator, dtype=self.scale.dtype, device=self.scale.device)
        noise = noise * self.scale.sqrt()
        return noise if self.basis is None else linear(noise, self.basis)


@dataclass(frozen=True)
class Dense:
    """A matrix (B, C, C)."""

    matrix: Tensor

    def to(self, dtype: torch.dtype) -> Dense:
        """Returns the term in another dtype: some structures are contracted in float64."""
        return self if self.matrix.dtype == dtype else Dense(self.matrix.to(dtype))

    def variance(self) -> Tensor:
        """Returns the diagonal (B, C)."""
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def centred_variance(self) -> Tensor:
        """Returns the diagonal (B, C) of `H M H`, `H = I - 11ᵀ/C`."""
        rows = self.matrix.mean(-1)  # (B, C)
        return self.variance() - 2 * rows + rows.mean(-1, keepdim=True)

    def dense(self) -> Tensor:
        """Returns the matrix."""
        return self.matrix

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Returns draws (n, B, C) through a root by eigendecomposition, so that singular matrices are fine."""
        return Thin(psd_root(self.matrix)).sample(count, generator)


Term = Thin | Rotated | Dense


@dataclass(frozen=True)
class Marginals:
    """Variances alone (B, C), of the outputs and of the outputs minus their average: what a closed-form link reads."""

    plain: Tensor
    centred: Tensor

    @classmethod
    def of(cls, term: Term) -> Marginals:
        """Returns those of a term, not as a view that would keep its matrix."""
        return cls(term.variance().clone(), term.centred_variance())

    def __add__(self, other: Marginals) -> Marginals:
        return Marginals(self.plain + other.plain, self.centred + other.centred)


def smaller(factor: Tensor) -> Thin | Dense:
    """Returns `F Fᵀ` as the factor (B, C, K), or multiplied out where that holds fewer numbers."""
    return Dense(factor @ factor.mT) if factor.shape[-1] > factor.shape[-2] else Thin(factor)


def distinct(first: Any, second: Any) -> tuple[Any, ...]:
    """Returns both, or the one that they are, so that nothing is computed twice."""
    return (first,) if second is first else (first, second)


def across(left: Tensor, right: Tensor) -> Tensor:
    """Returns `F F'ᵀ` (B, R, B', R') of factors (B, R, k) and (B', R', k)."""
    return linear(left.flatten(0, 1), right.flatten(0, 1)).view(*left.shape[:2], *right.shape[:2])


def _rows(latent: Latent) -> list[tuple[Any, str, Tensor]]:
    """Returns `(owner, name, tensor)` of all tensors with one row a sample."""
    entries = (
        (owner, part.name, getattr(owner, part.name)) for owner in (latent, *latent.terms) for part in fields(owner)
    )
    return [(owner, name, value) for owner, name, value in entries if isinstance(value, Tensor) and name != "basis"]


def _alike(first: Latent, second: Latent) -> bool:
    """Says whether the rows of one could stand below those of the other."""
    kinds = [[(type(o), n, v.dtype, v.shape[1:]) for o, n, v in _rows(latent)] for latent in (first, second)]
    return kinds[0] == kinds[1]


def _mapped(latent: Latent, change: Callable[[Tensor], Tensor]) -> Latent:
    """Returns the latent with all tensors changed that have one row a sample."""
    moved: dict[int, dict[str, Any]] = {}
    for owner, name, value in _rows(latent):
        moved.setdefault(id(owner), {})[name] = change(value)
    return replace(latent, **moved[id(latent)], terms=tuple(replace(term, **moved[id(term)]) for term in latent.terms))


def gathered(parts: Iterator[Latent], samples: int) -> Latent:
    """Joins the latents of consecutive chunks, written into tensors of all samples as they come."""
    whole: Latent | None = None
    start = 0
    for part in parts:
        count = len(part.mean)
        if count == samples:
            return part
        if whole is None and not any(value.requires_grad for _, _, value in _rows(part)):
            whole = _mapped(part, lambda rows: rows.new_empty(samples, *rows.shape[1:]))
        if whole is None or not _alike(whole, part):  # gradients, or texts of other lengths
            done = [] if whole is None else [_mapped(whole, itemgetter(slice(start)))]
            return together([*done, part, *parts])
        for (_, _, all_rows), (_, _, rows) in zip(_rows(whole), _rows(part), strict=True):
            all_rows[start : start + count] = rows
        start += count
        del part, rows  # before the next one is made
    assert whole is not None
    return whole


def together(parts: Sequence[Latent]) -> Latent:
    """Joins the latents of consecutive chunks."""
    return Latent(torch.cat([part.mean for part in parts]), concatenate([part.terms for part in parts]))


def concatenate(parts: Sequence[Sequence[Term]]) -> tuple[Term, ...]:
    """Joins the terms of consecutive chunks of samples."""
    if len(parts) == 1:
        return tuple(parts[0])
    if len({tuple(type(term) for term in terms) for terms in parts}) > 1:  # texts of one token beside longer ones
        return (Dense(torch.cat([total(term.dense() for term in terms) for terms in parts])),)
    joined: list[Term] = []
    for terms in zip(*parts, strict=True):
        first = terms[0]
        if isinstance(first, Thin) and len({(t.factor.shape[-1], t.scale is None) for t in terms}) > 1:
            joined.append(Dense(torch.cat([term.dense() for term in terms])))  # texts of other lengths
        elif isinstance(first, Thin):
            scale = None if first.scale is None else torch.cat([term.scale for term in terms])
            joined.append(Thin(torch.cat([term.factor for term in terms]), scale))
        elif isinstance(first, Rotated):
            joined.append(Rotated(first.basis, torch.cat([term.scale for term in terms])))
        else:
            joined.append(Dense(torch.cat([term.matrix for term in terms])))
    return tuple(joined)


def check_moments(values: Tensor) -> Tensor:
    """Returns variances, covariances or draws of the outputs, refusing those that are not finite."""
    if is_finite(values):
        return values
    raise LapwingError(
        f"The latent {tuple(values.shape)} is not finite: it exceeds the range of {values.dtype}. Scale the inputs and "
        "the targets to about 1, raise the prior precision, or fit the network in float64 with model.double()."
    )


def checked(latent: AnyLatent) -> AnyLatent:
    """Returns a latent for the user: its moments are finite when they are read, or refused."""
    if isinstance(latent, Latent):
        return replace(latent, checked=True)
    check_moments(latent.covariance if isinstance(latent, JointLatent) else latent.draws)
    return latent


def _root(variance: Tensor) -> Tensor:
    """Returns standard deviations, without slope at 0."""
    return variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()


def _generator(n: int, generator: torch.Generator | None, mean: Tensor) -> torch.Generator:
    if isinstance(n, bool) or not isinstance(n, Integral) or n < 1:
        raise LapwingError(
            f"Asked for sample({shown(n)}); a whole number of draws, at least 1, is needed: write sample(5)."
        )
    check_memory(f"sample({n})", n, mean.numel())
    return torch.Generator(mean.device).manual_seed(0) if generator is None else generator


@dataclass(frozen=True)
class Latent:
    """`f(x) ~ N(mean, Σ_terms)` independently for each of B inputs.

    Attributes:
        mean: (B, C), the network's outputs.
        terms: what the covariance is the sum of.
        checked: whether variances that are not finite are refused; tuning passes over candidates that have them.
    """

    mean: Tensor
    terms: tuple[Term, ...]
    checked: bool = False
    joint = False

    @cached_property
    @full_precision
    def variance(self) -> Tensor:
        """Marginal variances (B, C); the covariance is not expanded for them."""
        return self._finite(nonnegative(total(term.variance() for term in self.terms)))

    @property
    def std(self) -> Tensor:
        """Marginal standard deviations (B, C)."""
        return _root(self.variance)

    @cached_property
    @full_precision
    def centred_variance(self) -> Tensor:
        """Variances (B, C) of the outputs minus their average, all that a softmax sees; not expanded either."""
        return self._finite(nonnegative(total(term.centred_variance() for term in self.terms)))

    @cached_property
    @full_precision
    def covariance(self) -> Tensor:
        """Covariances of each input's outputs (B, C, C), expanded on first reading."""
        return self._finite(total(term.dense() for term in self.terms))

    def _finite(self, values: Tensor) -> Tensor:
        return check_moments(values) if self.checked else values

    @full_precision
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws outputs (n, B, C), inputs independent of each other; `generator=None` means seed 0."""
        generator = _generator(n, generator, self.mean)
        return self._finite(self.mean + total(term.sample(n, generator) for term in self.terms))


@dataclass(frozen=True)
class MarginalLatent:
    """A latent Gaussian of which only variances are known.

    Attributes:
        mean: (B, C).
        variance: marginal variances (B, C).
        centred_variance: variances (B, C) of the outputs minus their average.
    """

    mean: Tensor
    variance: Tensor
    centred_variance: Tensor
    joint = False

    @classmethod
    def of(cls, mean: Tensor, marginals: Marginals) -> MarginalLatent:
        """Clamps rounding noise below zero."""
        return cls(mean, nonnegative(marginals.plain), nonnegative(marginals.centred))


@dataclass(frozen=True)
class JointLatent:
    """`f(x_1..B) ~ N(mean, covariance)` with the covariances across inputs.

    Attributes:
        mean: (B, C).
        covariance: (B, C, B, C).
    """

    mean: Tensor
    covariance: Tensor
    joint = True

    @property
    def variance(self) -> Tensor:
        """Marginal variances (B, C)."""
        size = self.mean.numel()
        return nonnegative(self.covariance.reshape(size, size).diagonal().reshape(self.mean.shape))

    @property
    def centred_variance(self) -> Tensor:
        """Variances (B, C) of the outputs minus their average, all that a softmax sees."""
        own = self.covariance.diagonal(dim1=0, dim2=2).movedim(-1, 0)  # (B, C, C)
        return nonnegative(Dense(own).centred_variance())

    @property
    def std(self) -> Tensor:
        """Marginal standard deviations (B, C)."""
        return _root(self.variance)

    @full_precision
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws outputs (n, B, C), joint across inputs and outputs; `generator=None` means seed 0."""
        size = self.mean.numel()
        root = Thin(psd_root(self.covariance.reshape(1, size, size)))
        draws = root.sample(n, _generator(n, generator, self.mean))
        return self.mean + draws.reshape(n, *self.mean.shape)


@dataclass(frozen=True)
class LatentDraws:
    """Network outputs under S draws of the weights.

    Attributes:
        draws: (S, B, C).
    """

    draws: Tensor
    joint: bool = False

    def __post_init__(self) -> None:
        if self.draws.shape[0] < 2:
            raise LapwingError(
                f"Asked for the moments of {self.draws.shape[0]} weight draw; at least two are needed: write "
                "via=lw.MonteCarlo(draws=50)."
            )

    @property
    def mean(self) -> Tensor:
        """Mean over draws (B, C)."""
        return self.draws.mean(0)

    @property
    def variance(self) -> Tensor:
        """Unbiased variance over draws (B, C)."""
        return self.draws.var(0)

    @property
    def std(self) -> Tensor:
        """Standard deviation over draws (B, C)."""
        return self.draws.std(0)

    @property
    @full_precision
    def covariance(self) -> Tensor:
        """Unbiased covariance over draws: (B, C, C), or (B, C, B, C) when joint."""
        centred = self.draws - self.mean
        if self.joint:
            flat = centred.flatten(1)  # (S, B C)
            shape = (*self.mean.shape, *self.mean.shape)
            return (flat.T @ flat / (len(flat) - 1)).reshape(shape)
        return torch.einsum("sbc,sbd->bcd", centred, centred) / (len(centred) - 1)

    @full_precision
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Returns n of the draws, picked with replacement (n, B, C)."""
        generator = _generator(n, generator, self.draws[0])
        picked = torch.randint(len(self.draws), (n,), generator=generator, device=self.draws.device)
        return self.draws[picked]


AnyLatent = Latent | JointLatent | LatentDraws
