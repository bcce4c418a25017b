"""Latents of weight draws: `LinearDraws` through the Jacobian, `LatentDraws` through the network itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import LapwingError
from ..linalg import doubled
from ..network.entry import full_precision
from .latent import JointLatent, Latent, SelectedLatent, check_finite, generator_for
from .latent_at_positions import Described, LatentAtPositions
from .terms import standard_deviation

if TYPE_CHECKING:
    from typing_extensions import TypeIs


@dataclass(frozen=True, repr=False)
class LatentDraws(Described):
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
        generator = generator_for(n, generator, self.draws[0])
        picked = torch.randint(len(self.draws), (n,), generator=generator, device=self.draws.device)
        return self.draws[picked]

    def scaled(self, factor: float) -> LatentDraws:
        """Returns draws moved along lines to their mean, so that the covariance is multiplied by a number >= 0."""
        return LatentDraws(torch.lerp(self.mean, self.draws, factor**0.5), self.joint)

    def tempered(self, temperature: float) -> LatentDraws:
        """Returns draws that are moved as a whole, so that their mean is divided by a temperature."""
        return LatentDraws(self.draws + self.mean * (1 / temperature - 1), self.joint)

    def compact(self, covariances: bool) -> LatentDraws:
        """Returns a detached float64 copy: predictions average over the draws themselves."""
        return LatentDraws(doubled(self.draws.detach()), self.joint)

    def with_checks(self) -> LatentDraws:
        """Returns the latent itself, or refuses one that is not finite."""
        check_finite(self.draws)
        return self

    @staticmethod
    def concatenate(parts: Sequence[LatentDraws]) -> LatentDraws:
        """Joins the latents of consecutive batches."""
        return LatentDraws(torch.cat([part.draws for part in parts], 1))


@dataclass(frozen=True, repr=False)
class LinearDraws(Described):
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
    has_factor = True

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
        squares = torch.zeros_like(self.mean)
        for part in deviations:
            moved = part - part.mean(-1, keepdim=True) if centred else part
            squares = squares.addcmul_(moved, moved)
        return squares / len(deviations)

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
    def factor(self) -> Tensor:
        """F (B, C, S): `F Fᵀ` are the covariances of each input's outputs, and of all where the rows are joined."""
        return self.deviations.permute(1, 2, 0) / len(self.deviations) ** 0.5

    @full_precision
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws outputs (n, B, C), joint across inputs and outputs; `generator=None` means seed 0.

        The random numbers do not depend on the inputs: samples of two latents of one posterior are joint as well.
        """
        generator = generator_for(n, generator, self.mean)
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
        return LinearDraws(doubled(self.mean.detach()), doubled(self.deviations.detach()), self.joint)

    def with_checks(self) -> LinearDraws:
        """Returns the latent itself, or refuses one that is not finite."""
        check_finite(self.deviations)
        return self

    @staticmethod
    def concatenate(parts: Sequence[LinearDraws]) -> LinearDraws:
        """Joins the latents of consecutive batches."""
        return LinearDraws(torch.cat([part.mean for part in parts]), torch.cat([part.deviations for part in parts], 1))


AnyLatent = Latent | JointLatent | LinearDraws | LatentDraws | LatentAtPositions


def has_positions(latent: AnyLatent) -> TypeIs[LatentAtPositions]:
    """Whether a latent has positions."""
    return latent.has_positions


def is_selected(latent: AnyLatent) -> TypeIs[SelectedLatent]:
    """Whether a latent is one of some of the outputs."""
    return latent.is_selected


def has_factor(latent: AnyLatent) -> TypeIs[LinearDraws]:
    """Whether the covariance of a latent has the factor of its draws."""
    return latent.has_factor
