"""What a layer's treated weights add to the covariances of its outputs, across its positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ...tangent.layers.conv import unfold
from . import conv
from .calls import Call
from .linear import own_weights
from .moments import Site, Treated
from .rows import Rows
from .tail import is_layer


@dataclass(frozen=True)
class Layer:
    """A linear layer or convolution with treated weights of its own.

    Attributes:
        site: the call.
        treated: its weights.
        source: name of its input.
        owned: placeholders of the parameters in its block.
        bias: whether the bias is in it.
    """

    site: Site
    treated: Treated
    source: str
    owned: frozenset[str]
    bias: bool


def own_layer(site: Site | None, call: Call) -> Layer | None:
    """Returns the layer that a call is, None where its weights are not one layer's own."""
    if site is None:
        return None
    node = site.node
    convolution = node.target in conv.RULES
    treated = site.treated("weight") if convolution else own_weights(site) if is_layer(node) else None
    if treated is None or not treated.block.has_weight:
        return None
    if convolution and (treated.block.family != "conv" or treated.block.matrix_shape[0] > 1):
        return None  # groups go by the derivative
    given = site.named(node.args, node.kwargs)
    source = given.get("input", given.get("mat1", given.get("self")))
    roles = {role: found for role, found in site.roles.items() if found[0] is treated}
    owned = frozenset(given[role].name for role in roles)
    assert isinstance(source, fx.Node)
    return Layer(site, treated, source.name, owned, treated.block.bias)


def contribution(
    layer: Layer,
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    rows: Rows,
    samples: int,
    covariance: Tensor | None,
    blocks: Callable[[Treated], Tensor],
) -> Tensor:
    """Returns `Cov[h_tj, h_sk] = Σ_ii' (m_t m_sᵀ + Cov[a_t, a_s])_ii' Cov[W_ji, W_ki']`, (B, n, n).

    Args:
        layer: the layer.
        given: the values that it reads, in the dtype of the moments.
        values: the values as they are, for their shapes.
        rows: where the samples are.
        samples: B.
        covariance: of its input (B, n_x, n_x), None where that is certain.
        blocks: gives a block's covariance matrix.

    Cost: with one position, `LayerBlock.push`; else memory O(P²) for the block and O(B T² (I² + O²)).
    """
    x = given[layer.source]
    if is_layer(layer.site.node):
        inputs = x.shape[-1]
        mean = rows.flat(layer.source, x, samples).reshape(samples, -1, inputs)  # (B, T, I)
        spread = None if covariance is None else covariance.unflatten(2, (-1, inputs)).unflatten(1, (-1, inputs))
        grid_last = False
    else:
        mean, spread = _patches(layer, x, covariance)
        grid_last = True
    if layer.bias:
        mean = F.pad(mean, (0, 1), value=1.0)
        spread = None if spread is None else F.pad(F.pad(spread, (0, 1)), (0, 0, 0, 0, 0, 1))
    if mean.shape[1] == 1:
        second = None if spread is None else spread[:, 0, :, 0]
        return layer.treated.covariance.push(mean[:, 0], second, True)
    _, outputs, inputs = layer.treated.block.matrix_shape
    dense = blocks(layer.treated).to(mean.dtype).reshape(outputs, inputs, outputs, inputs)
    moment = torch.einsum("bti,bsj->btisj", mean, mean)
    moment = moment if spread is None else moment + spread
    out = torch.einsum("btisj,oipj->btosp", moment, dense)
    if grid_last:
        out = out.permute(0, 2, 1, 4, 3)  # (B, O, T, O, T)
    return out.flatten(3).flatten(1, 2)


def _patches(layer: Layer, x: Tensor, covariance: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns the patches (B, T, I) of an input (B, channels, *space), and their covariances (B, T, I, T, I)."""
    given = layer.site.named(layer.site.node.args, layer.site.node.kwargs)
    kernel = tuple(given["weight"].meta["val"].shape[2:])
    stride, dilation = (conv.numbers(given[name], len(kernel)) for name in ("stride", "dilation"))
    padding = conv.pairs(given["padding"], kernel, dilation)

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
