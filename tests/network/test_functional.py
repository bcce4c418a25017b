"""Other weights are handed to the network without writing it, so that other threads see the trained ones."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import is_
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.overrides import _get_current_function_mode

import lapwing as lw
from lapwing.data.inputs import Inputs
from lapwing.network.call import Call
from lapwing.network.eager import uncompiled
from lapwing.tangent import Tangent
from tests.network.test_sample_axis import truth
from tests.quick import others_slow
from tests.zoo import ZOO
from tests.zoo_modules import Net

EVERY = lw.matching("*")

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning", "ignore:.*deprecated:DeprecationWarning")


# --- values and gradients are those of a twin that holds the weights -------------------------------------------------
class Lists(nn.Module):
    """Parameters within lists, tuples and keywords, as views, by element, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(3, 4)) for _ in range(3)])
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.parts
        both = torch.cat(tensors=[first, second], dim=0)  # (6, 4)
        mixed = torch.einsum("bi,oi,ci->boc", [x * self.scale, first, second]).flatten(1)[:, :3]
        view = third.view(-1).clone()
        view[:4].mul_(2.0)
        rows = torch.stack(tuple(row for row in third))
        more = torch._foreach_mul([first, third], [2.0, 3.0])
        product = torch.linalg.multi_dot([x, first.T, third @ second.mT])
        size = len(first) + first.shape[0] + second.numel() + int(third.requires_grad)
        out = F.linear(x, weight=both)[:, :3] + mixed + x @ view.reshape(3, 4).T + x @ (rows + more[1] + more[0]).T
        return torch.tanh(out + product) + size * x[:, :3] * first[1, :3] + x @ third.data.T


class Squares(torch.autograd.Function):
    """A product with a backward pass of its own, which function modes do not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight).square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        slope = 2 * gradient * (x @ weight)
        return slope @ weight.T, x.T @ slope


def _own(function: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """A weight that is used by a function of one's own."""
    weight = nn.Parameter(torch.randn(4, 5))
    return Net(lambda net, x: net.head(function(x, net.weight)), weight=weight, head=nn.Linear(5, 3))


def _attention() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        tokens = net.layer(x[:, None] * torch.arange(1.0, 4.0).to(x)[:, None])
        return net.head((net.scale.exp() * net.other(tokens, tokens, tokens)[0]).mean(1))

    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    other = nn.MultiheadAttention(4, 2, kdim=4, vdim=4, batch_first=True)
    return Net(forward, layer=layer, other=other, head=nn.Linear(4, 3), scale=nn.Parameter(torch.rand(4) + 0.5))


def _mlp(wrap: Callable[[nn.Linear], nn.Module] = lambda layer: layer) -> nn.Module:
    return nn.Sequential(wrap(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


def _over_weights(x: Tensor, weight: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: x @ row, in_dims=1, out_dims=1)(weight)


AWKWARD: dict[str, Callable[[], nn.Module]] = {
    "lists": Lists,
    "attention": _attention,
    "weight norm by hooks": lambda: _mlp(nn.utils.weight_norm),
    "spectral norm": lambda: _mlp(parametrizations.spectral_norm),
    "spectral norm by hooks": lambda: _mlp(nn.utils.spectral_norm),
    "orthogonal": lambda: _mlp(parametrizations.orthogonal),
    "pruned": lambda: _mlp(lambda layer: prune.l1_unstructured(layer, "weight", 0.3)),
    "compiled child": lambda: _mlp(lambda layer: torch.compile(layer, backend="eager")),
    "data parallel": lambda: nn.DataParallel(_mlp()),
    "autograd function": lambda: _own(Squares.apply),
    "frozen autograd function": lambda: _own(Squares.apply).requires_grad_(False),
    "scripted": lambda: _mlp(torch.jit.script),
    "frozen and scripted": lambda: _mlp(torch.jit.script).requires_grad_(False),
    "scripted function": lambda: _own(torch.jit.script(_product)),
    "vmap": lambda: _own(lambda x, weight: torch.func.vmap(lambda column: x @ column, out_dims=1)(weight.T)),
    "vmap over weights": lambda: _own(_over_weights),
    "vmap over frozen weights": lambda: _own(_over_weights).requires_grad_(False),
}
UNSEEN = {"autograd function", "frozen autograd function", "scripted", "frozen and scripted", "scripted function",
          "vmap over weights", "vmap over frozen weights"}  # fmt: skip


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


def _agrees(build: Callable[[], nn.Module], x: Any) -> bool:
    """Compares outputs and gradients at moved weights with a twin that holds them; returns `unseen` of the survey."""
    model, other = build(), build().requires_grad_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    own = dict(model.named_parameters())
    tangent = Tangent.survey(model, x, EVERY)
    generator = torch.Generator().manual_seed(1)
    values = {n: v.detach() + 0.1 * torch.randn(v.shape, generator=generator, dtype=v.dtype) for n, v in own.items()}
    with torch.no_grad():
        for name, value in other.named_parameters():
            value.copy_(values[name])
    values = {name: value.requires_grad_() for name, value in values.items()}
    with torch.enable_grad():
        found = tangent.call_with(values, x)
        wanted = Call(other).rows(Inputs(x))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    options = {"allow_unused": True, "materialize_grads": True}
    gradients = torch.autograd.grad(found.square().sum(), [values[name] for name in own], **options)
    theirs = torch.autograd.grad(wanted.square().sum(), list(other.parameters()), **options)
    torch.testing.assert_close(gradients, theirs, rtol=1e-9, atol=1e-9)
    assert all(value is own[name] for name, value in model.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return tangent.plan.unseen


@pytest.mark.parametrize("name", AWKWARD)
def test_other_weights_give_what_a_twin_with_them_gives(name: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return AWKWARD[name]().double().eval()

    assert _agrees(build, torch.randn(5, 4).double()) is (name in UNSEEN)


@pytest.mark.parametrize("name", others_slow(ZOO))
def test_other_weights_of_the_zoo(name: str) -> None:
    assert not _agrees(lambda: uncompiled(ZOO[name].build()), ZOO[name].inputs(3, 0))


# --- what another thread sees ----------------------------------------------------------------------------------------
@contextmanager
def watched(model: nn.Module, layer: nn.Module, x: Tensor) -> Iterator[list[bool]]:
    """Within each call of a layer by this thread, lets another one call, read and copy the network.

    Yields:
        Whether all was as in the trained network, look by look.
    """
    here, seen, state = threading.get_ident(), [], {n: v.clone() for n, v in model.state_dict().items()}
    ids = [id(value) for value in model.parameters()]

    def same(other: nn.Module) -> bool:
        now = other.state_dict()
        return now.keys() == state.keys() and all(torch.equal(now[name], state[name]) for name in state)

    def outputs() -> Tensor:
        with torch.no_grad():
            return model(x)

    def look() -> bool:
        unmoved = same(model) and same(copy.deepcopy(model)) and [id(value) for value in model.parameters()] == ids
        return unmoved and torch.equal(outputs(), reference)

    def ask(*_: Any) -> None:
        if threading.get_ident() == here:
            seen.append(pool.submit(look).result())

    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.set_num_threads, 1).result()
        reference = pool.submit(outputs).result()
        hook = layer.register_forward_pre_hook(ask)
        try:
            yield seen
        finally:
            hook.remove()


WORK: dict[str, Callable[[nn.Module, Tensor, Any], Any]] = {
    "Monte Carlo": lambda posterior, x, loader: posterior.predict(x, via=lw.MonteCarlo(draws=2)),
    "generic parameters": lambda posterior, x, loader: posterior.latent(x).covariance,
    "forward mode": lambda posterior, x, loader: posterior.tangent.record(x).jvp(
        posterior.covariance.sample(1, torch.Generator())
    ),
    "mean field": lambda posterior, x, loader: lw.fit(posterior.model, loader, lw.MeanField(steps=2)),
    "ELLA": lambda posterior, x, loader: lw.fit(posterior.model, loader, lw.ELLA(rank=2, rows=4)),
    "default": lambda posterior, x, loader: lw.fit(posterior.model, loader),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", WORK)
def test_other_threads_see_the_trained_network(name: str) -> None:
    x = torch.randn(4, 4).double()
    model, loader = _attention().double().eval(), [(x, torch.tensor([0, 1, 2, 0]))]
    posterior = lw.fit(model, loader, lw.Diagonal(), params=EVERY, prior_precision=10.0)
    with watched(model, model.head, x) as seen:
        WORK[name](posterior, x, loader)
    assert len(seen) > 1
    assert all(seen)


@pytest.mark.parametrize("name", ["attention", "scripted"])
def test_an_exception_in_the_middle_leaves_nothing(name: str) -> None:
    model, x = AWKWARD[name]().double().eval(), torch.randn(5, 4).double()
    posterior = lw.fit(model, [(x, torch.arange(5) % 3)], lw.Diagonal(), params=EVERY, prior_precision=10.0)
    before, own, wanted = copy.deepcopy(model.state_dict()), list(model.parameters()), model(x)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = list(model.children())[-1].register_forward_pre_hook(stop)
    for ask in (lambda: posterior.predict(x, via=lw.MonteCarlo(draws=2)), lambda: posterior.latent(x)):
        with pytest.raises(KeyboardInterrupt):
            ask()
    hook.remove()
    assert all(map(is_, model.parameters(), own))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(x), wanted)
    assert _get_current_function_mode() is None


def test_weights_that_a_closure_holds() -> None:
    model, x = nn.Linear(4, 3).double().eval(), torch.randn(5, 4).double()
    tangent = Tangent.survey(model, x, EVERY, forward=lambda _, x, held=model.weight: torch.tanh(x @ held.T))
    values = {name: torch.full_like(value, 0.5) for name, value in model.named_parameters()}
    with torch.no_grad():
        torch.testing.assert_close(tangent.call_with(values, x), torch.tanh(0.5 * x.sum(1, keepdim=True)).expand(-1, 3))


# --- weights that no call can replace --------------------------------------------------------------------------------
class RunAgain(torch.autograd.Function):
    """Runs a module in the forward pass, and again in the backward pass, as adjoint solvers do."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, strict: bool, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.module, ctx.strict = module, strict
        ctx.save_for_backward(x, *parameters)
        return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            out = ctx.module(x := x.detach().requires_grad_())
            wanted = [value for value in (x, *parameters) if value.requires_grad]
            rows = iter(torch.autograd.grad(out, wanted, gradient, allow_unused=not ctx.strict))
        return None, None, *(next(rows) if value.requires_grad else None for value in (x, *parameters))


def adjoint(strict: bool = False) -> nn.Module:
    forward = lambda net, x: net.head(RunAgain.apply(net.block, strict, net.first(x), *net.block.parameters()))  # noqa: E731
    return Net(forward, first=nn.Linear(4, 4), block=_mlp(), head=nn.Linear(3, 3)).double().eval()


@pytest.mark.parametrize("names", [["head.weight", "head.bias"], ["first.weight", "first.bias"]])
def test_weights_around_such_a_function_have_the_gradients_of_a_plain_call(names: list[str]) -> None:
    model, x = adjoint(), torch.randn(5, 4).double()
    tangent = Tangent.survey(model, x, lw.last_layer if names[0][0] == "h" else lw.matching("first.*"))
    assert list(tangent.parameters) == names
    torch.testing.assert_close(tangent.record(x).rows(), truth(model, tangent, x))


def force(net: Any, x: Tensor) -> Tensor:
    """The gradient of an energy, with the graph of its own that no caller has switched on."""
    x = x.detach().requires_grad_()
    out = torch.autograd.grad(net.energy(x).sum(), x, create_graph=True)[0]
    return out[..., None].expand(-1, -1, net.positions) if net.positions else out


@pytest.mark.parametrize("positions", [0, 2])
def test_a_network_that_takes_gradients_without_enable_grad(positions: int) -> None:
    energy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1, bias=False))
    model, x = Net(force, energy=energy, positions=positions).double().eval(), torch.randn(6, 3).double()
    y = model(x).detach() + 0.1

    def within(model: nn.Module, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return model(x)

    found, wanted = (
        lw.fit(copy.deepcopy(model), [(x, y)], lw.Full(), likelihood=lw.Gaussian(0.1), prior_precision=2.0, forward=way)
        for way in (None, within)
    )
    for via in (None, lw.MonteCarlo(draws=3)):
        predictions = [posterior.predict(x, via=via) for posterior in (found, wanted)]
        torch.testing.assert_close(predictions[0].mean, predictions[1].mean)
        torch.testing.assert_close(predictions[0].variance, predictions[1].variance)
        assert not predictions[0].mean.requires_grad
