"""`lw.plan`: the bytes that a posterior keeps and the peak of a fit, compared with a real fit."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lapwing as lw
from lapwing.fitting import Plan, choice
from lapwing.fitting.registry import METHODS as REGISTERED
from lapwing.running.runner import Runner
from papers.common.measure import LiveBytes
from tests.zoo_modules import Net

planning = importlib.import_module("lapwing.fitting.plan")

METHODS = [
    lw.Diagonal(), lw.KFAC(), lw.KFAC(uncovered="dense"), lw.EKFAC(), lw.Full("primal"), lw.ELLA(10, 40),
    lw.ELLA(10, 40, residual="prior"), lw.VaLLA(20), lw.SubsetOfData(20), lw.SubsetOfWeights(500),
    lw.OptimalSubspace(10, rows=60, residual="prior"), lw.MeanField(5),
    lw.SampledLLA(8, lw.ConjugateGradients(iterations=3), em_steps=0),
]  # fmt: skip


class Live(LiveBytes):
    """Live bytes, with the workspace of LAPACK, which no tensor shows."""

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name, workspace = str(function), 0
        if "linalg_eigh" in name:
            workspace = 16 * args[0].shape[-1] ** 2
        elif "linalg_svd" in name:
            workspace = 8 * args[0].numel() + 56 * min(args[0].shape) ** 2
        self.now += workspace
        self.peak = max(self.peak, self.now)
        out = super().__torch_dispatch__(function, types, args, kwargs)
        self.now -= workspace
        return out


def mlp():
    """A norm between two layers, for what no Kronecker product covers."""
    return nn.Sequential(nn.Linear(12, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 3)).eval()


def cnn():
    """A convolution in groups, and a layer at many positions."""
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(128, 3)
    ).eval()  # fmt: skip


def transformer():
    """A table of positions, attention, and a head."""
    table = nn.Parameter(torch.randn(9, 16))
    layers = nn.Sequential(*[nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)])
    together = lambda net, x: net.head(net.layers(x + net.table).mean(1))  # noqa: E731
    return Net(together, table=table, layers=layers, head=nn.Linear(16, 3)).eval()


NETWORKS = {"mlp": (mlp, (12,)), "cnn": (cnn, (2, 6, 6)), "transformer": (transformer, (9, 16))}


def regression(shape, samples=120, batch=50, outputs=3):
    """Batches of which the last is smaller."""
    torch.manual_seed(0)
    x, y = torch.randn(samples, *shape), torch.randn(samples, outputs)
    return list(zip(x.split(batch), y.split(batch), strict=True))


def kept(posterior):
    return sum(value.nbytes for value in posterior.covariance.tensors().values())


def compared(model, data, method, **options):
    """Compares the kept and the peak bytes of a plan with those of a fit, and returns the plan."""
    planned = lw.plan(model, data, method, **options)
    with Live() as live:
        posterior = lw.fit(model, data, method, tune=None, **options)
    assert planned.kept_bytes == kept(posterior)
    assert live.peak / 2.5 < planned.peak_bytes < 2.5 * live.peak
    return planned


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_kept_bytes_are_exact_and_peaks_near(name, method):
    make, shape = NETWORKS[name]
    compared(make(), regression(shape), method, params=lw.everything)


def test_gradients_above_the_budget_are_taken_in_groups():
    layers = nn.Conv2d(2, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model, data = nn.Sequential(*layers, nn.Linear(32, 800)).eval(), regression((2, 12, 12), 2, 1, 800)
    planned = lw.plan(model, data, lw.Diagonal(), params=lw.everything, memory=2**24)
    assert planned.peak_bytes < 1.4 * 2**24 < 4 * 800 * 2 * 32 * 144  # the gradients of one sample


@pytest.mark.parametrize("samples", [20, 60])
def test_the_dual_form_keeps_the_span_of_all_rows(samples):
    compared(mlp(), regression((12,), samples), lw.Full("dual"))


def test_an_implicit_basis_keeps_inputs_in_place_of_directions():
    wide = nn.Sequential(nn.Linear(12, 2500), nn.ReLU(), nn.Linear(2500, 3)).eval()
    planned = compared(wide, regression((12,), 40), lw.SubsetOfData(20), memory=2**24)
    assert planned.kept_bytes < 8 * 60 * planned.parameters / 100


def test_tied_weights_embeddings_and_the_last_layer_in_float64():
    layer, classes = nn.Linear(12, 12), [(torch.randint(30, (8, 5)), torch.randn(8, 3))]
    twice = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(12, 3)).eval()
    tokens = nn.Sequential(nn.Embedding(30, 4), nn.Flatten(), nn.Linear(20, 3)).eval()
    doubled = [(x.double(), y.double()) for x, y in regression((12,))]
    for model, data, method, params in [
        (twice, regression((12,)), lw.EKFAC(), None), (tokens, classes, lw.KFAC(), None),
        (mlp().double(), doubled, lw.KFAC(), lw.last_layer),
    ]:  # fmt: skip
        compared(model, data, method, params=params)


def test_the_default_is_planned_as_it_is_fitted():
    model, data = mlp(), regression((12,))
    planned = lw.plan(model, data)
    posterior = lw.fit(model, data)
    assert planned.method == str(posterior.method)
    assert (planned.parameters, planned.outputs) == (posterior.tangent.size, 3)
    assert planned.kept_bytes == kept(posterior)


def test_all_methods_of_the_package_are_planned():
    model, data = cnn(), regression((2, 6, 6))
    default, *plans = lw.plan(model, data, "all")
    others = [method for method in REGISTERED if repr(method) != default.method]
    assert len(others) == len(REGISTERED) - 1  # the default is listed once
    assert [plan.method for plan in plans] == [repr(method) for method in others]
    for plan, method in list(zip((default, *plans), (None, *others), strict=True))[:3]:
        alone = lw.plan(model, data, method)
        assert (plan.passes, plan.kept_bytes, plan.peak_bytes) == (alone.passes, alone.kept_bytes, alone.peak_bytes)
    assert len(lw.plan(model, data, [None, *REGISTERED])) == 1 + len(REGISTERED)


def test_among_all_methods_some_are_planned_where_others_do_not_take_the_network():
    classes = [(x, torch.arange(len(x)) % 3) for x, _ in regression((12,))]
    trunk = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8))  # not treated
    together = lambda net, x: net.head(checkpoint(net.trunk, x, use_reentrant=False))  # noqa: E731
    plans = lw.plan(Net(together, trunk=trunk, head=nn.Linear(8, 3)).eval(), classes, "all")
    default, *others = plans
    assert default.parameters == 27
    assert all(one.parameters is None and "checkpoint" in one.advice for one in others)
    assert all(one.advice in str(plans) for one in others)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lw.Full("primal"), "Full needs 18,988 MiB for a dense covariance of 28803 weights, and the memory budget is"),
        (lw.Full(), "Full(form='dual') needs 659 MiB for 1500 rows of 28803 weights, and the memory budget is 16 MiB."),
        (lw.KFAC(uncovered="dense"), "KFAC(uncovered='dense') needs "),
        (lw.OptimalSubspace(200), "OptimalSubspace(rank=200) needs "),
        (lw.OptimalSubspace(4, lw.Full("primal")), "Full needs "),
        (lw.SampledLLA(64), "SampledLLA(draws=64) needs "),
        (lw.SubsetOfWeights(2000), "SubsetOfWeights(size=2000) needs "),
        (lw.ELLA(2, 5000), "The span of 1500 rows of J needs "),
        (lw.SubsetOfData(500), "SubsetOfData(size=500) needs "),
    ],
)
def test_what_exceeds_the_budget_is_advice_of_the_plan_and_refused_by_the_fit_before_any_pass(
    method, message, monkeypatch
):
    monkeypatch.delattr(Runner, "run")
    monkeypatch.setattr(choice, "memory_limit", lambda: 2**50)
    model = nn.Sequential(nn.Linear(12, 1600), nn.LayerNorm(1600), nn.ReLU(), nn.Linear(1600, 3)).eval()
    data, options = regression((12,), 500), {"memory": 2**24, "likelihood": lw.Gaussian(0.1)}
    advice = lw.plan(model, data, method, **options).advice
    assert advice.startswith(message)
    with pytest.raises(lw.LapwingError, match=re.escape(advice)):
        lw.fit(model, data, method, **options)


def test_sample_weights():
    plain = regression((12,))
    weighted = [{"x": x, "y": y, "sample_weights": torch.rand(len(x))} for x, y in plain]
    call = {"forward": lambda model, inputs: model(inputs["x"])}
    planned, alike = lw.plan(mlp(), weighted, lw.KFAC(), sample_weights=True, **call), lw.plan(mlp(), plain, lw.KFAC())
    assert (planned.passes, planned.kept_bytes) == (alike.passes, alike.kept_bytes)


def test_a_fit_that_exceeds_the_machine_is_refused_and_a_cheaper_method_named(monkeypatch):
    wide, data = nn.Sequential(nn.Linear(12, 3000), nn.ReLU(), nn.Linear(3000, 3)).eval(), regression((12,))
    planned = lw.plan(wide, data, lw.KFAC(), memory=2**24)
    assert planned.advice is None
    monkeypatch.setattr(choice, "memory_limit", lambda: planned.peak_bytes // 2)
    with pytest.raises(lw.LapwingError, match=r"KFAC.* GiB for 48003 weights, and .* Use lw.Diagonal\(\)"):
        lw.fit(wide, data, lw.KFAC(), memory=2**24)
    plans = lw.plan(wide, data, [lw.Diagonal(), lw.KFAC()], memory=2**24)
    assert plans[0].advice is None
    assert "Use lw.Diagonal()" in str(plans).splitlines()[-1]
    lw.fit(mlp(), data, lw.KFAC(), memory=2**24)
    monkeypatch.setattr(choice, "memory_limit", lambda: 2**10)
    with pytest.raises(lw.LapwingError, match=r"params=lw.last_layer"):
        lw.fit(wide, data, lw.KFAC(), memory=2**24)


@pytest.mark.quick(1)
@pytest.mark.parametrize("outputs", [1, 8])
@pytest.mark.parametrize("params", [lw.everything, lw.last_layer], ids=["everything", "last_layer"])
def test_peaks_of_few_and_more_outputs(params, outputs):
    model = nn.Sequential(transformer(), nn.Tanh(), nn.Linear(3, outputs)).eval()
    compared(model, regression((9, 16), 60, 25, outputs), lw.Diagonal(), params=params)


class Mine(lw.Method):
    """A method without a footprint."""

    def passes(self, problem):
        return (yield from lw.Diagonal().passes(problem))

    def __repr__(self):
        return "Mine()"


def test_plans_print_as_a_table_and_a_method_without_a_footprint_is_never_refused(monkeypatch):
    plans = lw.plan(mlp(), regression((12,)), [lw.Diagonal(), Mine()])
    assert plans[1] == Plan("Mine()", plans[0].parameters, 3)
    head, first, second, *units = str(plans).splitlines()
    assert head.split() == ["weights", "passes", "kept", "MiB", "peak", "MiB", "seconds", "method"]
    assert re.fullmatch(r" +723  +4.0  +0.003  +0\.\d+  +\S+  Diagonal\(\)", first)
    assert second.split() == ["723", "?", "?", "?", "?", "Mine()"]
    assert len(units) == 2
    monkeypatch.setattr(choice, "memory_limit", lambda: 1)
    lw.fit(mlp(), regression((12,)), Mine())


def test_passes_and_seconds_count_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass of a sample takes a second, and products none: the seconds are the passes of all samples."""
    monkeypatch.setattr(planning, "_forward_seconds", lambda *_: 1.0)
    monkeypatch.setattr(planning, "_product_seconds", lambda _: 0.0)
    model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
    data = [(torch.randn(100, 784), torch.arange(100) % 10)]
    passes = {  # the Fisher root has C - 1 columns, and a row of J costs two passes of its sample
        None: 1, lw.Diagonal(): 10, lw.EKFAC(): 20, lw.SubsetOfWeights(9, "magnitude"): 10,
        lw.SubsetOfWeights(9, "diagonal"): 20, lw.OptimalSubspace(9, rows=90): 20 + 2 * (90 + 9) / 100,
    }  # fmt: skip
    for method, wanted in passes.items():
        plan = lw.plan(model, data, method)
        assert (plan.passes, plan.seconds) == pytest.approx((wanted, 100 * wanted))
    assert lw.plan(model, data * 50, lw.EKFAC()).seconds == 5000 * 20


def test_the_time_counts_products_of_wide_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product takes a second, and a forward pass none: the seconds are the multiply-adds."""
    monkeypatch.setattr(planning, "_forward_seconds", lambda *_: 0.0)
    monkeypatch.setattr(planning, "_product_seconds", lambda _: 1.0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 1, bias=False)).eval()  # 24 + 6 weights
    loader = [(torch.randn(25, 4), torch.randn(25, 1))] * 4
    seconds = {method: lw.plan(model, loader, method).seconds for method in (lw.Diagonal(), lw.KFAC(), lw.Full())}
    assert seconds == {
        lw.Diagonal(): 0,
        lw.KFAC(): 10 * (6**3 + 4**3 + 1 + 6**3),
        lw.Full(): 10 * 30**3 + 100 * 30**2 / 2,
    }
    # 10 rows of J, their SVD, and their products with 100 samples
    assert lw.plan(model, loader, lw.ELLA(5, 10)).seconds == 10 * 10**3 + 10 * 30 * 2 * 10 + 30 * 5 * 100
    # KFAC; 8 rows of J, times its Kronecker factors and each other, and the eigenvectors; the span of 5 directions
    rows, span = 8 * (2 * (24 * (6 + 4) + 6 * (1 + 6)) + 8 * 30), 10 * 5**3 + 5 * 30 * 2 * 5 + 30 * 5 * 100
    wanted = seconds[lw.KFAC()] + rows + 10 * 8**3 + span
    assert lw.plan(model, loader, lw.OptimalSubspace(5, rows=8)).seconds == wanted


def test_a_product_is_timed() -> None:
    assert 0 < planning._product_seconds(torch.device("cpu")) < 1
