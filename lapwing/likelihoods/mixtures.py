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
"""Number of nodes of the trapezoidal rule for the CRPS of a mixture of normals."""

HALVINGS = 60  # after 53 the bracket is as narrow as float64 rounding


def normal_nodes(like: Tensor, count: int = NORMAL_NODES) -> tuple[Tensor, Tensor]:
    """Returns `count` nodes and weights (S, 1, 1) of the trapezoidal rule over `N(0, 1)`."""
    z = torch.linspace(-REACH, REACH, count, dtype=like.dtype, device=like.device)[:, None, None]
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

    Means and variances are (S, B, C) in float64, and w (S, 1, 1) sum to 1. A Newton step from the detached root makes
    the result differentiable in the means and variances (implicit function theorem).
    """
    scale = variances.sqrt()

    def average(values: Tensor) -> Tensor:
        return (weights * values).sum(0)

    # 1. F(y) = Σ_s w_s Φ((y - f_s)/σ_s) is at most p below all quantiles of the components, at least p above them
    with torch.no_grad():
        ends = means + scale * NormalDist().inv_cdf(probability)
        low, high = ends.amin(0), ends.amax(0)
        low, high = bisected(lambda y: average(torch.special.ndtr((y - means) / scale)) < probability, low, high)
        root = 0.5 * (low + high)
        # 2. F' (B, C) at the root
        standard = (root - means) / scale
        density = average(torch.exp(-0.5 * standard.square()) / scale) / math.sqrt(2.0 * math.pi)
        density = density.clamp_min(torch.finfo(density.dtype).tiny)
    # 3. a Newton step (F - p)/F' with F' fixed has the derivatives of the root, -∂F/F'
    excess = average(torch.special.ndtr((root - means) / scale)) - probability
    step = excess / density
    # 4. the value moves by at most the bracket and 1e-9 σ, the derivatives stay
    limit = high - low + 1e-9 * scale.detach().amin(0)  # density is 0 between distant components: Newton would diverge
    return root - step + (step - step.clamp(-limit, limit)).detach()


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
        """Returns `E|Y - y| - ∫ F (1 - F) dt`, the first in closed form, the integral by the trapezoidal rule.

        With `t = mean + s sinh(u)`, s² the geometric mean of the variances plus the variance of the means, the error is
        below 1e-9 of the CRPS unless most normals are far narrower than the distance of their means.
        """
        means, variances, weights = self._normals
        # 1. E|N(m, v)| = m erf(m/√2v) + √(2v/π) exp(-m²/2v)
        gap, width = y.to(means) - means, (2.0 * variances).sqrt()
        ratio = gap / width
        score = (weights * (gap * torch.erf(ratio) + width * (-ratio.square()).exp() / math.sqrt(math.pi))).sum(0)
        # 2. the largest u (B, C), and the sum over steps of size last / (n - 1)
        mean = (weights * means).sum(0)
        std = ((weights * variances.log()).sum(0).exp() + (weights * (means - mean).square()).sum(0)).sqrt()
        last = (((means - mean).abs() + REACH * variances.sqrt()).amax(0) / std).asinh().detach()
        for share in torch.linspace(-1.0, 1.0, SCORE_NODES, dtype=torch.float64).tolist():
            below = (weights * torch.special.ndtr((mean + std * (share * last).sinh() - means) / variances.sqrt())).sum(
                0
            )
            score = score - below * (1.0 - below) * std * (share * last).cosh() * last * (2.0 / (SCORE_NODES - 1))
        return score
