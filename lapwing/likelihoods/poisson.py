"""Counts: the Poisson likelihood, with logarithms of rates as outputs, and its predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch import distributions as dist

from ..covariance import AnyLatent
from ..linalg import at_least_float32, doubled, seeded
from .base import NoiselessLikelihood
from .links import ExactLink, Link, latent_nodes
from .mixtures import mixture_of
from .predictions import RealPrediction
from .quadrature import LEAST_VARIANCE
from .registry import register_likelihood
from .targets import aligned_targets, check_counts

NEWTON_STEPS = 60
"""Number of Newton steps to the mode of an integrand, and maximum number of halvings of a range of counts."""


@register_likelihood
@dataclass(frozen=True)
class Poisson(NoiselessLikelihood["CountPrediction"]):
    """`y_c ~ Poisson(exp(f_c))`, independently for each of C outputs; Λ = diag(exp(f)).

    Outputs are logarithms of rates, as for `torch.nn.PoissonNLLLoss`. Targets are counts, whole numbers from 0 up as
    integers or floats, (B, C), or (B,) if C = 1. Write `likelihood="poisson"`, because integer targets mean classes
    by default.

    Example:
        >>> import torch
        >>> Poisson().log_prob(torch.zeros(3, 1), torch.tensor([0, 2, 1])).shape
        torch.Size([3])
    """

    name: ClassVar[str] = "poisson"
    links: ClassVar[tuple[type[Link], ...]] = (ExactLink,)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        check_counts("Poisson", outputs.shape, outputs.device, targets)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns `Σ_c [y f - exp(f) - log y!]`, (B,)."""
        outputs = at_least_float32(outputs)
        return _log_mass(outputs, aligned_targets("Poisson", outputs, targets)).sum(-1)

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Returns `diag(exp(f/2))`, (B, C, C)."""
        return torch.diag_embed((0.5 * at_least_float32(outputs)).exp()).to(outputs.dtype)

    def fisher_parts(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns `exp(f)`, (B, C), and None."""
        return at_least_float32(outputs).exp(), None

    def predict(
        self, latent: AnyLatent, link: Link | None = None, generator: torch.Generator | None = None
    ) -> CountPrediction:
        """Returns the distribution of y: moments in closed form, the rest by quadrature; `generator` is not used."""
        self.choose_link(latent, link)
        return CountPrediction(latent)


@dataclass(frozen=True, eq=False, repr=False)
class CountPrediction(RealPrediction):
    """Counts with uncertain rates at B inputs: `∫ Poisson(y; exp(f)) N(f; m, v) df`, one output at a time.

    Mean and variances are exact. Weight draws give an equal mixture over the draws. The C outputs of one input are
    assumed independent.
    """

    latent: AnyLatent

    @property
    def mean(self) -> Tensor:
        """Mean of y, `E[exp(f)] = exp(m + v/2)`, (B, C)."""
        draws = self.latent.draws
        if draws is not None:
            return at_least_float32(draws).exp().mean(0)
        return (at_least_float32(self.latent.mean) + 0.5 * at_least_float32(self.latent.variance)).exp()

    @property
    def point(self) -> Tensor:
        """The mean, rounded to a count."""
        return self.mean.round()

    @property
    def epistemic_variance(self) -> Tensor:
        """Variance of the rate, `(exp(v) - 1) exp(2m + v)`, (B, C)."""
        draws = self.latent.draws
        if draws is not None:
            return at_least_float32(draws).exp().var(0, correction=0)
        return at_least_float32(self.latent.variance).expm1() * self.mean.square()

    @property
    def aleatoric_variance(self) -> Tensor:
        """Mean over rates of the variance of y, which equals the mean of y, (B, C)."""
        return self.mean

    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns the log probability of the counts (B, C), summed over the counts of one input, (B,).

        The trapezoidal rule around the mode of each integrand has no error but rounding, for any count and variance.
        """
        draws, mean = self.latent.draws, at_least_float32(self.latent.mean)
        y = doubled(self._targets(targets))
        if draws is not None:
            return (_log_mass(doubled(draws), y).logsumexp(0) - math.log(len(draws))).sum(-1).to(mean)
        return _log_predictive(doubled(mean), doubled(self.latent.variance), y).sum(-1).to(mean)

    def _is_discrete(self) -> bool:
        return True

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws y, (n, B, C), as floats: counts for drawn rates, joint across inputs if the latent is joint."""
        generator = seeded(generator, self.latent.mean.device)
        return torch.poisson(at_least_float32(self.latent.sample(n, generator)).exp(), generator)

    def distribution(self) -> dist.Distribution:
        """Returns a mixture of Poissons over 65 rates or over the draws, with batch shape (B,), event shape (C,)."""
        outputs, weights = latent_nodes(self.latent)
        return mixture_of(dist.Poisson, weights, outputs.exp())

    def _targets(self, targets: Tensor) -> Tensor:
        return self._aligned(targets, self.mean, check_counts)

    @torch.no_grad()
    def _quantile(self, probability: float) -> Tensor:
        """Returns the smallest counts with `P(y <= count) >= probability`, (B, C), which are not differentiable."""
        outputs, weights = latent_nodes(self.latent)
        rates = outputs.exp()
        highest = rates.amax(0).clamp_max(1e15)
        low, high = torch.full_like(highest, -1.0), (highest + 10.0 * highest.sqrt() + 40.0).floor()
        for _ in range(NEWTON_STEPS):
            middle = (0.5 * (low + high)).ceil().clamp_max(high - 1.0).clamp_min(0.0)
            below = self._distribution_function(middle, rates, weights) < probability
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
            if bool((high - low <= 1.0).all()):
                break
        return high.to(self.mean)

    def _below(self, y: Tensor) -> Tensor:
        outputs, weights = latent_nodes(self.latent)
        return self._distribution_function(y.to(outputs), outputs.exp(), weights)

    def _distribution_function(self, counts: Tensor, rates: Tensor, weights: Tensor) -> Tensor:
        """Returns `P(y <= k)` (B, C): the mean under the latent of `Q(k + 1, exp(f))`, which is P for a known rate.

        If the latent is wider than the step of Q in f, the expectation is integrated by parts: the mean of the latent's
        distribution function over `f = log g`, `g ~ Gamma(k + 1)`.
        """
        averaged = (weights * torch.special.gammaincc((counts + 1.0).expand_as(rates), rates)).sum(0)
        if self.latent.draws is not None:
            return averaged
        mean, std = doubled(self.latent.mean), (doubled(self.latent.variance) + LEAST_VARIANCE).sqrt()
        f, log_step = _stretched((counts + 1.0).log(), (counts + 1.0).rsqrt())
        log_density = (counts + 1.0) * f - f.exp() - torch.lgamma(counts + 1.0)
        by_parts = ((log_density + log_step).exp() * torch.special.ndtr((f - mean) / std)).sum(0)
        return torch.where(std * (counts + 1.0).sqrt() >= 1.0, by_parts, averaged)


def _log_mass(f: Tensor, y: Tensor) -> Tensor:
    """Returns `log Poisson(y; exp(f))`."""
    return y * f - f.exp() - torch.lgamma(y + 1.0)


def _stretched(centre: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Returns nodes `f = centre + width sinh(u)` (n, B, C) for u from -5 to 5, and the logarithms of their steps df."""
    u = torch.linspace(-5.0, 5.0, 101, dtype=centre.dtype, device=centre.device)[:, None, None]
    return centre + width * u.sinh(), (0.1 * width * u.cosh()).log()


def _log_predictive(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """Returns `log ∫ Poisson(y; exp(f)) N(f; m, v) df`, elementwise (B, C), float64; differentiable in m and v."""
    variance = variance + LEAST_VARIANCE
    with torch.no_grad():
        mode = torch.maximum(mean, y.log()).clamp_max(300.0)  # right of the mode, so Newton's steps decrease to it
        for _ in range(NEWTON_STEPS):
            rate = mode.exp()
            mode = mode + ((mean - mode) / variance + y - rate) / (1.0 / variance + rate)
        f, log_step = _stretched(mode, (1.0 / variance + mode.exp()).rsqrt())
    log_prior = -0.5 * ((f - mean).square() / variance + (2.0 * math.pi * variance).log())
    return (_log_mass(f, y) + log_prior + log_step).logsumexp(0)
