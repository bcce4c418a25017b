"""Ways in which a weight counts beside its layers' uses: generic if the survey sees them, refused on later batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import lapwing as lw
from lapwing.tangent import Tangent
from tests import oracle
from tests.conformance import jacobian
from tests.network.test_sample_axis import truth
from tests.zoo_modules import Net

EVERY = lw.matching("*")

OTHER_USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "slice": lambda w, e: F.linear(e, w[:4]),
    "chunk": lambda w, e: torch.cat([F.linear(e, part) for part in w.chunk(2)], -1),
    "cat": lambda w, e: F.linear(e, torch.cat([w])),
    "stack": lambda w, e: e @ torch.stack([w])[0],
    "from the left": lambda w, e: (w.clone() @ e.T).T,
    "unbind": lambda w, e: torch.stack([(e * row).sum(-1) for row in w.unbind(0)], -1),
    "rows": lambda w, e: torch.stack([(e * row).sum(-1) for row in w], -1),
    "einsum": lambda w, e: torch.einsum("bi,oi->bo", [e, w]),
    "transposed": lambda w, e: F.linear(e, w.T.contiguous()),
    "scaled": lambda w, e: F.linear(e, 2.0 * w),
    "vectors": lambda w, e: torch.stack([torch.mv(w, row) for row in e]),
    "as inputs": lambda w, e: F.linear(w, e).T,
    "mapped": lambda w, e: torch.vmap(lambda row: w @ row)(e),
}


def gated(name: str, frozen: bool, always: bool) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A network, inputs whose gates are shut, and inputs some of which have theirs open.

    It has a layer, and another use of the layer's weight for samples with a positive second input.
    """

    def forward(net: Any, x: Tensor, extra: Tensor) -> Tensor:
        hidden, gate = torch.tanh(net.first(x)), extra[:, :1].relu()
        if always or bool(gate.any()):
            hidden = hidden + gate * torch.sin(OTHER_USES[name](net.first.weight, extra))
        return net.head(hidden)

    torch.manual_seed(0)
    model = Net(forward, first=nn.Linear(4, 4), head=nn.Linear(4, 2)).double().eval().requires_grad_(not frozen)
    x, extra = torch.randn(6, 4).double(), torch.randn(6, 4).double()
    return model, (x, -extra.abs()), (x, extra)


USES = [*((name, False) for name in OTHER_USES), ("slice", True), ("cat", True)]


@pytest.mark.parametrize(("name", "frozen"), USES)
def test_another_use_without_gradient_on_the_first_batch_is_seen(name: str, frozen: bool) -> None:
    """A mask, a gate or a flag may be 0 for the few samples of the survey: the weight is generic, rows are right."""
    model, shut, some = gated(name, frozen, always=True)
    tangent = Tangent.survey(model, shut, EVERY)
    reasons = {line.block: line.reason for line in tangent.coverage.generic}
    assert reasons == {"first.weight": "it also reaches the outputs by functions of no layer family"}
    torch.testing.assert_close(tangent.record(some).rows(), jacobian(model, some, tangent.blocks))


def test_a_product_from_the_left_without_gradient_on_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples lie on another dimension than the first, which nothing showed; no row is lost."""
    monkeypatch.setitem(OTHER_USES, "a covered one", lambda w, e: (w @ e.T).T)
    model, shut, some = gated("a covered one", False, always=True)
    tangent = Tangent.survey(model, shut, EVERY)
    assert not tangent.coverage.generic
    wanted = jacobian(model, some, tangent.blocks)
    for n in (2, 5, 6):
        found = torch.cat([record.rows() for _, record in tangent.records(tuple(value[:n] for value in some))])
        torch.testing.assert_close(found, wanted[:n])


def forces(net: Any, x: Tensor, wanted: Tensor) -> Tensor:
    """Energies, and forces where they are asked for."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = net.head(torch.tanh(net.first(x)) ** 2)
        slopes = -torch.autograd.grad(energy.sum(), x, create_graph=True)[0] if wanted.ndim == 2 else 0 * x
    return torch.cat([energy, slopes * wanted.reshape(len(x), -1)], 1)


def test_gradients_within_the_network_are_seen_although_masked() -> None:
    model = Net(forces, first=nn.Linear(3, 5), head=nn.Linear(5, 1)).double().eval()
    x, wanted = torch.randn(6, 3).double(), torch.zeros(6, 1).double()
    wanted[4:] = 1
    tangent = Tangent.survey(model, (x, wanted), EVERY)
    assert {line.family for line in tangent.coverage.lines} == {"generic"}
    for rows in (slice(0, 1), slice(5, 6)):
        one = (x[rows], wanted[rows])
        torch.testing.assert_close(tangent.record(one).rows(), truth(model, tangent, one))
    plain = Tangent.survey(model, (x, torch.zeros(6).double()), EVERY)
    assert not plain.coverage.generic
    with pytest.raises(lw.LapwingError, match="takes gradients, which it did not do"):
        plain.record((x, wanted))


class Frozen(nn.Module):
    """A frozen number used by what takes no leaf of a graph, and frozen tensors that are no floating-point numbers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.head = how, nn.Linear(4, 5), nn.Linear(5, 2)
        self.number = nn.Parameter(torch.tensor([0.5, 2.0], dtype=torch.float64), requires_grad=False)
        self.mask = nn.Parameter(torch.ones(5, 4).tril().bool(), requires_grad=False)
        self.table = nn.Parameter(torch.arange(5, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(x, self.first.weight, self.first.bias)) * self.mask.any(1) * self.table
        if self.how == "numpy":
            hidden = hidden * float(self.number.numpy()[0])
        elif self.how == "out":
            hidden = hidden * torch.mul(self.number, 2.0, out=torch.empty_like(self.number))[0]
        elif self.how == "flag" and self.number.requires_grad:
            hidden = 2 * hidden
        elif self.how == "same":
            hidden = hidden * self.number.contiguous().to(x.dtype)[1]
        return self.head(hidden)


@pytest.mark.parametrize(
    ("how", "params"),
    [(how, params) for how in ("numpy", "out", "flag", "same") for params in (lw.everything, lw.last_layer)]
    + [("same", EVERY)],
)
def test_frozen_parameters_that_take_no_gradients(how: str, params: lw.tangent.Predicate) -> None:
    model, x = Frozen(how).double().eval(), torch.randn(6, 4).double()
    model.mask.data, model.table.data = model.mask.data.bool(), model.table.data.to(torch.int8)
    tangent = Tangent.survey(model, x, params)
    names = [name for block in tangent.blocks for name in block.parameters]
    assert "mask" not in names
    own = dict(model.named_parameters())
    wanted = {name for name in names if name != "number"}
    for n in range(2):
        outputs = model(x[n : n + 1])[0]
        for name in wanted:
            slopes = torch.stack([torch.autograd.grad(f, own[name], retain_graph=True)[0].flatten() for f in outputs])
            block = next(block for block in tangent.blocks if name in block.parameters)
            parts = block.split(tangent.record(x[n : n + 1])[block.name].rows()[0])
            torch.testing.assert_close(parts[name].flatten(1), slopes)
    assert not model.number.requires_grad


def test_inputs_made_by_the_network_itself_are_inputs() -> None:
    """A rollout, or inputs moved along the network's own gradient: what made them does not count."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    x = torch.randn(6, 3).double()
    posterior = lw.fit(model, [(x, torch.arange(6) % 3)], lw.KFAC(), prior_precision=1.0)
    moved = model(x)
    assert moved.requires_grad
    torch.testing.assert_close(posterior.latent(moved).variance, posterior.latent(moved.detach()).variance)
    again = lw.fit(model, [(moved, torch.arange(6) % 3)], lw.KFAC(), prior_precision=1.0)
    assert not again.tangent.coverage.generic


def test_a_network_that_uses_forward_mode_itself() -> None:
    """Its features are a derivative along the inputs."""

    def sloped(net: Any, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            found = torch.tanh(net.first(forward_ad.make_dual(x, torch.ones_like(x))))
            return net.head(forward_ad.unpack_dual(found).tangent)

    model = Net(sloped, first=nn.Linear(3, 5), head=nn.Linear(5, 2)).double().eval()
    x = torch.randn(6, 3).double()
    posterior = lw.fit(model, [(x, torch.arange(6) % 2)], lw.Full(), params=lw.everything, prior_precision=1.0)
    rows, wanted = posterior.tangent.record(x).rows().flatten(0, 1), oracle.jacobian(model, x).flatten(0, 1)
    torch.testing.assert_close(rows @ rows.T, wanted @ wanted.T)  # in any order of the weights
