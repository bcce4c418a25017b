"""How near one posterior's predictions are to another's: pure functions of predictive covariances and moments.

Letters: B inputs, C outputs, P weights, N data. Covariances are `posterior.latent(x).covariance` (B, C, C), or
`posterior.latent(x, joint=True).covariance` (B, C, B, C). Every function computes in float64 where its arguments are,
takes no gradient, and returns a float64 tensor.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from lapwing.errors import LapwingError, shown
from lapwing.evaluation.metrics import real_tensor
from lapwing.linalg import symmetric_eigen

_SHAPES = {2: "(n, n)", 3: "(B, C, C)", 4: "(B, C, B, C)"}


def relative_error(approximate: Tensor, exact: Tensor) -> Tensor:
    """Returns `‖Σ_approximate - Σ_exact‖_F / ‖Σ_exact‖_F`, 0 where they agree (optimal subspace, equation 20).

    Args:
        approximate: covariances of an approximation: (B, C, B, C) of all inputs jointly, as in the paper; (B, C, C) of
            each input alone, taken as one block-diagonal matrix; or a matrix (n, n).
        exact: what it approximates, of the same shape.

    Returns:
        The relative error ().

    Raises:
        LapwingError: other or different shapes, values that are not finite, or an exact covariance of 0.

    Cost: time and memory O(B² C²), or O(B C²) for blocks.

    Example:
        >>> x, y = torch.randn(40, 3), torch.randint(2, (40,))
        >>> model = torch.nn.Linear(3, 2).eval()
        >>> joint = [
        ...     lw.fit(model, [(x, y)], method, prior_precision=1.0).latent(x[:5], joint=True).covariance
        ...     for method in (lw.ELLA(rank=8, rows="all"), lw.Full())
        ... ]
        >>> relative_error(*joint).item() < 1e-3  # eight directions are all of them
        True
    """
    approximate, exact = _alike("relative_error", (2, 3, 4), approximate=approximate, exact=exact)
    return _ratio("relative_error", torch.linalg.vector_norm(approximate - exact), torch.linalg.vector_norm(exact))


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
        LapwingError: other shapes, values that are not finite, a negative noise, or a singular S₂.

    Cost: time O(B C³), memory O(B C²).

    Example:
        >>> zero, one = torch.zeros(1, 1), torch.ones(1, 1, 1)
        >>> round(gaussian_kl(zero, one, zero, 2 * one).item(), 4)
        0.0966
    """
    dtypes = [real_tensor("gaussian_kl", name, value).dtype for name, value in (("cov1", cov1), ("cov2", cov2))]
    delta, cov1, cov2, noise = _gaussians("gaussian_kl", mean1, cov1, mean2, cov2, noise_variance)
    dtype = torch.float64 if noise or dtypes == [torch.float64] * 2 else torch.float32
    values, vectors = symmetric_eigen(cov2)
    values = values + noise
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

    Example:
        >>> round(cqm(torch.zeros(2), torch.full((2,), 1e9), torch.tensor([-1.0, 1.0])).item(), 4)
        0.5
    """
    mean, std, y = (value.detach().cpu().double() for value in (mean, std, y))
    levels = torch.erf((y - mean).abs() / std * math.sqrt(0.5)).flatten().sort().values
    count = levels.numel()
    edges = torch.cat([torch.zeros_like(levels[:1]), levels, torch.ones_like(levels[:1])])  # (count + 2,)
    height = torch.arange(count + 1, dtype=torch.float64) / count  # P between two edges
    above, below = edges[1:] - height, edges[:-1] - height
    return 0.5 * (above * above.abs() - below * below.abs()).sum()  # ∫|α - h| dα = (α - h)|α - h|/2


def _finite(function: str, **values: Tensor) -> list[Tensor]:
    """Returns the values without their graph, as float64 where they are; raises for NaN and infinities."""
    tensors = {name: real_tensor(function, name, value).double() for name, value in values.items()}
    for name, value in tensors.items():
        bad = int((~value.isfinite()).sum())
        if bad:
            raise LapwingError(
                f"{function} needs finite values, and {bad} of {value.numel()} values of {name} are NaN or infinite. "
                f"Find them with (~{name}.isfinite()).nonzero()."
            )
    return list(tensors.values())


def _rounding(values: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns what is rounding noise in a dtype beside the largest of n eigenvalues (..., n), shape (...)."""
    return values.shape[-1] * torch.finfo(dtype).eps * values.amax(-1).clamp_min(torch.finfo(torch.float64).tiny)


def _alike(function: str, accepted: tuple[int, ...], **values: Tensor) -> list[Tensor]:
    """Checks that all are finite covariances of one shape with an accepted number of axes; returns float64."""
    values = {name: real_tensor(function, name, value) for name, value in values.items()}
    shapes = {tuple(value.shape) for value in values.values()}
    shape = next(iter(shapes))
    half = len(shape) // 2
    if len(shapes) > 1 or len(shape) not in accepted or shape[-half:] != shape[-2 * half : -half] or 0 in shape:
        listed = ", ".join(f"{name} {tuple(value.shape)}" for name, value in values.items())
        raise LapwingError(
            f"{function} takes covariances of shape {' or '.join(_SHAPES[axes] for axes in accepted)}, not {listed}."
            " Pass covariances of latents at the same inputs."
        )
    return _finite(function, **values)


def _ratio(function: str, error: Tensor, norm: Tensor) -> Tensor:
    """Divides by the norms of what is exact, which must not be 0."""
    if (norm == 0).any():
        raise LapwingError(
            f"{function} divides by the norm of the exact covariance, and {int((norm == 0).sum())} of "
            f"{norm.numel()} are 0. Pass the exact one second, and leave such inputs out."
        )
    return error / norm


def _gaussians(
    function: str, mean1: Tensor, cov1: Tensor, mean2: Tensor, cov2: Tensor, noise_variance: float
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Checks two Gaussians an input; returns the difference of the means, both covariances and the noise."""
    cov1, cov2 = _alike(function, (3,), cov1=cov1, cov2=cov2)
    mean1, mean2 = _finite(function, mean1=mean1, mean2=mean2)
    if mean1.shape != cov1.shape[:2] or mean2.shape != mean1.shape:
        raise LapwingError(
            f"{function} takes one Gaussian an input, and the shapes are mean1 {tuple(mean1.shape)}, cov1 "
            f"{tuple(cov1.shape)}, mean2 {tuple(mean2.shape)}, cov2 {tuple(cov2.shape)}; means (B, C) and covariances "
            f"(B, C, C) are accepted: {function}(one.mean, one.covariance, other.mean, other.covariance)."
        )
    real = isinstance(noise_variance, Real) and not isinstance(noise_variance, bool)
    if not real or not 0 <= noise_variance < math.inf:
        raise LapwingError(
            f"{function} adds a noise variance to both covariances, and noise_variance is {shown(noise_variance)}; a "
            "finite number of at least 0 is accepted: noise_variance=posterior.noise_variance."
        )
    return mean1 - mean2, cov1, cov2, float(noise_variance)
