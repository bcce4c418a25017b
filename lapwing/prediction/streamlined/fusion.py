"""Functions of one uncertain tensor that a network writes as several calls: activations, norms, softmaxes.

`x Φ(x)` taken call by call, with its factors independent, is wrong by an order of magnitude. So every maximal group of
element-wise calls on one uncertain tensor becomes one function. Statistics of that tensor along some dimensions, as in
norms written by hand, may take part: then the function is `y = g(x, s_1(x), ..., s_R(x))`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import vjp

from ...tangent.forward_mode import jvp
from .slopes import Slope, covers, of_function

aten = torch.ops.aten

IDENTITIES = frozenset(
    {
        aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default, aten.contiguous.default,
        aten.clone.default, aten.detach.default, aten.detach_.default, aten.alias.default, aten.lift_fresh_copy.default,
        aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.native_dropout.default,
    }
)  # fmt: skip
"""Calls that leave the values of a floating-point tensor as they are; dropout in eval mode, which is checked."""

STATISTICS = frozenset(
    {
        aten.mean.dim, aten.sum.dim_IntList, aten.var.dim, aten.var.correction, aten.std.dim, aten.std.correction,
        aten.amax.default, aten.amin.default, aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim,
        aten.logsumexp.default,
    }
)  # fmt: skip
"""Reductions that may take part in a function where their dimensions are kept."""


BATCH_NORMS = frozenset({aten.batch_norm.default, aten._native_batch_norm_legit_no_training.default})
"""Element-wise in eval mode, which is checked; the second gives a tuple."""


_UNTAGGED = frozenset(
    {
        aten.prelu.default, aten.hardswish.default, aten.log_sigmoid.default, aten.masked_fill.Tensor,
        aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar, aten.rsub.Tensor, aten.divide.Tensor,
        aten.multiply.Tensor, aten.subtract.Tensor, aten.arctan.default, aten.negative.default, aten.type_as.default,
        aten.special_expit.default, aten.absolute.default, aten.expand.default, aten.expand_as.default,
    }
)  # fmt: skip
"""Element-wise calls that torch does not tag as such."""

_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})


def is_pointwise(node: fx.Node) -> bool:
    """Whether each entry of a call's result depends on the same entry of its arguments alone."""
    if node.target in IDENTITIES or node.target in BATCH_NORMS:
        return True
    if node.target is operator.getitem:
        return bool(node.args[1] == 0) and getattr(node.args[0], "target", None) in BATCH_NORMS
    return node.target in _UNTAGGED or torch.Tag.pointwise in getattr(node.target, "tags", ())


def keeps_dims(node: fx.Node) -> bool:
    """Whether a call is a statistic with its dimensions kept."""
    if node.target not in STATISTICS:
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return bool(given.get("keepdim", False)) and given.get("dim") is not None


@dataclass(frozen=True)
class Fused:
    """One function `y = g(x, s(x))`.

    Attributes:
        source: name of x.
        body: the calls, in order; the last gives y.
        statistics: names of those calls that are statistics.
    """

    source: str
    body: tuple[fx.Node, ...]
    statistics: tuple[str, ...]

    @property
    def node(self) -> fx.Node:
        """The call that gives y."""
        return self.body[-1]

    @property
    def others(self) -> list[str]:
        """Names of the certain values that take part."""
        inside = {node.name for node in self.body} | {self.source}
        return sorted({s.name for node in self.body for s in node.all_input_nodes if s.name not in inside})

    @cached_property
    def closed(self) -> bool:
        """Whether all slopes have a closed form, so that no forward mode is needed."""
        return covers(self.body, self.statistics, IDENTITIES)

    def __call__(self, x: Tensor, values: Mapping[str, Any]) -> Tensor:
        """Returns y."""
        return self._from(self.body, {**values, self.source: x})[self.node.name]

    def _from(self, nodes: Sequence[fx.Node], values: dict[str, Any]) -> dict[str, Any]:
        for node in nodes:
            if node.name not in values:
                values[node.name] = call(node, values, values[self.source].dtype)
        return values

    def moments(self, x: Tensor, variance: Tensor, values: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns y and its variances by linearisation (Streamlined Prediction, equations 5 and 6).

            v_y = Σ_i (∂y/∂x_i)² v_i        ∂y/∂x = diag(∂g/∂x) + Σ_r ∂g/∂s_r ⊗ ∂s_r/∂x

        Cost: about two evaluations of g, time O(D R²); for calls without closed slopes 1 + R forward-mode evaluations
        of g and R backward ones of the statistics.
        """
        if not self.statistics:
            if self.closed:
                y, slope = self.slope(x, values)
                return y, _expanded(_squared(slope) * variance, y)
            y, slope = jvp(lambda x: self(x, values), (x,), (torch.ones_like(x),))
            return y, slope.square() * variance
        found = self._from(self.body, {**values, self.source: x})
        known = [found[name] for name in self.statistics]
        if self.closed:
            closed = of_function(
                self.body, self.source, self.statistics, found, lambda node: resolve(node, found, x.dtype)
            )
            y = found[self.node.name]
            return y, _expanded(self._carried(variance, known, closed.own, closed.others, closed.gradients), y)

        def g(x: Tensor, *known: Tensor) -> Tensor:
            return self._from(self.body, {**values, self.source: x, **dict(zip(self.statistics, known, strict=True))})[
                self.node.name
            ]

        inputs = (x, *known)
        zeros = [torch.zeros_like(value) for value in inputs]
        slopes = []
        for place, value in enumerate(inputs):
            tangents = [*zeros[:place], torch.ones_like(value), *zeros[place + 1 :]]
            slopes.append(jvp(g, inputs, tuple(tangents))[1])
        gradients = [self._gradient(name, x, values) for name in self.statistics]
        return found[self.node.name], self._carried(variance, known, slopes[0], slopes[1:], gradients)

    def slope(self, x: Tensor, values: Mapping[str, Any]) -> tuple[Tensor, Slope]:
        """Returns y and its slope, a tensor that broadcasts to y or a number, for a function without statistics."""
        found = self._from(self.body, {**values, self.source: x})
        closed = of_function(self.body, self.source, (), found, lambda node: resolve(node, found, x.dtype))
        return found[self.node.name], closed.own

    def _carried(
        self,
        variance: Tensor,
        known: Sequence[Tensor],
        slope: Slope,
        weights: Sequence[Slope],
        gradients: Sequence[Slope],
    ) -> Tensor:
        """Returns the variances of y from all slopes."""
        carried = _squared(slope) * variance
        for r, (weight, gradient, value) in enumerate(zip(weights, gradients, known, strict=True)):
            carried = carried + 2 * slope * weight * gradient * variance
            for q, (other_weight, other, other_value) in enumerate(
                zip(weights[: r + 1], gradients, known, strict=False)
            ):
                shared = reduced(gradient * other * variance, value.shape, other_value.shape)
                carried = carried + (2 - (q == r)) * weight * other_weight * shared
        return carried

    def _gradient(self, name: str, x: Tensor, values: Mapping[str, Any]) -> Tensor:
        """Returns `∂s/∂x` of one statistic, in the shape of x."""
        last = next(place for place, node in enumerate(self.body) if node.name == name)

        def statistic(x: Tensor) -> Tensor:
            return self._from(self.body[: last + 1], {**values, self.source: x})[name]

        value, pull = vjp(statistic, x)  # type: ignore[misc]
        return pull(torch.ones_like(value))[0]


def _squared(slope: Slope) -> Slope:
    return slope.square() if isinstance(slope, Tensor) else slope**2


def _expanded(value: Tensor, like: Tensor) -> Tensor:
    return value if value.shape == like.shape else value.expand_as(like)


def reduced(product: Tensor, shape: torch.Size, other: torch.Size) -> Tensor:
    """Sums over the dimensions that both statistics run over."""
    dims = [d for d in range(product.ndim) if shape[d] == 1 and other[d] == 1 and product.shape[d] > 1]
    return product.sum(dims, keepdim=True) if dims else product


def call(node: fx.Node, values: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Runs one call in the dtype of the moments; identities, which include casts, give their argument."""
    if node.target in IDENTITIES and not _to_other_kind(node):
        (source,) = (arg for arg in node.args[:1] if isinstance(arg, fx.Node))
        return values[source.name]
    args, kwargs = resolve(node, values, dtype)
    if node.target in _VIEWS:  # what is viewed may be laid out otherwise than in the network
        return args[0].reshape(args[1])
    if node.target is aten._weight_norm.default:  # it has no forward-mode derivative
        direction, size, dim = (*args, 0)[:3]
        return direction * (size / torch.norm_except_dim(direction, 2, dim))
    return node.target(*args, **kwargs)  # type: ignore[operator]


def resolve(node: fx.Node, values: Mapping[str, Any], dtype: torch.dtype) -> tuple[tuple, dict]:
    """Returns a call's arguments, floating-point dtypes among them replaced by that of the moments."""

    def found(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return values[leaf.name]
        if isinstance(leaf, torch.dtype) and leaf.is_floating_point:
            return dtype
        return leaf

    return fx.node.map_aggregate((node.args, node.kwargs), found)


def _to_other_kind(node: fx.Node) -> bool:
    """Whether a cast gives integers or truth values."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.is_floating_point()
