"""How near one posterior's predictions are to another's: pure functions of predictive covariances and moments.

Letters: B inputs, C outputs, P weights, N data. Covariances are `posterior.latent(x).covariance` (B, C, C), or
`posterior.latent(x, joint=True).covariance` (B, C, B, C). Every function computes in float64 where its arguments are,
takes no gradient, and returns a float64 tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lapwing.errors import LapwingError
from lapwing.linalg import symmetric_eigen


def relative_error(approximate: Tensor, exact: Tensor) -> Tensor:
    """Returns `‖Σ_approximate - Σ_exact‖_F / ‖Σ_exact‖_F`, 0 where they agree (optimal subspace, equation 20).

    Args:
        approximate: covariances of an approximation: (B, C, B, C) of all inputs jointly, as in the paper; (B, C, C) of
            each input alone, taken as one block-diagonal matrix; or a matrix (n, n).
        exact: what it approximates, of the same shape.

    Returns:
        The relative error ().

    Cost: time and memory O(B² C²), or O(B C²) for blocks.
    """
    difference = approximate.double() - exact.double()
    return torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(exact.double())


def gaussian_kl(mean1: Tensor, cov1: Tensor, mean2: Tensor, cov2: Tensor, noise_variance: float = 0.0) -> Tensor:
    """Returns `KL(N(m₁, S₁) ‖ N(m₂, S₂)) = 1/2 [Σ_i (e_i - log(1 + e_i)) + ΔᵀS₂⁻¹Δ]` of each input, in nats.

    `S = cov + σ²I`, `Δ = m₁ - m₂`, and e are the eigenvalues of `S₂^(-1/2) (S₁ - S₂) S₂^(-1/2)`: the noise cancels in
    the difference, so the result keeps its digits for nearly equal arguments. Arguments cannot be exchanged:
    with the approximation first, one that is too wide weighs most; with the exact posterior first, one too narrow.

    Args:
        mean1: (B, C).
        cov1: (B, C, C), symmetric positive semi-definite.
        mean2: as mean1.
        cov2: as cov1.
        noise_variance: σ², added to both diagonals; needed where cov2 is singular, as low-rank covariances are.

    Returns:
        One divergence an input (B,); infinite where S₁ is singular.

    Raises:
        LapwingError: a singular S₂.

    Cost: time O(B C³), memory O(B C²).
    """
    exact = noise_variance or (cov1.dtype, cov2.dtype) == (torch.float64, torch.float64)
    dtype = torch.float64 if exact else torch.float32
    mean1, cov1, mean2, cov2 = (value.double() for value in (mean1, cov1, mean2, cov2))
    delta = mean1 - mean2
    values, vectors = symmetric_eigen(cov2)
    values = values + noise_variance
    singular = values[:, 0] <= _rounding(values, dtype)  # without noise, what the arguments' dtype cannot resolve
    if singular.any():
        raise LapwingError(
            f"gaussian_kl needs an invertible second covariance, and with noise_variance={noise_variance} "
            f"{int(singular.sum())} of {len(values)} are singular. A positive noise makes them invertible: pass "
            "noise_variance=posterior.noise_variance, or another."
        )
    whitening = vectors * values.rsqrt()[:, None, :]  # W with Wᵀ S₂ W = I, (B, C, C)
    excess = whitening.mT @ (cov1 - cov2) @ whitening
    bound = excess.abs().sum(-1).amax(-1)  # no eigenvalue is larger: the shifted matrix is positive semi-definite
    shifted, _ = symmetric_eigen(torch.diag_embed(bound[:, None].expand_as(delta)) + excess)
    e = shifted - bound[:, None]  # (B, C)
    e = torch.where(1 + e <= _rounding(1 + e, dtype)[:, None], -1.0, e)
    distance = (whitening.mT @ delta[..., None]).square().sum((1, 2))  # (B,)
    return ((e - e.log1p()).sum(-1).clamp_min(0.0) + distance) / 2


def cqm(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """Returns the centred quantile metric `∫₀¹ |P(y ∈ I(x, α)) - α| dα` of Gaussian predictions, in [0, 1/2].

    `I(x, α)` is the open interval around the mean with probability α (VaLLA, equations 51 and 60), so 0 is perfect
    calibration and 1/2 is intervals that are far too wide or far too narrow. A target lies inside for every α above its
    level `|2Φ(z) - 1| = erf(|z|/√2)`, so P is the distribution function of the levels, a staircase, and the integral
    is computed exactly: no grid. At α = 1 the interval is the whole line and the integrand is 0. The trapezoidal
    rule on 11 points that takes it as 1 there gives 0.05 more. Samples and outputs are pooled. Sorts the levels.

    Args:
        mean: predictive means (N,) or (N, C).
        std: predictive standard deviations of y, positive, shape of `mean`.
        y: targets, shape of `mean`.
    """
    mean, std, y = (value.detach().cpu().double() for value in (mean, std, y))
    levels = torch.erf((y - mean).abs() / std * math.sqrt(0.5)).flatten().sort().values
    count = levels.numel()
    edges = torch.cat([torch.zeros_like(levels[:1]), levels, torch.ones_like(levels[:1])])  # (count + 2,)
    height = torch.arange(count + 1, dtype=torch.float64) / count  # P between two edges
    above, below = edges[1:] - height, edges[:-1] - height
    return 0.5 * (above * above.abs() - below * below.abs()).sum()  # ∫|α - h| dα = (α - h)|α - h|/2


def _rounding(values: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns what is rounding noise in a dtype beside the largest of n eigenvalues (..., n), shape (...)."""
    return values.shape[-1] * torch.finfo(dtype).eps * values.amax(-1).clamp_min(torch.finfo(torch.float64).tiny)
