"""Latents: the distribution of the network's outputs, before a link turns it into one of y.

A way through the network returns one of four: a Gaussian for each input (`Latent`), one Gaussian over all inputs
(`JointLatent`), one whose covariance is that of draws (`LinearDraws`), or outputs under draws of the weights
(`LatentDraws`). `SelectedLatent` is a `Latent` of some of the outputs. All have `mean`, `variance`, `std`,
`centred_variance`, `covariance`, `sample`, `scaled`, `tempered`, `compact` and `with_checks`; `draws` is None where
there are none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ..errors import LapwingError
from ..linalg import check_draws, is_finite, nonnegative, psd_root, seeded, total
from ..network.eager import full_precision
from .positions import LatentAtPositions
from .terms import DenseTerm, FactoredTerm, MarginalTerm, SelectedTerm, Term, concatenate, standard_deviation


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
    draws = None
    _row_names: ClassVar[tuple[str, ...]] = ("mean",)

    @cached_property
    @full_precision
    def variance(self) -> Tensor:
        """Marginal variances (B, C); the covariance is not expanded for them."""
        return self._finite(nonnegative(total(term.variance() for term in self.terms)))

    @property
    def std(self) -> Tensor:
        """Marginal standard deviations (B, C)."""
        return standard_deviation(self.variance)

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
        return check_finite(values) if self.checked else values

    @full_precision
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws outputs (n, B, C), inputs independent of each other; `generator=None` means seed 0."""
        generator = _generator(n, generator, self.mean)
        return self._finite(self.mean + total(term.sample(n, generator) for term in self.terms))

    def plus(self, covariance: Tensor) -> Latent:
        """Returns the latent with a further covariance (B, C, C) of each input's outputs."""
        return replace(self, terms=(*self.terms, DenseTerm(covariance)))

    def scaled(self, factor: float) -> Latent:
        """Returns the latent with its covariance times a number >= 0."""
        return replace(self, terms=tuple(term.scaled(factor) for term in self.terms))

    def tempered(self, temperature: float) -> Latent:
        """Returns the latent with its mean divided by a temperature; the covariance stays."""
        return replace(self, mean=self.mean / temperature)

    def at_temperatures(self, temperatures: Sequence[float]) -> Latent:
        """Returns the latent at each temperature, one copy of the batch after another."""
        return self.concatenate([self.tempered(temperature) for temperature in temperatures])

    def compact(self, covariances: bool) -> Latent:
        """Returns a detached float64 copy that keeps covariances, or variances alone."""
        if covariances:
            term: Term = DenseTerm(self.covariance.detach().double())
        else:
            term = MarginalTerm(self.variance.detach().double(), self.centred_variance.detach().double())
        return replace(self, mean=self.mean.detach().double(), terms=(term,))

    def with_checks(self) -> Latent:
        """Returns the latent for the user: moments that are not finite are refused when they are read."""
        return replace(self, checked=True)

    @staticmethod
    def concatenate(parts: Sequence[Latent]) -> Latent:
        """Joins the latents of consecutive batches."""
        first: Any = parts[0]
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in first._row_names}
        return replace(first, terms=concatenate([part.terms for part in parts]), **joined)

    @staticmethod
    def gather(parts: Iterator[Latent], samples: int) -> Latent:
        """Joins the latents of consecutive chunks, written into tensors of all samples as they come."""
        whole: Latent | None = None
        start = 0
        for part in parts:
            count = len(part.mean)
            if count == samples:
                return part
            if whole is None and not any(rows.requires_grad for rows in part._rows):
                whole = part._with_rows([rows.new_empty(samples, *rows.shape[1:]) for rows in part._rows])
            if whole is None or [term.layout for term in whole.terms] != [term.layout for term in part.terms]:
                done = [] if whole is None else [whole._with_rows([rows[:start] for rows in whole._rows])]
                return Latent.concatenate([*done, part, *parts])  # gradients, or texts of other lengths
            for all_rows, rows in zip(whole._rows, part._rows, strict=True):
                all_rows[start : start + count] = rows
            start += count
            del part, rows  # before the next one is made
        assert whole is not None
        return whole

    def taken(self, rows: Tensor) -> Latent:
        """Returns the latent of some samples, in this order."""
        return self._with_rows([values[rows] for values in self._rows])

    @property
    def _rows(self) -> list[Tensor]:
        """All tensors with one row per sample."""
        return [
            *(getattr(self, name) for name in self._row_names),
            *(rows for term in self.terms for rows in term.rows),
        ]

    def _with_rows(self, rows: Sequence[Tensor]) -> Latent:
        """Returns the latent with other tensors in place of `_rows`."""
        remaining, whole = iter(rows), cast("Any", self)
        named = {name: next(remaining) for name in self._row_names}
        terms = tuple(term.with_rows(*[next(remaining) for _ in term.rows]) for term in self.terms)
        return replace(whole, terms=terms, **named)


@dataclass(frozen=True)
class SelectedLatent(Latent):
    """The latent of k of the C outputs of each input: `mean` (B, k) and terms of (B, k, k).

    Attributes:
        outputs: which outputs they are, int64 (B, k).
        every_mean: (B, C), the means of all outputs.
    """

    outputs: Tensor = field(kw_only=True)
    every_mean: Tensor = field(kw_only=True)
    _row_names: ClassVar[tuple[str, ...]] = ("mean", "outputs", "every_mean")

    def tempered(self, temperature: float) -> SelectedLatent:
        """Returns the latent with its means divided by a temperature; the covariance stays."""
        return replace(self, mean=self.mean / temperature, every_mean=self.every_mean / temperature)

    def of_classes(self) -> Latent:
        """Returns a latent of all C logits (B, C), for links to class probabilities.

        The k logits move against their average as they do here. The other C - k keep their means; where a link asks for
        their variance, it is the average of the k.

        Raises:
            LapwingError: where k is 1: a softmax sees differences between logits alone.
        """
        count, classes = self.mean.shape[1], self.every_mean.shape[1]
        if count < 2:
            raise LapwingError(
                "A classifier's probabilities depend on differences between outputs, and one output is selected. Write "
                "via=lw.Linearized(outputs=10)."
            )
        gaps = self.centred_variance * (count / (count - 1) * (classes - 1) / classes) ** 2
        plain, centred = (
            part.mean(-1, keepdim=True).expand_as(self.every_mean).scatter(1, self.outputs, part)
            for part in (self.variance, gaps)
        )
        rows = self.covariance - self.covariance.mean(-1, keepdim=True)
        term = SelectedTerm(plain, centred, self.outputs, rows - rows.mean(-2, keepdim=True))
        return Latent(self.every_mean, (term,), self.checked)


@dataclass(frozen=True)
class JointLatent:
    """`f(x_1..B) ~ N(mean, covariance)` with the covariances between inputs.

    Attributes:
        mean: (B, C).
        covariance: (B, C, B, C).
    """

    mean: Tensor
    covariance: Tensor
    joint = True
    draws = None

    @property
    def variance(self) -> Tensor:
        """Marginal variances (B, C)."""
        size = self.mean.numel()
        return nonnegative(self.covariance.reshape(size, size).diagonal().reshape(self.mean.shape))

    @property
    def centred_variance(self) -> Tensor:
        """Variances (B, C) of the outputs minus their average, all that a softmax sees."""
        blocks = self.covariance.diagonal(dim1=0, dim2=2).movedim(-1, 0)  # (B, C, C)
        return nonnegative(DenseTerm(blocks).centred_variance())

    @property
    def std(self) -> Tensor:
        """Marginal standard deviations (B, C)."""
        return standard_deviation(self.variance)

    @full_precision
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws outputs (n, B, C), joint across inputs and outputs; `generator=None` means seed 0."""
        size = self.mean.numel()
        root = FactoredTerm(psd_root(self.covariance.reshape(1, size, size)))
        draws = root.sample(n, _generator(n, generator, self.mean))
        return self.mean + draws.reshape(n, *self.mean.shape)

    def plus(self, covariance: Tensor) -> JointLatent:
        """Returns the latent with a further covariance (B, C, C) of each input's outputs."""
        eye = torch.eye(len(self.mean), dtype=self.mean.dtype, device=self.mean.device)
        return JointLatent(self.mean, self.covariance + torch.einsum("bcd,be->bced", covariance, eye))

    def scaled(self, factor: float) -> JointLatent:
        """Returns the latent with its covariance times a number >= 0."""
        return JointLatent(self.mean, self.covariance * factor)

    def tempered(self, temperature: float) -> JointLatent:
        """Returns the latent with its mean divided by a temperature; the covariance stays."""
        return replace(self, mean=self.mean / temperature)

    def compact(self, covariances: bool) -> JointLatent:
        """Returns a detached float64 copy."""
        return JointLatent(self.mean.detach().double(), self.covariance.detach().double())

    def with_checks(self) -> JointLatent:
        """Returns the latent itself, or refuses one that is not finite."""
        check_finite(self.covariance)
        return self


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
                f"{self.draws.shape[0]} weight draw has no variance. Take at least two: write "
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
    def centred_variance(self) -> Tensor:
        """Unbiased variance over draws of the outputs minus their average (B, C)."""
        return (self.draws - self.draws.mean(-1, keepdim=True)).var(0)

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

    def scaled(self, factor: float) -> LatentDraws:
        """Returns draws moved along lines to their mean, so that the covariance is multiplied by a number >= 0."""
        mean = self.mean
        return LatentDraws(mean + (self.draws - mean) * factor**0.5, self.joint)

    def tempered(self, temperature: float) -> LatentDraws:
        """Returns draws that are moved as a whole, so that their mean is divided by a temperature."""
        return LatentDraws(self.draws + self.mean * (1 / temperature - 1), self.joint)

    def compact(self, covariances: bool) -> LatentDraws:
        """Returns a detached float64 copy: predictions average over the draws themselves."""
        return LatentDraws(self.draws.detach().double(), self.joint)

    def with_checks(self) -> LatentDraws:
        """Returns the latent itself, or refuses one that is not finite."""
        check_finite(self.draws)
        return self

    @staticmethod
    def concatenate(parts: Sequence[LatentDraws]) -> LatentDraws:
        """Joins the latents of consecutive batches."""
        return LatentDraws(torch.cat([part.draws for part in parts], 1))


@dataclass(frozen=True)
class LinearDraws:
    """`f ~ N(mean, 1/S Σ_s d_s d_sᵀ)` with `d_s = J(x)(θ_s - θ̂)`: a Gaussian over outputs and inputs, by S draws.

    The mean is the network's output, and the deviations have mean 0 by definition, so second moments are divided by S.

    Attributes:
        mean: (B, C).
        deviations: d (S, B, C), of the same weight draws at all inputs.
        joint: whether `covariance` is that between inputs, too.
    """

    mean: Tensor
    deviations: Tensor
    joint: bool = False
    draws = None

    @cached_property
    def variance(self) -> Tensor:
        """Marginal variances `1/S Σ_s d_s²` (B, C)."""
        return self._second_moments(self.deviations)

    @cached_property
    def centred_variance(self) -> Tensor:
        """Variances (B, C) of the outputs minus their average, all that a softmax sees."""
        return self._second_moments(self.deviations, centred=True)

    def _second_moments(self, deviations: Tensor, centred: bool = False) -> Tensor:
        """Averages squares, draw by draw, so that no second tensor of all draws is made."""
        parts = (d - d.mean(-1, keepdim=True) if centred else d for d in deviations)
        return total(part.square() for part in parts) / len(deviations)

    @property
    def std(self) -> Tensor:
        """Marginal standard deviations (B, C)."""
        return standard_deviation(self.variance)

    @property
    def standard_error(self) -> Tensor:
        """Monte Carlo error of the variances (B, C), one standard deviation of them: `variance √(2/S)`."""
        return self.variance * (2 / len(self.deviations)) ** 0.5

    @property
    @full_precision
    def covariance(self) -> Tensor:
        """Covariances (B, C, C), or (B, C, B, C) when joint; expanded at every reading, and only then."""
        count = len(self.deviations)
        if self.joint:
            flat = self.deviations.flatten(1)  # (S, B C)
            return (flat.T @ flat / count).reshape(*self.mean.shape, *self.mean.shape)
        rows = self.deviations.transpose(0, 1)  # (B, S, C)
        return rows.mT @ rows / count

    @property
    def covariance_standard_error(self) -> Tensor:
        """Monte Carlo error of the covariances, in their shape: `√((Σ_ij² + Σ_ii Σ_jj)/S)`."""
        variance, covariance = self.variance, self.covariance
        product = variance[:, :, None, None] * variance if self.joint else variance[:, :, None] * variance[:, None]
        return ((covariance.square() + product) / len(self.deviations)).sqrt()

    @property
    def factor(self) -> Tensor:
        """F (B, C, S): `F Fᵀ` are the covariances of each input's outputs, and of all where the rows are joined."""
        return self.deviations.permute(1, 2, 0) / len(self.deviations) ** 0.5

    @full_precision
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws outputs (n, B, C), joint across inputs and outputs; `generator=None` means seed 0.

        The random numbers do not depend on the inputs: samples of two latents of one posterior are joint as well.
        """
        generator = _generator(n, generator, self.mean)
        shape = (n, len(self.deviations))
        noise = torch.randn(shape, generator=generator, dtype=self.mean.dtype, device=self.mean.device)
        moved = noise @ self.deviations.flatten(1) / len(self.deviations) ** 0.5
        return self.mean + moved.view(n, *self.mean.shape)

    def scaled(self, factor: float) -> LinearDraws:
        """Returns the latent with its covariance times a number >= 0."""
        return LinearDraws(self.mean, self.deviations * factor**0.5, self.joint)

    def tempered(self, temperature: float) -> LinearDraws:
        """Returns the latent with its mean divided by a temperature; the covariance stays."""
        return replace(self, mean=self.mean / temperature)

    def compact(self, covariances: bool) -> LinearDraws:
        """Returns a detached float64 copy."""
        return LinearDraws(self.mean.detach().double(), self.deviations.detach().double(), self.joint)

    def with_checks(self) -> LinearDraws:
        """Returns the latent itself, or refuses one that is not finite."""
        check_finite(self.deviations)
        return self

    @staticmethod
    def concatenate(parts: Sequence[LinearDraws]) -> LinearDraws:
        """Joins the latents of consecutive batches."""
        return LinearDraws(torch.cat([part.mean for part in parts]), torch.cat([part.deviations for part in parts], 1))


AnyLatent = Latent | JointLatent | LinearDraws | LatentDraws | LatentAtPositions


def check_finite(values: Tensor) -> Tensor:
    """Returns variances, covariances or draws of the outputs, refusing those that are not finite."""
    if is_finite(values):
        return values
    raise LapwingError(
        f"The latent {tuple(values.shape)} is not finite: it exceeds the range of {values.dtype}. Scale the inputs and "
        "the targets to about 1, raise the prior precision, or fit the network in float64 with model.double()."
    )


def _generator(n: int, generator: torch.Generator | None, mean: Tensor) -> torch.Generator:
    check_draws("sample", "n", n, mean.numel())
    return seeded(generator, mean.device)
