"""Element-wise calls with their slopes, and the statistics in norms written by hand.

Slopes cost less than forward mode, and can be compiled and exported. Calls without a slope use forward mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..operations import Arguments, Kind, Operation, Partial, Slope, aten, register_aten


def one(a: Arguments, y: Any, name: str) -> Slope:
    """Returns the slope of an identity."""
    return 1.0


def _of_input(function: Callable[[Tensor], Tensor]) -> Partial:
    return lambda a, y, name: function(a["self"])


def _of_output(function: Callable[[Tensor], Tensor]) -> Partial:
    return lambda a, y, name: function(y)


def _backward(pull: Callable[..., Tensor], *options: str) -> Partial:
    """Returns the slope as a call's backward of ones."""
    return lambda a, y, name: pull(torch.ones_like(y), a["self"], **{option: a[option] for option in options})


def _inside(x: Tensor, low: Any, high: Any, ends: bool) -> Tensor:
    """Returns 1 for entries between two bounds, else 0. A bound may be None."""
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    inside = (x >= low) & (x <= high) if ends else (x > low) & (x < high)
    return inside.to(x.dtype)


def _power(a: Arguments, y: Any, name: str) -> Slope:
    x, power = a["self"], a["exponent"]
    if name == "exponent":
        return y * (x.log() if isinstance(x, Tensor) else math.log(x))
    if isinstance(power, (int, float)) and power in (0, 2):
        return 0.0 if power == 0 else 2 * x
    return power * x ** (power - 1)


def _elu(a: Arguments, y: Any, name: str) -> Slope:
    alpha, scale, inner = a["alpha"], a["scale"], a["input_scale"]
    return torch.where(a["self"] > 0, torch.full_like(y, scale), y * inner + alpha * scale * inner)


def _selu(x: Tensor) -> Tensor:
    below = x.clamp_max(0).exp() * 1.6732632423543772
    return torch.where(x > 0, torch.ones_like(x), below) * 1.0507009873554805


def _prelu(a: Arguments, y: Any, name: str) -> Slope:
    weight = a["weight"]
    weight = weight if weight.numel() == 1 else weight.reshape(-1, *(1,) * (a["self"].ndim - 2))
    return torch.where(a["self"] > 0, torch.ones_like(weight), weight)


def added(a: Arguments, y: Any, name: str) -> Slope:
    """Returns the slopes of `x + α y`."""
    return 1.0 if name == "self" else a.get("alpha", 1)


def subtracted(a: Arguments, y: Any, name: str) -> Slope:
    """Returns the slopes of `x - α y`."""
    return 1.0 if name == "self" else -a.get("alpha", 1)


def multiplied(a: Arguments, y: Any, name: str) -> Slope:
    """Returns the slopes of `x y`."""
    return a["other" if name == "self" else "self"]


def divided(a: Arguments, y: Any, name: str) -> Slope:
    """Returns the slopes of `x / y`."""
    return 1 / a["other"] if name == "self" else -y / a["other"]


def chosen(a: Arguments, y: Any, name: str) -> Slope:
    """Returns the slopes of `where(c, x, y)`."""
    return (a["condition"] if name == "self" else ~a["condition"]).to(y.dtype)


# ---- statistics, with respect to each entry of their argument


def _count(a: Arguments) -> Any:
    dims = a["dim"]
    return prod(a["self"].shape[d] for d in ([dims] if isinstance(dims, int) else dims))


def mean(a: Arguments, y: Any, name: str) -> Slope:
    """Returns the slope of a mean."""
    return 1 / _count(a)


def _variance(a: Arguments, y: Any, name: str) -> Slope:
    x, correction = a["self"], int(a["unbiased"]) if "unbiased" in a else a.get("correction")
    correction = 1 if correction is None else correction
    return 2 / (_count(a) - correction) * (x - x.mean(a["dim"], keepdim=True))


# ---- the table


def _elementwise(slope: Partial | None, *names: str, kind: Kind = Kind.OTHER) -> None:
    register_aten(Operation(Kind.ELEMENTWISE | kind, slope=slope), *names)


_elementwise(
    one, "dropout.default", "alpha_dropout.default", "feature_dropout.default", "detach.default", "detach_.default",
    "alias.default", "lift_fresh_copy.default", "to.dtype", "to.dtype_layout", "to.device", "_to_copy.default",
    kind=Kind.IDENTITY,
)  # fmt: skip
_elementwise(
    None, "ones_like.default", "zeros_like.default", "full_like.default", "empty_like.default", "new_ones.default",
    "new_zeros.default", "new_full.default", "new_empty.default", "floor.default", "ceil.default", "round.default",
    "sign.default", "trunc.default", kind=Kind.FLAT,
)  # fmt: skip
_elementwise(one, "type_as.default")
_elementwise(added, "add.Scalar")
_elementwise(subtracted, "sub.Scalar")
_elementwise(lambda a, y, name: -a["alpha"] if name == "self" else 1.0, "rsub.Scalar", "rsub.Tensor")
_elementwise(multiplied, "mul.Scalar")
_elementwise(divided, "div.Scalar")
_elementwise(_power, "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
_elementwise(_of_input(lambda x: -torch.ones_like(x)), "neg.default", "negative.default")
_elementwise(chosen, "where.ScalarOther", "where.ScalarSelf")
_elementwise(None, "where.Scalar")
_elementwise(lambda a, y, name: (~a["mask"]).to(y.dtype), "masked_fill.Scalar", "masked_fill.Tensor")
_elementwise(
    lambda a, y, name: _inside(a["self"], a.get("min"), a.get("max"), True),
    "clamp.default", "clamp_min.default", "clamp_max.default",
)  # fmt: skip
_elementwise(_of_input(torch.sign), "abs.default", "absolute.default")
_elementwise(_of_output(lambda y: y * (1 - y)), "sigmoid.default", "special_expit.default")
_elementwise(_of_input(lambda x: 1 / (1 + x.square())), "atan.default", "arctan.default")
_elementwise(_of_input(lambda x: (x > 0).to(x.dtype)), "relu.default")
_elementwise(_of_input(lambda x: _inside(x, 0, 6, False)), "relu6.default")
_elementwise(lambda a, y, name: _inside(a["self"], a["min_val"], a["max_val"], False), "hardtanh.default")
_elementwise(_of_output(lambda y: y), "exp.default")
_elementwise(_of_output(lambda y: y + 1), "expm1.default")
_elementwise(_of_input(torch.reciprocal), "log.default")
_elementwise(_of_input(lambda x: 1 / (1 + x)), "log1p.default")
_elementwise(_of_output(lambda y: 0.5 / y), "sqrt.default")
_elementwise(_of_output(lambda y: -0.5 * y.pow(3)), "rsqrt.default")
_elementwise(_of_output(lambda y: -y.square()), "reciprocal.default")
_elementwise(_of_input(lambda x: 2 * x), "square.default")
_elementwise(_of_output(lambda y: 1 - y.square()), "tanh.default")
_elementwise(_of_input(torch.cos), "sin.default")
_elementwise(_of_input(lambda x: -torch.sin(x)), "cos.default")
_elementwise(_of_input(lambda x: 2 / math.sqrt(math.pi) * (-x.square()).exp()), "erf.default")
_elementwise(_backward(aten.gelu_backward.default, "approximate"), "gelu.default")
_elementwise(_backward(aten.silu_backward.default), "silu.default")
_elementwise(_backward(aten.mish_backward.default), "mish.default")
_elementwise(_backward(aten.hardswish_backward.default), "hardswish.default")
_elementwise(_backward(aten.hardsigmoid_backward.default), "hardsigmoid.default")
_elementwise(_backward(aten.softplus_backward.default, "beta", "threshold"), "softplus.default")
_elementwise(_of_input(lambda x: torch.sigmoid(-x)), "log_sigmoid.default")
_elementwise(_elu, "elu.default")
_elementwise(lambda a, y, name: torch.where(a["self"] > 0, torch.ones_like(y), y / a["alpha"] + 1), "celu.default")
_elementwise(_of_input(_selu), "selu.default")
_elementwise(
    lambda a, y, name: torch.where(a["self"] > 0, torch.ones_like(y), torch.full_like(y, a["negative_slope"])),
    "leaky_relu.default",
)
_elementwise(_prelu, "prelu.default")

register_aten(Operation(Kind.STATISTIC, slope=_variance), "var.dim", "var.correction")
register_aten(
    Operation(Kind.STATISTIC, slope=lambda a, y, name: _variance(a, y, name) / (2 * y)), "std.dim", "std.correction"
)
register_aten(Operation(Kind.STATISTIC, slope=lambda a, y, name: (a["self"] - y).exp()), "logsumexp.default")
register_aten(Operation(Kind.STATISTIC), "linalg_vector_norm.default", "norm.ScalarOpt_dim")
