"""Networks that choose layers by values: experts, heads chosen by a number, early exits. Rows come in any order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.tangent import Tangent
from tests.conformance import jacobian
from tests.network.test_sample_axis import normal
from tests.refused import refused
from tests.zoo_modules import Net


def choice_of(x: Tensor) -> Tensor:
    """The number of the layer that each row uses, 0 to 3."""
    return (4 * x[:, 0].sigmoid()).long()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def routed(net: Any, x: Tensor) -> Tensor:
    """Each row uses one expert."""
    out, choice = x.new_zeros(len(x), 3), choice_of(x)
    for k, expert in enumerate(net.experts):
        rows = (choice == k).nonzero().squeeze(1)
        if len(rows):
            out = out.index_add(0, rows, expert(x[rows]))
    return out


def two_of_four(net: Any, x: Tensor) -> Tensor:
    """Each row uses the two experts of its largest entries, with weights that are not learned."""
    weights, choice = x.topk(2)
    out = x.new_zeros(len(x), 3)
    for k, expert in enumerate(net.experts):
        rows, place = (choice == k).nonzero(as_tuple=True)
        if len(rows):
            out = out.index_add(0, rows, weights[rows, place, None] * expert(x[rows]))
    return out


def heads(net: Any, x: Tensor) -> Tensor:
    """Each row uses the head of its number; the heads have different names and inputs."""
    z, choice, rows = torch.tanh(net.trunk(x)), choice_of(x), []
    for n, k in enumerate(choice.tolist()):
        rows.append((net.a, net.b, net.b, net.last)[k](z[n : n + 1, : 5 if k < 3 else 2]))
    return torch.cat(rows)


def exits(net: Any, x: Tensor) -> Tensor:
    """Rows leave at an early exit, which runs for all rows and only counts for these."""
    z = torch.tanh(net.trunk(x))
    early, out, leaves = net.early(z), net.late(torch.tanh(net.more(z))), choice_of(x) == 2
    return torch.where(leaves[:, None], early, out) if leaves.any() else out


def refined(net: Any, x: Tensor) -> Tensor:
    """Some rows use a second layer, which has the shape of the one that all rows use."""
    out, rows = net.experts[0](x), (choice_of(x) == 2).nonzero().squeeze(1)
    return out.index_add(0, rows, net.experts[1](x[rows])) if len(rows) else out


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "routed": lambda: Net(routed, experts=nn.ModuleList(mlp() for _ in range(4))),
    "two of four": lambda: Net(two_of_four, experts=nn.ModuleList(mlp() for _ in range(4))),
    "refined": lambda: Net(refined, experts=nn.ModuleList(mlp() for _ in range(2))),
    "heads": lambda: Net(heads, trunk=nn.Linear(4, 5), a=nn.Linear(5, 3), b=nn.Linear(5, 3), last=nn.Linear(2, 3)),
    "exits": lambda: Net(
        exits, trunk=nn.Linear(4, 5), early=nn.Linear(5, 3), more=nn.Linear(5, 6), late=nn.Linear(6, 3)
    ),
}
LAST = {
    "routed": ["experts.*.2.*"], "two of four": ["experts.*.2.*"], "refined": ["experts.*.2.*"],
    "heads": ["a.*", "b.*", "last.*"], "exits": ["early.*", "late.*"],
}  # fmt: skip


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]().double().eval()


X, Y = normal(60, 4, seed=1), torch.arange(60) % 3
ALIKE = (choice_of(X) != 0).long().argsort(stable=True)  # begins with all rows of expert 0
LEAVING = (choice_of(X) != 2).long().argsort(stable=True)  # begins with all rows of the early exit
AT_ENDS = (choice_of(X) == 2).long().argsort(stable=True).roll(1)  # begins and ends with rows of the early exit
PAIRS = X.topk(2).indices.sort(1).values.mul(torch.tensor([4, 1])).sum(1).argsort(stable=True)  # of experts 0 and 1


@pytest.mark.parametrize("params", ["last", "everything", "named"])
@pytest.mark.parametrize("name", NETWORKS)
def test_four_rows_do_not_decide_which_layers_exist(name: str, params: str) -> None:
    model, x = network(name), X[PAIRS if name == "two of four" else ALIKE]
    chosen: Any = {"last": lw.last_layer, "everything": lw.everything, "named": lw.matching(*LAST[name])}[params]
    tangent = Tangent.survey(model, x, chosen)
    if params != "everything":
        assert set(tangent.parameters) == {n for n, _ in model.named_parameters() if lw.matching(*LAST[name])(n, _)}
    z = normal(8, 4, seed=2)
    for rows, record in tangent.records(z):
        torch.testing.assert_close(record.rows(), jacobian(model, z[rows], tangent.blocks))


@pytest.mark.parametrize("method", [None, lw.KFAC(), lw.Full()], ids=["default", "KFAC", "Full"])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_variance_depends_on_the_order_of_rows(name: str, method: lw.Method | None) -> None:
    """Neither within the first batch nor if these rows are two batches."""

    def variance(order: Tensor, size: int = 60) -> Tensor:
        options: dict[str, Any] = {} if method is None else {"params": None}
        loader = list(zip(X[order].split(size), Y[order].split(size), strict=True))
        fitted = lw.fit(network(name), loader, *(() if method is None else (method,)),
                        likelihood="categorical", prior_precision=1.0, **options)  # fmt: skip
        return fitted.latent(X).variance

    wanted = variance(torch.arange(60))
    assert wanted.min() > 1e-3
    orders = [ALIKE, PAIRS, AT_ENDS] if name == "refined" else [ALIKE, PAIRS, AT_ENDS, LEAVING]
    for order in orders:
        torch.testing.assert_close(variance(order), wanted)
    for order in (torch.arange(60), torch.arange(59, -1, -1)):
        torch.testing.assert_close(variance(order, 40), wanted)


ONLY_FIRST, FIRST_TWO = choice_of(X) == 0, choice_of(X) < 2


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_the_first_batch_leaves_idle(frozen: bool, tmp_path: Path) -> None:
    """They are not in the last layer: a later batch and a prediction that use them are refused."""
    model = network("routed").requires_grad_(not frozen)
    first = (X[FIRST_TWO], Y[FIRST_TWO])
    used = r"Net uses experts\.2\.2\.weight at these inputs, .* Shuffle the data, .*params=lw\.matching"
    with pytest.raises(lw.LapwingError, match=used):
        lw.fit(model, [first, (X, Y)], likelihood="categorical")
    posterior = lw.fit(model, [first], likelihood="categorical", prior_precision=1.0)
    posterior.save(tmp_path / "posterior.safetensors")
    other = X[choice_of(X) == 2]
    ways = (lw.Linearized(), lw.Linearized(draws=4), lw.MonteCarlo(4))
    for fitted in (posterior, lw.load(tmp_path / "posterior.safetensors", model)):
        for way in ways:
            assert fitted.latent(X[FIRST_TWO], via=way).variance.min() > 1e-6
            with pytest.raises(lw.LapwingError, match=used):
                fitted.latent(other, via=way)
        with pytest.raises(lw.LapwingError, match=used):
            fitted.of(lambda f: f(other).sum(0))
    named = lw.fit(model, [first, (X, Y)], lw.KFAC(), likelihood="categorical", params=lw.matching("experts.*.2.*"))
    assert named.latent(other).variance.min() > 1e-6


def test_an_exit_that_no_row_of_the_first_batch_takes() -> None:
    late = choice_of(X) != 2
    fitted = lw.fit(network("exits"), [(X[late], Y[late])], likelihood="categorical", prior_precision=1.0)
    assert fitted.latent(X[late]).variance.min() > 1e-6
    refused(lambda: fitted.latent(X), "Net uses early.weight at these inputs")


def test_heads_chosen_by_a_text() -> None:
    """No function of torch chooses them."""

    def translated(net: Any, x: Tensor, languages: list[str]) -> Tensor:
        return torch.cat([getattr(net, language)(row[None]) for row, language in zip(x, languages, strict=True)])

    model = Net(translated, de=nn.Linear(4, 3), nl=nn.Linear(4, 3)).double().eval()
    languages = ["de"] * 8 + ["nl"] * 52
    fitted = lw.fit(model, [((X, languages), Y)], lw.Full(), params=lw.last_layer, prior_precision=1.0)
    assert len(fitted.tangent.parameters) == 4
    assert fitted.latent((X, languages)).variance.min() > 1e-6
    fitted = lw.fit(model, [((X, ["de"] * 60), Y)], lw.Full(), params=lw.last_layer, prior_precision=1.0)
    for way in (lw.Linearized(), lw.MonteCarlo(4)):
        refused(lambda way=way: fitted.latent((X[:2], ["nl", "de"]), via=way), "Net uses nl.weight at these inputs")


def test_heads_chosen_by_a_plain_number() -> None:
    """All samples share it."""
    model = (
        Net(lambda net, x, k: net.heads[k](x), heads=nn.ModuleList(nn.Linear(4, 3) for _ in range(2))).double().eval()
    )
    fitted = lw.fit(model, [((X, 0), Y)], lw.Full(), params=lw.last_layer, prior_precision=1.0)
    assert fitted.latent((X[:3], 0)).variance.min() > 1e-6
    for way in (lw.Linearized(), lw.MonteCarlo(4)):
        with pytest.raises(lw.LapwingError, match=r"Net (uses heads\.1|does not use heads\.0)\.weight at these inputs"):
            fitted.latent((X[:3], 1), via=way)


def noting(net: Any, x: Tensor) -> Tensor:
    """Notes the number of rows of each call."""
    net.sizes.add(len(x))
    return net.head(torch.tanh(net.trunk(x)) * (1.0 if net.chooses and bool(x.sum() > 1e9) else 0.5))


@pytest.mark.parametrize("params", [lw.last_layer, lw.everything], ids=["last", "everything"])
@pytest.mark.parametrize(("chooses", "spare"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_whole_batch_is_probed_only_if_rows_may_differ(
    chooses: bool, spare: bool, params: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    idle = {"spare": nn.Linear(5, 3)} if spare else {}
    layers = {"trunk": nn.Linear(4, 5), "head": nn.Linear(5, 3), **idle}
    model = Net(noting, **layers, chooses=chooses, sizes=set()).double().eval()
    tangent = Tangent.survey(model, X, params)
    assert max(model.sizes) == (60 if chooses and spare else 4)
    assert {"head.weight", "head.bias"} <= set(tangent.parameters)
    said = [record.getMessage() for record in caplog.records if "last layer of Net is treated" in record.getMessage()]
    assert said == (["The last layer of Net is treated: head.weight, head.bias."] if params is lw.last_layer else [])


@pytest.mark.parametrize("more", [{}, {"flag": True}, {"count": 3}, {"mode": "plain"}])
def test_a_number_or_a_text_of_all_rows_chooses_no_layer_of_a_row(more: dict[str, Any]) -> None:
    """A layer without a gradient on one probed row, such as behind a dead ReLU, is no expert."""
    model = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 2)}).double().eval()
    x = normal(40, 4)
    with torch.no_grad():
        model["b"].bias.fill_(-0.4)
    dead = (model["b"](model["a"](x).relu()) <= 0).all(1)
    x = torch.cat([x[dead], x[~dead]])

    def forward(net: Any, inputs: Any) -> Tensor:
        hidden = net["a"](inputs["x"]).relu()
        return net["c"](hidden + net["b"](hidden).relu())

    coverage = Tangent.survey(model, {"x": x, **more}, lw.everything, forward).coverage
    assert dead.any()
    assert not any(line.reason for line in coverage.lines)
