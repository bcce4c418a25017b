"""Moments through convolutions: linear layers on patches, whose outputs are taken as independent between positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...tangent.layers.conv import unfold
from .fusion import aten
from .moments import Moments, Rule, Site, Treated, mean_of, variance_of

_PATCHES = 2**24
"""Numbers of unfolded patches that are held at once."""


def convolution(site: Site, given: dict[str, Any]) -> Moments:
    """Passes moments through a convolution (Streamlined Prediction, appendix A.7; variances only).

        E[h] = W * m + b        Var[h] = W² * v + Var[(dW) * a] of the patches, in which a = m, v as in a linear layer

    Cost: one convolution for the mean, one of v with W² + Var[W], and one of m² with Var[W] for a diagonal posterior;
    for a Kronecker-factored one, one of m into the basis of its patches, and one with kernels of size 1.
    """
    x, weight, bias = given["input"], given["weight"], given["bias"]
    mean, variance = mean_of(x), variance_of(x)
    w, b, spread = mean_of(weight), mean_of(bias), variance_of(weight)

    def apply(x: Tensor, kernel: Tensor, shift: Tensor | None = None) -> Tensor:
        return site.node.target(**{**given, "input": x, "weight": kernel, "bias": shift})  # type: ignore[operator]

    h = apply(mean, w, b)
    parts = []
    if variance is not None:
        second = site.constant("second", lambda: w.square() if spread is None else w.square() + spread, w, spread)
        parts.append(apply(variance, second))
    treated = site.treated("weight")
    layer = treated is not None and treated.block.family == "conv"
    shared = layer and isinstance(bias, Moments) and treated is not None and treated.block.bias
    if layer and treated is not None:
        parts.append(_from_weights(site, treated, given, mean, shared, apply))
    elif spread is not None:
        parts.append(apply(mean.square(), spread))
    if isinstance(bias, Moments) and not shared:
        parts.append(bias.variance.reshape(-1, *(1,) * (w.ndim - 2)).expand_as(h))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return Moments(h, total)


def _from_weights(site: Site, treated: Treated, given: dict[str, Any], mean: Tensor, bias: bool, apply: Any) -> Tensor:
    """Returns `Σ_ii' a_i a_i' Cov[W_ji, W_ji']` for every patch a, a one appended for the bias."""
    rotated = site.constant("rotated", lambda: _kernels(treated, bias, given, mean.dtype))
    if rotated is None:
        return _pushed(site, treated, given, mean, bias)
    kernels, shift, spread, spread_shift = rotated
    if kernels is None:
        return apply(mean.square(), spread, spread_shift)
    groups = given["groups"]
    patches = _rotated(given, mean, kernels, shift).square()  # (B, G Q, *grid)
    return _pointwise(patches, spread, groups)


def _kernels(treated: Treated, bias: bool, given: dict[str, Any], dtype: torch.dtype) -> Any:
    """Returns the patches' basis as kernels, and the variances in it as kernels of size 1."""
    found = treated.covariance.rotation()
    if found is None:
        return None
    basis, spread = found
    spread, shape = spread.to(dtype), mean_of(given["weight"]).shape
    groups, outputs, _ = spread.shape
    if basis is None:
        kernel, shift = (spread[..., :-1], spread[..., -1].flatten()) if bias else (spread, None)
        return None, None, kernel.reshape(shape), shift
    basis = basis.to(dtype)
    kernel, shift = (basis[:, :-1], basis[:, -1].flatten()) if bias else (basis, None)  # (G, I, Q), (G Q,)
    kernels = kernel.mT.reshape(-1, *shape[1:])  # (G Q, I / kernel, *kernel)
    return kernels, shift, spread.reshape(groups * outputs, -1, *(1,) * (len(shape) - 2)), None


def _rotated(given: dict[str, Any], mean: Tensor, kernels: Tensor, shift: Tensor | None) -> Tensor:
    convolve = (F.conv1d, F.conv2d, F.conv3d)[mean.ndim - 3]
    names = ("stride", "padding", "dilation", "groups")
    stride, padding, dilation, groups = (given[name] for name in names)
    return convolve(mean, kernels, shift, stride, padding, dilation, groups)


def _pointwise(patches: Tensor, spread: Tensor, groups: int) -> Tensor:
    convolve = (F.conv1d, F.conv2d, F.conv3d)[patches.ndim - 3]
    return convolve(patches, spread, groups=groups)


def _pushed(site: Site, treated: Treated, given: dict[str, Any], mean: Tensor, bias: bool) -> Tensor:
    """The same by unfolding, for posteriors without one basis for all outputs, some samples at a time."""
    if given["groups"] != 1:
        raise site.refusal("in groups with a posterior that correlates all its weights", "are Kronecker and diagonal")
    kernel = tuple(mean_of(given["weight"]).shape[2:])
    space = len(kernel)
    stride, dilation = (numbers(given[name], space) for name in ("stride", "dilation"))
    padding = pairs(given["padding"], kernel, dilation)
    grid = tuple(
        (n + sum(p) - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(mean.shape[2:], padding, dilation, kernel, stride, strict=True)
    )
    per_sample = max(1, mean.shape[1] * torch.Size(kernel).numel() * torch.Size(grid).numel())
    parts = []
    for some in mean.split(max(1, _PATCHES // per_sample)):
        rows = unfold(some, kernel, stride, padding, dilation).flatten(2)  # (B, T, I)
        rows = F.pad(rows, (0, 1), value=1.0) if bias else rows
        found = treated.covariance.push(rows.flatten(0, 1), None, False)  # (B T, O)
        parts.append(found.reshape(len(some), -1, found.shape[-1]).mT.reshape(len(some), -1, *grid))
    return torch.cat(parts)


def numbers(value: Any, space: int) -> tuple[int, ...]:
    """Returns one number a dimension."""
    return (value,) * space if isinstance(value, int) else tuple(value) * (space if len(value) == 1 else 1)


def pairs(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns the zeros before and after, a dimension."""
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(t // 2, t - t // 2) for t in totals]
    return [(p, p) for p in numbers(0 if padding == "valid" else padding, len(kernel))]


RULES: dict[Any, Rule] = {
    target: convolution
    for target in (
        aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
        aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
        aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input,
    )
}  # fmt: skip
"""A transposed convolution's weights are treated by no layer family of the tangent, so only their variances count."""
