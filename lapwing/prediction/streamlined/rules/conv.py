"""Moments through convolutions: linear layers on patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....jacobian.layers.conv import unfold
from ..moments import Moments, layer_correlation, mean_of, total_of, variance_of
from ..operations import Kind, Operation, numbered, register_aten
from ..sites import Site, Treated

_MAX_PATCH_NUMBERS = 2**24
"""Numbers of unfolded patches that exist at once."""


def convolution(site: Site, arguments: dict[str, Any], positions: bool = True) -> Moments:
    """Passes moments through a convolution (Streamlined Prediction, appendix A.7; variances only).

        E[h] = W * m + b        Var[h] = W² * v + Var[(dW) * a] of the patches, in which a = m, v as in a linear layer

    Cost: one convolution for the mean, one of v with W² + Var[W], and one of m² with Var[W] for a diagonal posterior;
    for a Kronecker-factored one, one of m into the basis of its patches, and one with kernels of size 1.
    """
    x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    mean, variance = mean_of(x), variance_of(x)
    w, b, spread = mean_of(weight), mean_of(bias), variance_of(weight)

    def apply(x: Tensor, kernel: Tensor) -> Tensor:
        return site.apply(arguments, input=x, weight=kernel, bias=None)

    h = site.apply(arguments, input=mean, weight=w, bias=b)
    second = site.constant("second", lambda: total_of([w.square(), spread]), w, spread)
    parts: list[Tensor] = [] if variance is None else [apply(variance, second)]
    treated = site.weights
    treated = None if treated is None or treated.is_diagonal else treated
    shared = treated is not None and isinstance(bias, Moments) and treated.block.bias
    shift = bias.variance if isinstance(bias, Moments) and not shared else None
    if treated is not None:
        parts.append(_from_weights(site, treated, arguments, mean, shared))
    elif spread is not None:
        parts.append(apply(mean.square(), spread))
    if shift is not None:
        parts.append(shift.reshape(-1, *(1,) * (w.ndim - 2)))
    total = total_of(parts).expand_as(h)
    layout = site.layout if positions else None
    if layout is None:
        return Moments(h, total)
    pooled: list[Tensor] = []
    individual = None
    if isinstance(x, Moments):
        groups, cover = arguments["groups"], _cover(site, arguments, mean)
        counted = site.constant("counted", lambda: (second * _inside(cover)).flatten(2).sum(-1), second)  # (O, C)
        individual = _by_groups(layout.mean(x.individual, site.samples, 1), counted, groups)
        if x.correlation is not None:
            inherited = site.constant("inherited", lambda: _inherited(cover, w, spread), w, spread)  # (O, C)
            pooled.append(_by_groups(layout.mean(x.common, site.samples, 1).square(), inherited, groups))
    if spread is not None:
        rows = _mean_patches(site, arguments, mean)  # (B, C, *kernel)
        pooled.append(_pooled(treated, rows, spread, shared, arguments["groups"]))
    if shift is not None:
        pooled.append(shift.expand(h.shape[0], -1))
    if not pooled:
        return Moments(h, total)
    rho = layer_correlation(total, total_of(pooled), individual, layout, site.samples, 1)  # (B, O)
    return Moments(h, total, layout.spread(rho, total, 1))


def _inherited(cover: Sequence[Tensor], w: Tensor, spread: Tensor | None) -> Tensor:
    """Returns `(Σ_k W_jck)² + Σ_k Var[W_jck]` (O, C), each k counted for the share of positions that see it inside."""
    inside = _inside(cover)
    total = (w * inside).flatten(2).sum(-1).square()
    return total if spread is None else total + (spread * inside.square()).flatten(2).sum(-1)


def _inside(cover: Sequence[Tensor]) -> Tensor:
    """Returns the share of positions at which each place of the kernel lies inside the image, (*kernel)."""
    inside = cover[0].new_ones(())
    for matrix in cover:
        inside = inside[..., None] * matrix.sum(-1)
    return inside


def _cover(site: Site, arguments: dict[str, Any], mean: Tensor) -> list[Tensor]:
    """Returns, for each dimension, what each input counts in the mean over positions at each place of the kernel."""
    kernel, sizes = tuple(mean_of(arguments["weight"]).shape[2:]), tuple(mean.shape[2:])

    def make() -> list[Tensor]:
        cover = []
        for n, k, s, d, (before, after) in zip(sizes, kernel, *geometry(arguments, kernel), strict=True):
            count = (n + before + after - d * (k - 1) - 1) // s + 1
            start = torch.arange(count, device=mean.device) * s - before  # (T,)
            places = start[None, :] + torch.arange(k, device=mean.device)[:, None] * d  # (k, T)
            hits = places[..., None] == torch.arange(n, device=mean.device)  # (k, T, n)
            cover.append(hits.to(mean.dtype).sum(1) / count)
        return cover

    return site.constant(f"cover {sizes}", make)


def _mean_patches(site: Site, arguments: dict[str, Any], mean: Tensor) -> Tensor:
    """Returns the means of an input's patches over positions (B, C, *kernel)."""
    for matrix in reversed(_cover(site, arguments, mean)):
        mean = (mean @ matrix.mT).movedim(-1, 2)  # the last dimension of space goes to the front as one of the kernel
    return mean


def _pooled(treated: Treated | None, rows: Tensor, spread: Tensor, bias: bool, groups: int) -> Tensor:
    """Returns what the weights add to the variances of the mean over positions (B, O)."""
    if treated is None:
        return _by_groups(rows.flatten(1).square(), spread.flatten(1), groups)
    rows = rows.reshape(rows.shape[0], groups, -1)  # (B, G, I)
    rows = F.pad(rows, (0, 1), value=1.0) if bias else rows
    if treated.rotation is None:
        return treated.covariance.push(rows[:, 0], None, False)
    basis, variances = treated.rotation
    assert basis is not None
    rotated = torch.einsum("bgi,giq->bgq", rows, basis)
    return torch.einsum("bgq,goq->bgo", rotated.square(), variances).flatten(1)


def _by_groups(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Returns `W x` for x (B, I) and W (O, I / G)."""
    x, weight = x.unflatten(1, (groups, -1)), weight.unflatten(0, (groups, -1))
    return torch.einsum("bgi,goi->bgo", x, weight).flatten(1)


def _from_weights(site: Site, treated: Treated, arguments: dict[str, Any], mean: Tensor, bias: bool) -> Tensor:
    """Returns `Σ_ii' a_i a_i' Cov[W_ji, W_ji']` for every patch a, a one appended for the bias."""
    if treated.rotation is None:
        return _pushed(site, treated, arguments, mean, bias)
    shape = mean_of(arguments["weight"]).shape
    kernels, shift, spread = site.constant("rotated", lambda: _kernels(treated, bias, shape))
    convolve = (F.conv1d, F.conv2d, F.conv3d)[mean.ndim - 3]
    options = {name: arguments[name] for name in ("stride", "padding", "dilation", "groups")}
    patches = convolve(mean, kernels, shift, **options).square()  # (B, G Q, *grid)
    return convolve(patches, spread, groups=arguments["groups"])


def _kernels(treated: Treated, bias: bool, shape: torch.Size) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns the patches' basis as kernels, and the variances in it as kernels of size 1."""
    assert treated.rotation is not None
    basis, spread = treated.rotation
    assert basis is not None
    kernel, shift = (basis[:, :-1], basis[:, -1].flatten()) if bias else (basis, None)  # (G, I, Q), (G Q,)
    kernels = kernel.mT.reshape(-1, *shape[1:])  # (G Q, I / kernel, *kernel)
    return kernels, shift, spread.reshape(shape[0], -1, *(1,) * (len(shape) - 2))


def _pushed(site: Site, treated: Treated, arguments: dict[str, Any], mean: Tensor, bias: bool) -> Tensor:
    """Returns the same by unfolding, for posteriors without one basis for all outputs, some samples at a time."""
    if arguments["groups"] != 1:
        raise site.refusal(
            "it has groups, and the posterior correlates all its weights", "Fit with lw.KFAC() or lw.Diagonal()."
        )
    kernel = tuple(mean_of(arguments["weight"]).shape[2:])
    stride, dilation, padding = geometry(arguments, kernel)
    grid = tuple(
        (n + sum(p) - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(mean.shape[2:], padding, dilation, kernel, stride, strict=True)
    )
    per_sample = max(1, mean.shape[1] * torch.Size(kernel).numel() * torch.Size(grid).numel())
    parts = []
    for some in mean.split(max(1, _MAX_PATCH_NUMBERS // per_sample)):
        rows = unfold(some, kernel, stride, padding, dilation).flatten(2)  # (B, T, I)
        rows = F.pad(rows, (0, 1), value=1.0) if bias else rows
        variance = treated.covariance.push(rows.flatten(0, 1), None, False)  # (B T, O)
        parts.append(variance.reshape(len(some), -1, variance.shape[-1]).mT.reshape(len(some), -1, *grid))
    return torch.cat(parts)


def geometry(
    arguments: Mapping[str, Any], kernel: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, int]]]:
    """Returns the stride and dilation of each dimension, and the zeros before and after."""
    space = len(kernel)

    def numbers(value: Any) -> tuple[int, ...]:
        return (value,) * space if isinstance(value, int) else tuple(value) * (space if len(value) == 1 else 1)

    stride, dilation, padding = (arguments[name] for name in ("stride", "dilation", "padding"))
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, numbers(dilation), strict=True)]
        zeros = [(total // 2, total - total // 2) for total in totals]
    else:
        zeros = [(p, p) for p in numbers(0 if padding == "valid" else padding)]
    return numbers(stride), numbers(dilation), zeros


register_aten(
    Operation(Kind.CONVOLUTION, convolution, lambda node, labels: numbered(node, 1)),
    "conv1d.default", "conv2d.default", "conv3d.default", "conv1d.padding", "conv2d.padding", "conv3d.padding",
)  # fmt: skip
register_aten(  # no layer family of the tangent treats their weights, so only their variances count
    Operation(Kind.CONVOLUTION, partial(convolution, positions=False), lambda node, labels: numbered(node, 1)),
    "conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input",
)  # fmt: skip
