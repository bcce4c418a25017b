"""Moments through convolutions: linear layers on patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...tangent.layers.conv import unfold
from .fusion import aten
from .layout import together
from .linear import total_of
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
    layout = site.layout if site.node.target in _PLAIN else None
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
    total = total_of(parts)
    if layout is None:
        return Moments(h, total)
    pooled: list[Tensor] = []
    own = None
    if isinstance(x, Moments):
        cover = _cover(site, given, mean)
        counted = site.constant("counted", lambda: _counted(cover, second), second)  # (O, C)
        own = _by_groups(x.mean_own(layout, site.samples, 1), counted, given["groups"])
        if x.correlation is not None:
            inherited = site.constant("inherited", lambda: _inherited(cover, w, spread), w, spread)  # (O, C)
            average = x.amplitude(layout, site.samples, 1)  # (B, C)
            pooled.append(_by_groups(average.square(), inherited, given["groups"]))
    if spread is not None:
        rows = _mean_patches(site, given, mean)  # (B, C, *kernel)
        pooled.append(_pooled(treated if layer else None, rows, spread, shared, given["groups"]))
    if isinstance(bias, Moments) and not shared:
        pooled.append(bias.variance.expand(h.shape[0], -1))
    if not pooled:
        return Moments(h, total)
    rho = together(total, total_of(pooled), own, layout, site.samples, 1)  # (B, O)
    return Moments(h, total, layout.spread(rho, total, 1))


def _inherited(cover: Sequence[Tensor], w: Tensor, spread: Tensor | None) -> Tensor:
    """Returns `(Σ_k W_jck)² + Σ_k Var[W_jck]` (O, C), each k counted for the share of positions that see it inside."""
    seen = w.new_ones(())
    for matrix in cover:
        seen = seen[..., None] * matrix.sum(-1)  # (*kernel)
    found = (w * seen).flatten(2).sum(-1).square()
    return found if spread is None else found + (spread * seen.square()).flatten(2).sum(-1)


def _counted(cover: Sequence[Tensor], second: Tensor) -> Tensor:
    """Returns `Σ_k (W² + Var[W])_jck` (O, C), counted likewise."""
    seen = second.new_ones(())
    for matrix in cover:
        seen = seen[..., None] * matrix.sum(-1)
    return (second * seen).flatten(2).sum(-1)


def _coverage(given: dict[str, Any], kernel: tuple[int, ...], sizes: tuple[int, ...], like: Tensor) -> list[Tensor]:
    """Returns, for each dimension, what each input counts in the mean over positions at each place of the kernel."""
    space = len(kernel)
    stride, dilation = (numbers(given[name], space) for name in ("stride", "dilation"))
    padding = pairs(given["padding"], kernel, dilation)
    found = []
    for n, k, s, d, (before, after) in zip(sizes, kernel, stride, dilation, padding, strict=True):
        count = (n + before + after - d * (k - 1) - 1) // s + 1
        start = torch.arange(count, device=like.device) * s - before  # (T,)
        places = start[None, :] + torch.arange(k, device=like.device)[:, None] * d  # (k, T)
        hits = places[..., None] == torch.arange(n, device=like.device)  # (k, T, n)
        found.append(hits.to(like.dtype).sum(1) / count)
    return found


def _cover(site: Site, given: dict[str, Any], mean: Tensor) -> list[Tensor]:
    """Returns `_coverage` of a call."""
    kernel, sizes = tuple(mean_of(given["weight"]).shape[2:]), tuple(mean.shape[2:])
    return site.constant(f"cover {sizes}", lambda: _coverage(given, kernel, sizes, mean))


def _mean_patches(site: Site, given: dict[str, Any], mean: Tensor) -> Tensor:
    """Returns the means of an input's patches over positions (B, C, *kernel)."""
    for matrix in reversed(_cover(site, given, mean)):
        mean = (mean @ matrix.mT).movedim(-1, 2)  # the last dimension of space goes to the front as one of the kernel
    return mean


def _pooled(treated: Treated | None, rows: Tensor, spread: Tensor, bias: bool, groups: int) -> Tensor:
    """Returns what the weights add to the variances of the mean over positions (B, O)."""
    if treated is None:
        return _by_groups(rows.flatten(1).square(), spread.flatten(1), groups)
    found = treated.covariance.rotation()
    rows = rows.reshape(rows.shape[0], groups, -1)  # (B, G, I)
    rows = F.pad(rows, (0, 1), value=1.0) if bias else rows
    if found is None:
        return treated.covariance.push(rows[:, 0], None, False)
    basis, variances = (None if part is None else part.to(rows.dtype) for part in found)
    rotated = rows if basis is None else torch.einsum("bgi,giq->bgq", rows, basis)
    return torch.einsum("bgq,goq->bgo", rotated.square(), variances).flatten(1)


def _by_groups(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Returns `W x` for x (B, I) and W (O, I / G)."""
    x, weight = x.unflatten(1, (groups, -1)), weight.unflatten(0, (groups, -1))
    return torch.einsum("bgi,goi->bgo", x, weight).flatten(1)


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


_PLAIN: tuple[Any, ...] = (
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
)  # fmt: skip
RULES: dict[Any, Rule] = {
    target: convolution
    for target in (
        *_PLAIN, aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input,
    )
}  # fmt: skip
"""A transposed convolution's weights are treated by no layer family of the tangent, so only their variances count."""
