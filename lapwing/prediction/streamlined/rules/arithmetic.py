"""Moments of sums, products, quotients and means over dimensions, with independent sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from ..moments import Moments, Value, is_constant, mean_of, sum_correlation, total_of, variance_of
from ..operations import Kind, Operation, aten, broadcast, named, operation_of, register_aten, same_along, shape_of
from ..sites import Site
from . import elementwise

Bilinear = Callable[[Tensor, Tensor], Tensor]


def combined(site: Site, arguments: dict[str, Any]) -> Moments:
    """Returns the moments of sums, products, quotients and choices of independent x and y: residual branches, gates.

    E = g(m)        Var = Σ_x (∂g/∂x)² v_x, and v_x v_y for products
    """
    return _combined(site, site.node.target, operation_of(site.node).slope, arguments)


def _combined(site: Site, function: Any, slope_of: Any, arguments: dict[str, Any]) -> Moments:
    means = {name: mean_of(value) for name, value in arguments.items()}
    mean, linear = function(**means), True
    parts: list[tuple[Tensor, Any]] = []
    for name, x in arguments.items():
        if isinstance(x, Moments):
            slope = slope_of(means, mean, name)
            changes = isinstance(slope, Tensor) or abs(slope) != 1
            linear = linear and not isinstance(slope, Tensor)
            rho: Any = None
            if site.layout is not None:  # ρ of x is 1 if x is constant over the positions of the result
                dims, positions = len(site.node.meta["val"].shape), site.layout.positions
                rho = 1.0 if is_constant(x.variance, dims, positions) else x.correlation
            parts.append((slope**2 * x.variance if changes else x.variance, rho))
    if slope_of is elementwise.multiplied and len(parts) == 2:
        rho, other = parts[0][1], parts[1][1]
        both = None if rho is None or other is None else rho * other
        parts.append((arguments["self"].variance * arguments["other"].variance, both))
    total = total_of([variance for variance, _ in parts]).expand_as(mean)
    positions = site.layout.positions if linear and site.layout is not None else ()
    return Moments(mean, total, sum_correlation(total, parts, positions))


def product(x: Value, y: Value, bilinear: Bilinear) -> Moments:
    """Returns the moments of a bilinear map with coefficients 0 and 1, for independent entries."""
    parts, v, w = [], variance_of(x), variance_of(y)
    if v is not None:
        parts.append(bilinear(v, total_of([mean_of(y).square(), w])))
    if w is not None:
        parts.append(bilinear(mean_of(x).square(), w))
    return Moments(bilinear(mean_of(x), mean_of(y)), total_of(parts))


def contracted(site: Site, x: Value, y: Value, bilinear: Bilinear) -> Moments:
    """Returns the moments of a product that sums, such as attention written by hand, with correlated positions.

    If one side is certain and the other is summed only over positions, the map acts on `√(ρ v)` as on a mean.
    """
    result, place = product(x, y, bilinear), int(not isinstance(x, Moments))
    value, other = (y, x) if place else (x, y)
    layout, dims = site.layouts.get(operands(site.node)[place].name), _summed_dims(site.node)
    if isinstance(other, Moments) or value.correlation is None or layout is None or dims is None:
        return result
    if not set(dims[place]) <= set(layout.positions):
        return result

    def apply(value: Tensor, other: Tensor) -> Tensor:
        return bilinear(other, value) if place else bilinear(value, other)

    common = apply(value.common, other).square()
    variance = common + apply(value.individual, other.square())
    return Moments(result.mean, variance, sum_correlation(variance, [(common, 1.0)]))


def contracted_label(node: fx.Node, labels: Mapping[str, Any]) -> Any:
    """Returns the product of the labels of one side if it sums only over positions, as in attention written by hand."""
    if node.target is aten.einsum.default and len(node.args[1]) != 2:  # type: ignore[arg-type]
        return None
    sides, dims = operands(node), _summed_dims(node)
    if dims is None or sum(side.name in labels for side in sides) != 1:
        return None
    parts = []
    for side, summed in zip(sides, dims, strict=True):
        part = labels.get(side.name)
        if part is None:
            part = torch.ones(shape_of(side), dtype=torch.double)
        elif not all(same_along(part, dim) for dim in summed):
            return None
        for dim in summed:
            part = part.narrow(dim, 0, 1)
        parts.append(part)
    if node.target is aten.einsum.default:
        return torch.einsum(node.args[0], *parts)
    return parts[0] @ parts[1]


def operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Returns the two sides of a product."""
    sides: Any = node.args[1] if node.target is aten.einsum.default else node.args[-2:]
    return sides[0], sides[1]


def _summed_dims(node: fx.Node) -> tuple[list[int], list[int]] | None:
    """Returns the dimensions of both sides that a product sums over, or None for an einsum with dots."""
    sides = [len(side.meta["val"].shape) for side in operands(node)]
    if node.target is not aten.einsum.default:
        return [sides[0] - 1], [max(0, sides[1] - 2)]
    inputs, arrow, output = str(node.args[0]).replace(" ", "").partition("->")
    if "." in inputs or not arrow:
        return None
    x, y = ([dim for dim, letter in enumerate(side) if letter not in output] for side in inputs.split(","))
    return x, y


def _baddbmm(site: Site, arguments: dict[str, Any]) -> Moments:
    """Returns the moments of `β c + α x y` with a certain c."""
    if isinstance(arguments["self"], Moments):
        raise site.refusal("its summand is uncertain", "Add the summand after the product.")
    result = contracted(site, arguments["batch1"], arguments["batch2"], torch.matmul)
    alpha, beta = arguments["alpha"], arguments["beta"]
    summand = arguments["self"] * beta if beta else 0
    return Moments(summand + alpha * result.mean, alpha**2 * result.variance, result.correlation)


def _einsum(site: Site, arguments: dict[str, Any]) -> Moments:
    """Returns the moments of `einsum(equation, x, y)`, or of `einsum(equation, x)`, which moves and sums entries."""
    operands, equation = arguments["tensors"], arguments["equation"]
    if len(operands) == 1:
        return Moments(torch.einsum(equation, operands[0].mean), torch.einsum(equation, operands[0].variance))
    if len(operands) != 2:
        raise site.refusal(f"it has {len(operands)} tensors", "Write products of two tensors.")
    return contracted(site, operands[0], operands[1], lambda x, y: torch.einsum(equation, x, y))


def summed(site: Site, arguments: dict[str, Any]) -> Moments:
    """Returns the moments of a sum or mean over dimensions."""
    x: Moments = arguments["self"]
    dims, keep = arguments.get("dim"), arguments.get("keepdim", False)
    dims = list(range(x.mean.ndim)) if dims in (None, []) else [dims] if isinstance(dims, int) else list(dims)
    mean = x.mean.sum(dims, keepdim=keep)
    scale = prod(x.mean.shape[d] for d in dims) if site.node.target is aten.mean.dim else 1
    if x.correlation is None:
        return Moments(mean / scale, x.variance.sum(dims, keepdim=keep) / scale**2)
    layout = site.layout_of("self")
    positions = [] if layout is None else [d % x.mean.ndim for d in dims if d % x.mean.ndim in layout.positions]
    common = x.common.sum(positions, keepdim=True).square() if positions else x.common.square()
    common, individual = common.sum(dims, keepdim=keep), x.individual.sum(dims, keepdim=keep)
    variance = common + individual
    return Moments(mean / scale, variance / scale**2, sum_correlation(variance, [(common, 1.0)]))


def _summed_label(node: fx.Node, labels: Mapping[str, Any]) -> Any:
    arguments = named(node)
    label = next(iter(labels.values()), None)
    return None if label is None else label.amax(arguments.get("dim") or [], keepdim=arguments["keepdim"])


def gated(site: Site, arguments: dict[str, Any]) -> Moments:
    """Returns the moments of a gated linear unit, `x σ(y)` of two halves, with σ linearised."""
    source, dim = arguments["self"], arguments["dim"]
    x, y = source.moved(lambda part: part.chunk(2, dim)[0]), source.moved(lambda part: part.chunk(2, dim)[1])
    gate = y.mean.sigmoid()
    y = Moments(gate, (gate * (1 - gate)).square() * y.variance, y.correlation)
    return _combined(site, aten.mul.Tensor, elementwise.multiplied, {"self": x, "other": y})


def _gated_label(node: fx.Node, labels: Mapping[str, Any]) -> Any:
    dim = named(node)["dim"]
    label = next(iter(labels.values()), None)
    return None if label is None else label.narrow(dim, 0, label.shape[dim] // 2)


for _slope, *_names in (
    (elementwise.added, "add.Tensor"),
    (elementwise.subtracted, "sub.Tensor", "subtract.Tensor"),
    (elementwise.multiplied, "mul.Tensor", "multiply.Tensor"),
    (elementwise.divided, "div.Tensor", "divide.Tensor"),
    (elementwise.chosen, "where.self"),
):
    register_aten(Operation(Kind.ELEMENTWISE, combined, broadcast, _slope), *_names)
register_aten(Operation(Kind.STATISTIC, summed, _summed_label, elementwise.mean), "mean.dim")
register_aten(Operation(Kind.STATISTIC, summed, _summed_label, lambda a, y, name: 1.0), "sum.dim_IntList")
register_aten(Operation(Kind.OTHER, gated, _gated_label), "glu.default")
register_aten(
    Operation(Kind.PRODUCT, lambda site, a: contracted(site, a["self"], a["mat2"], torch.matmul), contracted_label),
    "bmm.default",
)
register_aten(Operation(Kind.PRODUCT, _baddbmm, contracted_label), "baddbmm.default")
register_aten(Operation(Kind.PRODUCT, _einsum, contracted_label), "einsum.default")
