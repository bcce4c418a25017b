"""What a layer's treated weights add to the covariances of its outputs, across its positions: for full mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ...jacobian.layers.conv import unfold
from .axes import SampleAxes
from .operations import Kind, is_a, named
from .rules.conv import conv_weights, geometry
from .rules.linear import linear_weights
from .sites import Site, Treated


@dataclass(frozen=True)
class TreatedLayer:
    """A linear layer or convolution with treated weights that no other layer shares.

    Attributes:
        site: the call.
        treated: its weights.
        source: name of its input.
        owned: placeholders of the parameters in its block.
    """

    site: Site
    treated: Treated
    source: str
    owned: frozenset[str]


def treated_layer(site: Site | None) -> TreatedLayer | None:
    """Returns the layer that a call is, None where its weights are not one layer's alone."""
    if site is None:
        return None
    if is_a(site.node, Kind.CONVOLUTION):
        treated = conv_weights(site)
        if treated is not None and treated.block.matrix_shape[0] > 1:
            return None  # groups go by the derivative
    else:
        treated = linear_weights(site) if is_a(site.node, Kind.LINEAR) else None
    if treated is None or not treated.block.has_weight:
        return None
    arguments = named(site.node, site.node.args, site.node.kwargs)
    source = arguments.get("input", arguments.get("mat1", arguments.get("self")))
    assert isinstance(source, fx.Node)
    owned = frozenset(arguments[role].name for role, known in site.roles.items() if known[0] is treated)
    return TreatedLayer(site, treated, source.name, owned)


def contribution(
    layer: TreatedLayer,
    x: Tensor,
    axes: SampleAxes,
    samples: int,
    covariance: Tensor | None,
    matrix: Callable[[Treated], Tensor],
) -> Tensor:
    """Returns `Cov[h_tj, h_sk] = Σ_ii' (m_t m_sᵀ + Cov[a_t, a_s])_ii' Cov[W_ji, W_ki']`, (B, n, n).

    Args:
        layer: the layer.
        x: its input, in the dtype of the moments.
        axes: where the samples are.
        samples: B.
        covariance: of its input (B, n_x, n_x), None where that is certain.
        matrix: gives a block's covariance matrix.

    Cost: with one position, `LayerBlock.push`; else memory O(P²) for the block and O(B T² (I² + O²)).
    """
    convolution = is_a(layer.site.node, Kind.CONVOLUTION)
    if convolution:
        mean, spread = _patches(layer, x, covariance)
    else:
        inputs = x.shape[-1]
        mean = axes.flat(layer.source, x, samples).reshape(samples, -1, inputs)  # (B, T, I)
        spread = None if covariance is None else covariance.unflatten(2, (-1, inputs)).unflatten(1, (-1, inputs))
    if layer.treated.block.bias:
        mean = F.pad(mean, (0, 1), value=1.0)
        spread = None if spread is None else F.pad(F.pad(spread, (0, 1)), (0, 0, 0, 0, 0, 1))
    if mean.shape[1] == 1:
        second = None if spread is None else spread[:, 0, :, 0]
        return layer.treated.covariance.push(mean[:, 0], second, True)
    _, outputs, inputs = layer.treated.block.matrix_shape
    dense = matrix(layer.treated).to(mean.dtype).reshape(outputs, inputs, outputs, inputs)
    moment = torch.einsum("bti,bsj->btisj", mean, mean)
    moment = moment if spread is None else moment + spread
    out = torch.einsum("btisj,oipj->btosp", moment, dense)
    if convolution:
        out = out.permute(0, 2, 1, 4, 3)  # (B, O, T, O, T)
    return out.flatten(3).flatten(1, 2)


def _patches(layer: TreatedLayer, x: Tensor, covariance: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns the patches (B, T, I) of an input (B, channels, *space), and their covariances (B, T, I, T, I)."""
    arguments = named(layer.site.node, layer.site.node.args, layer.site.node.kwargs)
    kernel = tuple(arguments["weight"].meta["val"].shape[2:])
    stride, dilation, padding = geometry(arguments, kernel)

    def cut(x: Tensor) -> Tensor:
        return unfold(x, kernel, stride, padding, dilation).flatten(2)

    mean = cut(x)
    if covariance is None:
        return mean, None
    samples, positions, inputs = mean.shape
    half = cut(covariance.mT.reshape(-1, *x.shape[1:]))  # (B n, T, I)
    half = half.reshape(samples, -1, positions * inputs).mT
    whole = cut(half.reshape(-1, *x.shape[1:])).reshape(samples, positions, inputs, positions, inputs)
    return mean, whole
