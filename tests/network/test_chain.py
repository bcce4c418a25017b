"""Chains of linear layers: gradients without autograd's backward pass, taken only where the graph is a chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import tangent as tn
from lapwing.network.chain import chain_gradients
from lapwing.network.tracing import output_gradients
from tests.jacobian.test_contractions import close, dense

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "relu in place": lambda: nn.ReLU(inplace=True), "gelu": nn.GELU,
    "gelu tanh": lambda: nn.GELU("tanh"), "silu": nn.SiLU, "silu in place": lambda: nn.SiLU(inplace=True),
    "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "elu": nn.ELU, "selu": nn.SELU, "celu": nn.CELU, "leaky": nn.LeakyReLU,
    "softplus": nn.Softplus, "relu6": nn.ReLU6, "hardtanh": nn.Hardtanh, "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid, "mish": nn.Mish, "log sigmoid": nn.LogSigmoid,
    "threshold": lambda: nn.Threshold(0.1, -1.0), "two": lambda: nn.Sequential(nn.Tanh(), nn.GELU()),
    "none": nn.Identity,
}  # fmt: skip


class Projection(nn.Module):
    """`x W` with W stored (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Skip(nn.Module):
    """`x + tanh(x)`, where both ways are element-wise."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.tanh()


def network(*middle: nn.Module, end: nn.Module | None = None) -> nn.Module:
    """4-6-...-5-3, in float64."""
    torch.manual_seed(0)
    parts = [nn.Linear(4, 6), *middle, nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), *([] if end is None else [end])]
    return nn.Sequential(*parts).double().eval()


def recorded(model: nn.Module, samples: int = 5, u: Tensor | None = None) -> tuple[tn.Tangent, Tensor, tn.Record]:
    """The tangent, inputs and a record of them."""
    x = torch.randn(samples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tangent = tn.Tangent.survey(model, x[:3])
    return tangent, x, tangent.record(x, u)


def is_chain(record: tn.Record) -> bool:
    """Whether the record's gradients are taken without autograd."""
    assert record.graph is not None
    return chain_gradients(record.graph, record.noted, None) is not None


@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_rows_of_a_chain(name: str, end: bool) -> None:
    """Jacobians, and products with cotangents, against jacrev; the weights keep every bit."""
    model = network(ACTIVATIONS[name](), end=ACTIVATIONS[name]() if end else None)
    before = [value.clone() for value in model.parameters()]
    tangent, x, record = recorded(model)
    assert is_chain(record)
    wanted = dense(model, x, tangent)
    close(record.rows(), wanted)
    u = torch.randn(5, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    close(recorded(model, u=u)[2].rows(), u.mT @ wanted)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("middle", [Projection(6, 6), nn.Linear(6, 6, bias=False)])
def test_linear_layers_without_activation(middle: nn.Module) -> None:
    """The gradients of the outputs are rows of the weights there, the same for every sample."""
    tangent, x, record = recorded(model := network(nn.ReLU(), middle))
    assert is_chain(record)
    close(record.rows(), dense(model, x, tangent))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_goes_through_autograd(dtype: torch.dtype) -> None:
    """There a chain would round twice, and overflow where an activation is off."""
    model = network(nn.ReLU()).to(dtype)
    x = torch.randn(3, 4, dtype=dtype)
    assert not is_chain(tn.Tangent.survey(model, x).record(x))


def test_latents_do_not_hold_the_weights() -> None:
    """What later steps of training, or a write into a latent, would change."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double().eval()
    x, y = torch.randn(5, 4).double(), torch.randint(3, (5,))
    latent = lw.fit(model, [(x, y)], lw.Diagonal(), prior_precision=1.0).latent(x)
    twin = lw.fit(model, [(x, y)], lw.Diagonal(), prior_precision=1.0).latent(x).covariance
    with torch.no_grad():
        model[1].weight.mul_(2)
    close(latent.covariance, twin)


def test_weights_written_before_the_rows_are_taken() -> None:
    """As autograd says it: the recording is of other weights."""
    model = network(nn.ReLU())
    record = recorded(model)[2]
    with torch.no_grad():
        model[2].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        record.rows()


@pytest.mark.parametrize(
    "middle",
    [nn.Softmax(-1), nn.LayerNorm(6), Skip(), nn.Unflatten(1, (6, 1)), nn.PReLU()],
    ids=lambda m: type(m).__name__,
)
def test_what_is_no_chain_goes_through_autograd(middle: nn.Module) -> None:
    """Functions that mix entries, branches, other shapes and other layers."""
    model = network(middle, *([nn.Flatten()] if isinstance(middle, nn.Unflatten) else []))
    tangent, x, record = recorded(model)
    assert not is_chain(record)
    close(record.rows(), dense(model, x, tangent))


def test_a_skip_over_a_layer_is_no_chain() -> None:
    """The input of a later layer depends on an earlier one by two ways."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).tanh()
            return self.third(h + self.second(h).tanh())

    torch.manual_seed(0)
    tangent, x, record = recorded(model := Residual().double().eval())
    assert not is_chain(record)
    close(record.rows(), dense(model, x, tangent))


def test_within_a_backward_pass() -> None:
    """Graph nodes do nothing when called there, so gradients go through autograd."""
    model = network(nn.ReLU())
    record = recorded(model)[2]
    outputs, noted = record.graph, record.noted
    assert outputs is not None
    wanted = output_gradients(outputs, noted, None, False)
    seen: list[Any] = []

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            seen.append(chain_gradients(outputs, noted, None))
            with torch.enable_grad():
                seen.append(output_gradients(outputs, noted, None, False))
            return g

    x = torch.ones(1, requires_grad=True)
    torch.autograd.grad(Inner.apply(x).sum(), x)
    assert seen[0] is None
    for found, expected in zip(seen[1], wanted, strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            close(found, expected)


def test_autocast_is_no_chain() -> None:
    """Layers that compute in another dtype than their weights'."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float()

    x = torch.randn(3, 4)
    tangent = tn.Tangent.survey(network(nn.ReLU()).float(), x, forward=forward)
    assert not is_chain(record := tangent.record(x))
    assert record.rows().isfinite().all()
