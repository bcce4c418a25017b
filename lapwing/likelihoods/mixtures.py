"""Mixtures of normals, such as those over weight draws: densities, quantiles and scores, also with missing targets."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor
from torch import distributions as dist

from .predictions import RealPrediction

NORMAL_NODES, REACH = 65, 8.0
"""Number of nodes of the trapezoidal rule over a Gaussian, and its half width in standard deviations."""

SCORE_NODES = 129
"""Most normals whose CRPS is from all pairs, and number of nodes of the trapezoidal rule for more normals."""

HALVINGS = 60  # after 53 the bracket is as narrow as float64 rounding of its ends


def normal_nodes(like: Tensor, count: int = NORMAL_NODES, reach: float = REACH) -> tuple[Tensor, Tensor]:
    """Returns `count` nodes and weights (S, 1, 1) of the trapezoidal rule over `N(0, 1)`."""
    z = torch.linspace(-reach, reach, count, dtype=like.dtype, device=like.device)[:, None, None]
    return z, (-0.5 * z.square()).softmax(0)


def mixture_of(family: Callable[..., dist.Distribution], weights: Tensor, *parameters: Tensor) -> dist.Independent:
    """Returns a mixture for each output, (B,) and event shape (C,), for weights (S, 1, 1) and parameters (S, B, C)."""
    moved = [values.movedim(0, -1).contiguous() for values in parameters]
    chances = dist.Categorical(probs=weights.movedim(0, -1).expand_as(moved[0]))
    return dist.Independent(dist.MixtureSameFamily(chances, family(*moved)), 1)


def known_residuals(outputs: Tensor, targets: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Returns y - f (..., B, C), with 0 if y (B, C) is NaN, and `Σ log 2πσ²` over the known y (B,)."""
    known = ~targets.isnan()
    return torch.where(known, targets, outputs) - outputs, (known * (2.0 * math.pi * noise).log()).sum(-1)


def bisected(
    is_below: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, halvings: int = HALVINGS
) -> tuple[Tensor, Tensor]:
    """Returns the ends of brackets after halvings; `is_below(y)` is a mask of the y below their roots."""
    for _ in range(halvings):
        middle = 0.5 * (low + high)
        below = is_below(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low, high


def mixture_quantile(means: Tensor, variances: Tensor, weights: Tensor, probability: float) -> Tensor:
    """Returns the quantile (B, C) of the mixture `Σ_s w_s N(f_s, σ_s²)` of every output, by bisection.

    Means and variances are (S, B, C) in float64, and w (S, 1, 1) sum to 1. The result is differentiable in the
    means and variances (implicit function theorem).
    """
    scale = variances.sqrt()

    def excess(y: Tensor) -> Tensor:
        return (weights * torch.special.ndtr((y - means) / scale)).sum(0) - probability

    with torch.no_grad():
        # 1. F(y) = Σ_s w_s Φ((y - f_s)/σ_s) is at most p below all quantiles of the components, at least p above them
        ends = means + scale * NormalDist().inv_cdf(probability)
        # 2. u of y = c + σ sinh(u), c the mean and σ the least σ_s: halvings also find a root far inside a wide bracket
        centre, least = (weights * means).sum(0), scale.amin(0)
        low, high = (((end - centre) / least).nan_to_num().asinh() for end in (ends.amin(0), ends.amax(0)))
        low, high = bisected(lambda u: excess(centre + least * u.sinh()) < 0, low, high)
        root = centre + least * (0.5 * (low + high)).sinh()
        # 3. F' (B, C) at the root
        density = (weights * (-0.5 * ((root - means) / scale).square()).exp() / scale).sum(0) / math.sqrt(2.0 * math.pi)
        density = density.clamp_min(torch.finfo(density.dtype).tiny)
    # 4. a term that is 0 has the derivatives of the root, -∂F/F'
    below = excess(root)
    return root - (below - below.detach()) / density


class NormalsPrediction(RealPrediction):
    """Real values, each with a mixture of normals: quantiles, distribution functions and scores in closed form."""

    latent: Any

    @property
    def covariance(self) -> Tensor:
        """Covariances of the C targets of each input, (B, C, C): of their means, plus the noise on the diagonal."""
        count = self.mean.shape[-1]  # the first outputs are the means
        return self.latent.own_covariance[:, :count, :count].to(self.mean) + self.aleatoric_variance.diag_embed()

    @property
    @abstractmethod
    def _normals(self) -> tuple[Tensor, Tensor, Tensor]:
        """Means and variances (S, B, C) of the normals and their weights (S, 1, 1), in float64."""

    def _quantile(self, probability: float) -> Tensor:
        return mixture_quantile(*self._normals, probability).to(self.mean)

    def _below(self, y: Tensor) -> Tensor:
        means, variances, weights = self._normals
        return (weights * torch.special.ndtr((y.to(means) - means) / variances.sqrt())).sum(0)

    def _crps(self, y: Tensor) -> Tensor:
        """Returns `E|Y - y| - E|Y - Y'|/2` from all pairs of normals, or from an integral if there are many normals.

        For Z ~ N(c, τ²) with the distribution function G it is `E|Y - y| - E|Y - Z| + E|Z - Z'|/2 + ∫ (F - G)² dt`,
        where no term is far larger than the sum. With `t = c + τ sinh(u)`, c the mean and τ the harmonic mean of
        `√(v + (m - c)²)`, its error is below 1e-4 unless most normals are far narrower than the distance of means.
        """
        means, variances, weights = self._normals
        gap, stds = y.to(means) - means, variances.sqrt()

        def average(values: Tensor) -> Tensor:
            return (weights * values).sum(0)

        if len(means) <= SCORE_NODES:
            score = average(_size(gap, variances))
            for s, weight in enumerate(weights):  # each pair once
                pairs = weights[s:] * _size(means[s:] - means[s], variances[s:] + variances[s])
                score = score - weight * (pairs.sum(0) - 0.5 * pairs[0])
            return score
        # 1. c, τ and the largest u (B, C)
        with torch.no_grad():
            centre = average(means)
            tau = 1.0 / average((variances + (means - centre).square()).rsqrt())
            last = (((means - centre).abs() + REACH * stds).amax(0) / tau).asinh()
        # 2. the expectations, with √(v + τ²) - √v = τ²/(√(v + τ²) + √v)
        wide = variances + tau.square()
        rise = tau.square() / (wide.sqrt() + stds)
        change = _size(gap, variances, 0.0) - _size(centre - means, wide, 0.0) - math.sqrt(2.0 / math.pi) * rise
        score = average(change) + tau / math.sqrt(math.pi)
        # 3. the sum over steps of size last / (n - 1); 1 - F and 1 - G above c, where F and G are 1 but for rounding
        for share in torch.linspace(-1.0, 1.0, SCORE_NODES, dtype=torch.float64).tolist():
            x, side = (share * last).sinh(), -1.0 if share > 0 else 1.0
            error = average(torch.special.ndtr(side * (centre + tau * x - means) / stds)) - torch.special.ndtr(side * x)
            score = score + error.square() * tau * (share * last).cosh() * last * (2.0 / (SCORE_NODES - 1))
        return score


def _size(gap: Tensor, variance: Tensor, offset: float = 1.0) -> Tensor:
    """Returns `E|N(m, v)| = m erf(m/√2v) + √(2v/π) exp(-m²/2v)`; minus `√(2v/π)`, without a loss, if offset is 0."""
    width = (2.0 * variance).sqrt()
    ratio = gap / width
    return gap * ratio.erf() + width * ((-ratio.square()).expm1() + offset) / math.sqrt(math.pi)
