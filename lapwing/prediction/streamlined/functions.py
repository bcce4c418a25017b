"""Functions of one uncertain tensor that a network writes as several calls: activations, norms, softmaxes.

`x Φ(x)` with x and Φ(x) as independent factors is wrong by an order of magnitude. So every maximal group of
element-wise calls on one uncertain tensor becomes one function. It may include statistics of that tensor along some
dimensions, as in norms written by hand: `y = g(x, s_1(x), ..., s_R(x))`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.func import vjp

from ...network.generic import jvp
from .moments import Layout, Moments, Value, is_constant
from .operations import Slope, aten, has_schema, is_statistic, named, operation_of
from .sites import arguments_of, run


@dataclass(frozen=True)
class Fused:
    """One function `y = g(x, s(x))` of the tensor named `source`. The last call of the body returns y."""

    source: str
    body: tuple[fx.Node, ...]

    @property
    def node(self) -> fx.Node:
        """The call that returns y."""
        return self.body[-1]

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        """Names of the calls that are statistics."""
        return tuple(node.name for node in self.body if is_statistic(node))

    @cached_property
    def certain(self) -> list[str]:
        """Names of the certain arguments."""
        inside = {node.name for node in self.body} | {self.source}
        return sorted({s.name for node in self.body for s in node.all_input_nodes if s.name not in inside})

    @cached_property
    def closed(self) -> bool:
        """Whether all slopes are in the table, so that the function needs no forward mode."""
        return all(operation_of(node).slope is not None for node in self.body)

    def __call__(self, x: Tensor, values: Mapping[str, Any]) -> Tensor:
        return self._run(x, values)[self.node.name]

    def slope(self, x: Tensor, values: Mapping[str, Any]) -> tuple[Tensor, Slope]:
        """Returns y and its slope, a tensor that broadcasts to y or a number, for a function without statistics."""
        known = self._run(x, values)
        slopes, _ = self._slopes(known, x.dtype)
        return known[self.node.name], slopes.get(self.source, 0.0)

    def moments(self, x: Tensor, variance: Tensor, values: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns y and its variances by linearisation (Streamlined Prediction, equations 5 and 6), in time O(D R²).

        `v_y = Σ_i (∂y/∂x_i)² v_i` with `∂y/∂x = diag(∂g/∂x) + Σ_r ∂g/∂s_r ⊗ ∂s_r/∂x`.
        """
        known = self._run(x, values)
        slopes, gradients = self._slopes(known, x.dtype)
        y, direct = known[self.node.name], slopes.get(self.source, 0.0)
        total = (direct.square() if isinstance(direct, Tensor) else direct**2) * variance
        parts = [(slopes.get(name, 0.0), gradients[name], known[name].shape) for name in self.statistics]
        for r, (weight, gradient, shape) in enumerate(parts):
            total = total + 2 * direct * weight * gradient * variance
            for q, (other_weight, other, other_shape) in enumerate(parts[: r + 1]):
                product = gradient * other * variance
                dims = [d for d, n in enumerate(product.shape) if shape[d] == other_shape[d] == 1 and n > 1]
                shared = product.sum(dims, keepdim=True) if dims else product
                total = total + (2 - (q == r)) * weight * other_weight * shared
        return y, total if total.shape == y.shape else total.expand_as(y)

    def _run(self, x: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
        known = {**values, self.source: x}
        for node in self.body:
            known[node.name] = run(node, known, x.dtype)
        return known

    def _slopes(self, values: Mapping[str, Any], dtype: torch.dtype) -> tuple[dict[str, Slope], dict[str, Slope]]:
        """Returns `∂g/∂x` and `∂g/∂s_r` by name, and `∂s_r/∂x`, by the chain rule."""
        slopes: dict[str, dict[str, Slope]] = {self.source: {self.source: 1.0}}
        gradients: dict[str, Slope] = {}
        for node in self.body:
            if not has_schema(node):  # picks the first of several values
                slopes[node.name] = slopes[node.all_input_nodes[0].name]
                continue
            arguments = arguments_of(node, values, dtype)
            total: dict[str, Slope] = {}
            for name, argument in named(node).items():
                if not isinstance(argument, fx.Node) or argument.name not in slopes:
                    continue
                slope = _partial(node, arguments, values[node.name], name)
                for leaf, inner in slopes[argument.name].items():
                    part = _product(slope, inner)
                    total[leaf] = part if leaf not in total else total[leaf] + part
            if node.name in self.statistics:
                gradients[node.name] = self._gradient(total, gradients, values)
                total = {node.name: 1.0}
            slopes[node.name] = total
        return slopes[self.node.name], gradients

    def _gradient(self, slopes: Mapping[str, Slope], known: Mapping[str, Slope], values: Mapping[str, Any]) -> Slope:
        """Returns `∂s/∂x` of a statistic of x, including the path through other statistics."""
        x, total = values[self.source], slopes.get(self.source, 0.0)
        for name, through in slopes.items():
            if name != self.source:
                dims = [d for d in range(x.ndim) if values[name].shape[d] == 1 and x.shape[d] != 1]
                through = (through + torch.zeros_like(x)).sum(dims, keepdim=True) if dims else through
                total = total + through * known[name]
        return total


def _partial(node: fx.Node, arguments: Mapping[str, Any], y: Any, name: str) -> Slope:
    """Returns the derivative of one call by an argument, from the table or by automatic differentiation."""
    slope = operation_of(node).slope
    y = y[0] if isinstance(y, (tuple, list)) else y
    if slope is not None:
        found = slope(arguments, y, name)
        return found.to(y.dtype) if isinstance(found, Tensor) and found.dtype == torch.bool else found  # of a mask

    def function(x: Tensor) -> Tensor:
        return node.target(**{**arguments, name: x})  # type: ignore[operator]

    if is_statistic(node):
        return vjp(function, arguments[name])[1](torch.ones_like(y))[0]
    return jvp(function, (arguments[name],), (torch.ones_like(arguments[name]),))[1]


def _product(a: Slope, b: Slope) -> Slope:
    """Returns a b, without a multiplication by 1."""
    if isinstance(a, float) and a == 1.0:
        return b
    return a if isinstance(b, float) and b == 1.0 else a * b


def carry(fused: Fused, values: Mapping[str, Value], activations: str, layout: Layout | None = None) -> Moments:
    """Returns the moments of g (Streamlined Prediction, equations 5 and 6), with the correlations of its argument.

        E[g(h)] = g(m)        Var[g(h)] = g'(m)² Var[h]

    `activations="moments"` uses the exact moments of g(h) if g has no statistics of h.
    """
    source: Moments = values[fused.source]
    ends_with_relu = fused.node.target is aten.relu.default
    if ends_with_relu and len(fused.body) == 1 and activations == "linear":
        mean = source.mean.relu()
        return Moments(mean, aten.threshold_backward.default(source.variance, mean, 0), source.correlation)
    if activations == "linear" or fused.statistics:
        result = Moments(*fused.moments(source.mean, source.variance, values))
    elif ends_with_relu:
        inner = Fused(fused.source, fused.body[:-1])
        h = Moments(*inner.moments(source.mean, source.variance, values)) if inner.body else source
        result = relu_moments(h)
    else:
        result = quadrature(lambda x: fused(x, values), source)
    rho = source.correlation
    if layout is not None and layout.shared and result.mean.shape != source.mean.shape:
        same = is_constant(source.variance, result.mean.ndim, layout.positions)  # at all positions
        rho = torch.ones_like(source.variance) if same else rho
    return result if rho is None else Moments(result.mean, result.variance, rho)


def carry_covariance(fused: Fused, source: Moments, values: Mapping[str, Any]) -> Moments | None:
    """Returns the moments of an element-wise function with covariances, or None if it repeats entries."""
    assert source.covariance is not None
    y, slope = fused.slope(source.mean, values)
    if y.shape != source.mean.shape:
        return None
    slope = slope.expand_as(y) if isinstance(slope, Tensor) else torch.full_like(y, slope)
    slope = slope.reshape(source.covariance.shape[0], -1)  # (B, n)
    return Moments.joint(y, slope[:, :, None] * source.covariance * slope[:, None, :])


def relu_moments(h: Moments) -> Moments:
    """Returns the moments of `max(h, 0)`, with `z = m/s`.

    E = m Φ(z) + s φ(z)        E[.²] = (m² + s²) Φ(z) + m s φ(z)
    """
    m, v = h.mean, h.variance.clamp_min(torch.finfo(h.variance.dtype).tiny)
    s = v.sqrt()
    z = m / s
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    below, above = torch.special.ndtr(z), torch.special.ndtr(-z)
    mean = m * below + s * density
    # E[.²] - E², written without a difference of large numbers
    variance = v * (below - density * (z * (below - above) + density) + z.square() * below * above)
    return Moments(mean, variance.clamp_min(0))


def quadrature(function: Callable[[Tensor], Tensor], h: Moments) -> Moments:
    """Returns the moments of `g(h)` by Gauss-Hermite quadrature with 20 points: exact for polynomials of degree 20."""
    s = h.variance.sqrt()
    centre = function(h.mean)
    first, second = torch.zeros_like(centre), torch.zeros_like(centre)
    points, weights = np.polynomial.hermite_e.hermegauss(20)
    weights = weights / math.sqrt(2 * math.pi)
    for point, weight in zip(points.tolist(), weights.tolist(), strict=True):
        shifted = function(h.mean + point * s) - centre
        first, second = first + weight * shifted, second + weight * shifted.square()
    return Moments(centre + first, (second - first.square()).clamp_min(0))
