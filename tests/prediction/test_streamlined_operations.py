"""The table of operations: complete, and open to operations from outside the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.prediction.streamlined import Kind, Operation, broadcast, independent, register_operation
from lapwing.prediction.streamlined.moments import Moments
from lapwing.prediction.streamlined.operations import OPERATIONS, operation_of
from lapwing.prediction.uncertain import prepared
from lapwing.tangent import Tangent
from tests.prediction.streamlined_oracle import F64, build
from tests.refused import refused
from tests.zoo_modules import Net


@torch.library.custom_op("lapwing_test::squareplus", mutates_args=())
def squareplus(x: Tensor, b: float) -> Tensor:
    """`(x + √(x² + b)) / 2`, an activation that torch does not have."""
    return (x + (x.square() + b).sqrt()) / 2


@squareplus.register_fake
def _(x: Tensor, b: float) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)
    ctx.b = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    x, y = ctx.saved_tensors
    return gradient * y / (x.square() + ctx.b).sqrt(), None


squareplus.register_autograd(_backward, setup_context=_setup)
TARGET = torch.ops.lapwing_test.squareplus.default


def network(net: Any, x: Tensor) -> Tensor:
    """Tokens through a layer and the activation, averaged, and a head."""
    return net.last(squareplus(net.first(x), 2.0).mean(1))


def plain(net: Any, x: Tensor) -> Tensor:
    """The same with the activation written out."""
    h = net.first(x)
    return net.last(((h + (h.square() + 2.0).sqrt()) / 2).mean(1))


@pytest.fixture
def table() -> Iterator[None]:
    """Leaves the table as it was."""
    yield
    OPERATIONS.pop(TARGET, None)


def variances(together: Callable[..., Tensor], way: lw.Streamlined = lw.Streamlined()) -> Tensor:  # noqa: B008
    torch.manual_seed(0)
    model = Net(together, first=nn.Linear(4, 6), last=nn.Linear(6, 2)).double().eval()
    x = torch.randn(3, 5, 4, dtype=F64)
    tangent = Tangent.survey(model, x, lw.matching("*.bias"))
    return way.latent(tangent, build(tangent, "diagonal"), prepared(x)).variance


@pytest.mark.usefixtures("table")
def test_an_activation_from_outside_is_one_entry() -> None:
    """With a slope alone it is grouped, linearised and given its channels like torch's own."""
    refused(lambda: variances(network), "stops at lapwing_test.squareplus … from outside torch")
    register_operation(
        Operation(Kind.ELEMENTWISE, slope=lambda a, y, name: y / (a["x"].square() + a["b"]).sqrt()), TARGET
    )
    torch.testing.assert_close(variances(network), variances(plain), rtol=1e-10, atol=0.0)
    refused(lambda: variances(network, lw.Streamlined("full")), "forward mode does not pass")


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(("label", "exact"), [(broadcast, True), (independent, False)])
def test_a_rule_from_outside_says_what_its_positions_share(label: object, exact: bool) -> None:
    def rule(site: object, arguments: dict) -> Moments:
        x, root = arguments["x"], (arguments["x"].mean.square() + arguments["b"]).sqrt()
        y = (x.mean + root) / 2
        rho = x.correlation if label is broadcast else None
        return Moments(y, (y / root).square() * x.variance, rho)

    register_operation(Operation(Kind.OTHER, rule, label), TARGET)  # type: ignore[arg-type]
    difference = (variances(network) / variances(plain) - 1).abs().max()
    assert (difference < 1e-10) == exact


def test_calls_without_an_entry_use_the_tags_of_torch() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert operation_of(graph.call_function(torch.ops.aten.digamma.default, (x,))).kind == Kind.ELEMENTWISE
    assert operation_of(graph.call_function(torch.ops.aten.cumsum.default, (x, 0))).kind == Kind.OTHER
