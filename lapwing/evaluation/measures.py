"""How near one posterior's predictions are to another's: pure functions of predictive covariances and moments.

Letters: B inputs, C outputs, P weights, N data. Covariances are `posterior.latent(x).covariance` (B, C, C), or
`posterior.latent(x, joint=True).covariance` (B, C, B, C). Every function computes in float64 where its arguments are,
takes no gradient, and returns a float64 tensor. `found` is the approximation, `exact` what it approximates.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from ..errors import LapwingError, shown
from ..linalg import symmetric_eigen
from .arguments import real_tensor

_SHAPES = {2: "(n, n)", 3: "(B, C, C)", 4: "(B, C, B, C)"}


def relative_error(found: Tensor, exact: Tensor) -> Tensor:
    """Returns `‖Σ_found - Σ_exact‖_F / ‖Σ_exact‖_F`, 0 where they agree (optimal subspace, equation 20).

    Args:
        found: covariances of an approximation: (B, C, B, C) of all inputs jointly, as in the paper; (B, C, C) of each
            input alone, taken as one block-diagonal matrix; or a matrix (n, n).
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
    found, exact = _alike("relative_error", (2, 3, 4), found=found, exact=exact)
    return _ratio("relative_error", torch.linalg.vector_norm(found - exact), torch.linalg.vector_norm(exact))


def trace(covariance: Tensor | None = None, *, variance: Tensor | None = None) -> Tensor:
    """Returns `Tr Σ`, for subspaces the larger the better (optimal subspace, equation 25 and Lemma 2).

    A subspace's covariance never exceeds that of the full posterior it truncates, nor does its trace: among subspaces
    of one full posterior, at one prior precision and noise, a larger trace is closer. Across priors it says nothing.

    Args:
        covariance: (B, C, B, C), (B, C, C) or (n, n).
        variance: instead of it, variances (B, C) as `posterior.latent(x).variance` gives them without a covariance.

    Returns:
        The trace (), a sum over inputs and outputs.

    Raises:
        LapwingError: both or neither given, other shapes, or values that are not finite.

    Cost: time O(B C).

    Example:
        >>> trace(torch.eye(3)).item(), trace(variance=torch.ones(4, 2)).item()
        (3.0, 8.0)
    """
    if (covariance is None) == (variance is None):
        raise LapwingError(
            f"trace takes a covariance or variances, and was given {'neither' if covariance is None else 'both'}; one "
            "of them is accepted: trace(latent.covariance), or trace(variance=latent.variance)."
        )
    if variance is not None:
        return _finite("trace", variance=variance)[0].sum()
    assert covariance is not None
    (covariance,) = _alike("trace", (2, 3, 4), covariance=covariance)
    blocks = covariance if covariance.ndim == 3 else _joined(covariance)[None]
    return blocks.diagonal(dim1=1, dim2=2).sum()


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
    given = [real_tensor("gaussian_kl", name, value).dtype for name, value in (("cov1", cov1), ("cov2", cov2))]
    delta, cov1, cov2, noise = _gaussians("gaussian_kl", mean1, cov1, mean2, cov2, noise_variance)
    dtype = torch.float64 if noise or given == [torch.float64] * 2 else torch.float32
    values, vectors = symmetric_eigen(cov2)
    values = values + noise
    singular = values[:, 0] <= _rounding(values, dtype)  # without noise, what the arguments' dtype cannot resolve
    if singular.any():
        raise LapwingError(
            f"gaussian_kl needs an invertible second covariance, and with noise_variance={noise_variance} "
            f"{int(singular.sum())} of {len(values)} are singular; a positive noise makes them invertible: pass "
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


def gaussian_wasserstein(
    mean1: Tensor, cov1: Tensor, mean2: Tensor, cov2: Tensor, noise_variance: float = 0.0
) -> Tensor:
    """Returns `W₂² = ‖Δ‖² + Tr(S₁ + S₂ - 2 (S₂^½ S₁ S₂^½)^½)` of each input and return W₂, in the unit of the outputs.

    `S = cov + σ²I`, `Δ = m₁ - m₂`. The trace is `min_U ‖R₁ - R₂U‖_F²` over rotations U, for any roots `R Rᵀ = S`; taken
    so, nothing cancels, and equal arguments are at distance 0. Singular covariances are fine.

    Args:
        mean1: (B, C).
        cov1: (B, C, C), symmetric positive semi-definite.
        mean2: as mean1.
        cov2: as cov1.
        noise_variance: σ², added to both diagonals.

    Returns:
        One distance an input (B,).

    Raises:
        LapwingError: other shapes, values that are not finite, or a negative noise.

    Cost: time O(B C³), memory O(B C²).

    Example:
        >>> mean, one = torch.zeros(1, 1), torch.ones(1, 1, 1)
        >>> gaussian_wasserstein(mean, 4 * one, mean + 1, 4 * one).item()
        1.0
    """
    asked = "gaussian_wasserstein"
    delta, cov1, cov2, noise = _gaussians(asked, mean1, cov1, mean2, cov2, noise_variance)
    roots = []
    for covariance in (cov1, cov2):
        values, vectors = symmetric_eigen(covariance)
        values = torch.where(values > _rounding(values)[:, None], values, 0.0) + noise
        roots.append(vectors * values.sqrt()[:, None, :])
    left, _, right = torch.linalg.svd(roots[1].mT @ roots[0])  # (B, C, C)
    apart = roots[0] - roots[1] @ (left @ right)
    return (delta.square().sum(-1) + apart.square().sum((1, 2))).sqrt()


def categorical_kl(p: Tensor, q: Tensor) -> Tensor:
    """Returns `KL(p ‖ q) = Σ_c p_c log(p_c / q_c)` of each input, in nats.

    Summed as `Σ_c [p log(p/q) - p + q]`, terms of which none is negative: exact for nearly equal arguments too.

    Args:
        p: class probabilities (B, C), rows summing to 1; a probability of 0 adds nothing.
        q: class probabilities (B, C); infinite where it is 0 and p is not.

    Returns:
        One divergence an input (B,).

    Raises:
        LapwingError: different shapes, or rows that are no probabilities.

    Cost: time and memory O(B C).

    Example:
        >>> round(categorical_kl(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])).item(), 4)
        0.1438
    """
    p, q = real_tensor("categorical_kl", "p", p), real_tensor("categorical_kl", "q", q)
    rows = {"p": p, "q": q}
    if p.shape != q.shape or p.ndim != 2 or p.shape[1] < 2:
        raise LapwingError(
            f"categorical_kl compares class probabilities row by row, and p has shape {tuple(p.shape)} and q "
            f"{tuple(q.shape)}; one shape (B, C) with C > 1 is accepted: categorical_kl(one.probs, other.probs)."
        )
    for name, value in rows.items():
        rounding = 0.05 if value.dtype in (torch.float16, torch.bfloat16) else 1e-3
        value = value.double()
        wrong = ~((value >= 0).all(1) & ((value.sum(1) - 1).abs() <= rounding))  # NaN is wrong too
        if wrong.any():
            raise LapwingError(
                f"categorical_kl needs probabilities, and {int(wrong.sum())} of {len(value)} rows of {name} are not "
                f"positive with sum 1; for logits pass {name}.softmax(1)."
            )
        rows[name] = value / value.sum(1, keepdim=True)
    p, q = rows["p"], rows["q"]
    excess = (q - p) / p  # -1 where q is 0
    return torch.where(p > 0, p * (excess - excess.log1p()), q).sum(1)


def _finite(asked: str, **values: Tensor) -> list[Tensor]:
    """Returns the values without their graph, as float64 where they are; raises for NaN and infinities."""
    found = {name: real_tensor(asked, name, value).double() for name, value in values.items()}
    for name, value in found.items():
        bad = int((~value.isfinite()).sum())
        if bad:
            raise LapwingError(
                f"{asked} needs finite values, and {bad} of {value.numel()} values of {name} are NaN or infinite; find "
                f"them with (~{name}.isfinite()).nonzero()."
            )
    return list(found.values())


def _rounding(values: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns what is rounding noise in a dtype beside the largest of n eigenvalues (..., n), shape (...)."""
    return values.shape[-1] * torch.finfo(dtype).eps * values.amax(-1).clamp_min(torch.finfo(torch.float64).tiny)


def _alike(asked: str, accepted: tuple[int, ...], **values: Tensor) -> list[Tensor]:
    """Checks that all are finite covariances of one shape with an accepted number of axes; returns float64."""
    values = {name: real_tensor(asked, name, value) for name, value in values.items()}
    shapes = {tuple(value.shape) for value in values.values()}
    shape = next(iter(shapes))
    half = len(shape) // 2
    if len(shapes) > 1 or len(shape) not in accepted or shape[-half:] != shape[-2 * half : -half] or 0 in shape:
        listed = ", ".join(f"{name} {tuple(value.shape)}" for name, value in values.items())
        raise LapwingError(
            f"{asked} takes covariances of one shape, and found {listed}; accepted are "
            f"{' and '.join(_SHAPES[axes] for axes in accepted)}: pass covariances of latents at the same inputs."
        )
    return _finite(asked, **values)


def _joined(covariance: Tensor) -> Tensor:
    """Returns (n, n) from itself or from (B, C, B, C)."""
    return covariance.reshape(2 * (math.isqrt(covariance.numel()),))


def _ratio(asked: str, error: Tensor, norm: Tensor) -> Tensor:
    """Divides by the norms of what is exact, which must not be 0."""
    if (norm == 0).any():
        raise LapwingError(
            f"{asked} divides by the norm of the exact covariance, and found {int((norm == 0).sum())} of "
            f"{norm.numel()} to be 0; others are needed: pass the exact one second, and leave such inputs out."
        )
    return error / norm


def _gaussians(
    asked: str, mean1: Tensor, cov1: Tensor, mean2: Tensor, cov2: Tensor, noise_variance: float
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Checks two Gaussians an input; returns the difference of the means, both covariances and the noise."""
    cov1, cov2 = _alike(asked, (3,), cov1=cov1, cov2=cov2)
    mean1, mean2 = _finite(asked, mean1=mean1, mean2=mean2)
    if mean1.shape != cov1.shape[:2] or mean2.shape != mean1.shape:
        raise LapwingError(
            f"{asked} takes one Gaussian an input, and the shapes are mean1 {tuple(mean1.shape)}, cov1 "
            f"{tuple(cov1.shape)}, mean2 {tuple(mean2.shape)}, cov2 {tuple(cov2.shape)}; means (B, C) and covariances "
            f"(B, C, C) are accepted: {asked}(one.mean, one.covariance, other.mean, other.covariance)."
        )
    real = isinstance(noise_variance, Real) and not isinstance(noise_variance, bool)
    if not real or not 0 <= noise_variance < math.inf:
        raise LapwingError(
            f"{asked} adds a noise variance to both covariances, and noise_variance is {shown(noise_variance)}; a "
            "finite number of at least 0 is accepted: noise_variance=posterior.noise_variance."
        )
    return mean1 - mean2, cov1, cov2, float(noise_variance)
