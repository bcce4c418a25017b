"""Densities and quantiles of mixtures of Gaussians over weight draws, and Gaussians with missing targets."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

_HALVINGS = 60  # after 53 the bracket is as narrow as float64 rounding


def mixture_log_density(draws: Tensor, noise_variance: Tensor | float, targets: Tensor) -> Tensor:
    """Returns `log 1/S Σ_s N(y; f_s, diag σ²)` (B,), for f (S, B, C), y (B, C), and one σ² or σ² (C,)."""
    noise = torch.as_tensor(noise_variance, dtype=draws.dtype, device=draws.device).expand(draws.shape[-1])
    residual, volume = known_residuals(draws, targets, noise)
    squares = (residual.square() / noise).sum(-1)  # (S, B, C) -> (S, B)
    return torch.logsumexp(-0.5 * squares, 0) - 0.5 * volume - math.log(len(draws))


def known_residuals(outputs: Tensor, targets: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Returns y - f (..., B, C), with 0 if y (B, C) is NaN, and `Σ log 2πσ²` over the known y (B,), for σ² (C,)."""
    known = ~targets.isnan()
    return torch.where(known, targets, outputs) - outputs, (known * (2.0 * math.pi * noise).log()).sum(-1)


def known_covariance(covariance: Tensor, targets: Tensor) -> Tensor:
    """Returns covariances (B, C, C) with 0 in the rows and columns of y (B, C) that are NaN."""
    known = (~targets.isnan()).to(covariance.dtype)
    return covariance * known[:, :, None] * known[:, None, :]


def mixture_quantile(
    draws: Tensor, variance: Tensor | float, probability: float, weights: Tensor | None = None
) -> Tensor:
    """Returns the quantile (B, C) of the mixture `Σ_s w_s N(f_s, σ_s²)` of every output, by bisection.

    The means f are (S, B, C), the variance is one number or (S, B, C), and w (S, 1, 1) sum to 1; None means 1/S. The
    smallest and the largest quantile of the components bracket the quantile of the mixture. A final Newton step from
    the detached root makes the result differentiable in the draws (implicit function theorem). Time O(60 S B C).
    """
    means = draws.double()
    scale = torch.as_tensor(variance, dtype=means.dtype, device=means.device).sqrt()

    def average(values: Tensor) -> Tensor:
        return values.mean(0) if weights is None else (weights * values).sum(0)

    with torch.no_grad():
        ends = means + scale * NormalDist().inv_cdf(probability)
        low, high = ends.amin(0), ends.amax(0)
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            below = average(torch.special.ndtr((middle - means) / scale)) < probability
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        root = 0.5 * (low + high)
        standard = (root - means) / scale
        density = average(torch.exp(-0.5 * standard.square()) / scale) / math.sqrt(2.0 * math.pi)
        density = density.clamp_min(torch.finfo(density.dtype).tiny)
    excess = average(torch.special.ndtr((root - means) / scale)) - probability
    step = excess / density
    smallest = scale.detach().amin(0) if scale.ndim else scale
    limit = (high - low).detach() + 1e-9 * smallest  # density is 0 between distant components: Newton would diverge
    return (root - step + (step - step.clamp(-limit, limit)).detach()).to(draws.dtype)
