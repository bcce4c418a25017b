"""The survey and its chunks: memory stays within the budget at any batch size, and changes no answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.jacobian.jacobian import BlockJacobian
from lapwing.jacobian.layers import READERS
from lapwing.jacobian.layers.linear import LinearUse
from lapwing.network.recording_plan import RecordingPlan
from lapwing.prediction.uncertain import prepared
from lapwing.tangent import Tangent
from lapwing.tangent.stored import from_json, to_json
from papers.common.measure import LiveBytes
from tests import oracle
from tests.conformance import jacobian
from tests.prediction.streamlined_oracle import build, surveyed
from tests.quick import others_slow
from tests.refused import refused
from tests.zoo import ZOO
from tests.zoo_modules import Net

EVERY = lw.matching("*")
SMALL = 2**24


def sequence() -> nn.Module:
    """Embedding, norm, position-wise layers and a head."""
    together = lambda net, x: net.head(torch.relu(net.mix(net.norm(net.embed(x)))).mean(1))  # noqa: E731
    layers = {"embed": nn.Embedding(500, 64), "norm": nn.LayerNorm(64), "mix": nn.Linear(64, 128)}
    return Net(together, **layers, head=nn.Linear(128, 10))


def recurrent() -> nn.Module:
    layer = nn.LSTM(16, 32, batch_first=True)
    return Net(lambda net, x: net.head(net.layer(x)[0][:, -1]), layer=layer, head=nn.Linear(32, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def cnn() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.MaxPool2d(4), nn.Flatten(), nn.Linear(256, 10))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16, patch_size=4, num_channels=3, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, num_labels=10,
    )  # fmt: skip
    return ViTForImageClassification(config)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "mlp": (mlp, lambda b: torch.randn(b, 64)),
    "cnn": (cnn, lambda b: torch.randn(b, 3, 16, 16)),
    "vit": (vit, lambda b: {"pixel_values": torch.randn(b, 3, 16, 16)}),
    "sequence": (sequence, lambda b: torch.randint(500, (b, 20))),
    "recurrent": (recurrent, lambda b: torch.randn(b, 12, 16)),
    "many outputs": (
        lambda: nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 300)),
        lambda b: torch.randn(b, 64),
    ),
}


def built(name: str, samples: int) -> tuple[nn.Module, Any]:
    make, inputs = NETWORKS[name]
    torch.manual_seed(0)
    return make().eval(), inputs(samples)


def contract(tangent: Tangent, x: Any) -> dict[str, Tensor]:
    """A contraction of every kind, over all chunks."""
    totals: dict[str, Tensor] = {}
    with torch.no_grad():
        for _, record in tangent.records(x):
            for name in record:
                jacobian = record[name]
                found = {"squares": jacobian.squared_sum(), "norm": jacobian.squared_norm()}
                found["gram"] = jacobian.weighted_gram(torch.ones(jacobian.size)).sum(0)
                for key, value in found.items():
                    totals[f"{name}/{key}"] = totals.get(f"{name}/{key}", 0) + value
    return totals


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", NETWORKS)
def test_chunks_shrink_with_the_budget(name: str) -> None:
    model, x = built(name, 4)
    lengths = [Tangent.survey(model, x, EVERY, memory=2**power).chunk_length() for power in (24, 26, 28, 30, 34)]
    assert lengths == sorted(lengths)
    assert 1 <= lengths[0] < lengths[-1]
    tangent = Tangent.survey(model, x, EVERY, memory=SMALL)
    assert tangent.chunk_length(dtype=torch.float64) <= max(1, tangent.chunk_length() // 2 + 1)
    assert tangent.chunk_length(scratch_per_sample=10**12) == 1


@pytest.mark.quick(2)
@pytest.mark.parametrize(("name", "samples"), [*((name, 40) for name in NETWORKS), ("mlp", 150), ("sequence", 150)])
def test_the_peak_stays_within_twice_the_budget(name: str, samples: int) -> None:
    model, x = built(name, samples)
    tangent = Tangent.survey(model, x, EVERY, memory=SMALL)
    with LiveBytes() as live:
        totals = contract(tangent, x)
    held = sum(value.numel() * value.element_size() for value in totals.values())
    assert live.peak - held < 2 * SMALL, f"{live.peak / SMALL:.2f} times the budget"
    del totals


def test_the_budget_is_used() -> None:
    """The measure measures, and chunks are not needlessly small."""
    model, x = built("cnn", 50)
    with LiveBytes() as live:
        contract(Tangent.survey(model, x, EVERY, memory=SMALL), x)
    assert live.peak > SMALL / 4
    with LiveBytes() as whole:
        contract(Tangent.survey(model, x, EVERY), x)
    assert whole.peak > 3 * live.peak


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=[] if (name, method) == ("cnn", lw.KFAC()) else pytest.mark.slow)
        for name in ("mlp", "cnn")
        for method in (lw.Diagonal(), lw.KFAC(), lw.ELLA(rank=5, rows=20), lw.SampledLLA(4))
    ],
    ids=str,
)
def test_joint_covariances_and_draws_stay_within_twice_the_budget(name: str, method: lw.Method) -> None:
    samples = {"mlp": 160, "cnn": 16}[name]
    model, x = built(name, samples)
    data = [(x[:16].clone(), torch.arange(16) % 10)]
    small = lw.fit(model, data, method, memory=SMALL, prior_precision=10.0)
    large = replace(small, tangent=replace(small.tangent, memory=2**30))
    found = []
    for via, joint in ((lw.Linearized(), True), (lw.MonteCarlo(2), False)):
        many = x if joint else torch.cat([x] * (2000 // samples))
        with LiveBytes() as live:
            found.append(small.latent(many, via=via, joint=joint))
        returned = sum(value.nbytes for value in vars(found[-1]).values() if isinstance(value, Tensor))
        assert live.peak - returned < 2 * SMALL, f"{live.peak / SMALL:.2f} times the budget"
        torch.testing.assert_close(found[-1].mean, large.latent(many, via=via, joint=joint).mean, rtol=1e-4, atol=1e-4)
    wanted = large.latent(x, joint=True)
    torch.testing.assert_close(found[0].covariance, wanted.covariance, rtol=2e-3, atol=1e-4)
    assert torch.equal(found[0].covariance, found[0].covariance.permute(2, 3, 0, 1))


def test_joint_covariances_by_chunks_as_long_as_what_samples_share() -> None:
    shifted = lambda net, x, shared: net.head(torch.tanh(net.first(x) + shared.mean()))  # noqa: E731
    model = Net(shifted, first=nn.Linear(4, 6), head=nn.Linear(6, 3)).double().eval()
    batch = {"x": torch.randn(23, 4).double(), "shared": torch.randn(5, 4).double()}
    posterior = lw.fit(model, [{**batch, "labels": torch.arange(23) % 3}], lw.KFAC(), params=EVERY, prior_precision=1.0)
    wanted = posterior.latent(batch, joint=True)
    lengths = set()
    for memory in range(10_000, 60_000, 1_000):
        small = replace(posterior, tangent=replace(posterior.tangent, memory=memory))
        lengths.add(23 % max(1, small.tangent.chunk_length() // 2))
        torch.testing.assert_close(small.latent(batch, joint=True).covariance, wanted.covariance)
    assert 5 in lengths


@pytest.mark.parametrize("name", others_slow(ZOO))
def test_one_sample_gives_the_same_survey(name: str) -> None:
    case, many = ZOO[name], surveyed(name)
    one = Tangent.survey(case.build(), case.inputs(1, 0), EVERY)
    assert one.blocks == many.blocks
    assert one.plan.uses == many.plan.uses
    assert not one.plan.single_sample
    rows = [tangent.record(case.inputs(3, 1)).rows() for tangent in (one, many)]
    torch.testing.assert_close(*rows)


def test_a_network_that_runs_on_one_sample_only_says_so_later() -> None:
    def few(net: Any, x: Tensor) -> Tensor:
        if len(x) > net.largest:
            raise ValueError("cannot handle batch sizes > 1 if no padding token is defined")
        return net.linear(x)

    model = Net(few, linear=nn.Linear(4, 2), largest=1).eval()
    x, y = torch.randn(5, 4), torch.arange(5) % 2
    posterior = lw.fit(model, [(x[i : i + 1], y[i : i + 1]) for i in range(5)], lw.KFAC())
    parts = torch.cat([posterior.latent(x[i : i + 1]).variance for i in range(5)])
    model.largest = 5
    refused(lambda: posterior.latent(x), "put a larger batch first")
    torch.testing.assert_close(lw.fit(model, [(x, y)], lw.KFAC()).latent(x).variance, parts)


@pytest.mark.parametrize("name", others_slow(ZOO))
def test_json_round_trip(name: str) -> None:
    case, tangent, x = ZOO[name], surveyed(name), ZOO[name].inputs(3, 0)
    data = json.loads(json.dumps(to_json(tangent)))
    again = from_json(data, case.build(), None, None)
    assert again.blocks == tangent.blocks
    assert again.coverage == tangent.coverage
    assert RecordingPlan.from_json(json.loads(json.dumps(tangent.plan.to_json())), tangent.blocks) == tangent.plan
    last = (*tangent.plan.last, -1)[0]  # as in files of lapwing 0.3.0
    older = RecordingPlan.from_json({**tangent.plan.to_json(), "last": last}, tangent.blocks)
    assert older.last == (() if last < 0 else (last,))
    torch.testing.assert_close(again.record(x).rows(), tangent.record(x).rows())


GENERIC = {
    "bilinear": {"bilinear.weight", "bilinear.bias"},
    "vit": {"vit.embeddings.cls_token"},
    "weight_norm": {f"0.parametrizations.weight.original{i}" for i in (0, 1)},
}
"""Blocks of the zoo that no family covers; every other one is covered, since a generic one is slow, not wrong."""


@pytest.mark.parametrize("name", ZOO)
def test_coverage_names_every_parameter_once_and_says_why_not(name: str) -> None:
    tangent = surveyed(name)
    report = tangent.coverage
    assert {line.block for line in report.generic} == GENERIC.get(name, set())
    named = [parameter for line in report.lines for parameter in line.parameters]
    own = dict(oracle.uncompiled(tangent.model).named_parameters())
    assert sorted(named) == sorted(own)
    assert sum(line.weights for line in report.lines) == sum(value.numel() for value in own.values())
    for line in report.lines:
        assert (line.family == "generic") == bool(line.reason)
        assert line.block in str(report)


@pytest.mark.parametrize("method", [lw.Full(), lw.Diagonal(), lw.KFAC(), lw.ELLA(rank=4, rows=12)], ids=str)
def test_a_trunk_without_gradients_has_none(method: lw.Method, caplog: pytest.LogCaptureFixture) -> None:
    without = torch.no_grad()(lambda net, x: net.trunk(x).relu())
    model = Net(lambda net, x: net.head(without(net, x)), trunk=nn.Linear(4, 5), head=nn.Linear(5, 3)).double().eval()
    x = torch.randn(8, 4, dtype=torch.float64)
    loader = [(x[:5], torch.arange(5) % 3), (x[5:], torch.arange(3) % 3)]
    last = lw.fit(model, loader)
    assert [block.name for block in last.tangent.blocks] == ["head"]
    assert not caplog.text
    whole = lw.fit(model, loader, method, params=lw.everything, prior_precision=2.0)
    assert "trunk.weight, trunk.bias" in caplog.text
    assert "within torch.no_grad()" in str(whole.tangent.coverage)
    record = whole.tangent.record(x)
    torch.testing.assert_close(record.rows(), jacobian(model, x, whole.tangent.blocks))
    assert not any(record[block].rows().any() for block in record if block.startswith("trunk"))
    head = lw.fit(model, loader, method, params=lw.matching("head.*"), prior_precision=2.0)
    if not isinstance(method, lw.ELLA):  # whose rows are drawn among all weights
        torch.testing.assert_close(whole.latent(x).covariance, head.latent(x).covariance)


def weighed(net: Any, x: Tensor) -> Tensor:
    """Weights that are read as attributes, transposed and by keyword."""
    h = torch.tanh(net.first(x)) @ net.weight.T
    if net.weight.requires_grad:
        h = F.layer_norm(h, (5,), weight=net.scale)
    return net.head(torch.cat([h, net.scale.expand_as(h)], 1)[:, :5])


def test_layers_that_are_not_treated_keep_nothing() -> None:
    layers = [layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh())]
    model, x = nn.Sequential(*layers, nn.Linear(32, 3)).eval(), torch.randn(64, 32)
    tangent = Tangent.survey(model, x, lw.last_layer)
    with LiveBytes() as live:
        record = tangent.record(x)
    assert live.peak < 6 * x.nbytes  # of 24 layers
    assert record.outputs.shape == (64, 3)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("names", ["first.*", "weight", "scale", "head.*", "*"])
def test_weights_that_are_not_treated_are_constants(names: str) -> None:
    parts = {"weight": nn.Parameter(torch.randn(5, 6)), "scale": nn.Parameter(torch.ones(5))}
    model = Net(weighed, **parts, first=nn.Linear(4, 6), head=nn.Linear(5, 3)).double().eval()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    tangent = Tangent.survey(model, x.detach(), lw.matching(names))
    rows = tangent.record(x).rows()
    parameters = dict(model.named_parameters())
    derivatives = torch.func.jacrev(lambda values: torch.func.functional_call(model, values, (x,)))(parameters)
    wanted = torch.cat([block.join(derivatives) for block in tangent.blocks], -1)
    torch.testing.assert_close(rows, wanted)
    slopes = (torch.autograd.grad(values.square().sum(), x, retain_graph=True)[0] for values in (rows, wanted))
    torch.testing.assert_close(*slopes)


@pytest.mark.quick(1)
@pytest.mark.parametrize("method", [lw.Full(), lw.KFAC()], ids=str)
def test_a_parameter_without_dimensions(method: lw.Method) -> None:
    parts = {"head": nn.Linear(4, 3), "temperature": nn.Parameter(torch.tensor(1.3))}
    model = Net(lambda net, x: net.head(x) * net.temperature, **parts).double().eval()
    x = torch.randn(8, 4, dtype=torch.float64)
    posterior = lw.fit(model, [(x, torch.arange(8) % 3)], method, params=lw.everything, prior_precision=20.0)
    assert posterior.sample(3)["temperature"].shape == (3,)
    drawn = posterior.latent(x, via=lw.MonteCarlo(400)).covariance
    exact = posterior.latent(x).covariance
    assert (drawn - exact).norm() < 0.2 * exact.norm()
    assert posterior.predict(x, via=lw.Streamlined()).probs.isfinite().all()


def conditional(net: Any, x: Tensor) -> Tensor:
    """A layer that runs if the sum of the inputs has one sign."""
    h = torch.tanh(net.first(x))
    return net.head(net.extra(h) if bool(x.sum() > 0) is net.positive else h)


def test_a_layer_that_the_first_batch_did_not_run_is_left_to_the_generic_family() -> None:
    """`test_refusals.py` has the layer that the first batch ran and a later one does not."""
    layers = {"first": nn.Linear(4, 4), "extra": nn.Linear(4, 4), "head": nn.Linear(4, 2)}
    model, x = Net(conditional, **layers, positive=False).double().eval(), torch.rand(5, 4).double()
    tangent = Tangent.survey(model, x)
    assert tangent.record(x).rows().shape == (5, 2, tangent.size)
    torch.testing.assert_close(tangent.record(-x).rows(), jacobian(model, -x, tangent.blocks))


def shared_and_tied() -> nn.Module:
    """A layer in two places, a weight in two layers, a place without a module."""
    twice = nn.Linear(4, 4)
    model = nn.Sequential(twice, nn.Sequential(nn.BatchNorm1d(4), twice), nn.ReLU(), nn.Linear(4, 4, bias=False))
    model[3].weight = twice.weight
    model[2].register_module("nothing", None)
    return model


@pytest.mark.parametrize("name", [*ZOO, "shared and tied"])
def test_a_state_has_the_names_that_the_network_gives(name: str) -> None:
    shared = name == "shared and tied"
    tangent = Tangent.survey(shared_and_tied().eval(), torch.randn(3, 4), EVERY) if shared else surveyed(name)
    state, own = tangent.state(), oracle.uncompiled(tangent.model)
    parameters = dict(own.named_parameters())
    assert list(state)[: len(parameters)] == list(parameters)
    buffers = [name for name in own.state_dict() if name not in dict(own.named_parameters(remove_duplicate=False))]
    real = {name for name in buffers if own.get_buffer(name).is_floating_point()}
    kept = {name for name, _ in own.named_buffers()}  # once, where a module has two names
    assert set(list(state)[len(parameters) :]) == real & kept
    assert all(state[name] is value for name, value in parameters.items())


def test_a_last_layer_has_no_gradients_of_its_own_to_hold():
    """Where the outputs themselves are the cotangents; numbers in their place are counted."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1000)).eval(), torch.randn(4, 16)
    tangent = Tangent.survey(model, x, lw.last_layer, memory=2**26)
    assert tangent.plan.last == (0,)
    assert tangent.chunk_length() == 8
    assert tangent.chunk_length(columns=1000) == 3
    assert Tangent.survey(model, x, lw.matching("0.*"), memory=2**26).plan.last == ()


def test_what_does_not_fit_at_once_is_said(caplog):
    """256 outputs behind two 64-channel maps: all of one sample's gradients are over 16 MiB, one output's are not."""
    convolutions = nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 64, 256)).eval()
    x = torch.randn(2, 1, 8, 8)
    with caplog.at_level("INFO", "lapwing"):
        Tangent.survey(model, x, EVERY)
        assert not caplog.records
        tangent = Tangent.survey(model, x, EVERY, memory=SMALL)
    assert "One sample of Sequential needs about 29 MiB (C = 256)" in caplog.text
    assert "Pass memory=33554432 to process them in one" in caplog.text
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert tangent.chunk_length() == 1


def test_a_sample_above_the_budget_is_warned_of(caplog):
    """The rows of a generic layer are formed whole; a large image is taken by strips of its positions."""
    model, x = nn.Bilinear(64, 64, 1400), torch.randn(2, 64)
    forward = lambda network, batch: network(batch, batch)[:, :2]  # noqa: E731
    with caplog.at_level("WARNING", "lapwing"):
        Tangent.survey(model.eval(), x, EVERY, forward)
        assert not caplog.records
        Tangent.survey(model, x, EVERY, forward, memory=SMALL)
    assert "One sample of Bilinear needs about 66 MiB even for one output and one position at a time" in caplog.text
    assert "pass memory=134217728" in caplog.text


JOINED: dict[str, tuple[Callable[[Tensor, int], Tensor], str]] = {
    "broadcast": (lambda rows, samples: rows, "embedding"),
    "repeat": (lambda rows, samples: rows.repeat(samples, 1, 1), "generic"),
    "sum": (lambda rows, samples: rows.sum(0), "generic"),
}
"""How a table of positions that is read once for the whole batch is joined to the tokens, and its family."""


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("samples", [1, 3])
def test_a_table_of_positions(name: str, samples: int) -> None:
    """It is spread over the samples if the network's outputs stay the same, else left to the generic family."""
    join, family = JOINED[name]

    def together(net: Any, tokens: Tensor) -> Tensor:
        rows = join(net.positions(torch.arange(tokens.shape[1])[None]), len(tokens))
        return net.head(torch.tanh(net.tokens(tokens) + rows).mean(1))

    layers = {"tokens": nn.Embedding(7, 4), "positions": nn.Embedding(6, 4), "head": nn.Linear(4, 3)}
    model = Net(together, **layers).double().eval()
    tangent = Tangent.survey(model, torch.randint(7, (4, 5)), EVERY)
    found = {line.block.removesuffix(".weight"): line.family for line in tangent.coverage.lines}
    assert found == {"tokens": "embedding", "positions": family, "head": "linear"}
    assert tangent.plan.spread == (family == "embedding")
    x = torch.randint(7, (samples, 6))
    record = tangent.record(x)
    torch.testing.assert_close(record.outputs, model(x).detach())
    torch.testing.assert_close(record.rows(), jacobian(model, x, tangent.blocks))


@pytest.mark.parametrize("flag", ["sparse", "scale_grad_by_freq"])
@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_flags_of_tables_do_not_change_the_derivative(layer: type[nn.Module], flag: str) -> None:
    """Sparse gradients, and gradients that are scaled by frequency in training."""

    def rows(value: bool) -> Tensor:
        torch.manual_seed(0)
        table = layer(7, 4, **{flag: value})
        middle = [nn.Flatten()] if layer is nn.Embedding else []
        model = nn.Sequential(table, *middle, nn.Linear(4 * (5 if middle else 1), 3)).double().eval()
        tokens = torch.arange(20).reshape(4, 5) % 3
        record = Tangent.survey(model, tokens, EVERY).record(tokens)
        assert all(value.grad is None for value in model.parameters())
        return record.rows()

    assert torch.equal(rows(True), rows(False))


def test_hooks_on_activations_do_not_change_the_derivative() -> None:
    def clipping(net: Any, x: Tensor, clip: bool = True) -> Tensor:
        hidden = torch.tanh(net.first(x)) * net.scale
        if clip and hidden.requires_grad:
            hidden.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return net.head(hidden)

    parts = {"first": nn.Linear(4, 5), "head": nn.Linear(5, 2), "scale": nn.Parameter(torch.tensor(2.0))}
    model, x = Net(clipping, **parts).double().eval(), torch.randn(6, 4).double()
    rows = Tangent.survey(model, x, EVERY).record(x).rows()
    plain = Tangent.survey(model, x, EVERY, lambda model, x: model(x, clip=False)).record(x).rows()
    assert torch.equal(rows, plain)


def test_a_shared_input_as_long_as_a_later_batch_is_refused_for_covered_parameters_too() -> None:
    """Chunks would cut it; the loader's last batch may be as long."""

    anchored = lambda net, x, anchors: net.head(torch.tanh(x + anchors.reshape(-1, 4).mean(0)))  # noqa: E731
    model = Net(anchored, head=nn.Linear(4, 2)).double().eval()
    x, anchors = torch.randn(7, 4).double(), torch.randn(5, 4).double()
    tangent = Tangent.survey(model, (x, anchors), EVERY)
    for n in (7, 1, 2):
        assert tangent.record((x[:n], anchors)).rows().shape == (n, 2, 10)
    refused(lambda: tangent.record((x[:5], anchors)), "A tensor … has the length 5 of this batch … shared[None]")
    for way in (lw.Linearized(), lw.MonteCarlo(2), lw.Streamlined()):
        with pytest.raises(lw.LapwingError, match=r"A tensor .* has the length 5 of this batch"):
            way.latent(tangent, build(tangent, "diagonal"), prepared((x[:5], anchors)), False)
    torch.testing.assert_close(tangent.record((x[:5], anchors[None])).rows(), tangent.record((x, anchors)).rows()[:5])


@pytest.mark.parametrize("fault", ["scaled inputs", "shuffled inputs", "gradients"])
def test_a_family_that_is_wrong_is_found_out_by_autograd(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters go generic, with the reason kept, and the Jacobian is right all the same."""

    class Wrong(LinearUse):
        def __init__(self, inputs: Tensor, weight: Tensor, bias: Tensor) -> None:
            seen = {"scaled inputs": inputs * 1.001, "shuffled inputs": inputs.flip(-1)}
            super().__init__(seen.get(fault, inputs), weight, bias, False)

        def jacobian(self, g: Tensor | None, *args: Any) -> BlockJacobian:
            return super().jacobian(-g if g is not None and fault == "gradients" else g, *args)

    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval(), torch.randn(6, 4).double()
    monkeypatch.setitem(READERS, F.linear, lambda args, kwargs, watched: Wrong(*args))
    tangent = Tangent.survey(model, x, EVERY)
    wrong = {"0.weight", "2.weight"} | ({"0.bias", "2.bias"} if fault == "gradients" else set())
    found = {line.parameters[0]: line for line in tangent.coverage.lines}
    assert len(found) == 4
    assert {name for name, line in found.items() if line.family == "generic"} == wrong
    assert {found[name].reason for name in wrong} == {"its recorded uses do not add up to autograd's gradient"}
    torch.testing.assert_close(tangent.record(x).rows(), jacobian(model, x, tangent.blocks))


def test_idle_parameters_are_said_once_for_each_network(caplog: pytest.LogCaptureFixture) -> None:
    def network() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
        model.register_parameter("unused", nn.Parameter(torch.ones(2)))
        return model

    x, y = torch.randn(6, 4), torch.arange(6) % 3
    first, second = network(), network()
    for model, times in ((first, 1), (first, 1), (second, 2), (first, 2)):
        lw.fit(model, [(x, y)], lw.Diagonal()).with_prior(2.0)
        assert sum("has no gradient on the first batch" in record.getMessage() for record in caplog.records) == times


def counting(assigned: bool = False, persistent: bool = True) -> nn.Module:
    """Counts its calls, in place or by a new buffer."""

    def forward(net: Any, x: Tensor) -> Tensor:
        net.calls = net.calls + 1.0 if assigned else net.calls.add_(1.0)
        return net.linear(x)

    model = Net(forward, linear=nn.Linear(4, 3)).eval()
    model.register_buffer("calls", torch.zeros(()), persistent=persistent)
    return model


def test_a_network_that_assigns_a_buffer_or_does_not_keep_it() -> None:
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    for model in (counting(persistent=False), counting(assigned=True)):
        posterior = lw.fit(model, [(x, y)], prior_precision=1.0)
        assert torch.equal(posterior.predict(x).probs, posterior.predict(x).probs)
    assert float(model.calls) == 0.0  # what a network assigns is put back
