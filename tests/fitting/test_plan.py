"""`lw.plan`: bytes that a posterior keeps, peaks of a fit, and passes, from shapes, beside those of a real fit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import lapwing as lw
from benchmarks.measure import LiveBytes
from lapwing.fitting import Plan, room
from lapwing.fitting.plan import METHODS as METHODS_OF_ALL
from lapwing.fitting.runner import Runner
from lapwing.fitting.speed import Speed
from lapwing.methods.cost import EIGEN, Outline, Work
from lapwing.tangent import Tangent

METHODS = [
    lw.Diagonal(), lw.KFAC(), lw.KFAC(uncovered="dense"), lw.EKFAC(), lw.Full("primal"), lw.ELLA(10, 40),
    lw.ELLA(10, 40, residual="prior"), lw.VaLLA(20), lw.SubsetOfData(20), lw.SubsetOfWeights(30),
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


class Transformer(nn.Module):
    """A table of positions, attention, and a head."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 16))
        self.layers = nn.Sequential(*[nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.layers(x + self.table).mean(1))


def transformer():
    return Transformer().eval()


NETWORKS = {"mlp": (mlp, (12,)), "cnn": (cnn, (2, 6, 6)), "transformer": (transformer, (9, 16))}


@pytest.fixture
def live_only(monkeypatch):
    """Peaks of live tensors, without what the allocator keeps beside them."""
    monkeypatch.setattr(room, "HEAP", 0)


def regression(shape, samples=120, batch=50, outputs=3):
    """Batches of which the last is smaller."""
    torch.manual_seed(0)
    x, y = torch.randn(samples, *shape), torch.randn(samples, outputs)
    return list(zip(x.split(batch), y.split(batch), strict=True))


def kept(posterior):
    return sum(value.nbytes for value in posterior.covariance.tensors().values())


def compared(model, data, method, **options):
    """The plan, and a fit's kept and peak bytes."""
    planned = lw.plan(model, data, method, **options)
    with Live() as live:
        posterior = lw.fit(model, data, method, tune=None, **options)
    return planned, kept(posterior), live.peak


@pytest.mark.usefixtures("live_only")
@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_kept_bytes_are_exact_and_peaks_near(name, method):
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    planned, exact, peak = compared(make(), regression(shape), method, params=lw.everything)
    assert planned.kept_bytes == exact
    assert peak / 1.6 < planned.peak_bytes < 1.6 * peak


@pytest.mark.usefixtures("live_only")
@pytest.mark.parametrize(
    ("name", "params"),
    [*((name, lw.everything) for name in NETWORKS), ("cnn", lw.last_layer), ("transformer", lw.last_layer)],
)
@pytest.mark.parametrize("outputs", [1, 8])
def test_peaks_of_few_and_more_outputs(name, params, outputs):
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Tanh(), nn.Linear(3, outputs)).eval()
    planned, _, peak = compared(model, regression(shape, 60, 25, outputs), lw.Diagonal(), params=params)
    assert peak / 1.6 < planned.peak_bytes < 1.6 * peak


@pytest.mark.usefixtures("live_only")
def test_gradients_above_the_budget_are_taken_in_groups():
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model, data = nn.Sequential(*layers, nn.Linear(32, 800)).eval(), regression((2, 12, 12), 2, 1, 800)
    planned = lw.plan(model, data, lw.Diagonal(), params=lw.everything, memory=2**24)
    assert planned.peak_bytes < 1.4 * 2**24 < 4 * 800 * 2 * 32 * 144  # the gradients of one sample


def test_on_a_cpu_the_allocator_keeps_as_much_again_up_to_a_limit(monkeypatch):
    torch.manual_seed(0)
    call, peaks = (mlp(), regression((12,)), lw.Diagonal()), []
    for limit in (0, 1000, 2**30):
        monkeypatch.setattr(room, "HEAP", limit)
        peaks.append(lw.plan(*call).peak_bytes)
    live = peaks[0]
    assert peaks == [live, live + 1000, live + int(room.HOLES * live)]


@pytest.mark.usefixtures("live_only")
@pytest.mark.parametrize("samples", [20, 60])
def test_the_dual_form_keeps_the_span_of_all_rows(samples):
    torch.manual_seed(0)
    planned, exact, peak = compared(mlp(), regression((12,), samples), lw.Full("dual"))
    assert planned.kept_bytes == exact
    assert peak / 1.6 < planned.peak_bytes < 1.6 * peak


def test_an_implicit_basis_keeps_inputs_in_place_of_directions():
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(12, 2500), nn.ReLU(), nn.Linear(2500, 3)).eval()
    planned, exact, _ = compared(wide, regression((12,), 40), lw.SubsetOfData(20), memory=2**24)
    assert planned.kept_bytes == exact
    assert exact < 8 * 60 * planned.parameters / 100
    assert "So rows of J stand for them" in planned.note
    assert lw.plan(wide, regression((12,), 40), lw.SubsetOfData(20), memory=2**26).note is None


def test_other_dtypes_tied_weights_and_the_last_layer():
    torch.manual_seed(0)
    for model in (mlp().double(), mlp()):
        data = [(x.to(model[0].weight.dtype), y.to(model[0].weight.dtype)) for x, y in regression((12,))]
        planned, exact, _ = compared(model, data, lw.KFAC(), params=lw.last_layer)
        assert planned.kept_bytes == exact
    layer = nn.Linear(12, 12)
    twice = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(12, 3)).eval()
    planned, exact, _ = compared(twice, regression((12,)), lw.EKFAC())
    assert planned.kept_bytes == exact
    tokens = nn.Sequential(nn.Embedding(30, 4), nn.Flatten(), nn.Linear(20, 3)).eval()
    planned, exact, _ = compared(tokens, [(torch.randint(30, (8, 5)), torch.randn(8, 3))], lw.KFAC())
    assert planned.kept_bytes == exact


def test_the_default_is_planned_as_it_is_fitted():
    torch.manual_seed(0)
    model, data = mlp(), regression((12,))
    planned = lw.plan(model, data)
    posterior = lw.fit(model, data)
    assert planned.method == str(posterior.method)
    assert (planned.parameters, planned.outputs) == (posterior.tangent.size, 3)
    assert planned.kept_bytes == kept(posterior)


def test_passes_are_of_the_order_of_one_and_a_backward_pass_for_each_output():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
    data = [(torch.randn(100, 784), torch.randint(10, (100,)))]
    diagonal, last = (lw.plan(model, data, lw.Diagonal(), params=params) for params in (None, lw.last_layer))
    assert 3 < diagonal.passes < 11  # 5.6 were measured
    assert 1 < last.passes < 3
    assert 3 < diagonal.predict_passes < 11  # 4.6 were measured


def test_kfac_of_many_outputs_is_priced_with_its_decomposition(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(Speed, "of", lambda *_: Speed(0.0, 0.0, 1e-9))
    data = [(torch.randn(8, 4), torch.arange(8))]
    for outputs in (900, 2000):  # the Fisher root has C - 1 columns, and above 1 000 outputs one that is drawn
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, outputs)).eval()
        planned = lw.plan(model, data, lw.KFAC(), params=lw.last_layer)
        assert planned.seconds == pytest.approx(1e-9 * EIGEN * (outputs**3 + 9**3), rel=1e-6)


def test_several_plans_print_as_a_table_and_a_method_without_a_cost_says_so():
    class Mine(lw.Method):
        def passes(self, problem):
            return (yield from lw.Diagonal().passes(problem))

        def __repr__(self):
            return "Mine()"

    torch.manual_seed(0)
    plans = lw.plan(mlp(), regression((12,)), [lw.Diagonal(), Mine()])
    assert [one.method for one in plans] == ["Diagonal()", "Mine()"]
    assert plans[1] == Plan("Mine()", plans[0].parameters, 3)
    head, first, second, _ = str(plans).splitlines()
    assert head.split()[-1] == "method"
    assert first.split()[-1] == "Diagonal()"
    assert second.split()[2:] == ["?", "?", "?", "?", "?", "?", "Mine()"]
    assert len(str(plans[0]).splitlines()) == 3


def test_all_methods_are_planned_from_one_survey(monkeypatch):
    surveys, survey = [], Tangent.survey
    monkeypatch.setattr(Tangent, "survey", lambda *args, **options: surveys.append(1) or survey(*args, **options))
    model, data = cnn(), regression((2, 6, 6))
    plans = lw.plan(model, data, "all")
    assert len(surveys) <= 3
    assert [plan.method for plan in plans[1:]] == [repr(method) for method in METHODS_OF_ALL[1:]]
    for plan, method in zip(plans, METHODS_OF_ALL, strict=True):
        alone = lw.plan(model, data, method)
        assert (plan.passes, plan.kept_bytes, plan.peak_bytes) == (alone.passes, alone.kept_bytes, alone.peak_bytes)


def test_among_all_methods_one_that_is_refused_says_why():
    plans = lw.plan(nn.Linear(12, 3).eval(), regression((12,)), "all")
    (few,) = (plan for plan in plans if "SubsetOfWeights" in plan.method)
    assert few.passes is None
    assert "asks for more weights than the 39 treated ones" in few.note
    assert few.note in str(plans)


class Complex(nn.Module):
    """A trunk that lapwing does not treat, and a last layer that it does."""

    def __init__(self):
        super().__init__()
        self.waves = nn.Parameter(torch.randn(12, 8, dtype=torch.complex64))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        """Returns (B, 3)."""
        return self.head((x + 0j).matmul(self.waves).abs())


def test_among_all_methods_some_are_planned_where_others_do_not_take_the_network():
    classes = [(x, torch.arange(len(x)) % 3) for x, _ in regression((12,))]
    default, *others = lw.plan(Complex().eval(), classes, "all")
    assert default.parameters == 27
    assert all(one.parameters is None and "complex64" in one.note for one in others)


def test_what_is_wrong_for_every_method_is_an_error():
    held_out = [(torch.randn(9, 5), torch.randn(9, 3))]
    with pytest.raises(lw.LapwingError, match="The held-out data do not fit"):
        lw.plan(mlp(), regression((12,)), "all", validation=held_out)


def test_a_data_size_below_what_a_sampler_draws_is_planned_where_a_collate_function_drops_samples():
    x, y = regression((12,), 60, 60)[0]
    loader = DataLoader(TensorDataset(x, y), 20, collate_fn=lambda rows: default_collate(rows[::2]))
    assert lw.plan(mlp(), loader, lw.KFAC(), data_size=30, prior_precision=1.0, tune=None).passes


def test_an_optimal_subspace_that_is_refused_has_no_hint_of_rows_computed_again():
    wide = nn.Sequential(nn.Linear(12, 1600), nn.ReLU(), nn.Linear(1600, 3)).eval()
    plan = lw.plan(wide, regression((12,), 500), lw.OptimalSubspace(200), memory=2**24)
    assert plan.advice.startswith("OptimalSubspace(rank=200) needs")
    assert plan.note is None


@dataclass
class Named:
    """A predicate without a hash."""

    prefix: str

    def __call__(self, name: str, _: Any) -> bool:
        """Whether the name begins with the prefix."""
        return name.startswith(self.prefix)


def test_predicates_need_no_hash():
    plans = lw.plan(mlp(), regression((12,)), [lw.KFAC(), lw.Diagonal()], params=Named("0"))
    assert [plan.parameters for plan in plans] == [520, 520]


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
    monkeypatch.setattr(room, "memory_limit", lambda: 2**50)
    model = nn.Sequential(nn.Linear(12, 1600), nn.LayerNorm(1600), nn.ReLU(), nn.Linear(1600, 3)).eval()
    data, options = regression((12,), 500), {"memory": 2**24, "likelihood": lw.Gaussian(0.1)}
    advice = lw.plan(model, data, method, **options).advice
    assert advice.startswith(message)
    with pytest.raises(lw.LapwingError, match=re.escape(advice)):
        lw.fit(model, data, method, **options)


def test_seconds_grow_with_the_data_and_stand_in_the_table(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(Speed, "of", lambda *_: Speed(1e-6, 1e-10, 1e-9))  # others use the machine too
    few, many = (
        lw.plan(mlp(), regression((12,), samples), lw.Diagonal(), likelihood=lw.Gaussian(1.0)) for samples in (50, 5000)
    )
    assert 0 < few.seconds < many.seconds
    assert f"{many.seconds:,.2f}" in str(many).splitlines()[1].split()


def test_the_speed_of_the_machine_is_measured_once_for_a_list(monkeypatch):
    torch.manual_seed(0)
    speeds, of = [], Speed.of
    monkeypatch.setattr(Speed, "of", lambda *args: speeds.append(of(*args)) or speeds[-1])
    plans = lw.plan(mlp(), regression((12,)), [lw.Diagonal(), lw.KFAC()])
    assert len(speeds) == 1
    assert all(one.seconds > 0 for one in plans)


def test_a_fisher_root_that_is_drawn_at_all_positions_is_counted():
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 1)).eval()

    def drawn(side, params=lw.everything):
        """The products of a pass beside the layers' own."""
        x = torch.randn(3, 2, side, side)
        outline = Outline.of(Tangent.survey(model, x, params), lw.Categorical(), x, 3)
        return outline.over_data(lambda *_: 0.0).products

    assert drawn(32) == 4 * drawn(16) > 0
    assert drawn(12) == 0  # 720 outputs, whose root is exact
    assert drawn(32, lw.last_layer) == 0  # each position is a sample


def test_work_is_added_part_by_part():
    both = Work(1, 2, 3, 4) + Work(records=1, decompositions=1).times(2)
    assert both == Work(3, 2, 3, 6)


@pytest.mark.parametrize("form", [list, dict])
def test_sample_weights(form):
    torch.manual_seed(0)
    plain = regression((12,))
    weighted = [(x, y, torch.rand(len(x))) for x, y in plain]
    if form is dict:
        weighted = [{"x": x, "y": y, "sample_weights": w} for x, y, w in weighted]
    call = {"forward": lambda model, inputs: model(inputs["x"])} if form is dict else {}
    planned = lw.plan(mlp(), weighted, lw.KFAC(), sample_weights=True, **call)
    alike = lw.plan(mlp(), plain, lw.KFAC())
    assert (planned.passes, planned.kept_bytes, planned.peak_bytes) == (
        alike.passes, alike.kept_bytes, alike.peak_bytes
    )  # fmt: skip
    with pytest.raises(lw.LapwingError, match="holds no sample weights"):
        lw.plan(mlp(), plain, lw.KFAC(), sample_weights=True)
    with pytest.raises(lw.LapwingError, match="neither True nor False"):
        lw.plan(mlp(), plain, lw.KFAC(), sample_weights=1)


def test_nothing_is_written():
    torch.manual_seed(0)
    model, data = mlp(), regression((12,))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    lw.plan(model, data, lw.EKFAC())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not model._forward_hooks
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("live_only")
def test_a_fit_that_exceeds_the_machine_is_refused_and_a_cheaper_method_named(monkeypatch):
    torch.manual_seed(0)
    model, data = mlp(), regression((12,))
    wide = nn.Sequential(nn.Linear(12, 3000), nn.ReLU(), nn.Linear(3000, 3)).eval()
    planned = lw.plan(wide, data, lw.KFAC(), memory=2**24)
    needed = planned.peak_bytes
    assert planned.advice is None
    monkeypatch.setattr(room, "memory_limit", lambda: needed - 1)
    with pytest.raises(lw.LapwingError, match=r"KFAC.* GiB for 48003 weights, and .* Use lw.Diagonal\(\)"):
        lw.fit(wide, data, lw.KFAC(), memory=2**24)
    head, call = nn.Sequential(nn.Linear(12, 3000)).eval(), ([(data[0][0], torch.arange(50))], lw.KFAC())
    half = lw.plan(head, *call, params=lw.last_layer, memory=2**24).peak_bytes // 2
    monkeypatch.setattr(room, "memory_limit", lambda: half)
    with pytest.raises(lw.LapwingError, match=r"Use lw.Diagonal\(\), params=lw.last_layer, which needs"):
        lw.fit(head, *call, params=lw.last_layer, memory=2**24)
    monkeypatch.setattr(room, "memory_limit", lambda: needed - 1)
    plans = lw.plan(wide, data, [lw.Diagonal(), lw.KFAC()], memory=2**24)
    assert plans[0].advice is None
    assert "Use lw.Diagonal()" in str(plans).splitlines()[-1]
    assert str(plans[0]) == "\n".join(str(plans[0]).splitlines()[:3])
    lw.fit(model, data, lw.KFAC(), memory=2**24)
    monkeypatch.setattr(room, "memory_limit", lambda: 2**10)
    with pytest.raises(lw.LapwingError, match=r"params=lw.last_layer"):
        lw.fit(wide, data, lw.KFAC(), memory=2**24)
