"""Slopes of element-wise calls in closed form: what linearises a function without a forward-mode derivative.

Plain calls cost less than dual numbers, and, unlike these, they can be compiled and exported. A function with a call
that is not here goes by forward mode (`fusion.py`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

Slope = Any
"""A tensor that broadcasts to the call's value, or a number."""

Partial = Callable[[Mapping[str, Any], Any, str], Slope]
"""`(arguments by name, the call's value y, name of an argument)` -> ∂y/∂argument, entry by entry."""


def _one(given: Mapping[str, Any], y: Any, name: str) -> Slope:
    return 1.0


def _added(given: Mapping[str, Any], y: Any, name: str) -> Slope:
    return 1.0 if name == "self" else given.get("alpha", 1)


def _taken(given: Mapping[str, Any], y: Any, name: str) -> Slope:
    return 1.0 if name == "self" else -given.get("alpha", 1)


def _taken_from(given: Mapping[str, Any], y: Any, name: str) -> Slope:
    return -given.get("alpha", 1) if name == "self" else 1.0


def _times(given: Mapping[str, Any], y: Any, name: str) -> Slope:
    return given["other" if name == "self" else "self"]


def _over(given: Mapping[str, Any], y: Any, name: str) -> Slope:
    return 1 / given["other"] if name == "self" else -y / given["other"]


def _power(given: Mapping[str, Any], y: Any, name: str) -> Slope:
    x, power = given["self"], given["exponent"]
    if name == "exponent":
        return y * (x.log() if isinstance(x, Tensor) else math.log(x))
    if isinstance(power, (int, float)):
        return 0.0 if power == 0 else 2 * x if power == 2 else power * x ** (power - 1)
    return power * x ** (power - 1)


def _chosen(given: Mapping[str, Any], y: Any, name: str) -> Slope:
    return (given["condition"] if name == "self" else ~given["condition"]).to(y.dtype)


def _kept(given: Mapping[str, Any], y: Any, name: str) -> Slope:
    return (~given["mask"]).to(y.dtype)


def _inside(x: Tensor, low: Any, high: Any, ends: bool) -> Tensor:
    """Returns 1 where x lies between two bounds, either of which may be missing."""
    found = torch.ones_like(x, dtype=torch.bool)
    if low is not None:
        found = (x >= low) if ends else (x > low)
    if high is not None:
        found = found & ((x <= high) if ends else (x < high))
    return found.to(x.dtype)


def _clamped(given: Mapping[str, Any], y: Any, name: str) -> Slope:
    return _inside(given["self"], given.get("min"), given.get("max"), True)


def _hardtanh(given: Mapping[str, Any], y: Any, name: str) -> Slope:
    return _inside(given["self"], given["min_val"], given["max_val"], False)


def _normed(given: Mapping[str, Any], y: Any, name: str) -> Slope:
    """Batch norm in eval mode: `γ / √(v + ε)` a channel."""
    slope = (given["running_var"] + given["eps"]).rsqrt()
    slope = slope if given["weight"] is None else slope * given["weight"]
    return slope.reshape(-1, *(1,) * (given["input"].ndim - 2))


def _leaky(given: Mapping[str, Any], y: Any, name: str) -> Slope:
    return torch.where(given["self"] > 0, torch.ones_like(y), torch.full_like(y, given["negative_slope"]))


def _prelu(given: Mapping[str, Any], y: Any, name: str) -> Slope:
    weight = given["weight"]
    weight = weight if weight.numel() == 1 else weight.reshape(-1, *(1,) * (given["self"].ndim - 2))
    return torch.where(given["self"] > 0, torch.ones_like(weight), weight)


def _backward(pull: Callable[..., Tensor], *options: str) -> Partial:
    """Returns the slope that a call's own backward gives for ones."""

    def partial(given: Mapping[str, Any], y: Any, name: str) -> Slope:
        x = given["self"]
        return pull(torch.ones_like(x), x, *(given[option] for option in options))

    return partial


def _elu(given: Mapping[str, Any], y: Any, name: str) -> Slope:
    x, alpha, scale, inner = (given[key] for key in ("self", "alpha", "scale", "input_scale"))
    return torch.where(x > 0, torch.full_like(x, scale), y * inner + alpha * scale * inner)


def _of_input(function: Callable[[Tensor], Tensor]) -> Partial:
    return lambda given, y, name: function(given["self"])


def _of_output(function: Callable[[Tensor], Tensor]) -> Partial:
    return lambda given, y, name: function(y)


PARTIALS: dict[Any, Partial] = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _added),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar, aten.subtract.Tensor), _taken),
    **dict.fromkeys((aten.rsub.Scalar, aten.rsub.Tensor), _taken_from),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar, aten.multiply.Tensor), _times),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar, aten.divide.Tensor), _over),
    **dict.fromkeys((aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar), _power),
    **dict.fromkeys((aten.neg.default, aten.negative.default), _of_input(lambda x: -torch.ones_like(x))),
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf), _chosen),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), _kept),
    **dict.fromkeys((aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default), _clamped),
    **dict.fromkeys((aten.abs.default, aten.absolute.default), _of_input(torch.sign)),
    **dict.fromkeys((aten.sigmoid.default, aten.special_expit.default), _of_output(lambda y: y * (1 - y))),
    **dict.fromkeys((aten.atan.default, aten.arctan.default), _of_input(lambda x: 1 / (1 + x.square()))),
    **dict.fromkeys((aten.expand.default, aten.expand_as.default, aten.type_as.default), _one),
    aten.relu.default: _of_input(lambda x: (x > 0).to(x.dtype)),
    aten.relu6.default: _of_input(lambda x: _inside(x, 0, 6, False)),
    aten.hardtanh.default: _hardtanh,
    aten.exp.default: _of_output(lambda y: y),
    aten.expm1.default: _of_output(lambda y: y + 1),
    aten.log.default: _of_input(torch.reciprocal),
    aten.log1p.default: _of_input(lambda x: 1 / (1 + x)),
    aten.sqrt.default: _of_output(lambda y: 0.5 / y),
    aten.rsqrt.default: _of_output(lambda y: -0.5 * y.pow(3)),
    aten.reciprocal.default: _of_output(lambda y: -y.square()),
    aten.square.default: _of_input(lambda x: 2 * x),
    aten.tanh.default: _of_output(lambda y: 1 - y.square()),
    aten.sin.default: _of_input(torch.cos),
    aten.cos.default: _of_input(lambda x: -torch.sin(x)),
    aten.erf.default: _of_input(lambda x: 2 / math.sqrt(math.pi) * (-x.square()).exp()),
    aten.gelu.default: lambda given, y, name: aten.gelu_backward.default(
        torch.ones_like(y), given["self"], approximate=given["approximate"]
    ),
    aten.silu.default: _backward(aten.silu_backward.default),
    aten.mish.default: _backward(aten.mish_backward.default),
    aten.hardswish.default: _backward(aten.hardswish_backward.default),
    aten.hardsigmoid.default: _backward(aten.hardsigmoid_backward.default),
    aten.softplus.default: _backward(aten.softplus_backward.default, "beta", "threshold"),
    aten.log_sigmoid.default: _of_input(lambda x: torch.sigmoid(-x)),
    aten.elu.default: _elu,
    aten.celu.default: lambda given, y, name: torch.where(
        given["self"] > 0, torch.ones_like(y), y / given["alpha"] + 1
    ),
    aten.selu.default: _of_input(
        lambda x: torch.where(x > 0, torch.ones_like(x), x.clamp_max(0).exp() * 1.6732632423543772) * 1.0507009873554805
    ),
    aten.leaky_relu.default: _leaky,
    aten.prelu.default: _prelu,
    aten.batch_norm.default: _normed,
    aten._native_batch_norm_legit_no_training.default: _normed,
}
"""Element-wise call -> its slopes."""


def _mean(given: Mapping[str, Any], value: Tensor) -> Slope:
    return 1 / _count(given)


def _variance(given: Mapping[str, Any], value: Tensor) -> Slope:
    x = given["self"]
    return 2 / (_count(given) - _correction(given)) * (x - x.mean(given["dim"], keepdim=True))


def _deviation(given: Mapping[str, Any], value: Tensor) -> Slope:
    return _variance(given, value) / (2 * value)


def _count(given: Mapping[str, Any]) -> Any:
    dims = given["dim"]
    return prod(given["self"].shape[d] for d in ([dims] if isinstance(dims, int) else dims))


def _correction(given: Mapping[str, Any]) -> Any:
    if "unbiased" in given:
        return int(given["unbiased"])
    return 1 if given.get("correction") is None else given["correction"]


STATISTIC_PARTIALS: dict[Any, Callable[[Mapping[str, Any], Tensor], Slope]] = {
    aten.mean.dim: _mean,
    aten.sum.dim_IntList: lambda given, value: 1.0,
    aten.var.dim: _variance,
    aten.var.correction: _variance,
    aten.std.dim: _deviation,
    aten.std.correction: _deviation,
    aten.logsumexp.default: lambda given, value: (given["self"] - value).exp(),
}
"""Statistic with its dimensions kept -> its slopes in each entry of its argument."""


def covers(body: Sequence[fx.Node], statistics: Sequence[str], identities: frozenset) -> bool:
    """Whether all calls of a function have slopes here; statistics must run over the same dimensions."""
    dims = {_dims(node) for node in body if node.name in statistics}
    return len(dims) <= 1 and all(
        node.target in identities
        or node.target is operator.getitem
        or (node.target in (STATISTIC_PARTIALS if node.name in statistics else PARTIALS))
        for node in body
    )


def _dims(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    dims: Any = _named(node, node.args, node.kwargs).get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims)
    return tuple(sorted(d % value.ndim if isinstance(value, Tensor) else d for d in dims))


def _named(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call's arguments by name, defaults filled in."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return {**given, **{a.name: value for a, value in zip(schema, args, strict=False)}, **kwargs}


@dataclass(frozen=True)
class Slopes:
    """Slopes of `y = g(x, s_1(x), ..., s_R(x))`.

    Attributes:
        own: `∂g/∂x`.
        others: `∂g/∂s_r`, in the order of the statistics.
        gradients: `∂s_r/∂x`, in the shape of x or one that broadcasts to it.
    """

    own: Slope
    others: tuple[Slope, ...]
    gradients: tuple[Slope, ...]


def of_function(
    body: Sequence[fx.Node],
    source: str,
    statistics: Sequence[str],
    values: Mapping[str, Any],
    resolve: Callable[[fx.Node], tuple[Any, Any]],
) -> Slopes:
    """Returns the slopes of a function from the values of its calls (the chain rule, forwards).

    Args:
        body: the calls, in order; the last gives y.
        source: name of x.
        statistics: names of those calls that are statistics.
        values: name -> value, of x, of every call, and of all else that takes part.
        resolve: call -> its arguments as values.
    """
    slopes: dict[str, dict[str, Slope]] = {source: {source: 1.0}}
    gradients: dict[str, Slope] = {}
    for node in body:
        found: dict[str, Slope] = {}
        if node.target is operator.getitem or not hasattr(node.target, "_schema"):
            slopes[node.name] = slopes[node.all_input_nodes[0].name]
            continue
        where = {
            name: arg.name
            for name, arg in _named(node, node.args, node.kwargs).items()
            if isinstance(arg, fx.Node) and arg.name in slopes
        }
        given = _named(node, *resolve(node))
        y = values[node.name]
        y = y[0] if isinstance(y, (tuple, list)) else y
        if node.name in statistics:
            (argument,) = where.values()
            partial = STATISTIC_PARTIALS[node.target](given, y)
            gradients[node.name] = _gradient(partial, slopes[argument], source, gradients, y, given["self"])
            slopes[node.name] = {node.name: 1.0}
            continue
        for name, argument in where.items():
            partial = PARTIALS[node.target](given, y, name) if node.target in PARTIALS else 1.0
            for leaf, slope in slopes[argument].items():
                part = _product(partial, slope)
                found[leaf] = part if leaf not in found else found[leaf] + part
        slopes[node.name] = found
    last = slopes[body[-1].name]
    others = tuple(last.get(name, 0.0) for name in statistics)
    return Slopes(last.get(source, 0.0), others, tuple(gradients[name] for name in statistics))


def _gradient(
    partial: Slope, slopes: Mapping[str, Slope], source: str, known: Mapping[str, Slope], value: Tensor, x: Tensor
) -> Slope:
    """Returns `∂s/∂x`, what goes through other statistics included."""
    total = _product(partial, slopes.get(source, 0.0))
    for name, slope in slopes.items():
        if name != source:
            through = _product(partial, slope)
            dims = [d for d in range(x.ndim) if value.shape[d] == 1 and x.shape[d] != 1]
            through = (through + torch.zeros_like(x)).sum(dims, keepdim=True) if dims else through
            total = total + through * known[name]
    return total


def _product(a: Slope, b: Slope) -> Slope:
    """Returns a b, without a multiplication by 1."""
    if isinstance(a, float) and a == 1.0:
        return b
    return a if isinstance(b, float) and b == 1.0 else a * b


__all__ = ["PARTIALS", "Slopes", "covers", "of_function"]
