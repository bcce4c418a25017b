"""The end of a network with covariances: its last linear layer, and element-wise calls and views after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ...tangent.forward_mode import jvp
from .fusion import Fused, aten
from .linear import layer_of, own_weights
from .moments import Moments, Site, mean_of, variance_of
from .plan import Item, Plan

VIEWS = frozenset(
    {
        aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unsqueeze.default, aten.squeeze.dim,
        aten.squeeze.default, aten.squeeze.dims, aten.slice.Tensor, aten._unsafe_view.default,
    }
)  # fmt: skip
_LAYERS = frozenset({aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default})


@dataclass(frozen=True)
class Joint:
    """The Gaussian over one tensor with its covariances within a sample.

    Attributes:
        mean: (B, ...), n numbers a sample.
        covariance: (B, n, n).
    """

    mean: Tensor
    covariance: Tensor

    @property
    def marginal(self) -> Moments:
        """The same with variances alone."""
        return Moments(self.mean, self.covariance.diagonal(dim1=1, dim2=2).reshape(self.mean.shape))


def find(plan: Plan) -> frozenset[str]:
    """Returns the names of the steps from the last linear layer on, none where something else is between."""
    producers = {item.node.name: item for item in plan.items}
    readers: dict[str, int] = {}
    for item in plan.items:
        for name in item.sources:
            readers[name] = readers.get(name, 0) + 1
    found, name = [], plan.output
    while name in producers:
        item = producers[name]
        found.append(name)
        if item.fused is not None and not item.fused.statistics:
            name = item.fused.source
        elif item.uncertain and item.node.target in VIEWS:
            name = item.uncertain[0]
        else:
            return frozenset(found) if item.uncertain and item.node.target in _LAYERS else frozenset()
        if readers[name] > 1:
            return frozenset()
    return frozenset()


def is_layer(node: fx.Node) -> bool:
    """Whether a call is one that the end of a network starts with."""
    return node.target in _LAYERS


def last_layer(site: Site, given: dict[str, Any], samples: int) -> Joint | None:
    """Returns the outputs of a linear layer with their covariances, None where it has several positions a sample.

    Cov[h] = W diag(v) Wᵀ + Σ_ii' (m mᵀ + diag v)_ii' Cov[W_ji, W_j'i']
    """
    x, weight, bias, transposed = layer_of(site, given)
    mean, variance = mean_of(x), variance_of(x)
    w, b = mean_of(weight), mean_of(bias)
    if (
        mean.ndim < 2
        or w.ndim != 2
        or mean.numel() != samples * mean.shape[-1]
        or (isinstance(weight, Moments) and own_weights(site) is None)
    ):
        return None
    w = w.mT if transposed else w  # (O, I)
    lead, mean = mean.shape[:-1], mean.reshape(samples, -1)
    h = F.linear(mean, w, b)
    parts = []
    if variance is not None:
        variance = variance.reshape(samples, -1)
        parts.append((w * variance[:, None, :]) @ w.mT)  # (B, O, O)
    treated = own_weights(site)
    if treated is not None and treated.block.has_weight:
        shared = isinstance(bias, Moments) and treated.block.bias
        rows = F.pad(mean, (0, 1), value=1.0) if shared else mean
        spread = None if variance is None else F.pad(variance, (0, 1)) if shared else variance
        parts.append(treated.covariance.push(rows, spread, True))
    else:
        shared = False
    if isinstance(bias, Moments) and not shared:
        alone = site.treated("bias", "self")
        if alone is not None and not alone.block.has_weight:
            parts.append(alone.covariance.push(mean.new_ones(1, 1), None, True).expand(samples, -1, -1))
        else:
            parts.append(torch.diag_embed(bias.variance).expand(samples, -1, -1))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return Joint(h.reshape(*lead, -1), total)


def continued(item: Item, source: Joint, given: Mapping[str, Any], viewed: Any) -> Joint | None:
    """Passes covariances through an element-wise function or a view, None where entries get lost."""
    if item.fused is None:
        mean = viewed(source.mean)
        return Joint(mean, source.covariance) if mean.numel() == source.mean.numel() else None
    return _through(item.fused, source, given)


def _through(fused: Fused, source: Joint, given: Mapping[str, Any]) -> Joint | None:
    x = source.mean
    if fused.closed:
        y, slope = fused.slope(x, given)
    else:
        y, slope = jvp(lambda x: fused(x, given), (x,), (torch.ones_like(x),))
    if y.shape != x.shape:
        return None
    slope = slope.expand_as(y) if isinstance(slope, Tensor) else torch.full_like(y, slope)
    slope = slope.reshape(source.covariance.shape[0], -1)  # (B, n)
    return Joint(y, slope[:, :, None] * source.covariance * slope[:, None, :])
