"""The α-divergence term of a likelihood: the logarithm of the power mean of p(y|f) under a Gaussian over f.

`1/α log E[p(y|f)^α]`; at α = 1 the log predictive density, at α -> 0 the expected log likelihood `E[log p(y|f)]`.
Pure functions, differentiable in means and covariances. B inputs, C outputs, S draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import linalg
from ..errors import LapwingError, shown
from . import quadrature
from .links import at_least_float32, seeded


def check_alpha(alpha: Any) -> None:
    """Raises where α is not a finite number from 0 up."""
    number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if not (number and 0.0 <= alpha < math.inf):
        raise LapwingError(
            f"A power mean takes a finite alpha of at least 0, not alpha={shown(alpha)}. Write alpha=1.0 for the "
            "predictive density, or alpha=0.0 for the expected log likelihood."
        )


def weighted_log_power_mean(logs: Tensor, log_weights: Tensor, alpha: float, dim: int) -> Tensor:
    """Returns `1/α log Σ_k e^{w_k + α l_k}` over one axis, `Σ_k e^{w_k} l_k` at α = 0.

    Right to rounding for tiny α, where the sum is all but 1, and where it underflows.

    Args:
        logs: l.
        log_weights: w, of a shape that fits; the weights add to 1.
        alpha: α, at least 0.
        dim: The axis.
    """
    if alpha == 0:
        return (log_weights.exp() * logs).sum(dim)
    top = logs.detach().amax(dim, keepdim=True)
    top = torch.where(top.isfinite(), top, torch.zeros_like(top))
    powers = alpha * (logs - top)  # at most 0
    below = (log_weights.exp() * torch.expm1(powers)).sum(dim)  # from -1 to 0
    log_mean = torch.where(below > -0.5, torch.log1p(below.clamp_min(-0.5)), (powers + log_weights).logsumexp(dim))
    return top.squeeze(dim) + log_mean / alpha


def gaussian_log_power_mean(
    mean: Tensor, covariance: Tensor, targets: Tensor, alpha: float, noise_variance: Tensor | float
) -> Tensor:
    """Returns `1/α log E[N(y; f, σ²I)^α]` for f ~ N(m, K), in closed form, (B,).

    `-C/2 log 2πσ² - 1/(2α) logdet(I + αK/σ²) - 1/2 rᵀ(σ²I + αK)⁻¹r` with r = y - m, and at α = 0
    `-C/2 log 2πσ² - tr(K)/(2σ²) - rᵀr/(2σ²)`.

    Args:
        mean: m, (B, C).
        covariance: K, (B, C, C), PSD.
        targets: y, (B, C).
        alpha: α, at least 0.
        noise_variance: σ².

    Returns:
        Values (B,), differentiable in m, K and σ². Time O(B C³).
    """
    noise = torch.as_tensor(noise_variance, dtype=mean.dtype, device=mean.device)
    residual = targets - mean
    constant = -0.5 * mean.shape[-1] * (2.0 * math.pi * noise).log()
    if alpha == 0:
        spread = covariance.diagonal(dim1=-2, dim2=-1).sum(-1) + residual.square().sum(-1)
        return constant - 0.5 * spread / noise
    covariance = 0.5 * (covariance + covariance.mT)
    values = torch.linalg.eigvalsh(covariance / noise)  # negative ones are rounding; log1p keeps the digits of tiny α
    eye = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    factor = linalg.cholesky(noise * eye + alpha * covariance)
    white = torch.linalg.solve_triangular(factor, residual[..., None], upper=False)[..., 0]  # (B, C)
    volume = torch.log1p((alpha * values).clamp_min(-0.5)).sum(-1) / alpha
    return constant - 0.5 * volume - 0.5 * white.square().sum(-1)


def binary_log_power_mean(mean: Tensor, variance: Tensor, alpha: float, nodes: int = quadrature.NODES) -> Tensor:
    """Returns `1/α log E[σ(f)^α]` for f ~ N(m, v), by quadrature, elementwise.

    Args:
        mean: m, any shape; its sign is turned for an answer of no.
        variance: v, of the same shape.
        alpha: α, at least 0.
        nodes: Number of nodes.

    Returns:
        Values in float64, of the shape of the mean.
    """
    f, weights = quadrature.rule(mean.double(), variance.double(), alpha, nodes)
    return weighted_log_power_mean(F.logsigmoid(f), weights, alpha, -1)


def sampled_log_power_mean(
    log_prob: Callable[[Tensor, Tensor], Tensor],
    mean: Tensor,
    covariance: Tensor,
    targets: Tensor,
    alpha: float,
    draws: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns `1/α log 1/S Σ_s p(y|f_s)^α` over draws `f_s = m + L ε_s`, `K = L Lᵀ`, (B,).

    Args:
        log_prob: log p(y|f) (S B,) of outputs (S B, C) and as many targets.
        mean: m, (B, C).
        covariance: K, (B, C, C); jitter is added where it is not positive definite.
        targets: y, B of them.
        alpha: α, at least 0.
        draws: S. The result is biased downwards by O(α/S).
        generator: Source of randomness; None means seed 0.

    Returns:
        Values (B,), differentiable in m and K. Time O(B C³ + S B C²), memory O(S B C).
    """
    mean = at_least_float32(mean)
    root = linalg.cholesky(covariance.double()).to(mean.dtype)
    generator = seeded(generator, mean.device)
    noise = torch.randn(draws, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
    outputs = mean + torch.einsum("bcd,sbd->sbc", root, noise)
    repeated = targets.expand(draws, *targets.shape).flatten(0, 1)
    logs = log_prob(outputs.flatten(0, 1), repeated).reshape(draws, -1)  # (S B,) -> (S, B)
    return weighted_log_power_mean(logs, logs.new_full((draws, 1), -math.log(draws)), alpha, 0)
