"""Latents from weight draws: `LinearDraws` through the Jacobian, `LatentDraws` through the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..network.entry import full_precision
from .latent import BaseLatent, Factor, affine_logits, check_finite, generator_for
from .terms import standard_normal


@dataclass(frozen=True, repr=False)
class LatentDraws(BaseLatent):
    """Network outputs (S, B, C) under S draws of the weights."""

    draws: Tensor
    joint: bool = False

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
    @full_precision
    def covariance(self) -> Tensor:
        """Unbiased covariance over draws: (B, C, C), or (B, C, B, C) if joint."""
        return _second_moments(self.draws - self.mean, self.joint) / (len(self.draws) - 1)

    @full_precision
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Returns n of the draws (n, B, C), chosen with replacement."""
        generator = generator_for(n, generator, self.draws[0])
        picked = torch.randint(len(self.draws), (n,), generator=generator, device=self.draws.device)
        return self.draws[picked]

    def scaled(self, factor: Factor) -> LatentDraws:
        root: Any = self.draws.new_tensor(factor).sqrt() if isinstance(factor, tuple) else factor**0.5
        return LatentDraws(torch.lerp(self.mean, self.draws, root), self.joint)

    def tempered(self, temperature: float) -> LatentDraws:
        return LatentDraws(self.draws + self.mean * (1 / temperature - 1), self.joint)

    def mapped(self, matrix: Tensor, shift: Tensor) -> LatentDraws:
        return LatentDraws(affine_logits(self.draws, matrix, shift), self.joint)

    def with_checks(self) -> LatentDraws:
        check_finite(self.draws)
        return self

    @staticmethod
    def concatenate(parts: Sequence[LatentDraws]) -> LatentDraws:
        return LatentDraws(torch.cat([part.draws for part in parts], 1))


@dataclass(frozen=True, repr=False)
class LinearDraws(BaseLatent):
    """`f ~ N(mean, 1/S Σ_s d_s d_sᵀ)` with `d_s = J(x)(θ_s - θ̂)`: a Gaussian over outputs and inputs from S draws.

    The mean (B, C) is the network's output. The expectation of the deviations d (S, B, C) is 0, so second moments are
    divided by S.
    """

    mean: Tensor
    deviations: Tensor  # d, from the same weight draws at all inputs
    joint: bool = False  # whether `covariance` includes covariances between inputs
    draws = None

    @cached_property
    def variance(self) -> Tensor:
        """Marginal variances `1/S Σ_s d_s²` (B, C)."""
        return self._mean_squares(centred=False)

    @cached_property
    def centred_variance(self) -> Tensor:
        """Variances (B, C) of the outputs minus their average, the only part a softmax depends on."""
        return self._mean_squares(centred=True)

    def _mean_squares(self, centred: bool) -> Tensor:
        """Returns the mean squares of the deviations (B, C), draw by draw, to avoid a second tensor of all draws."""
        squares = torch.zeros_like(self.mean)
        for part in self.deviations:
            moved = part - part.mean(-1, keepdim=True) if centred else part
            squares = squares.addcmul_(moved, moved)
        return squares / len(self.deviations)

    @property
    def standard_error(self) -> Tensor:
        """Monte Carlo standard errors of the variances (B, C): `variance √(2/S)`."""
        return self.variance * (2 / len(self.deviations)) ** 0.5

    @property
    @full_precision
    def covariance(self) -> Tensor:
        """Covariances (B, C, C), or (B, C, B, C) if joint. Computed at each access and not stored."""
        return _second_moments(self.deviations, self.joint) / len(self.deviations)

    @full_precision
    def covariance_times(self, vectors: Tensor) -> Tensor:
        inner = torch.einsum("sbc,bkc->bks", self.deviations, vectors)
        return torch.einsum("bks,sbc->bkc", inner, self.deviations) / len(self.deviations)

    @property
    def factor(self) -> Tensor:
        """F (B, C, S) with `F Fᵀ` the covariance of each input's outputs, or of all outputs if rows are joined."""
        return self.deviations.permute(1, 2, 0) / len(self.deviations) ** 0.5

    @full_precision
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws outputs (n, B, C), jointly across inputs and outputs. `generator=None` means seed 0.

        The random numbers do not depend on the inputs, so samples of two latents of one posterior are also joint.
        """
        generator = generator_for(n, generator, self.mean)
        noise = standard_normal((n, len(self.deviations)), self.mean, generator)
        moved = noise @ self.deviations.flatten(1) / len(self.deviations) ** 0.5
        return self.mean + moved.view(n, *self.mean.shape)

    def scaled(self, factor: Factor) -> LinearDraws:
        root: Any = self.mean.new_tensor(factor).sqrt() if isinstance(factor, tuple) else factor**0.5
        return LinearDraws(self.mean, self.deviations * root, self.joint)

    def mapped(self, matrix: Tensor, shift: Tensor) -> LinearDraws:
        return LinearDraws(affine_logits(self.mean, matrix, shift), self.deviations @ matrix.T, self.joint)

    def with_checks(self) -> LinearDraws:
        check_finite(self.deviations)
        return self

    @staticmethod
    def concatenate(parts: Sequence[LinearDraws]) -> LinearDraws:
        return LinearDraws(torch.cat([part.mean for part in parts]), torch.cat([part.deviations for part in parts], 1))


def _second_moments(deviations: Tensor, joint: bool) -> Tensor:
    """Returns `Σ_s d_s d_sᵀ` for d (S, B, C): (B, C, C), or (B, C, B, C) if joint."""
    if joint:
        flat, shape = deviations.flatten(1), deviations.shape[1:]
        return (flat.T @ flat).reshape(*shape, *shape)
    rows = deviations.transpose(0, 1)  # (B, S, C)
    return rows.mT @ rows
