"""Moments of convolutions, plain and transposed: linear layers on patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....jacobian.layers.conv import ConvUse, TransposedConvUse, read_conv, read_transposed_conv
from ..moments import Moments, layer_correlation, mean_of, total_of, variance_of
from ..operations import Kind, Operation, numbered, register_aten
from ..sites import TRANSPOSED, Site, Treated


def convolution(site: Site, arguments: dict[str, Any]) -> Moments:
    """Returns the moments of a convolution (Streamlined Prediction, appendix A.7; variances only).

        E[h] = W * m + b        Var[h] = W² * v + Var[(dW) * a] of the patches, with a = m, v as in a linear layer

    The second term costs a convolution of m² with Var[W] for a diagonal posterior. For a Kronecker-factored one it
    costs a convolution of m into the basis of its patches, and one with kernels of size 1.
    """
    x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    mean, variance = mean_of(x), variance_of(x)
    if mean.ndim == 4 and mean.dtype == torch.float32 and mean.is_cpu and arguments["groups"] == 1:
        # Most of these convolutions are a tenth to two thirds faster with channels last, and later calls keep the
        # order. Convolutions in float64 or with groups can be slower. Other devices were not measured.
        mean = mean.contiguous(memory_format=torch.channels_last)
        variance = None if variance is None else variance.contiguous(memory_format=torch.channels_last)
    w, b, spread = mean_of(weight), mean_of(bias), variance_of(weight)

    def apply(x: Tensor, kernel: Tensor) -> Tensor:
        return site.apply(arguments, input=x, weight=kernel, bias=None)

    h = site.apply(arguments, input=mean, weight=w, bias=b)
    second = site.constant("second", lambda: total_of([w.square(), spread]))
    parts: list[Tensor] = [] if variance is None else [apply(variance, second)]
    treated = site.weights
    treated = None if treated is None or treated.is_diagonal else treated
    shared = treated is not None and isinstance(bias, Moments) and treated.block.bias
    shift = bias.variance if isinstance(bias, Moments) and not shared else None
    if treated is not None:
        parts.append(_from_weights(site, treated, arguments, mean, h.shape[2:], shared))
    elif spread is not None:
        parts.append(apply(mean.square(), spread))
    if shift is not None:
        parts.append(shift.reshape(-1, *(1,) * (w.ndim - 2)))
    total = reduce(Tensor.add_, parts).expand_as(h)  # in place, into a new tensor: only the bias is not new, and last
    layout = site.layout
    if layout is None:
        return Moments(h, total)
    pooled: list[Tensor] = []
    groups, sizes, cover = arguments["groups"], tuple(mean.shape[2:]), _cover(site, arguments, mean, h.shape[2:])
    kernels = _outputs_first(site, w, groups)
    spreads = None if spread is None else _outputs_first(site, spread, groups)
    if isinstance(x, Moments):
        averaged = site.constant(f"averaged {sizes}", lambda: _averaged(cover, kernels, spreads))  # (O, C)
        common, individual = x.averages(layout, site.samples, 1)
        pooled.append(_by_groups(individual, averaged, groups))
        if common is not None:
            inherited = site.constant(f"inherited {sizes}", lambda: _inherited(cover, kernels, spreads))  # (O, C)
            pooled.append(_by_groups(common.square(), inherited, groups))
    if spreads is not None:
        patches = (reduce(torch.kron, cover) @ mean.flatten(2).mT).mT  # their means over positions (B, C, K)
        if treated is None:
            pooled.append(_by_groups(patches.flatten(1).square(), spreads.flatten(1), groups))
        else:
            rows = patches.reshape(patches.shape[0], groups, -1)  # (B, G, I)
            pooled.append(treated.push(F.pad(rows, (0, 1), value=1.0) if shared else rows))
    if shift is not None:
        pooled.append(shift.expand(h.shape[0], -1))
    return Moments(h, total, layer_correlation(total, total_of(pooled), layout, site.samples, 1))


def _averaged(cover: Sequence[Tensor], w: Tensor, spread: Tensor | None) -> Tensor:
    """Returns the variance (O, C) of the mean over positions, for inputs that are independent with variance 1.

    That is `Σ_kk' W_jck W_jck' M_kk' + Σ_k Var[W_jck] M_kk`, where `M_kk' = Σ_s c_ks c_k's` for the weight c_ks of
    input s in the mean at kernel entry k: neighbouring patches share inputs.
    """
    overlap = reduce(torch.kron, (matrix @ matrix.mT for matrix in cover))  # (K, K)
    flat = w.flatten(2)  # (O, C, K)
    total = ((flat @ overlap) * flat).sum(-1)
    return total if spread is None else total + spread.flatten(2) @ overlap.diagonal()


def _inherited(cover: Sequence[Tensor], w: Tensor, spread: Tensor | None) -> Tensor:
    """Returns `(Σ_k W_jck)² + Σ_k Var[W_jck]` (O, C), with each k weighted by its share of positions in the image."""
    inside = cover[0].new_ones(())  # the shares, (*kernel)
    for matrix in cover:
        inside = inside[..., None] * matrix.sum(-1)
    total = (w * inside).flatten(2).sum(-1).square()
    return total if spread is None else total + (spread * inside.square()).flatten(2).sum(-1)


def _outputs_first(site: Site, weight: Tensor, groups: int) -> Tensor:
    """Returns the kernels of a convolution as (G O, I, *kernel), also for transposed ones, (G I, O, *kernel)."""
    if site.node.target not in TRANSPOSED:
        return weight
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)


def _use(site: Site, arguments: Mapping[str, Any], inputs: Tensor) -> ConvUse:
    """Returns the use of the layer at an input, which cuts patches."""
    read = read_transposed_conv if site.node.target in TRANSPOSED else read_conv
    use = read((), {**arguments, "input": inputs, "weight": mean_of(arguments["weight"]), "bias": None})
    assert use is not None
    return use


def patches_of(site: Site, arguments: Mapping[str, Any], inputs: Tensor) -> Tensor:
    """Returns the patches (B, T, I) of an input (B, channels, *space)."""
    return _use(site, arguments, inputs).patches().unflatten(0, (len(inputs), -1))


def _cover(site: Site, arguments: dict[str, Any], mean: Tensor, grid: torch.Size) -> list[Tensor]:
    """Returns the weights (k, n) of each dimension's n inputs in the mean over positions at each kernel entry."""
    use = _use(site, arguments, mean)
    kernel, sizes = tuple(use.parameters["weight"].shape[2:]), tuple(mean.shape[2:])
    transposed = isinstance(use, TransposedConvUse)
    gaps = use.gaps if isinstance(use, TransposedConvUse) else (1,) * len(kernel)

    def make() -> list[Tensor]:
        cover = []
        lines = zip(sizes, gaps, grid, kernel, use.stride, use.dilation, use.padding, strict=True)
        for n, gap, count, k, s, d, (before, _) in lines:
            start = torch.arange(count, device=mean.device) * s - before  # (T,)
            steps = torch.arange(k, device=mean.device) * d
            places = start[None, :] + (steps.flip(0) if transposed else steps)[:, None]  # (k, T)
            hits = places[..., None] == gap * torch.arange(n, device=mean.device)  # (k, T, n)
            cover.append(hits.to(mean.dtype).sum(1) / count)
        return cover

    return site.constant(f"cover {sizes}", make)


def _by_groups(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Returns `W x` for x (B, I) and W (O, I / G)."""
    x, weight = x.unflatten(1, (groups, -1)), weight.unflatten(0, (groups, -1))
    return torch.einsum("bgi,goi->bgo", x, weight).flatten(1)


def _from_weights(
    site: Site, treated: Treated, arguments: dict[str, Any], mean: Tensor, grid: torch.Size, bias: bool
) -> Tensor:
    """Returns `Σ_ii' a_i a_i' Cov[W_ji, W_ji']` for every patch a, with a one appended for the bias.

    For posteriors without one basis for all outputs it unfolds the patches, by chunks of samples.
    """
    if treated.rotation is None:
        if arguments["groups"] != 1:
            raise site.refusal(
                "it has groups, and the posterior correlates all its weights", "Fit with lw.KFAC() or lw.Diagonal()."
            )
        per_sample = max(1, mean.shape[1] * mean_of(arguments["weight"]).shape[2:].numel() * grid.numel())
        parts = []
        for some in mean.split(max(1, 2**24 // per_sample)):  # at most 2²⁴ entries of patches in memory
            rows = patches_of(site, arguments, some)
            rows = F.pad(rows, (0, 1), value=1.0) if bias else rows
            variance = treated.covariance.push(rows.flatten(0, 1), None, False)  # (B T, O)
            parts.append(variance.reshape(len(some), -1, variance.shape[-1]).mT.reshape(len(some), -1, *grid))
        return torch.cat(parts)
    kernels, shift, spread = site.constant("rotated", lambda: _kernels(treated, bias, mean_of(arguments["weight"])))
    patches = site.apply(arguments, input=mean, weight=kernels, bias=shift).square()  # (B, G Q, *grid)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[mean.ndim - 3]
    return convolve(patches, spread, groups=arguments["groups"])


def _kernels(treated: Treated, bias: bool, weight: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns the patches' basis as kernels, and the variances in it as kernels of size 1."""
    assert treated.rotation is not None
    assert treated.block.matrix is not None
    basis, spread = treated.rotation
    assert basis is not None
    groups, kernel = len(basis), weight.shape[2:]
    basis, shift = (basis[:, :-1], basis[:, -1].flatten()) if bias else (basis, None)  # (G, I, Q), (G Q,)
    kernels = basis.mT.reshape(groups, basis.shape[-1], -1, *kernel)  # (G, Q, I / kernel, *kernel)
    kernels = kernels.transpose(1, 2) if treated.block.matrix.transposed else kernels
    return kernels.flatten(0, 1), shift, spread.flatten(0, 1)[(..., *[None] * len(kernel))]


register_aten(
    Operation(Kind.CONVOLUTION, convolution, lambda node, labels: numbered(node, 1)),
    "conv1d.default", "conv2d.default", "conv3d.default", "conv1d.padding", "conv2d.padding", "conv3d.padding",
    "conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input",
)  # fmt: skip
