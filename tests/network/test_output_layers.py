"""Which weights `lw.last_layer` treats: those after which no others come on the way to the outputs, or a refusal."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.tangent import Tangent
from tests import oracle
from tests.refused import refused
from tests.zoo_modules import Net

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(12) % 5


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 2)


def tower(outputs: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


def hidden() -> nn.Linear:
    return nn.Linear(6, 8)


def prototypes() -> dict[str, nn.Module | nn.Parameter]:
    return {"a": hidden(), "p": parameter(5, 8)}


def residual(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    for block in net.blocks:
        h = h + block(h)
    return h


def routed(net: Any, x: Tensor) -> Tensor:
    """Each sample goes through one expert."""
    chosen, out = net.router(x).argmax(-1), x.new_zeros(len(x), 5)
    for k, expert in enumerate(net.experts):
        rows = chosen == k
        if rows.any():
            out[rows] = expert(x[rows])
    return out


class Ensemble(nn.Module):
    """Members whose weights are stacked and run by vmap."""

    def __init__(self) -> None:
        super().__init__()
        members = [tower() for _ in range(3)]
        stacked, _ = torch.func.stack_module_state(members)
        self.names = list(stacked)
        self.stacked = nn.ParameterList(nn.Parameter(value.detach()) for value in stacked.values())
        self.__dict__["member"] = members[0]

    def forward(self, x: Tensor) -> Tensor:
        def one(values: list[Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(self.member, dict(zip(self.names, values, strict=True)), (x,))

        return torch.vmap(one, (0, None))(list(self.stacked), x).mean(0)


NORMED = {
    "weight norm": (nn.utils.parametrizations.weight_norm, [f"parametrizations.weight.original{i}" for i in (0, 1)]),
    "weight norm, old": (nn.utils.weight_norm, ["weight_g", "weight_v"]),
    "spectral norm": (nn.utils.parametrizations.spectral_norm, ["parametrizations.weight.original"]),
    "spectral norm, old": (nn.utils.spectral_norm, ["weight_orig"]),
}  # fmt: skip

HEAD = ["2.weight", "2.bias"]
BOTH = ["a.2.weight", "a.2.bias", "b.2.weight", "b.2.bias"]
A_HEAD = ["a.2.weight", "a.2.bias"]

TREATED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a plain head": (tower, HEAD),
    "a frozen trunk": (lambda: nn.Sequential(nn.Linear(6, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, 5)), HEAD),
    "all frozen": (lambda: tower().requires_grad_(False), HEAD),
    "log-softmax": (lambda: nn.Sequential(*tower(), nn.LogSoftmax(-1)), HEAD),
    "batch norm": (lambda: nn.Sequential(*tower(), nn.BatchNorm1d(5)), HEAD),
    "a learned temperature": (
        lambda: Net(lambda net, x: net.a(x) / net.t.exp(), a=tower(), t=parameter(1)), A_HEAD,
    ),
    "convolution and pooling": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ),
        ["3.weight", "3.bias"],
    ),
    "x @ W.T + b": (
        lambda: Net(
            lambda net, x: torch.sin(torch.addmm(net.c, x, net.v.T)) @ net.w.mT + net.b,
            v=parameter(8, 6), c=parameter(8), w=parameter(5, 8), b=parameter(5),
        ),
        ["w", "b"],
    ),
    "a head beside the outputs": (
        lambda: Net(lambda net, x: (net.main(x), net.aux(x))[0], main=tower(), aux=tower()),
        ["main.2.weight", "main.2.bias"],
    ),
    "the mean of two towers": (lambda: Net(lambda net, x: (net.a(x) + net.b(x)) / 2, a=tower(), b=tower()), BOTH),
    "two towers joined": (lambda: Net(lambda net, x: torch.cat([net.a(x), net.b(x)], 1), a=tower(3), b=tower(2)), BOTH),
    "written into a tensor": (lambda: Net(lambda net, x: written(net, x), a=tower(3), b=tower(2)), BOTH),
    "a wide path": (
        lambda: Net(lambda net, x: net.a(x) + net.wide(x), a=tower(), wide=nn.Linear(6, 5, bias=False)),
        ["a.2.weight", "a.2.bias", "wide.weight"],
    ),
    "a residual network without a head": (
        lambda: Net(residual, first=nn.Linear(6, 5), blocks=nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3)
        )),
        ["first.weight", "first.bias", *(f"blocks.{k}.2.{name}" for k in range(3) for name in ("weight", "bias"))],
    ),
    "a tied autoencoder": (
        lambda: Net(lambda net, x: F.linear(torch.tanh(net.a(x)), net.a.weight.T, net.b), a=hidden(), b=parameter(6)),
        ["a.weight", "b"],
    ),
    "distances to prototypes": (
        lambda: Net(lambda net, x: -torch.cdist(net.a(x), net.p).square(), **prototypes()),
        ["a.weight", "a.bias", "p"],
    ),
    "layers called one sample at a time": (
        lambda: Net(lambda net, x: torch.stack([net.a(row) for row in x]), a=tower()), A_HEAD,
    ),
    "an ensemble by vmap": (Ensemble, ["stacked.2", "stacked.3"]),
    "a scripted trunk": (
        lambda: nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.Tanh())), nn.Linear(8, 5)),
        ["1.weight", "1.bias"],
    ),
    "a recurrent layer": (
        lambda: Net(lambda net, x: net.a(x.view(-1, 2, 3))[0][:, -1], a=nn.LSTM(3, 5, batch_first=True)),
        ["a.weight_ih_l0", "a.weight_hh_l0", "a.bias_ih_l0", "a.bias_hh_l0"],
    ),
    "hard routing, all experts used": (
        lambda: Net(routed, router=nn.Linear(6, 2), experts=nn.ModuleList([tower(), tower()])),
        [f"experts.{k}.2.{name}" for k in range(2) for name in ("weight", "bias")],
    ),
}  # fmt: skip
TREATED |= {
    name: (
        lambda wrap=wrap: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), wrap(nn.Linear(8, 5))),
        [f"2.{one}" for one in (*made_of, "bias")],
    )
    for name, (wrap, made_of) in NORMED.items()
}

PRODUCT = "are a product of what several of its weights give"
REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "a gate": (
        lambda: Net(lambda net, x: net.h(x) * torch.sigmoid(net.g(x)), h=tower(), g=nn.Linear(6, 1)),
        ("outputs of Net", PRODUCT, "params=lw.matching('h.2.*', 'g.*')"),
    ),
    "the force of a product": (
        lambda: Net(force(lambda net, x: net.a(x) * net.b(x)), a=tower(1), b=tower(1)),
        (PRODUCT, "params=lw.matching('a.2.*', 'b.2.*')"),
    ),
    "cosines to prototypes": (
        lambda: Net(lambda net, x: F.cosine_similarity(net.a(x)[:, None], net.p, dim=-1), **prototypes()),
        (PRODUCT, "params=lw.matching('p', 'a.*')"),
    ),
    "a learned scale an output": (
        lambda: Net(lambda net, x: net.a(x) * net.scale, a=tower(), scale=parameter(5)),
        (PRODUCT, "params=lw.matching('scale', 'a.2.*')"),
    ),
    "a scripted network": (
        lambda: torch.jit.script(tower().double().eval()),
        ("The network is scripted or traced", "write lw.fit(model, loader, lw.Diagonal(), params=lw.everything)"),
    ),
    "a scripted head": (
        lambda: nn.Sequential(hidden(), torch.jit.script(nn.Linear(8, 5))),
        ("The part 1 of Sequential is scripted or traced",),
    ),
}  # fmt: skip


def written(net: Any, x: Tensor) -> Tensor:
    out = x.new_zeros(len(x), 5)
    out[:, :3] = net.a(x)
    out[:, 3:].copy_(net.b(x))
    return out


def built(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return make().double().eval()


def treated(model: nn.Module, x: Any = X) -> list[str]:
    return list(Tangent.survey(model, x, lw.last_layer).parameters)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TREATED)
def test_the_last_layer_is_what_no_weights_follow(name: str) -> None:
    make, names = TREATED[name]
    model = built(make)
    state = lambda: {key: (id(x), x._version, x.requires_grad) for key, x in model.named_parameters()}  # noqa: E731
    before = state()
    assert sorted(treated(model)) == sorted(names)
    assert state() == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_where_no_layer_is_the_last_the_message_names_what_to_treat(name: str) -> None:
    make, parts = REFUSED[name]
    model = built(make)
    message = refused(lambda: treated(model), *parts)
    patterns = re.findall(r"'(.*?)'", message.partition("matching")[2])
    if patterns:  # the line works
        posterior = lw.fit(model, [(X, Y)], lw.Diagonal(), params=lw.matching(*patterns), prior_precision=1.0)
        assert (posterior.latent(X).variance > 0).all()


VALUED = (
    "weight norm", "spectral norm", "the mean of two towers", "log-softmax",
    "layers called one sample at a time", "a tied autoencoder", "hard routing, all experts used",
)  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VALUED)
def test_variances_are_the_dense_ones_and_follow_the_input(name: str) -> None:
    make, names = TREATED[name]
    model = built(make)
    y = torch.zeros(12, 6, dtype=torch.float64) if name == "a tied autoencoder" else Y
    likelihood = lw.Gaussian(1.0) if y.ndim == 2 else lw.Categorical()
    batches = [(X[:5], y[:5]), (X[5:10], y[5:10]), (X[10:], y[10:])]
    posterior = lw.fit(model, batches, lw.Full(), params=lw.last_layer, prior_precision=2.0, likelihood=likelihood)
    jacobian, f = oracle.jacobian(model, X, names), oracle.outputs(model, X)
    fisher = oracle.gaussian_fisher(f) if y.ndim == 2 else oracle.softmax_fisher(f)
    sigma = oracle.laplace_covariance(oracle.ggn(jacobian, fisher), 2.0)
    torch.testing.assert_close(posterior.latent(X).covariance, oracle.output_covariance(jacobian, sigma))

    default = lw.fit(model, batches, likelihood=likelihood, prior_precision=2.0)
    near, far = default.latent(torch.cat([X[:1], 30 * X[:1]])).variance.mean(1)
    assert near > 0
    assert not torch.isclose(near, far, rtol=0.01)


def test_a_head_tied_to_an_embedding_counts_in_both_uses() -> None:
    table = nn.Embedding(7, 4)
    model = Net(
        lambda net, t: net.hidden(net.table(t).mean(1)).tanh() @ net.table.weight.T, table=table, hidden=nn.Linear(4, 4)
    )
    model, tokens = model.double().eval(), torch.arange(12).view(4, 3) % 7
    tangent = Tangent.survey(model, tokens, lw.last_layer)
    assert list(tangent.parameters) == ["table.weight"]
    torch.testing.assert_close(tangent.record(tokens).rows(), oracle.jacobian(model, tokens, ["table.weight"]))


def test_inputs_that_require_gradients() -> None:
    model = built(lambda: Net(lambda net, x: net.a(x) * x[:, :1] + x[:, 1:], a=tower()))
    leaf = X.clone().requires_grad_()
    for x in (leaf, 2 * leaf, model.a[0](X).tanh()[:, :6].clone()):
        assert treated(model, x) == A_HEAD


def test_first_batches_of_one_sample() -> None:
    assert treated(built(tower), X[:1]) == HEAD
    assert treated(built(TREATED["the mean of two towers"][0]), X[:1]) == BOTH


def force(energy: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Return a forward that gives the gradient of an energy."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(energy(net, x).sum(), x, create_graph=True)[0]

    return forward


ENERGY = force(lambda net, x: net.a(x))

FORCES: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[str]]] = {
    "a force": (ENERGY, ["a.2.weight"]),
    "a force and a layer": (lambda net, x: ENERGY(net, x) + net.b(x), ["a.2.weight", "b.2.weight", "b.2.bias"]),
    "an energy and its force": (lambda net, x: torch.cat([net.a(x), ENERGY(net, x)], 1), ["a.2.weight", "a.2.bias"]),
    "torch.func.grad": (lambda net, x: torch.vmap(torch.func.grad(lambda row: net.a(row).sum()))(x), ["a.2.weight"]),
    "a gradient that is its cotangent": (
        lambda net, x: torch.autograd.grad((y := x.clone().requires_grad_()) + 1, y, net.a(x).expand(-1, 6))[0],
        ["a.2.weight", "a.2.bias"],
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FORCES)
def test_a_gradient_that_the_network_takes_has_the_last_layer_of_what_it_is_taken_of(name: str) -> None:
    forward, names = FORCES[name]

    def with_gradients(net: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return forward(net, x)

    assert treated(built(lambda: Net(with_gradients, a=tower(1), b=tower(1)))) == names


ROWS = torch.arange(12)


def tokens(rows: Tensor) -> Tensor:
    """Turn row numbers into 4 token numbers each, unseen by torch."""
    return torch.tensor([[(5 * k + j) % 12 for j in range(4)] for k in rows.tolist()])


def texts(net: Any, rows: Tensor) -> Tensor:
    return net.a(net.table(tokens(rows)).mean(1))


def over_a_graph(net: Any, rows: Tensor) -> Tensor:
    """Two layers of a graph network over all nodes; the rows only select."""
    return (X @ X.T @ net.b(torch.relu(X @ X.T @ net.a(X))))[rows]


BYPASSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[str]]] = {
    "rows looked up by number": (lambda net, rows: net.a(X[rows.tolist()]), A_HEAD),
    "rows of a buffer": (lambda net, rows: net.a(net.norm.running_mean.expand(12, 6)[rows.tolist()]), A_HEAD),
    "NumPy": (lambda net, rows: net.a(torch.from_numpy(np.sin(X.numpy()[rows.numpy()]))), A_HEAD),
    "tokens made in the forward": (texts, A_HEAD),
    "two towers": (lambda net, rows: net.a(X[rows.tolist()]) + net.b(X[rows.tolist()]), BOTH),
    "one layer": (lambda net, rows: net.b[0](X[rows.tolist()]), ["b.0.weight", "b.0.bias"]),
    "scripted and own functions": (
        lambda net, rows: net.b[2](Tripled.apply(net.s(X[rows.tolist()]), net.b[0].weight[:, :5])), BOTH[2:],
    ),
    "a graph network": (lambda net, rows: over_a_graph(net.g, rows), ["g.b.weight", "g.b.bias"]),
    "a low-rank product with a mask": (
        lambda net, rows: net.a[0](X[rows.tolist()]) @ (net.p * net.norm.running_var[:1] @ net.q).T, ["p", "q"],
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", BYPASSED)
def test_inputs_that_bypass_torch_are_data(name: str, frozen: bool) -> None:
    forward, names = BYPASSED[name]
    parts = {"a": tower(), "b": tower(), "table": nn.Embedding(12, 6), "norm": nn.BatchNorm1d(6)}
    parts["s"] = torch.jit.script(nn.Linear(6, 5))
    graph = Net(lambda net, x: x, a=nn.Linear(6, 8), b=nn.Linear(8, 5))
    model = built(lambda: Net(forward, **parts, g=graph, p=parameter(5, 2), q=parameter(2, 8)))
    assert treated(model.requires_grad_(not frozen), ROWS) == names


def encoder() -> nn.Module:
    return Net(texts, a=tower(), table=nn.Embedding(12, 6))


class Tripled(torch.autograd.Function):
    """A layer and its backward pass as one function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 3 * x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, 3 * gradient.T @ ctx.saved_tensors[0]


def test_a_layer_within_a_function_of_its_own_is_not_part_of_the_head() -> None:
    assert treated(
        built(lambda: Net(lambda net, x: net.b(Tripled.apply(x, net.a.weight)), a=hidden(), b=nn.Linear(8, 5)))
    ) == ["b.weight", "b.bias"]


def test_the_log_and_the_posterior_name_what_is_treated(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lapwing"):
        posterior = lw.fit(built(tower), [(X, Y)])
    assert "The last layer of Sequential is treated: 2.weight, 2.bias." in caplog.messages
    assert "over 45 of 101 weights of Sequential (2.weight, 2.bias), the default for classes" in repr(posterior)
