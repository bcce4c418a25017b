"""Moments of sums, products, means over positions, taken as independent where both sides are uncertain."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from .fusion import aten
from .moments import Moments, Rule, Site, Value, mean_of, variance_of


def added(site: Site, given: dict[str, Any]) -> Moments:
    """Returns the moments of `x + α y` for independent x and y: residual branches, shifts."""
    x, y, alpha = given["self"], given["other"], given.get("alpha", 1)
    mean = site.node.target(**{**given, "self": mean_of(x), "other": mean_of(y)})  # type: ignore[operator]
    parts = [variance_of(x), variance_of(y)]
    if parts[1] is not None and alpha != 1:
        parts[1] = parts[1] * alpha**2
    total: Any = sum(part for part in parts if part is not None)
    return Moments(mean, total if total.shape == mean.shape else total.expand_as(mean))


def multiplied(site: Site, given: dict[str, Any]) -> Moments:
    """Returns the moments of `x y` for independent x and y: gates, scales.

    E = m_x m_y        Var = m_y² v_x + m_x² v_y + v_x v_y
    """
    return product(given["self"], given["other"], torch.mul)


def product(x: Value, y: Value, bilinear: Any) -> Moments:
    """Returns the moments of a bilinear map whose coefficients are 0 and 1, of independent entries."""
    mean = bilinear(mean_of(x), mean_of(y))
    v, w = variance_of(x), variance_of(y)
    if w is None:
        return Moments(mean, bilinear(v, mean_of(y).square()))
    if v is None:
        return Moments(mean, bilinear(mean_of(x).square(), w))
    return Moments(mean, bilinear(v, y.mean.square() + w) + bilinear(x.mean.square(), w))


def divided(site: Site, given: dict[str, Any]) -> Moments:
    """Returns the moments of `x / y`, linearised in y, for independent x and y."""
    x, y = given["self"], given["other"]
    ratio, inverse = mean_of(x) / mean_of(y), mean_of(y).reciprocal().square()
    v, w = variance_of(x), variance_of(y)
    parts = [] if v is None else [v * inverse]
    if w is not None:
        parts.append(ratio.square() * inverse * w)
    total: Any = sum(parts)
    return Moments(ratio, total.expand_as(ratio))


def summed(site: Site, given: dict[str, Any]) -> Moments:
    """Returns the moments of a sum or mean over dimensions."""
    x: Moments = given["self"]
    dims, keep = given.get("dim"), given.get("keepdim", False)
    dims = list(range(x.mean.ndim)) if dims in (None, []) else [dims] if isinstance(dims, int) else list(dims)
    mean = x.mean.sum(dims, keepdim=keep)
    variance = x.variance.sum(dims, keepdim=keep)
    if site.node.target in (aten.mean.dim, aten.mean.default):
        count = prod(x.mean.shape[d] for d in dims)
        return Moments(mean / count, variance / count**2)
    return Moments(mean, variance)


def gated(site: Site, given: dict[str, Any]) -> Moments:
    """Returns the moments of a gated linear unit, `x σ(y)` of two halves, with σ linearised."""
    dim = given["dim"]
    (x, y), (v, w) = (part.chunk(2, dim) for part in (given["self"].mean, given["self"].variance))
    gate = y.sigmoid()
    return product(Moments(x, v), Moments(gate, (gate * (1 - gate)).square() * w), torch.mul)


def chosen(site: Site, given: dict[str, Any]) -> Moments:
    """Returns the moments of `where(c, x, y)`."""
    x, y = given["self"], given["other"]
    mean = torch.where(given["condition"], mean_of(x), mean_of(y))
    v, w = (_spread(value, mean) for value in (x, y))
    return Moments(mean, torch.where(given["condition"], v, w))


def _spread(value: Value, like: Tensor) -> Tensor:
    variance = variance_of(value)
    return like.new_zeros(()) if variance is None else variance


RULES: dict[Any, Rule] = {
    aten.add.Tensor: added,
    aten.sub.Tensor: added,
    aten.mul.Tensor: multiplied,
    aten.div.Tensor: divided,
    aten.subtract.Tensor: added,
    aten.multiply.Tensor: multiplied,
    aten.divide.Tensor: divided,
    aten.glu.default: gated,
    aten.where.self: chosen,
    aten.mean.dim: summed,
    aten.sum.dim_IntList: summed,
}
