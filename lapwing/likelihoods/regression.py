"""Predictions of a regression: a latent plus independent Gaussian noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import torch
from torch import Tensor
from torch import distributions as dist

from ..covariance import AnyLatent, has_factor, is_selected
from ..data.frames import as_targets
from ..linalg import check_draws, cholesky, seeded
from .links import at_least_float32
from .mixtures import known_covariance, known_residuals, mixture_log_density, mixture_quantile, normal_nodes
from .predictions import RealPrediction, tails_of
from .targets import aligned_targets, check_real_targets
from .transformed import TransformedPrediction


@dataclass(frozen=True, eq=False, repr=False)
class RegressionPrediction(RealPrediction):
    """Real outputs at B inputs: the latent plus independent Gaussian noise.

    Weight draws give an equal mixture of Gaussians, `1/S Σ_s N(f_s, σ² I)`. Then `log_prob`, `interval`, `mean` and
    `variance` are computed from this mixture.

    Args:
        latent: the latent over outputs.
        noise_variance: σ², in squared units of y.
        missing: whether a NaN target is missing.
        noise_ratios: r (C,), factor of σ² at each output, or (B, C); None means ones.
    """

    latent: AnyLatent
    noise_variance: float
    missing: bool = False
    noise_ratios: tuple[float, ...] | Tensor | None = None

    @property
    def mean(self) -> Tensor:
        return at_least_float32(self.latent.mean)

    @property
    def epistemic_variance(self) -> Tensor:
        return at_least_float32(self.latent.variance)

    @property
    def aleatoric_variance(self) -> Tensor:
        return torch.zeros_like(self.mean) + self._noise

    @cached_property
    def _noise(self) -> Tensor:
        """The noise variance of each output (C,), or (B, C) of each input: for selected outputs, or ratios (B, C)."""
        mean = self.mean
        noise = mean.new_full((mean.shape[-1],), self.noise_variance)
        if self.noise_ratios is None:
            return noise
        ratios = torch.as_tensor(self.noise_ratios, dtype=noise.dtype, device=noise.device)
        return noise * (ratios[self.latent.outputs] if is_selected(self.latent) else ratios)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Returns the exact central interval of each output: Gaussian quantiles, or mixture quantiles by bisection."""
        tails, draws = tails_of(level), self._draws()
        if draws is None:
            half = NormalDist().inv_cdf(tails[1]) * self.std
            return self.mean - half, self.mean + half
        low, high = (mixture_quantile(draws, self._noise, p) for p in tails)
        return low, high

    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns the log density of the targets for each input separately, (B,), in nats.

        `log N(y; m, Σ + σ² I)` with the (C, C) covariance of the outputs of one input. A joint latent does not couple
        inputs here: for the joint density write `distribution().log_prob(y.flatten())`.

        Cost: O(B C³), or O(S B C) for S weight draws, or O(S² B C) for S linearised draws.
        """
        mean, draws = self.mean, self._draws()
        targets = as_targets(targets, mean.device)
        check_real_targets("RegressionPrediction.log_prob", mean.shape, mean.device, targets, self.missing)
        targets = aligned_targets("RegressionPrediction.log_prob", mean, targets)
        if draws is not None:
            return mixture_log_density(draws, self._noise, targets)
        if mean.shape[-1] == 1:
            values = dist.Normal(mean, self.std, validate_args=False).log_prob(targets.nan_to_num())
            return torch.where(targets.isnan(), 0.0, values).squeeze(-1)
        if has_factor(self.latent) and not self.missing:
            columns = self.latent.factor.double()
            return self._low_rank(mean.double(), columns).log_prob(targets.double()).to(mean.dtype)
        # missing targets get residual 0 and variance σ², and their density is divided out
        factor = cholesky(self._noisy(known_covariance(self._blocks().double(), targets)))  # (B, C, C)
        residual, _ = known_residuals(mean.double(), targets.double(), self._noise)
        normal = dist.MultivariateNormal(torch.zeros_like(residual), scale_tril=factor, validate_args=False)
        holes = 0.5 * (targets.isnan() * (2.0 * math.pi * self._noise).log()).sum(-1)
        return (normal.log_prob(residual) + holes).to(mean.dtype)

    def transformed(self, function: Callable[[Tensor], Tensor]) -> TransformedPrediction:
        draws, mean, noise = self._draws(), self.mean, self._noise
        if draws is not None:
            return TransformedPrediction(
                self, function, (draws, noise, draws.new_full((len(draws), 1, 1), 1 / len(draws)))
            )
        z, weights = normal_nodes(mean.double())
        return TransformedPrediction(self, function, (mean + self.epistemic_variance.sqrt() * z, noise, weights))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws y, (n, B, C): latent draws (joint across inputs if the latent is joint) plus independent noise."""
        check_draws("sample", "n", n, self.latent.mean.numel())
        generator = seeded(generator, self.latent.mean.device)
        latent = at_least_float32(self.latent.sample(n, generator))
        noise = torch.randn(latent.shape, generator=generator, dtype=latent.dtype, device=latent.device)
        return latent + self._noise.to(latent.dtype).sqrt() * noise

    def distribution(self) -> dist.Distribution:
        """Returns y as a `torch.distributions` object with batch shape (B,) and event shape (C,).

        This is a Normal for one output, a MultivariateNormal for several, a LowRankMultivariateNormal for linearised
        draws, and a mixture for weight draws. A joint latent gives batch shape () and event shape (B·C,), inputs first.
        """
        mean, draws = self.mean, self._draws()
        if draws is not None:
            centres = draws.flatten(1) if self.latent.joint else draws.transpose(0, 1)  # (S, B·C) or (B, S, C)
            noise = self._noise_of_each(centres).sqrt()
            noise = (noise if noise.ndim == 1 else noise[:, None]).expand_as(centres)
            weights = dist.Categorical(logits=torch.zeros_like(centres[..., 0]))
            return dist.MixtureSameFamily(weights, dist.Independent(dist.Normal(centres, noise), 1))
        if has_factor(self.latent):
            factor = at_least_float32(self.latent.factor)
            if self.latent.joint:
                return self._low_rank(mean.flatten(), factor.flatten(0, 1))
            return self._low_rank(mean, factor)
        if self.latent.joint:
            size = mean.numel()
            covariance = at_least_float32(self.latent.covariance).reshape(size, size)  # (B, C, B, C) -> (B·C, B·C)
            return dist.MultivariateNormal(mean.flatten(), scale_tril=cholesky(self._noisy(covariance)))
        if mean.shape[-1] == 1:
            return dist.Independent(dist.Normal(mean, self.std), 1)
        return dist.MultivariateNormal(mean, scale_tril=cholesky(self._noisy(self._blocks())))

    def __repr__(self) -> str:
        inputs, outputs = self.latent.mean.shape
        return f"RegressionPrediction({inputs} inputs, {outputs} outputs, noise_variance={self.noise_variance:g})"

    def _draws(self) -> Tensor | None:
        """Returns weight draws in at least float32, or None."""
        draws = self.latent.draws
        return None if draws is None else at_least_float32(draws)

    def _low_rank(self, mean: Tensor, factor: Tensor) -> dist.LowRankMultivariateNormal:
        """Returns `N(mean, F Fᵀ + σ² diag(r))`, with a density that needs only S x S matrices."""
        noise = self._noise_of_each(mean).expand_as(mean)
        return dist.LowRankMultivariateNormal(mean, factor, noise, validate_args=False)

    def _blocks(self) -> Tensor:
        """Returns the latent covariance of every input, (B, C, C)."""
        covariance = at_least_float32(self.latent.covariance)
        return covariance.diagonal(dim1=0, dim2=2).movedim(-1, 0) if self.latent.joint else covariance

    def _noisy(self, covariance: Tensor) -> Tensor:
        """Adds the noise variances to the diagonal of covariances (..., C, C) or (B·C, B·C)."""
        return covariance + self._noise_of_each(covariance).diag_embed()

    def _noise_of_each(self, values: Tensor) -> Tensor:
        """Returns the noise variances in the dtype of values (..., C), repeated B times for values (..., B·C)."""
        noise = self._noise.to(values.dtype)
        copies = values.shape[-1] // noise.shape[-1]
        return noise if copies == 1 else noise.repeat(copies)
