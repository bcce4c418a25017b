"""Closed slopes of element-wise calls against forward mode, for every call in the table, and for whole functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.data.inputs import Inputs
from lapwing.prediction.streamlined import rules  # noqa: F401  (fills the table)
from lapwing.prediction.streamlined.functions import Fused
from lapwing.prediction.streamlined.graph import read
from lapwing.prediction.streamlined.operations import OPERATIONS, Kind
from lapwing.prediction.streamlined.schedule import schedule
from lapwing.tangent import Tangent
from tests.zoo_modules import Net

aten = torch.ops.aten
CONSTANT = torch.linspace(0.5, 2.0, 6, dtype=torch.float64)
CHANNELS = torch.linspace(0.1, 0.6, 6, dtype=torch.float64)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: torch.add(CONSTANT, x, alpha=3), "sub": lambda x: torch.sub(x, CONSTANT, alpha=2),
    "sub from": lambda x: torch.sub(CONSTANT, x, alpha=2), "rsub": lambda x: torch.rsub(x, CONSTANT, alpha=2),
    "mul": lambda x: x * CONSTANT * x, "div": lambda x: x / (CONSTANT + x.square()), "over": lambda x: 1 / (3 + x),
    "pow": lambda x: x**3, "square root of square": lambda x: (x**2 + 1) ** 0.5, "pow 2": lambda x: x**2,
    "pow tensor": lambda x: (x + 5) ** (x * 0.3), "exponential": lambda x: 2.0**x, "neg": lambda x: -x,
    "where": lambda x: torch.where(x > 0.1, x * 2, x.square()), "clamp": lambda x: x.clamp(-0.5, 0.7),
    "clamp below": lambda x: x.clamp_min(0.1), "abs": torch.abs, "sigmoid": torch.sigmoid, "atan": torch.atan,
    "masked": lambda x: x.masked_fill(CONSTANT > 1, 0.3), "relu": torch.relu, "relu6": lambda x: F.relu6(4 * x),
    "hardtanh": F.hardtanh, "exp": torch.exp, "expm1": torch.expm1, "log": lambda x: torch.log(x + 5),
    "log1p": lambda x: torch.log1p(x + 4), "sqrt": lambda x: torch.sqrt(x + 5), "rsqrt": lambda x: torch.rsqrt(x + 5),
    "reciprocal": lambda x: torch.reciprocal(x + 5), "square": torch.square, "tanh": torch.tanh, "sin": torch.sin,
    "cos": torch.cos, "erf": torch.erf, "gelu": F.gelu, "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu, "mish": F.mish, "hardswish": lambda x: F.hardswish(2 * x), "hardsigmoid": F.hardsigmoid,
    "softplus": lambda x: F.softplus(x, 2.0, 1.0), "log sigmoid": F.logsigmoid, "elu": lambda x: F.elu(x, 0.7),
    "celu": lambda x: F.celu(x, 0.5), "selu": F.selu, "leaky": lambda x: F.leaky_relu(x, 0.2),
    "prelu": lambda x: F.prelu(x, CHANNELS), "one prelu": lambda x: F.prelu(x, CHANNELS[:1]),
    "batch norm": lambda x: F.batch_norm(x, CHANNELS, CONSTANT, CONSTANT, CHANNELS),
    "plain batch norm": lambda x: F.batch_norm(x, CHANNELS, CONSTANT),
    "expanded": lambda x: (x * 2).expand(x.shape[0], 6) + 1,
    "gelu by hand": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "root mean square": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3),
    "layer norm": lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-3).sqrt() * CONSTANT,
    "population variance": lambda x: x / (x.var(-1, correction=0, keepdim=True) + 1).sqrt(),
    "population deviation": lambda x: x / x.std(-1, correction=0, keepdim=True),
    "by deviation": lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
    "nested": lambda x: (x - x.mean(-1, keepdim=True)) * ((x - x.mean(-1, keepdim=True)) ** 2).sum(-1, keepdim=True),
    "log softmax": lambda x: x - torch.logsumexp(x, -1, keepdim=True) + torch.tanh(x).mean(-1, keepdim=True),
}  # fmt: skip


@cache
def fused_of(function: Callable[[Tensor], Tensor]) -> tuple[Fused, dict[str, Any]]:
    """Returns the function as the schedule groups it, and its arguments."""
    applied = Net(lambda net, x: net.last(function(net.first(x))), first=nn.Linear(4, 6), last=nn.Linear(6, 2))
    model, x = applied.double().eval(), torch.randn(5, 4, dtype=torch.float64)
    tangent = Tangent.survey(model, x, lw.everything)
    graph = read(tangent, Inputs(x))
    steps = schedule(graph, frozenset(graph.parameters), frozenset(), "values").steps
    found = [step.fused for step in steps if step.fused is not None]
    assert len(found) == 1, "the function is not one group"
    values = graph.run(Inputs(x))
    assert found[0] is not None
    return found[0], {name: values[name] for name in (found[0].source, *found[0].certain)}


WITHOUT_SLOPE: dict[str, Callable[[Tensor], Tensor]] = {
    "digamma": lambda x: torch.digamma(x + 5), "hardshrink": F.hardshrink, "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
}  # fmt: skip


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", [*FUNCTIONS, *WITHOUT_SLOPE])
def test_variances_are_those_of_forward_mode(name: str) -> None:
    torch.manual_seed(3)
    fused, values = fused_of({**FUNCTIONS, **WITHOUT_SLOPE}[name])
    assert fused.closed == (name in FUNCTIONS)
    x = values[fused.source]
    variance = torch.rand(5, 6, dtype=torch.float64) + 0.1
    mean, found = fused.moments(x, variance, values)
    jacobian = torch.func.jacrev(lambda x: fused(x, values))(x)  # (B, D, B, D)
    torch.testing.assert_close(mean, fused(x, values))
    wanted = torch.einsum("bicj,cj->bi", jacobian.square(), variance)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_every_call_of_the_table_is_tested() -> None:
    """Except other names of the same calls, and operators that other tests register."""
    seen = {node.target for function in FUNCTIONS.values() for node in fused_of(function)[0].body}
    twins = {
        aten.add.Scalar, aten.sub.Scalar, aten.subtract.Tensor, aten.mul.Scalar, aten.multiply.Tensor, aten.div.Scalar,
        aten.divide.Tensor, aten.rsub.Scalar, aten.rsub.Tensor, aten.negative.default, aten.where.ScalarOther,
        aten.where.ScalarSelf, aten.masked_fill.Tensor, aten.clamp_max.default, aten.absolute.default,
        aten.special_expit.default, aten.arctan.default, aten.expand_as.default, aten.type_as.default,
        aten._native_batch_norm_legit_no_training.default, aten.pow.Scalar,
    }  # fmt: skip
    slopes = {target for target, entry in OPERATIONS.items() if entry.slope is not None}
    slopes = {target for target in slopes if getattr(target, "namespace", "aten") == "aten"}
    moves = {target for target, entry in OPERATIONS.items() if entry.kind & (Kind.IDENTITY | Kind.VIEW)}
    moves.add(operator.getitem)
    assert slopes - moves - seen <= twins
