"""Moments of sums, products, means over positions, taken as independent where both sides are uncertain."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from .fusion import aten
from .layout import share
from .moments import Moments, Rule, Site, Value, mean_of, variance_of


def added(site: Site, given: dict[str, Any]) -> Moments:
    """Returns the moments of `x + α y` for independent x and y: residual branches, shifts."""
    x, y, alpha = given["self"], given["other"], given.get("alpha", 1)
    mean = site.node.target(**{**given, "self": mean_of(x), "other": mean_of(y)})  # type: ignore[operator]
    parts = [variance_of(x), variance_of(y)]
    if parts[1] is not None and alpha != 1:
        parts[1] = parts[1] * alpha**2
    total: Any = sum(part for part in parts if part is not None)
    total = total if total.shape == mean.shape else total.expand_as(mean)
    rho = zip(parts, (correlation_in(site, x), correlation_in(site, y)), strict=True)
    layout = site.layout
    positions = () if layout is None else layout.positions
    return Moments(mean, total, share(total, [(v, r) for v, r in rho if v is not None], positions))


def correlation_in(site: Site, x: Value) -> Tensor | float | None:
    """Returns ρ of an argument in a sum or product; 1 for one that is the same at all positions of the result."""
    if not isinstance(x, Moments) or site.layout is None:
        return None
    missing = len(site.node.meta["val"].shape) - x.variance.ndim
    if all(dim < missing or x.variance.shape[dim - missing] == 1 for dim in site.layout.positions):
        return 1.0
    return x.correlation


def multiplied(site: Site, given: dict[str, Any]) -> Moments:
    """Returns the moments of `x y` for independent x and y: gates, scales.

    E = m_x m_y        Var = m_y² v_x + m_x² v_y + v_x v_y
    """
    x, y = given["self"], given["other"]
    return _times(x, y, correlation_in(site, x), correlation_in(site, y))


def _times(x: Value, y: Value, *rho: Tensor | float | None) -> Moments:
    """Returns the moments of `x y` for independent x and y with these correlations of their positions."""
    found = product(x, y, torch.mul)
    if all(part is None for part in rho):
        return found
    if not (isinstance(x, Moments) and isinstance(y, Moments)):
        kept = rho[0] if isinstance(x, Moments) else rho[1]
        return found if kept is None else Moments(found.mean, found.variance, found.variance.new_ones(()) * kept)
    first, second = y.mean.square() * x.variance, x.mean.square() * y.variance
    both = None if None in rho else rho[0] * rho[1]  # type: ignore[operator]
    parts = [(first, rho[0]), (second, rho[1]), (x.variance * y.variance, both)]
    return Moments(found.mean, found.variance, share(found.variance, parts))


def product(x: Value, y: Value, bilinear: Any) -> Moments:
    """Returns the moments of a bilinear map whose coefficients are 0 and 1, of independent entries."""
    mean = bilinear(mean_of(x), mean_of(y))
    v, w = variance_of(x), variance_of(y)
    if w is None:
        return Moments(mean, bilinear(v, mean_of(y).square()))
    if v is None:
        return Moments(mean, bilinear(mean_of(x).square(), w))
    return Moments(mean, bilinear(v, y.mean.square() + w) + bilinear(x.mean.square(), w))


def contracted(site: Site, x: Value, y: Value, bilinear: Any) -> Moments:
    """Returns `product` for maps that sum: attention written by hand, whose tokens move together, among them.

    Where one side is certain, and the other is summed over positions alone, `√(ρ v)` goes through as it is.
    """
    found = product(x, y, bilinear)
    for place, (value, other) in enumerate(((x, y), (y, x))):
        if not isinstance(value, Moments) or isinstance(other, Moments) or value.correlation is None:
            continue
        source, dims = site.layouts.get(operands(site.node)[place].name), sums(site.node)
        if source is None or dims is None or not set(dims[place]) <= set(source.positions):
            continue

        def apply(x: Tensor, y: Tensor, place: int = place) -> Tensor:
            return bilinear(x, y) if place == 0 else bilinear(y, x)

        common = apply(value.common, other).square()
        variance = common + apply(value.own, other.square())
        return Moments(found.mean, variance, share(variance, [(common, 1.0)]))
    return found


def operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Returns the two sides of a product."""
    sides: Any = node.args[1] if node.target is aten.einsum.default else node.args[-2:]
    return sides[0], sides[1]


def sums(node: fx.Node) -> tuple[list[int], list[int]] | None:
    """Returns the dimensions of both sides that a product sums over, None where it is written with dots."""
    sides = [len(side.meta["val"].shape) for side in operands(node)]
    if node.target is not aten.einsum.default:
        return [sides[0] - 1], [max(0, sides[1] - 2)]
    inputs, arrow, output = str(node.args[0]).replace(" ", "").partition("->")
    if "." in inputs or not arrow:
        return None
    x, y = ([dim for dim, letter in enumerate(side) if letter not in output] for side in inputs.split(","))
    return x, y


def divided(site: Site, given: dict[str, Any]) -> Moments:
    """Returns the moments of `x / y`, linearised in y, for independent x and y."""
    x, y = given["self"], given["other"]
    ratio, inverse = mean_of(x) / mean_of(y), mean_of(y).reciprocal().square()
    v, w = variance_of(x), variance_of(y)
    parts = [] if v is None else [v * inverse]
    if w is not None:
        parts.append(ratio.square() * inverse * w)
    total: Any = sum(parts)
    total = total.expand_as(ratio)
    sides = [correlation_in(site, side) for side in (x, y) if isinstance(side, Moments)]
    return Moments(ratio, total, share(total, zip(parts, sides, strict=True)))


def summed(site: Site, given: dict[str, Any]) -> Moments:
    """Returns the moments of a sum or mean over dimensions."""
    x: Moments = given["self"]
    dims, keep = given.get("dim"), given.get("keepdim", False)
    dims = list(range(x.mean.ndim)) if dims in (None, []) else [dims] if isinstance(dims, int) else list(dims)
    mean = x.mean.sum(dims, keepdim=keep)
    scale = prod(x.mean.shape[d] for d in dims) if site.node.target in (aten.mean.dim, aten.mean.default) else 1
    if x.correlation is None:
        return Moments(mean / scale, x.variance.sum(dims, keepdim=keep) / scale**2)
    together = [d % x.mean.ndim for d in dims if d % x.mean.ndim in site.positions("self")]
    common = x.common.sum(together, keepdim=True).square() if together else x.common.square()
    common, own = common.sum(dims, keepdim=keep), x.own.sum(dims, keepdim=keep)
    variance = common + own
    return Moments(mean / scale, variance / scale**2, share(variance, [(common, 1.0)]))


def gated(site: Site, given: dict[str, Any]) -> Moments:
    """Returns the moments of a gated linear unit, `x σ(y)` of two halves, with σ linearised."""
    source, dim = given["self"], given["dim"]
    (x, y), (v, w) = (part.chunk(2, dim) for part in (source.mean, source.variance))
    rho = (None, None) if source.correlation is None else source.correlation.expand_as(source.variance).chunk(2, dim)
    gate = y.sigmoid()
    return _times(Moments(x, v), Moments(gate, (gate * (1 - gate)).square() * w), *rho)


def chosen(site: Site, given: dict[str, Any]) -> Moments:
    """Returns the moments of `where(c, x, y)`."""
    x, y = given["self"], given["other"]
    mean = torch.where(given["condition"], mean_of(x), mean_of(y))
    v, w = (_spread(value, mean) for value in (x, y))
    variance = torch.where(given["condition"], v, w)
    rho = [correlation_in(site, value) for value in (x, y)]
    if rho == [None, None]:
        return Moments(mean, variance)
    first, second = (variance.new_zeros(()) + (0 if r is None else r) for r in rho)
    return Moments(mean, variance, torch.where(given["condition"], first, second))


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
