"""Moments of norms, linearised with their statistics, and of softmaxes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..moments import Moments, Value, mean_of, ratio, sum_correlation, total_of, variance_of
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
    x = arguments["input"]
    trailing = mean_of(x).ndim - 2
    scale = (arguments["running_var"] + arguments["eps"]).rsqrt()
    scale, shift = (v.reshape(-1, *(1,) * trailing) for v in (scale, -arguments["running_mean"] * scale))
    mean = (mean_of(x) * scale).add_(shift)  # in place: fresh memory costs more than the sum
    inner = Moments(mean, x.variance, x.correlation) if isinstance(x, Moments) else mean
    result = affine(site, inner, arguments["weight"], arguments["bias"], trailing, scale.square())
    return result if site.node.target is aten.batch_norm.default else (result,)


def affine(
    site: Site, x: Value, weight: Value | None, bias: Value | None, trailing: int, factor: Tensor | None = None
) -> Moments:
    """Returns the moments of `γ x̂ + β`, with γ and β correlated within each feature as in the posterior.

        Var = (γ² + Var[γ]) v + Var[γ] x̂² + Var[β] + 2 x̂ Cov[γ, β]

    `trailing` dimensions follow the features. The variances of x̂ still need the `factor`, if there is one.
    """

    def wide(value: Any) -> Any:
        return None if value is None else value.reshape(*value.shape, *(1,) * trailing)

    mean, variance = mean_of(x), variance_of(x)
    gamma, beta, gamma_v, beta_v = map(wide, (mean_of(weight), mean_of(bias), variance_of(weight), variance_of(bias)))
    if gamma is None:
        out = mean if beta is None else mean + beta
    else:
        out = mean * gamma if beta is None else (mean * gamma).add_(beta)
    crossed = _covariance(site, gamma_v, beta_v, mean.dtype)

    def added(mean: Tensor, shape: Any) -> Tensor | None:
        """Returns the variances from γ and β at a certain x̂; `shape` fits their values to its dimensions."""
        total = None if beta_v is None else shape(beta_v)
        if gamma_v is not None:
            from_gamma = mean.square().mul_(shape(gamma_v))
            total = from_gamma if total is None else from_gamma.add_(total)
        return total if crossed is None or total is None else total + 2 * mean * shape(crossed)

    from_weights, carried = added(mean, lambda value: value), None
    if variance is not None:
        slope = mean.new_ones(()) if gamma is None else gamma.square()
        slope = total_of([slope, gamma_v])
        carried = variance * (slope if factor is None else slope * factor)
    total = total_of([from_weights, carried])
    total = total if total.shape == out.shape else total.expand_as(out)
    layout = site.layout
    if layout is None:
        return Moments(out, total)
    parts: list[tuple[Tensor, Tensor | float | None]] = []
    channel = 1 if trailing else -1
    width = next((value.numel() for value in (gamma, beta) if value is not None), 0)
    if from_weights is not None:
        from_weights, rho = from_weights.expand_as(out), None
        if width == out.shape[channel]:
            average = layout.mean(mean, site.samples, channel)
            pooled: Any = added(average, lambda value: value.reshape(-1))
            whole, count = layout.mean(from_weights, site.samples, channel), out.numel() // average.numel()
            rho = ratio((pooled - whole / count).clamp_min(0), whole - whole / count)
        parts.append((from_weights, None if rho is None else layout.spread(rho, out, channel)))
    if carried is not None:
        parts.append((carried, x.correlation))
    return Moments(out, total, sum_correlation(total, parts, layout.positions))


def _covariance(site: Site, gamma_v: Tensor | None, beta_v: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns Cov[γ, β] in the shape of γ's variances, or None if it is 0."""
    weight, bias = site.roles.get("weight"), site.roles.get("bias")
    if gamma_v is None or beta_v is None or weight is None or bias is None or weight[0] is not bias[0]:
        return None
    treated = weight[0]
    if treated.is_diagonal:
        return None

    def make() -> Tensor:  # Var[γ_i + β_i] = Var γ_i + Var β_i + 2 Cov[γ_i, β_i]
        eye = torch.eye(gamma_v.numel(), dtype=dtype, device=gamma_v.device)
        variances = treated.covariance.push(torch.cat([eye, eye], 1), None, False).flatten()
        return (variances - gamma_v.flatten() - beta_v.flatten()) / 2

    return site.constant("crossed", make).reshape(gamma_v.shape)


def softmax(site: Site, arguments: dict[str, Any]) -> Moments:
    """Returns the moments of a softmax, `v_y = y² u`, or of its logarithm, `v_y = u`: `u = (1 - 2p) v + Σ p² v`."""
    x, dim, logarithm = arguments["self"], arguments["dim"], not is_a(site.node, Kind.SOFTMAX)
    y = x.mean.log_softmax(dim) if logarithm else x.mean.softmax(dim)
    p = y.exp() if logarithm else y
    variance = (1 - 2 * p) * x.variance + (p.square() * x.variance).sum(dim, keepdim=True)
    return Moments(y, variance if logarithm else p.square() * variance)


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
register_aten(Operation(Kind.OTHER, softmax, broadcast), "log_softmax.int", "_log_softmax.default")
