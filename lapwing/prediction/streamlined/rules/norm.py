"""Moments of norms, linearised with their statistics, and of softmaxes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..moments import Moments, Value, mean_of, ratio, root, sum_correlation, total_of, variance_of
from ..operations import Arguments, Kind, Operation, Slope, aten, broadcast, is_a, register_aten
from ..sites import Site


def normalised(x: Tensor, variance: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """Returns `x̂ = (x - μ)/s` over the last dimension and its variances, for independent entries of x.

        v_x̂ = [(1 - 2/D - 2 x̂²/D) v + (Σv + 2 x̂ Σx̂v + x̂² Σx̂²v)/D²] / s²

    Root-mean-square norms (`centred=False`) have no μ and none of its terms: `[(1 - 2 x̂²/D) v + x̂² Σx̂²v/D²] / s²`.
    """
    d = x.shape[-1]
    x = x - x.mean(-1, keepdim=True) if centred else x
    inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()  # 1/s
    x = x * inverse
    scaled, square = variance * inverse.square(), x.square()
    second = (square * scaled).sum(-1, keepdim=True) / d**2
    if not centred:
        return x, (1 - 2 / d * square) * scaled + square * second
    total, cross = scaled.sum(-1, keepdim=True) / d**2, (x * scaled).sum(-1, keepdim=True) / d**2
    return x, (1 - 2 / d - 2 / d * square) * scaled + (total + 2 * x * cross + square * second)


def sample_norm(site: Site, arguments: dict[str, Any]) -> Moments:
    """Returns the moments of `F.layer_norm`, `F.rms_norm` (last dimensions) and `F.group_norm` (groups of channels)."""
    x, grouped = arguments["input"], "num_groups" in arguments
    shape, eps = mean_of(x).shape, arguments["eps"]
    if isinstance(x, Moments):
        lead = (shape[0], arguments["num_groups"]) if grouped else shape[: -len(arguments["normalized_shape"])]
        eps = torch.finfo(x.mean.dtype).eps if eps is None else eps
        centred = site.node.target is not aten.rms_norm.default
        parts = normalised(x.mean.reshape(*lead, -1), x.variance.reshape(*lead, -1), eps, centred)
        inner: Value = Moments(parts[0].reshape(shape), parts[1].reshape(shape), x.correlation)
    else:
        inner = site.apply({**arguments, **{name: None for name in ("weight", "bias") if name in arguments}})
    return affine(site, inner, arguments["weight"], arguments.get("bias"), len(shape) - 2 if grouped else 0)


def batch_norm(site: Site, arguments: dict[str, Any]) -> Moments | tuple[Moments]:
    """Returns the moments of `F.batch_norm` in eval mode with treated weights; with certain ones it is element-wise."""
    x, eps, statistics = arguments["input"], arguments["eps"], (arguments["running_mean"], arguments["running_var"])
    trailing, mean = mean_of(x).ndim - 2, F.batch_norm(mean_of(x), *statistics, eps=eps)
    factor = (statistics[1] + eps).reciprocal().reshape(-1, *(1,) * trailing)
    inner = Moments(mean, x.variance * factor, x.correlation) if isinstance(x, Moments) else mean
    result = affine(site, inner, arguments["weight"], arguments["bias"], trailing)
    return result if site.node.target is aten.batch_norm.default else (result,)


def affine(site: Site, x: Value, weight: Value | None, bias: Value | None, trailing: int) -> Moments:
    """Returns the moments of `γ x̂ + β`, with γ and β correlated within each feature as in the posterior.

        Var = (γ² + Var[γ]) v + (√Var[γ] x̂ + Cov[γ, β]/√Var[γ])² + Var[β] - Cov[γ, β]²/Var[γ]

    `trailing` dimensions follow the features.
    """

    def wide(value: Tensor) -> Tensor:
        return value.reshape(*value.shape, *(1,) * trailing)

    def scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        x = x if weight is None else x * wide(weight)
        return x if bias is None else x + wide(bias)

    mean, variance = mean_of(x), variance_of(x)
    gamma, beta = mean_of(weight), mean_of(bias)
    out = scaled(mean, gamma, beta)
    slope, spread, shift, rest = _terms(site, weight, bias)
    layout, channel = site.layout, 1 if trailing else -1
    width = next((value.numel() for value in (gamma, beta) if value is not None), 0)
    by_channel = layout if width == out.shape[channel] else None
    from_weights = None if rest is None else wide(rest)
    pooled = [] if rest is None else [rest.flatten()]  # the variances of means over positions, from the weights
    if spread is not None:
        along = scaled(mean, spread, shift)
        if by_channel is not None:
            pooled.append(by_channel.mean(along, site.samples, channel).square())
        along.square_()  # in place, here and below: fresh memory costs more than the sum
        from_weights = along if from_weights is None else along.add_(from_weights)
    carried = variance if variance is None or slope is None else variance * wide(slope)
    total = total_of([carried, from_weights]).expand_as(out)
    if layout is None:
        return Moments(out, total)
    parts: list[tuple[Tensor, Tensor | float | None]] = []
    if from_weights is not None:
        from_weights, rho = from_weights.expand_as(out), None
        if by_channel is not None:
            whole = by_channel.mean(from_weights, site.samples, channel)
            alone = whole / (out.numel() // whole.numel())
            rho = layout.expanded(ratio((total_of(pooled) - alone).clamp_min(0), whole - alone), out, channel)
        parts.append((from_weights, rho))
    if carried is not None:
        parts.append((carried, x.correlation))
    return Moments(out, total, sum_correlation(total, parts, layout.positions))


def _terms(
    site: Site, weight: Value | None, bias: Value | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Returns `γ² + Var[γ]`, `√Var[γ]`, `Cov[γ, β]/√Var[γ]` and `Var[β] - Cov[γ, β]²/Var[γ]`.

    None stands for 1 in the first, and for 0 in the others.
    """
    gamma, gamma_v, beta_v = mean_of(weight), variance_of(weight), variance_of(bias)
    slope = None if gamma is None else total_of([gamma.square(), gamma_v])
    if gamma_v is None:
        return slope, None, None, beta_v
    spread, gamma_of, beta_of = root(gamma_v), site.roles.get("weight"), site.roles.get("bias")
    if beta_v is None or gamma_of is None or beta_of is None or gamma_of[0] is not beta_of[0]:
        return slope, spread, None, beta_v
    treated = gamma_of[0]
    if treated.is_diagonal:
        return slope, spread, None, beta_v

    def make() -> Tensor:  # Var[γ_i + β_i]
        eye = torch.eye(gamma_v.numel(), dtype=gamma_v.dtype, device=gamma_v.device)
        return treated.covariance.push(torch.cat([eye, eye], 1), None, False).reshape(gamma_v.shape)

    most = root(beta_v)  # |Cov[γ, β]| <= √(Var[γ] Var[β]); beyond it is rounding, divided by a √Var[γ] near 0
    shift = ((site.constant("both", make) - gamma_v - beta_v) / (2 * spread)).clamp(-most, most)
    return slope, spread, shift, (beta_v - shift.square()).clamp_min(0)


def softmax(site: Site, arguments: dict[str, Any]) -> Moments:
    """Returns the moments of a softmax, `v_y = y² u`, or of its logarithm, `v_y = u`: `u = (1 - 2p) v + Σ p² v`."""
    x, dim, logarithm = arguments["self"], arguments["dim"], is_a(site.node, Kind.LOG_SOFTMAX)
    y = x.mean.log_softmax(dim) if logarithm else x.mean.softmax(dim)
    p = y.exp() if logarithm else y
    variance = (1 - 2 * p) * x.variance + (p.square() * x.variance).sum(dim, keepdim=True)
    return Moments(y, variance if logarithm else p.square() * variance)


def log_softmax_with_covariances(x: Moments) -> Moments:
    """Returns `log softmax(x)` (B, n) with covariances `(I - 1 pᵀ) Σ (I - p 1ᵀ)`: all entries lose the same number."""
    assert x.covariance is not None
    y = x.mean.log_softmax(-1)
    shared = x.covariance @ y.exp()[:, :, None]  # Σ p (B, n, 1)
    matrix = x.covariance - shared - shared.mT + y.exp()[:, None] @ shared
    return Moments.joint(y, matrix, x.centred)


def _batch_norm_slope(a: Arguments, y: Any, name: str) -> Slope:
    """Returns `γ / √(v + ε)` for each channel."""
    slope = (a["running_var"] + a["eps"]).rsqrt()
    slope = slope if a["weight"] is None else slope * a["weight"]
    return slope.reshape(-1, *(1,) * (a["input"].ndim - 2))


register_aten(
    Operation(Kind.NORM, sample_norm, broadcast), "layer_norm.default", "rms_norm.default", "group_norm.default"
)
register_aten(  # in eval mode, which is checked; the second gives a tuple
    Operation(Kind.NORM | Kind.ELEMENTWISE, batch_norm, broadcast, _batch_norm_slope),
    "batch_norm.default", "_native_batch_norm_legit_no_training.default",
)  # fmt: skip
register_aten(Operation(Kind.SOFTMAX, softmax, broadcast), "softmax.int", "_softmax.default", "_safe_softmax.default")
register_aten(Operation(Kind.LOG_SOFTMAX, softmax, broadcast), "log_softmax.int", "_log_softmax.default")
