"""Counts: the Poisson likelihood, with logarithms of rates as outputs, and its predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch import distributions as dist

from ..covariance import AnyLatent, Latent, LatentDraws
from ..covariance.terms import EigenTerm, standard_normal
from ..linalg import at_least_float32, doubled, seeded
from ..options import number, option
from .base import NoiselessLikelihood, apply_weights
from .links import ExactLink, Link, latent_nodes
from .mixtures import NORMAL_NODES, REACH, mixture_of
from .predictions import RealPrediction
from .quadrature import LEAST_VARIANCE
from .registry import register_likelihood
from .targets import aligned_targets, check_counts

SURE, SEVERAL_COUNTS = 3.0, 1.5
"""Training counts have a dispersion if their excess is above `SURE` standard errors of Poisson counts, and above
`SEVERAL_COUNTS` roots of its sum of squares: one or two counts show nothing."""

DISPERSIONS = [k / 8 for k in range(-24, 17)]
"""Candidates for log10 of the dispersion that held-out data choose."""

LEAST_RATE = 1e-9
"""Least `μ + μ²` that divides a squared residual."""

DRAW_NODES, MOST_RATES = 16, 4_097
"""Number of rates that the noise of a rate gives each weight draw; maximum number of rates of a `distribution()`."""

NEWTON_STEPS = 60
"""Number of Newton steps to the mode of an integrand, and maximum number of halvings of a range of counts."""


@register_likelihood
@dataclass(frozen=True)
class Poisson(NoiselessLikelihood["CountPrediction"]):
    """`y_c ~ Poisson(exp(f_c))`, independently for each of C outputs; Λ = diag(exp(f)).

    Most counts vary more than Poisson counts. So predictions are `y_c ~ Poisson(ε_c exp(f_c))` with lognormal noise ε
    of mean 1 and variance α: the mean μ stays, and the variance is `μ + α μ²`. The quasi-likelihood of such counts has
    the curvature `Λ/φ`, so a fit multiplies τ by `φ = Σ (μ + α μ²)/Σ μ` over the training data, if τ is 1 and the
    prior of the method can be changed.

    Outputs are logarithms of rates, as for `torch.nn.PoissonNLLLoss`. Targets are counts, whole numbers from 0 up as
    integers or floats, (B, C), or (B,) if C = 1. Write `likelihood="poisson"`, because integer targets mean classes
    by default.

    Args:
        dispersion: α >= 0. None lets the training residuals decide, by `Σ [(y - μ)² - y - α μ²]/(μ + μ²) = 0`; α is 0
            unless three or more counts show that they vary more than Poisson counts by three standard errors. Then a
            larger α may take its place: the α of highest likelihood for left-out counts, if the default tuning chooses
            the prior precision, or the α of highest held-out likelihood with `validation=`.
        fitted_dispersion: α that a fit has found, one for all outputs. Heads of `lw.Joint` have `dispersion`, or 0.

    Source: McCullagh and Nelder 1989, Generalized Linear Models, sections 4.5 and 6.2.

    Example:
        >>> import torch
        >>> Poisson().log_prob(torch.zeros(3, 1), torch.tensor([0, 2, 1])).shape
        torch.Size([3])
    """

    dispersion: float | None = option(None, number(0), write="0.5")
    fitted_dispersion: float = option(0.0, number(0))
    name: ClassVar[str] = "poisson"
    left_out_decides: ClassVar[Literal["noise", "spread"] | None] = "noise"
    links: ClassVar[tuple[type[Link], ...]] = (ExactLink,)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        check_counts("Poisson", outputs.shape, outputs.device, targets)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns `Σ_c [y f - exp(f) - log y!]`, (B,)."""
        outputs = at_least_float32(outputs)
        return _log_mass(outputs, aligned_targets("Poisson", outputs, targets)).sum(-1)

    def statistics(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
        """Returns weighted sums of log p(y|f), and of what `with_dispersion` and `dispersion_temperature` need."""
        rates = doubled(outputs).exp()
        y = aligned_targets("Poisson", rates, targets.to(rates.device)).to(rates)
        each = apply_weights(torch.ones_like(rates), weights)
        excess = ((y - rates).square() - y) / (rates * (1.0 + rates)).clamp_min(LEAST_RATE)
        sums = {
            "excess": excess,
            "excess_at_one": rates / (1.0 + rates),  # the mean excess at α = 1
            "excess_variance": 2.0 * each / (1.0 + rates).square(),  # at α = 0
            "squared_excess": each * excess.square(),
            "rates": rates,
            "squared_rates": rates.square(),
        }
        totals = {name: apply_weights(values, weights).sum() for name, values in sums.items()}
        return {**super().statistics(outputs, targets, weights), **totals}

    @property
    def alpha(self) -> float:
        """α, the variance of the noise of a rate."""
        return self.fitted_dispersion if self.dispersion is None else self.dispersion

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns `log (y + 1/2)/(μ + 1/2)` in float64, (B, C): how far the output is from the logarithm of y."""
        outputs = doubled(outputs)
        y = aligned_targets("Poisson", outputs, targets.to(outputs.device))
        return (y + 0.5).log() - (outputs.exp() + 0.5).log()

    def noise_candidates(self) -> list[Poisson]:
        """Returns larger dispersions than the present one: a network fits its training counts too well, if anything."""
        larger = [10**k for k in DISPERSIONS if 10**k > self.fitted_dispersion]
        return [replace(self, fitted_dispersion=alpha) for alpha in larger] if self.dispersion is None else []

    def raised(self, prediction: CountPrediction) -> Tensor | None:
        return prediction.mean if self.dispersion is None else None

    def with_dispersion(self, statistics: dict[str, Tensor]) -> tuple[Poisson, float]:
        names = "excess", "excess_at_one", "excess_variance", "squared_excess"
        excess, at_one, variance, square = (float(statistics.get(name, 0.0)) for name in names)
        surely = excess > max(SURE * variance**0.5, SEVERAL_COUNTS * square**0.5) and self.dispersion is None
        dispersed = replace(self, fitted_dispersion=excess / at_one if surely else 0.0)
        return dispersed, dispersed.dispersion_temperature(statistics)

    def with_further(self, former: dict[str, Tensor], whole: dict[str, Tensor]) -> tuple[Poisson, float]:
        decided = math.isclose(self.with_dispersion(former)[0].alpha, self.alpha)  # else held-out data chose α
        new = self.with_dispersion(whole)[0] if decided else self
        return new, new.dispersion_temperature(whole) / self.dispersion_temperature(former)

    def dispersion_temperature(self, statistics: dict[str, Tensor]) -> float:
        """Returns φ, the factor of τ."""
        if not self.alpha:
            return 1.0
        return 1.0 + self.alpha * float(statistics.get("squared_rates", 0.0) / statistics.get("rates", 1.0))

    def fisher_root(self, outputs: Tensor) -> Tensor:
        return torch.diag_embed((0.5 * at_least_float32(outputs)).exp()).to(outputs.dtype)

    def fisher_parts(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        return at_least_float32(outputs).exp(), None

    def predict(
        self, latent: AnyLatent, link: Link | None = None, generator: torch.Generator | None = None
    ) -> CountPrediction:
        """Returns the distribution of y: moments in closed form, the rest by quadrature; `generator` is not used."""
        self.choose_link(latent, link)
        return CountPrediction(latent, self.alpha)


@dataclass(frozen=True, eq=False, repr=False)
class CountPrediction(RealPrediction):
    """Counts with uncertain rates at B inputs: `∫ Poisson(y; exp(f)) N(f; m, v) df`, one output at a time.

    With a dispersion α the integral is over `f + log ε`, which is normal, too. Mean and variances are exact. Weight
    draws give an equal mixture over the draws. The C outputs of one input are assumed independent.
    """

    latent: AnyLatent
    dispersion: float = 0.0

    @cached_property
    def _noisy(self) -> AnyLatent:
        """The latent of `f + log ε`, with `log ε ~ N(-s/2, s)` and `s = log(1 + α)`; equal draws of both."""
        spread = math.log1p(self.dispersion)
        if not spread:
            return self.latent
        if self.latent.draws is None:
            mean, variance = (at_least_float32(part) for part in (self.latent.mean, self.latent.variance))
            return Latent(mean - 0.5 * spread, (EigenTerm(None, variance + spread),))
        draws = at_least_float32(self.latent.draws)
        noise = torch.special.ndtri((torch.arange(DRAW_NODES, device=draws.device) + 0.5) / DRAW_NODES)
        noise = (noise * (spread / noise.square().mean()) ** 0.5).to(draws)
        noise = noise - noise.exp().mean().log()
        return LatentDraws((draws + noise[:, None, None, None]).flatten(0, 1))

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
        """Mean over rates of the variance of y, `E[μ + α μ²]`, (B, C)."""
        return self.mean + self.dispersion * (self.epistemic_variance + self.mean.square())

    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns the log probability of the counts (B, C), summed over the counts of one input, (B,).

        The trapezoidal rule around the mode of each integrand has no error but rounding, for any count and variance.
        """
        draws, mean = self._noisy.draws, at_least_float32(self._noisy.mean)
        y = doubled(self._targets(targets))
        if draws is not None:
            return (_log_mass(doubled(draws), y).logsumexp(0) - math.log(len(draws))).sum(-1).to(mean)
        return _log_predictive(doubled(mean), doubled(self._noisy.variance), y).sum(-1).to(mean)

    def _is_discrete(self) -> bool:
        return True

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws y, (n, B, C), as floats: counts for drawn rates, joint across inputs if the latent is joint."""
        generator = seeded(generator, self.latent.mean.device)
        f, spread = at_least_float32(self.latent.sample(n, generator)), math.log1p(self.dispersion)
        if spread:
            f = f + spread**0.5 * standard_normal(f.shape, f, generator) - 0.5 * spread
        return torch.poisson(f.exp(), generator)

    def distribution(self) -> dist.Distribution:
        """Returns a mixture of Poissons over 65 to `MOST_RATES` rates or over the draws, batch shape (B,), event (C,).

        Neighbouring rates differ by at most a standard deviation of their counts, up to two deviations above the mean.
        """
        mean, std = doubled(self._noisy.mean), doubled(self._noisy.variance).sqrt()
        steps = float((2 * REACH * std * (0.5 * mean + std).exp()).max())
        outputs, weights = latent_nodes(self._noisy, int(min(max(NORMAL_NODES, steps + 1), MOST_RATES)))
        return mixture_of(dist.Poisson, weights, outputs.exp())

    def _targets(self, targets: Tensor) -> Tensor:
        return self._aligned(targets, self.mean, check_counts)

    @torch.no_grad()
    def _quantile(self, probability: float) -> Tensor:
        """Returns the smallest counts with `P(y <= count) >= probability`, (B, C), which are not differentiable."""
        outputs, weights = latent_nodes(self._noisy)
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
        outputs, weights = latent_nodes(self._noisy)
        return self._distribution_function(y.to(outputs), outputs.exp(), weights)

    def _distribution_function(self, counts: Tensor, rates: Tensor, weights: Tensor) -> Tensor:
        """Returns `P(y <= k)` (B, C): the mean under the latent of `Q(k + 1, exp(f))`, which is P for a known rate.

        If the latent is wider than the step of Q in f, the expectation is integrated by parts: the mean of the latent's
        distribution function over `f = log g`, `g ~ Gamma(k + 1)`.
        """
        averaged = (weights * torch.special.gammaincc((counts + 1.0).expand_as(rates), rates)).sum(0)
        if self._noisy.draws is not None:
            return averaged
        mean, std = doubled(self._noisy.mean), (doubled(self._noisy.variance) + LEAST_VARIANCE).sqrt()
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
