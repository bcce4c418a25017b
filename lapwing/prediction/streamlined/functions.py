"""Functions of one uncertain tensor that a network writes as several calls: activations, norms, softmaxes.

`x Φ(x)` taken call by call, with its factors independent, is wrong by an order of magnitude. So every maximal group of
element-wise calls on one uncertain tensor becomes one function. Statistics of that tensor along some dimensions, as in
norms written by hand, may take part: then the function is `y = g(x, s_1(x), ..., s_R(x))`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import vjp

from ...errors import LapwingError
from ...network.generic import jvp
from .moments import Layout, Moments, Value, is_constant
from .operations import Arguments, Partial, Slope, aten, has_schema, is_statistic, named, operation_of
from .sites import resolve, run

NODES = 20
"""Points of the quadrature for functions without a closed form."""


@dataclass(frozen=True)
class Slopes:
    """Slopes of `y = g(x, s_1(x), ..., s_R(x))`.

    Attributes:
        direct: `∂g/∂x`.
        through: `∂g/∂s_r`, in the order of the statistics.
        gradients: `∂s_r/∂x`, in the shape of x or one that broadcasts to it.
    """

    direct: Slope
    through: tuple[Slope, ...]
    gradients: tuple[Slope, ...]


@dataclass(frozen=True)
class Fused:
    """One function `y = g(x, s(x))`.

    Attributes:
        source: name of x.
        body: the calls, in order; the last gives y.
    """

    source: str
    body: tuple[fx.Node, ...]

    @property
    def node(self) -> fx.Node:
        """The call that gives y."""
        return self.body[-1]

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        """Names of those calls that are statistics."""
        return tuple(node.name for node in self.body if is_statistic(node))

    @cached_property
    def others(self) -> list[str]:
        """Names of the certain values that take part."""
        inside = {node.name for node in self.body} | {self.source}
        return sorted({s.name for node in self.body for s in node.all_input_nodes if s.name not in inside})

    @cached_property
    def closed(self) -> bool:
        """Whether all slopes have a closed form, so that no forward mode is needed."""
        dims = {_dims(node) for node in self.body if node.name in self.statistics}
        return len(dims) <= 1 and all(operation_of(node).slope is not None for node in self.body)

    def __call__(self, x: Tensor, values: Mapping[str, Any]) -> Tensor:
        """Returns y."""
        return self._run(self.body, {**values, self.source: x})[self.node.name]

    def slope(self, x: Tensor, values: Mapping[str, Any]) -> tuple[Tensor, Slope]:
        """Returns y and its slope, a tensor that broadcasts to y or a number, for a function without statistics."""
        if not self.closed:
            return jvp(lambda x: self(x, values), (x,), (torch.ones_like(x),))
        known = self._run(self.body, {**values, self.source: x})
        return known[self.node.name], self._closed_slopes(known, x.dtype).direct

    def moments(self, x: Tensor, variance: Tensor, values: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns y and its variances by linearisation (Streamlined Prediction, equations 5 and 6).

            v_y = Σ_i (∂y/∂x_i)² v_i        ∂y/∂x = diag(∂g/∂x) + Σ_r ∂g/∂s_r ⊗ ∂s_r/∂x

        Cost: about two evaluations of g, time O(D R²); for calls without closed slopes 1 + R forward-mode evaluations
        of g and R backward ones of the statistics.
        """
        if not self.statistics:
            y, slope = self.slope(x, values)
            carried = _squared(slope) * variance
        else:
            known = self._run(self.body, {**values, self.source: x})
            y, statistics = known[self.node.name], [known[name] for name in self.statistics]
            slopes = self._closed_slopes(known, x.dtype) if self.closed else self._forward_slopes(x, statistics, values)
            carried = _carried(variance, statistics, slopes)
        return y, carried if carried.shape == y.shape else carried.expand_as(y)

    def _run(self, nodes: Sequence[fx.Node], values: dict[str, Any]) -> dict[str, Any]:
        for node in nodes:
            if node.name not in values:
                values[node.name] = run(node, values, values[self.source].dtype)
        return values

    def _closed_slopes(self, values: Mapping[str, Any], dtype: torch.dtype) -> Slopes:
        """Returns all slopes from the values of the calls (the chain rule, forwards)."""
        slopes: dict[str, dict[str, Slope]] = {self.source: {self.source: 1.0}}
        gradients: dict[str, Slope] = {}
        for node in self.body:
            if not has_schema(node):  # the first of several values
                slopes[node.name] = slopes[node.all_input_nodes[0].name]
                continue
            names = {
                name: argument.name
                for name, argument in named(node, node.args, node.kwargs).items()
                if isinstance(argument, fx.Node) and argument.name in slopes
            }
            arguments = named(node, *resolve(node, values, dtype))
            partial, y = operation_of(node).slope, values[node.name]
            assert partial is not None
            y = y[0] if isinstance(y, (tuple, list)) else y
            total: dict[str, Slope] = {}
            for name, argument in names.items():
                slope = self._slope_of(node, partial, arguments, y, name)
                for leaf, inner in slopes[argument].items():
                    part = _product(slope, inner)
                    total[leaf] = part if leaf not in total else total[leaf] + part
            if node.name in self.statistics:
                gradients[node.name] = self._gradient(total, gradients, y, arguments["self"])
                total = {node.name: 1.0}
            slopes[node.name] = total
        final = slopes[self.node.name]
        through = tuple(final.get(name, 0.0) for name in self.statistics)
        return Slopes(final.get(self.source, 0.0), through, tuple(gradients[name] for name in self.statistics))

    @staticmethod
    def _slope_of(node: fx.Node, partial: Partial, arguments: Arguments, y: Any, name: str) -> Slope:
        try:
            return partial(arguments, y, name)
        except KeyError as error:
            raise LapwingError(
                f"The slope of {node.target} reads the argument {error}, and the arguments of the call are "
                f"{', '.join(arguments)}. Read one of these in the slope."
            ) from error

    def _gradient(self, slopes: Mapping[str, Slope], known: Mapping[str, Slope], value: Tensor, x: Tensor) -> Slope:
        """Returns `∂s/∂x` of a statistic of x, what goes through other statistics included."""
        total = slopes.get(self.source, 0.0)
        for name, through in slopes.items():
            if name != self.source:
                dims = [d for d in range(x.ndim) if value.shape[d] == 1 and x.shape[d] != 1]
                through = (through + torch.zeros_like(x)).sum(dims, keepdim=True) if dims else through
                total = total + through * known[name]
        return total

    def _forward_slopes(self, x: Tensor, statistics: Sequence[Tensor], values: Mapping[str, Any]) -> Slopes:
        """Returns the same by forward mode, and the gradients of the statistics by backward passes."""

        def g(x: Tensor, *statistics: Tensor) -> Tensor:
            return self(x, {**values, **dict(zip(self.statistics, statistics, strict=True))})

        def gradient(name: str) -> Tensor:
            end = next(place for place, node in enumerate(self.body) if node.name == name) + 1
            inner = lambda x: self._run(self.body[:end], {**values, self.source: x})[name]  # noqa: E731
            value, pull = vjp(inner, x)  # type: ignore[misc]
            return pull(torch.ones_like(value))[0]

        inputs = (x, *statistics)
        zeros = [torch.zeros_like(value) for value in inputs]
        slopes = []
        for place, value in enumerate(inputs):
            tangents = [*zeros[:place], torch.ones_like(value), *zeros[place + 1 :]]
            slopes.append(jvp(g, inputs, tuple(tangents))[1])
        return Slopes(slopes[0], tuple(slopes[1:]), tuple(map(gradient, self.statistics)))


def _dims(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    dims: Any = named(node, node.args, node.kwargs).get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims)
    return tuple(sorted(d % value.ndim if isinstance(value, Tensor) else d for d in dims))


def _carried(variance: Tensor, statistics: Sequence[Tensor], slopes: Slopes) -> Tensor:
    """Returns the variances of y from all slopes."""
    total = _squared(slopes.direct) * variance
    parts = list(zip(slopes.through, slopes.gradients, statistics, strict=True))
    for r, (weight, gradient, value) in enumerate(parts):
        total = total + 2 * slopes.direct * weight * gradient * variance
        for q, (other_weight, other, other_value) in enumerate(parts[: r + 1]):
            product = gradient * other * variance
            dims = [d for d, n in enumerate(product.shape) if value.shape[d] == other_value.shape[d] == 1 and n > 1]
            shared = product.sum(dims, keepdim=True) if dims else product
            total = total + (2 - (q == r)) * weight * other_weight * shared
    return total


def _squared(slope: Slope) -> Slope:
    return slope.square() if isinstance(slope, Tensor) else slope**2


def _product(a: Slope, b: Slope) -> Slope:
    """Returns a b, without a multiplication by 1."""
    if isinstance(a, float) and a == 1.0:
        return b
    return a if isinstance(b, float) and b == 1.0 else a * b


# ---- moments


def carry(fused: Fused, values: Mapping[str, Value], activations: str, layout: Layout | None = None) -> Moments:
    """Passes moments through one function (Streamlined Prediction, equations 5 and 6).

        E[g(h)] = g(m)        Var[g(h)] = g'(m)² Var[h]

    Args:
        fused: g.
        values: the uncertain tensor and the certain values that take part, by name.
        activations: "linear" for the above, "moments" for the moments of g(h) themselves. Functions with statistics of
            the tensor, as norms, are linearised in either case.
        layout: the dimensions of the result, where positions are correlated: slopes leave correlations as they are.
    """
    source: Moments = values[fused.source]
    ends_with_relu = fused.node.target is aten.relu.default
    if ends_with_relu and len(fused.body) == 1 and activations == "linear":
        mean = source.mean.relu()
        return Moments(mean, source.variance * (mean > 0), source.correlation)
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
    """Passes covariances through an element-wise function, None where it repeats entries."""
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
    # E[.²] - E², in a form without the difference of large numbers
    variance = v * (below - density * (z * (below - above) + density) + z.square() * below * above)
    return Moments(mean, variance.clamp_min(0))


def quadrature(function: Callable[[Tensor], Tensor], h: Moments) -> Moments:
    """Returns the moments of `g(h)` by Gauss-Hermite quadrature: exact for polynomials of degree 20.

    Cost: twenty evaluations of g.
    """
    s = h.variance.sqrt()
    centre = function(h.mean)
    first, second = torch.zeros_like(centre), torch.zeros_like(centre)
    for point, weight in zip(*_quadrature_rule(), strict=True):
        shifted = function(h.mean + point * s) - centre
        first, second = first + weight * shifted, second + weight * shifted.square()
    return Moments(centre + first, (second - first.square()).clamp_min(0))


@lru_cache
def _quadrature_rule() -> tuple[list[float], list[float]]:
    """Returns points and weights for the standard normal, by the eigenvalues of the recurrence of its polynomials."""
    off = torch.arange(1, NODES, dtype=torch.float64).sqrt()
    points, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return points.tolist(), vectors[0].square().tolist()
