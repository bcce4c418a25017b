"""Equal mixtures of Gaussians with one noise variance: log density, moments and exact quantiles."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

_HALVINGS = 60  # a float64 bracket shrinks below its rounding in 53


def mixture_log_density(draws: Tensor, noise_variance: float, targets: Tensor) -> Tensor:
    """Returns `log 1/S Σ_s N(y; f_s, σ² I)` for every input.

    Args:
        draws: Component means f, (S, B, C).
        noise_variance: σ².
        targets: y, (B, C).

    Returns:
        Log densities, (B,).
    """
    outputs = draws.shape[-1]
    squares = (targets - draws).square().sum(-1)  # (S, B, C) -> (S, B)
    constant = 0.5 * outputs * math.log(2.0 * math.pi * noise_variance) + math.log(len(draws))
    return torch.logsumexp(-0.5 * squares / noise_variance, 0) - constant


def mixture_quantile(draws: Tensor, noise_variance: float, probability: float) -> Tensor:
    """Returns the quantile of every output's mixture `1/S Σ_s N(f_s, σ²)` by bisection of its distribution function.

    The quantile lies between the smallest and the largest of the components' quantiles, which brackets it. A final
    Newton step from the detached root makes the result differentiable in the draws (implicit function theorem).

    Args:
        draws: Component means f, (S, B, C).
        noise_variance: σ².
        probability: Level p of the quantile, in (0, 1).

    Returns:
        Quantiles, (B, C). Time O(60 S B C).
    """
    scale = math.sqrt(noise_variance)
    means = draws.double()
    with torch.no_grad():
        offset = scale * NormalDist().inv_cdf(probability)
        low, high = means.amin(0) + offset, means.amax(0) + offset
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            below = torch.special.ndtr((middle - means) / scale).mean(0) < probability
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        root = 0.5 * (low + high)
        standard = (root - means) / scale
        density = torch.exp(-0.5 * standard.square()).mean(0) / (scale * math.sqrt(2.0 * math.pi))
        density = density.clamp_min(torch.finfo(density.dtype).tiny)
    excess = torch.special.ndtr((root - means) / scale).mean(0) - probability
    step = excess / density
    limit = (high - low).detach() + 1e-9 * scale  # between far-apart components the density is 0 and Newton leaps
    return (root - step + (step - step.clamp(-limit, limit)).detach()).to(draws.dtype)
