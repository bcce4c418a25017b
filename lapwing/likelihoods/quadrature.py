"""Expectations of functions of a sigmoid under a Gaussian, `E[g(f)]`, f ~ N(m, v), accurate at every mean and variance.

Such functions change within a few units around f = 0, and the Gaussian within its standard deviation. The ratio of
these two scales may be several thousand. Gauss-Hermite rules use only the second scale: with 64 nodes the error of a
probability is 4e-2 at a standard deviation of 1000, larger than the error of the probit approximation (2e-2). Here the
trapezoidal rule is applied in a variable that is stretched around f = 0, and converges geometrically. Maximum errors
for standard deviations s from 1e-6 to 1000 and means within 8 s of 0 or within 100 units:

    nodes                  32       48       64
    log E[σ(f)]            9e-5     6e-8     3e-11
    E[σ log(σ/E σ)]        3e-5     2e-8     2e-11
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ..linalg import doubled

NODES = 48
"""Default number of nodes of a rule, for an error below 1e-7."""

_REACH = 8.0  # half width in standard deviations; 1e-15 of the mass is outside
_STRETCH = 2.0  # distance from the kink, in standard deviations, at which nodes become evenly spaced
_KINK = 3.0  # half width of the kink of a sigmoid at f = 0; its poles are at ±iπ
_WIDEST = 1e4  # at larger standard deviations the sigmoid counts as a step: an error of 3e-5
_CHUNK_NUMBERS = 2**22

LEAST_VARIANCE = 1e-12
"""Constant added to variances, so that the derivative of the square root is finite."""


def rule(mean: Tensor, variance: Tensor, slope: float = 0.0, nodes: int = NODES) -> tuple[Tensor, Tensor]:
    """Returns nodes f and log weights (..., nodes) with `Σ_k e^{w_k} g(f_k) ≈ E[g(f)]`, f ~ N(m, v), in float64.

    With z = (f - m)/s and the kink at κ = -m/s, the trapezoidal rule in u is taken after `z = κ + h asinh(ω sinh(u))`:
    steps of ω near the kink, of h away from it.

    `slope` is the growth rate of g, which grows as `e^{slope f}` for f below 0; use 0 for bounded g. The nodes are
    centred on the mass of the integrand, so that logarithms of tiny expectations are accurate. f is differentiable in
    mean and variance; the weights are constants.
    """
    spread = (variance + LEAST_VARIANCE)[..., None]  # all shapes below are (..., 1), (..., 2) or (..., nodes)
    mean, std = mean[..., None], spread.sqrt()
    with torch.no_grad():
        # 1. -κ = m/s and the centre c of the mass, where e^{slope f} N(f; m, v) is largest, at most κ; then κ from c
        near = mean / std.clamp_min(LEAST_VARIANCE**0.5)  # ONNX loses the constant in a sum
        centre = torch.minimum(slope * std, -near).clamp_min(0.0) if slope > 0 else None
        near = (near if centre is None else near + centre).clamp(-_REACH, _REACH)
        # 2. ω, about 3/(h s) for large s, and below 1
        width = torch.add(1.0, spread.clamp_max(_WIDEST**2), alpha=(_STRETCH / _KINK) ** 2).rsqrt()
        # 3. the u at which z - c = ±8, even steps in u between them, and the weight h du/√(2π) of a step
        constants = _constants.__wrapped__ if torch.compiler.is_compiling() else _constants  # a trace makes its own
        ends, even = constants(nodes, mean.dtype, mean.device)
        ends = torch.asinh(torch.add(ends, near, alpha=1.0 / _STRETCH).sinh() / width)
        u, step = (ends @ even).split([nodes, 1], -1)
        # 4. y = ω sinh u and z/h, with z = c + κ + h asinh y (..., nodes)
        asinh = (width * u.sinh()).asinh()
        z = torch.sub(asinh, near, alpha=1.0 / _STRETCH)
        z = z if centre is None else torch.add(z, centre, alpha=1.0 / _STRETCH)
        # 5. log of dz = h ω cosh u / √(1 + y²) du, times N(z; 0, 1)
        logs = (step * width * u.cosh() / asinh.cosh()).log()
        weights = torch.addcmul(logs, z, z, value=-(_STRETCH**2) / 2.0)
    return torch.addcmul(mean, std, z, value=_STRETCH), weights


@cache
def _constants(nodes: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns ∓8/h (2,), and a matrix (2, nodes + 1) that maps the ends of u to its nodes and the weight of a step."""
    ends = torch.tensor([-_REACH, _REACH], dtype=dtype, device=device) / _STRETCH
    shares = torch.linspace(0.0, 1.0, nodes, dtype=dtype, device=device)
    weight = ends.sign() * (_STRETCH / math.sqrt(2.0 * math.pi) / (nodes - 1))
    return ends, torch.cat([torch.stack([1.0 - shares, shares]), weight[:, None]], 1)


def information(mean: Tensor, variance: Tensor, nodes: int = NODES) -> Tensor:
    """Returns the information `Σ_c E[σ log(σ/p) + (1 - σ) log((1 - σ)/(1 - p))]` of answers yes or no, (B,), in nats.

    p is E[σ(f)], for f (B, C).
    """

    def of(mean: Tensor, variance: Tensor) -> Tensor:
        f, log_weights = rule(mean, variance, 0.0, nodes)
        return information_at(torch.stack([f, -f], 1), log_weights.exp(), variance)

    return in_chunks(of, 2 * nodes, mean, variance)


def information_at(f: Tensor, weights: Tensor, variance: Tensor) -> Tensor:
    """Returns `Σ_c E[σ log(σ/p)]`, summed over answers, (B,), for nodes f (B, answers, C, n) and weights (B, C, n).

    The result is never negative, and 0 at a variance of 0: the integrand is `p [r log r - (r - 1)]` with `r = σ/p`.
    """
    sigmoids = torch.sigmoid(f).clamp_min(1e-37)  # for divisions and derivatives; ONNX has constants in float32
    p = torch.einsum("bck,back->bac", weights, sigmoids)
    ratio = sigmoids / p.unsqueeze(-1)
    values = torch.xlogy(ratio, ratio) - (ratio - 1.0)
    p = p * (variance / variance.clamp_min(LEAST_VARIANCE)).unsqueeze(1)
    return torch.einsum("bac,bac->b", p, torch.einsum("bck,back->bac", weights, values))


def log_sigmoid_mean(mean: Tensor, variance: Tensor, nodes: int = NODES) -> Tensor:
    """Returns `log E[σ(f)]`, elementwise."""

    def of(mean: Tensor, variance: Tensor) -> Tensor:
        f, weights = rule(mean, variance, 1.0, nodes)
        return torch.logsumexp(F.logsigmoid(f) + weights, -1)

    return in_chunks(of, nodes, mean, variance)


def log_odds(mean: Tensor, variance: Tensor, nodes: int = NODES) -> Tensor:
    """Returns `log E[σ(f)] - log E[σ(-f)]`, elementwise, computed from the smaller one."""
    mean, variance = doubled(mean), doubled(variance)
    signs = torch.where(mean < 0, -1.0, 1.0).to(mean.dtype)
    smaller = log_sigmoid_mean(-signs * mean, variance, nodes)
    return signs * (torch.log1p(-smaller.exp()) - smaller)


_LARGEST_LOGIT = math.log1p(200.0)  # end of the table, in log(1 + |m| / sqrt(1 + π/8 v))
_LARGEST_STD = math.log1p(_WIDEST)  # end of the table, in log(1 + s)


def tabulated_log_odds(mean: Tensor, variance: Tensor) -> Tensor:
    """Returns `log_odds` from a table of ratios to the probit approximation, 100 times as fast. Not differentiable.

    Errors of `log E[σ(f)]` are at most 1.2e-4 for log odds up to 10, and about 1e-6 in the mean.
    """
    approximate = mean * torch.rsqrt(1.0 + (math.pi / 8.0) * variance)
    places = approximate.abs().log1p() / _LARGEST_LOGIT, variance.sqrt().log1p() / _LARGEST_STD
    grid = 2.0 * torch.stack(places, -1).reshape(1, 1, -1, 2) - 1.0
    table = _log_ratios(mean.device, mean.dtype)
    ratios = F.grid_sample(table, grid, padding_mode="border", align_corners=True)
    return approximate * ratios.reshape(mean.shape).exp()


@cache
def _log_ratios(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns the table of `tabulated_log_odds` (1, 1, stds, logits), by Chebyshev interpolation of 6 144 entries."""

    def interpolation(count: int, points: int) -> tuple[Tensor, Tensor]:
        """Returns Chebyshev nodes between 0 and 1, and the matrix from values at them to values at even points."""
        angles = math.pi * (torch.arange(count, dtype=torch.float64) + 0.5) / count
        orders = torch.arange(count, dtype=torch.float64)[:, None]
        weights = torch.full_like(orders, 2.0 / count)
        weights[0] /= 2.0
        even = torch.linspace(-1.0, 1.0, points, dtype=torch.float64).acos()
        return (1.0 + angles.cos()) / 2.0, torch.cos(orders * even).T @ (weights * torch.cos(orders * angles))

    (logits, to_logits), (stds, to_stds) = interpolation(64, 1024), interpolation(96, 2048)
    approximate, std = (logits * _LARGEST_LOGIT).expm1(), (stds * _LARGEST_STD).expm1()[:, None]
    exact = log_odds(approximate * (1.0 + (math.pi / 8.0) * std.square()).sqrt(), std.square() + 0.0 * approximate, 64)
    return (to_stds @ (exact / approximate).log() @ to_logits.T).to(device, dtype)[None, None]


def binary_log_power_mean(mean: Tensor, variance: Tensor, alpha: float, nodes: int) -> Tensor:
    """Returns `1/α log E[σ(f)^α]` for f ~ N(m, v), by quadrature, elementwise, in float64; for a no, pass -m."""
    f, weights = rule(doubled(mean), doubled(variance), alpha, nodes)
    return weighted_log_power_mean(F.logsigmoid(f), weights, alpha, -1)


def weighted_log_power_mean(logs: Tensor, log_weights: Tensor, alpha: float, dim: int) -> Tensor:
    """Returns `1/α log Σ_k e^{w_k + α l_k}` over one axis, or `Σ_k e^{w_k} l_k` at α = 0.

    The weights `e^{w_k}` sum to 1. The result is exact up to rounding, also for tiny α and if the sum underflows.
    """
    if alpha == 0:
        return (log_weights.exp() * logs).sum(dim)
    top = logs.detach().amax(dim, keepdim=True)
    top = torch.where(top.isfinite(), top, torch.zeros_like(top))
    powers = alpha * (logs - top)  # at most 0
    below = (log_weights.exp() * torch.expm1(powers)).sum(dim)  # from -1 to 0
    log_mean = torch.where(below > -0.5, torch.log1p(below.clamp_min(-0.5)), (powers + log_weights).logsumexp(dim))
    return top.squeeze(dim) + log_mean / alpha


def sigmoid_entropy(logits: Tensor) -> Tensor:
    """Returns the entropy of `y ~ Bernoulli(σ(f))` in nats, `log(1 + e^{-|f|}) + |f| σ(-|f|)`, elementwise."""
    size = logits.abs()
    return F.softplus(-size) + size * torch.sigmoid(-size)


def in_chunks(function: Callable[..., Tensor], nodes: int, *values: Tensor) -> Tensor:
    """Applies a function, in float64, to chunks of the rows of tensors with at most `_CHUNK_NUMBERS` nodes."""
    values = tuple(map(doubled, values))
    if torch.compiler.is_compiling():  # chunks would fix the batch size of an exported program
        return function(*values)
    length = max(1, _CHUNK_NUMBERS // (nodes * max(1, values[0][:1].numel())))
    parts = [function(*rows) for rows in zip(*(value.split(length) for value in values), strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
