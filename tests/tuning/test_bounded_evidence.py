"""BoundedEvidence: costs of the spread and leave-one-out widths against naive oracles, and the widths of fits."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, Normal
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import lapwing as lw
from lapwing.data.inputs import Inputs, Samples
from lapwing.methods import Footprint
from lapwing.tangent import Tangent
from lapwing.tuning import BoundedEvidence, Training, bounded_evidence
from lapwing.tuning import leave_one_out as exact_model
from lapwing.tuning.gaussian_process import LeaveOneOut, learning_curve
from lapwing.tuning.held_out import spread_costs
from lapwing.tuning.refit import error_of_copy, fresh_copy
from lapwing.tuning.regression_width import width_by_inputs, with_left_out_width
from lapwing.tuning.search import crossing
from lapwing.tuning.training_kernel import process_of, table_of
from tests.oracle import jacobian
from tests.quick import others_slow
from tests.refilling import Refilling
from tests.trained import made_once, train
from tests.zoo import ZOO
from tests.zoo_modules import Net

METHODS = [lw.Diagonal(), lw.KFAC(uncovered="dense"), lw.ELLA(rank=5, rows=12), lw.ELLA(5, 12, "prior"), lw.Full()]


@made_once
def memorised(classes=3):
    """A network that is sure of random labels, and its data in batches of 20, 10 and 10."""
    x, y = torch.randn(40, 4, dtype=torch.float64), torch.randint(classes, (40,))
    model = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, classes)).double()
    train(model, lambda: cross_entropy(model(x), y), 300)
    return model.eval(), list(zip(x.split([20, 10, 10]), y.split([20, 10, 10]), strict=True))


def leave_one_out(posterior, loader, *rest, **options):
    """The leave-one-out predictions of batches (x, y)."""
    return exact_model.leave_one_out(posterior, list(map(Samples.of, loader)), *rest, **options)


def cost(posterior, loader):
    """The mean loss of predictions against the network's own, sample by sample."""
    lost = []
    for x, y in loader:
        for i in range(len(y)):
            one, label = Inputs(x).take(slice(i, i + 1)).value, y[i : i + 1]
            own = posterior.likelihood.log_prob(posterior.tangent.outputs_of(one), label)
            lost.append(float(own - posterior.predict(one).log_prob(label)))
    return sum(lost) / len(lost)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("mlp", method) for method in METHODS),
        ("cnn_bn_inplace", METHODS[1]),
        pytest.param("gpt2", METHODS[1], marks=pytest.mark.slow),
    ],
)
def test_costs_equal_predictions_made_one_by_one(name, method):
    case = ZOO[name]
    loader = [(case.inputs(6, 1), case.targets(6, 1)), (case.inputs(3, 2), case.targets(3, 2))]
    fitted = lw.fit(case.build(), loader, method, likelihood="categorical", params=lw.matching("*"), tune=None)
    candidates = [fitted.with_prior(delta) for delta in (0.1, 1.0, 30.0)]
    for found, candidate in zip(spread_costs(candidates, loader)[0], candidates, strict=True):
        assert found == pytest.approx(cost(candidate, loader), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("nats", "params"), [(0.002, lw.everything), (0.005, lw.last_layer), (0.05, lw.everything)])
def test_a_network_that_memorised_its_labels_is_held_to_the_bound(params, nats):
    model, loader = memorised()
    wide = lw.fit(model, loader, lw.KFAC(), params=params, tune=lw.Evidence())
    tuned = BoundedEvidence(nats, points=161).tune(wide, Training(loader))
    assert cost(wide, loader) > 3 * nats
    assert tuned.prior_precision > 3 * wide.prior_precision
    assert cost(tuned, loader) == pytest.approx(nats, rel=1e-2)
    assert cost(tuned.with_prior(0.8 * tuned.prior_precision), loader) > nats
    coarse = BoundedEvidence(nats).tune(wide, Training(loader))
    assert cost(coarse, loader) == pytest.approx(nats, rel=0.2)
    cheap = BoundedEvidence(cost(wide, loader) + 1e-6).tune(wide, Training(loader))
    assert cheap.prior_precision == wide.prior_precision


def test_heads_of_memorised_labels_are_held_to_the_bound_of_labels():
    model, loader = memorised()
    both = lw.Joint({"a": lw.Categorical(), "b": lw.Categorical()}, outputs={"a": slice(0, 3), "b": slice(3, 6)})
    data = [(x, {"a": y, "b": y}) for x, y in loader]
    twice = lw.fit(model, data, likelihood=both, forward=lambda model, x: model(x).repeat(1, 2))
    evidence = lw.fit(model, data, likelihood=both, forward=lambda model, x: model(x).repeat(1, 2), tune=lw.Evidence())
    assert twice.prior_precision > 10 * evidence.prior_precision


@pytest.mark.parametrize("temperature", others_slow([0.7, 3.0], [3.0]))
def test_a_logit_temperature_is_no_cost_of_the_spread(temperature):
    model, loader = memorised()
    fitted = lw.fit(model, loader, tune=None, likelihood=lw.Categorical(logit_temperature=temperature))
    candidates = [fitted.with_prior(delta) for delta in (1.0, 1e12)]
    alone = sum(float(cross_entropy(model(x).detach() / temperature, y, reduction="sum")) for x, y in loader)
    lost = [
        (-sum(float(candidate.predict(x).log_prob(y).sum()) for x, y in loader) - alone) / 40
        for candidate in candidates
    ]
    found = spread_costs(candidates, loader)[0]
    assert found == pytest.approx(lost, abs=1e-9)
    assert found[0] > 1e-4 > found[1]


@pytest.mark.parametrize("classes", others_slow([2, 3], [3]))
def test_memorised_labels_that_choose_the_prior_precision_are_warned_of(classes, caplog):
    model, loader = memorised(classes=classes)
    nll = sum(cross_entropy(model(x), y, reduction="sum").item() for x, y in loader) / 40
    with caplog.at_level(logging.INFO, "lapwing"):
        for options, tells in (({}, True), ({"prior_precision": 1.0}, False), ({"tune": lw.Evidence()}, False)):
            caplog.clear()
            lw.fit(model, loader, **options)
            line = f"Sequential is almost sure of its training labels, whose NLL is {nll:.2g} per sample"
            assert (line in caplog.text) is tells
        caplog.clear()
        torch.nn.init.zeros_(model[-1].weight)  # sure of nothing
        lw.fit(model, loader)
        assert "almost sure" not in caplog.text


def test_densities_and_rare_counts_are_no_labels(caplog):
    """An NLL near 0, or below it, is a matter of the unit of a density, and of the rate of counts."""
    scale = math.exp(0.03 - 1) / 2  # so log 2 e scale, the entropy, is 0.03
    of_scale = torch.distributions.Laplace(0.0, scale).sample((400,))
    laplace = lw.FromDistribution(lambda f: torch.distributions.Laplace(f[..., 0], scale))
    rare, small = (torch.arange(400) % 200 == 0).float()[:, None], -9.0 + math.exp(-4.5) * torch.randn(400, 1)
    for likelihood, bias, outputs, y in (
        ("poisson", -5.0, 1, rare),  # an NLL of 0.03
        (laplace, 0.0, 1, of_scale * scale / of_scale.abs().mean()),
        (lw.HeteroscedasticGaussian(), -9.0, 2, small),  # a log variance, so the density is above 1
    ):
        model = torch.nn.Linear(2, outputs).eval()
        torch.nn.init.zeros_(model.weight), torch.nn.init.constant_(model.bias, bias)
        lw.fit(model, [(torch.randn(400, 2), y)], likelihood=likelihood)
    assert "almost sure" not in caplog.text


def test_two_spellings_of_one_law_get_one_prior_precision():
    """Where few samples determine many weights, a right spread costs more than 0.005 nats."""
    model, loader, _ = overfitted()
    law = lw.FromDistribution(lambda f: torch.distributions.Normal(f[..., 0], 0.3))
    first, second = (lw.fit(model, loader, lw.Full(), likelihood=each) for each in (lw.Gaussian(0.09), law))
    assert second.prior_precision == pytest.approx(first.prior_precision, rel=5e-3)  # one by quadrature
    assert cost(second, loader) > 0.005


@pytest.fixture
def bounds(monkeypatch):
    """The bounds of all fits, which keep the evidence's prior precision."""
    found = []
    monkeypatch.setattr(bounded_evidence, "crossing", lambda points, costs, bound: found.append(bound) or 0.0)
    return found


def cost_at(leverage, outputs):
    """What a right spread costs in a linear regression: `log N(e; 0, 1) - log N(e; 0, 1 + h)` at E[e²] = 1 - h."""
    residual = torch.tensor([-1.0, 1.0], dtype=torch.float64) * (1 - leverage) ** 0.5
    own, spread = (Normal(0.0, (1 + variance) ** 0.5).log_prob(residual).mean() for variance in (0, leverage))
    return float(own - spread) * outputs


@pytest.mark.parametrize("likelihood", ["categorical", lw.Bernoulli()], ids=str)
def test_classes_may_cost_what_a_right_spread_costs_in_a_linear_regression(likelihood, bounds):
    model, loader = memorised(classes=4)
    data = [(x, y if likelihood == "categorical" else nn.functional.one_hot(y, 4).double()) for x, y in loader]
    posterior = lw.fit(model, data, lw.Full(), likelihood=likelihood)
    dense, delta = posterior.covariance.to_dense(), posterior.prior_precision
    outputs, loss = (3, cross_entropy) if likelihood == "categorical" else (4, binary_cross_entropy_with_logits)
    leverage = float((1 - delta * dense.diagonal()).sum()) / 40 / outputs
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    scales = torch.logspace(0, 1, 2001, dtype=torch.float64)
    losses = [float(loss(scale * model(x).detach(), y)) for scale in scales]
    saved = losses[0] - min(losses)  # the training loss that larger logits would save
    assert saved > 0.001 or likelihood != "categorical"
    assert bounds == [pytest.approx(cost_at(leverage, outputs) - saved, rel=1e-4)]
    assert bounds[0] > 0.01


@pytest.mark.parametrize("method", [None, lw.Diagonal(), lw.Full()], ids=repr)
def test_the_last_layer_may_cost_what_all_weights_cost(method, bounds):
    """They were fitted to the labels together."""
    model, loader = memorised()
    lw.fit(model, loader, method, params=lw.last_layer)
    lw.fit(model, loader, lw.KFAC())
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-6)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)  # trained on other labels
    lw.fit(model, loader, lw.Full(), params=lw.last_layer)
    assert bounds[2] < bounds[0] / 2


def test_samples_that_are_read_stand_for_all(bounds):
    """KFAC of the weights that are not treated is fitted to few samples, whose number does not matter."""
    model, loader = memorised()
    for samples in (120, 40):
        lw.fit(model, loader * 3, params=lw.last_layer, tune=BoundedEvidence(samples=samples))
    assert bounds[0] == pytest.approx(bounds[1], rel=0.2)
    lw.fit(model, loader, params=lw.last_layer, data_size=120)
    assert bounds[0] == pytest.approx(bounds[2], rel=1e-6)


@pytest.mark.parametrize("likelihood", [lw.Categorical(), lw.Ordinal()], ids=repr)
def test_all_weights_do_not_count_if_they_are_too_many_or_outputs_are_not_logits(likelihood, bounds, monkeypatch):
    model, loader = memorised()
    logits = likelihood.activation is not None
    options = {"params": lw.last_layer, "likelihood": likelihood}
    posterior = lw.fit(model, loader, **options, tune=lw.Evidence())
    precision, scale = posterior.prior.precision, posterior.scale.of_curvature
    outputs = 3 - logits
    leverage = float(posterior.covariance.effective_dimension(precision, scale).sum()) / 40 / outputs
    monkeypatch.setattr(bounded_evidence, "KFAC_MULTIPLY_ADDS", 1 if logits else 2**40)
    lw.fit(model, loader, **options)
    assert bounds == [pytest.approx(max(0.005, cost_at(leverage, outputs)), rel=1e-6)]


def test_fewer_samples_count_all_weights_if_their_passes_take_long(bounds, monkeypatch):
    model, loader = memorised()
    lw.fit(model, loader, params=lw.last_layer)
    work = Tangent.survey(model, loader[0][0]).plan.work(Tangent.survey(model, loader[0][0]).blocks)
    for share in (2.0, 10.0, 10.1):
        monkeypatch.setattr(bounded_evidence, "KFAC_MULTIPLY_ADDS", 40 * 3 * work / share)
        lw.fit(model, loader, params=lw.last_layer)
    whole, half, tenth, none = bounds
    assert half == pytest.approx(whole, rel=0.25)
    assert none < tenth < half  # of four samples in 40


@pytest.mark.parametrize("needed", [Footprint(0, 2**40, 1.0), Footprint(0, 0, 1.0, products=2.0**40)], ids=str)
def test_all_weights_do_not_count_if_their_factors_are_too_wide(needed, bounds, monkeypatch):
    """They would exceed the memory budget, or take long to decompose."""
    model, loader = memorised()
    lw.fit(model, loader, params=lw.last_layer)
    monkeypatch.setattr(lw.KFAC, "footprint", lambda self, shape: needed)
    lw.fit(model, loader, lw.Full(), params=lw.last_layer)
    assert bounds[1] < bounds[0] / 2


def test_the_bound_by_all_weights_does_not_depend_on_the_form_of_the_data(bounds):
    """Batches of one row, another order, a loader that fills the same tensors again, and rows as positions."""
    model, loader = memorised()
    x, y = (torch.cat(parts) for parts in zip(*loader, strict=True))
    equal = list(zip(x.split(20), y.split(20), strict=True))
    ones, positions = list(zip(x.split(1), y.split(1), strict=True)), (x.reshape(8, 5, 4), y.reshape(8, 5))
    for data in (loader, ones, (x.flip(0), y.flip(0)), Refilling(equal), positions):
        lw.fit(model, data, params=lw.last_layer)
    assert bounds[0] > 0.1
    assert bounds[1:] == pytest.approx([bounds[0]] * 4, rel=1e-6)


def test_an_error_behind_the_last_layer_does_not_end_a_fit(bounds):
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise TypeError("no gradient")

    model, loader = memorised()
    broken = Net(lambda net, x: net.last(Once.apply(net.before(x))), before=model[:2], last=model[2]).eval()
    lw.fit(broken, loader, params=lw.last_layer)
    lw.fit(model, loader, params=lw.last_layer)
    assert bounds[0] < bounds[1] / 2


def test_rows_that_are_read_stand_for_the_labels_that_count(bounds):
    """The first of two batches is read, and all that count are in it."""
    model, loader = memorised()
    x, y = (torch.cat(parts) for parts in zip(*loader, strict=True))
    lw.fit(model, [(x, y)], params=lw.last_layer)
    none = torch.randn(40, 4, dtype=torch.float64), torch.full((40,), -100)
    lw.fit(model, [(x, y), none], params=lw.last_layer, tune=BoundedEvidence(samples=40))
    assert bounds[1] == pytest.approx(bounds[0], rel=1e-6)


def test_a_bound_of_many_samples_or_of_a_diagonal_is_a_two_hundredth_of_a_nat(bounds):
    model, loader = memorised()
    lw.fit(model, loader, data_size=4000)
    lw.fit(model, loader, lw.Diagonal())  # which counts too many dimensions
    lw.fit(model, loader, tune=BoundedEvidence(nats=0.1))
    assert bounds == [0.005, 0.005, 0.1]


@pytest.mark.parametrize("method", [lw.Full(), lw.KFAC()], ids=str)
def test_rows_that_do_not_count_do_not_change_the_bound(method):
    model, loader = memorised()
    x, y = (torch.cat(parts) for parts in zip(*loader, strict=True))
    once, none = torch.ones(40, dtype=torch.float64), torch.zeros(60, dtype=torch.float64)
    more, labels = torch.randn(60, 4, dtype=torch.float64), torch.zeros(60, dtype=torch.long)

    def precision(*data, **options):
        return lw.fit(model, [data], method, params=lw.everything, **options).prior_precision

    few = precision(x, y)
    assert few > 2 * precision(x, y, tune=lw.Evidence())
    x, y = torch.cat([x, more]), torch.cat([y, labels])
    assert precision(x, y, torch.cat([once, none]), sample_weights=True) == pytest.approx(few, rel=1e-6)
    y[40:] = -100
    assert precision(x, y) == pytest.approx(few, rel=1e-6)
    x, y = x[:40], y[:40]
    copies = precision(x.repeat(3, 1), y.repeat(3))
    assert precision(x, y, 3 * once, sample_weights=True) == pytest.approx(copies, rel=1e-6)


def test_missing_answers_do_not_change_the_bound():
    """Three answers in three rows count as much as in one."""
    model, loader = memorised(classes=3)
    x, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    y, law = nn.functional.one_hot(labels, 3).double(), lw.Bernoulli(missing=True)
    more = torch.randn(60, 4, dtype=torch.float64), torch.full((60, 3), torch.nan, dtype=torch.float64)
    apart = torch.where(torch.eye(3, dtype=torch.bool), y[:, None], torch.nan).flatten(0, 1)
    data = [(x, y), (torch.cat([x, more[0]]), torch.cat([y, more[1]])), (x.repeat_interleave(3, 0), apart)]

    def precision(data, **options):
        return lw.fit(model, data, lw.Full(), params=lw.everything, likelihood=law, **options).prior_precision

    data += [(x, y.bool()), (x, y.long())]  # without missing ones

    few = precision(data[0])
    assert few > 2 * precision(data[0], tune=lw.Evidence())
    assert [precision(one) for one in data[1:]] == pytest.approx([few] * 4, rel=1e-6)


@pytest.mark.parametrize("value", [-1e9, -torch.inf])
def test_impossible_classes_do_not_change_the_bound(value):
    model, loader = memorised()
    masks = torch.full((1, 20), value, dtype=torch.float64)

    def masked(network, x):
        outputs = network(x)
        return torch.cat([outputs[:, :1], masks.expand(len(x), -1), outputs[:, 1:]], 1)

    after = [(x, torch.where(y > 0, y + 20, y)) for x, y in loader]
    found, wanted = lw.fit(model, after, lw.KFAC(), forward=masked), lw.fit(model, loader, lw.KFAC())
    assert wanted.prior_precision > 1.5 * lw.fit(model, loader, lw.KFAC(), tune=lw.Evidence()).prior_precision
    assert found.prior_precision == pytest.approx(wanted.prior_precision, rel=1e-4)


def test_one_yes_or_no_keeps_the_mean_probability():
    """Within a standard error of the number of yes; for labels the other way round, and with rows that do not count."""
    x = torch.randn(300, 8, dtype=torch.float64)
    y = torch.bernoulli((2 * x[:, :1] - 4).sigmoid()).bool()
    model = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 1)).double()
    train(model, lambda: nn.functional.binary_cross_entropy_with_logits(model(x), y.double()), 60, 0.01)
    before = model(x).sigmoid().detach()
    error = float((300 * before.mean() * (1 - before.mean())).sqrt())

    def fitted(*data, **options):
        return lw.fit(model, [data], lw.KFAC(), likelihood=lw.Bernoulli(), **options)

    evidence, posterior = (fitted(x, y, tune=tune) for tune in (lw.Evidence(), lw.BoundedEvidence()))
    shifts = [float((one.predict(x).probs - before).sum()) for one in (evidence, posterior)]
    assert shifts[0] > 1.5 * error > 1.5 * shifts[1] > 0
    more = torch.cat([x, x + 3]), torch.cat([y, ~y]), torch.ones(600).index_fill(0, torch.arange(300, 600), 0)
    assert fitted(*more, sample_weights=True).prior_precision == pytest.approx(posterior.prior_precision, rel=1e-6)
    with torch.no_grad():
        for parameter in model[-1].parameters():
            parameter.neg_()
    assert fitted(x, ~y).prior_precision == pytest.approx(posterior.prior_precision, rel=1e-6)


@pytest.mark.parametrize("hidden", [5, 100])
def test_the_bound_of_a_yes_or_no_falls_if_more_dimensions_than_samples_count(hidden, bounds):
    x, y = torch.randn(20, 6, dtype=torch.float64), torch.rand(20, 1) > 0.5
    layers = [nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(hidden, 1)).double().eval()
    posterior = lw.fit(model, (x, y), lw.KFAC(), tune=lw.Evidence())
    shares = posterior.covariance.effective_dimension(posterior.prior.precision, posterior.scale.of_curvature)
    h = float(shares.sum()) / 20
    assert (h > 1) == (hidden == 100)
    lw.fit(model, (x, y), lw.KFAC())
    logits, loss = model(x).detach(), nn.functional.binary_cross_entropy_with_logits
    losses = [float(loss(logits * 10**exponent, y.double())) for exponent in torch.linspace(0, 1, 200)]
    assert bounds == [pytest.approx(min(h, 1 / h) / 2 - (losses[0] - min(losses)), abs=1e-4)]


@pytest.mark.parametrize("likelihood", [lw.Poisson(), lw.Bernoulli(), lw.HeteroscedasticGaussian(), lw.Categorical()])
def test_a_position_counts_as_a_sample(likelihood, bounds, monkeypatch):
    monkeypatch.setattr(bounded_evidence, "MIN_COST", 0.0)
    outputs = {"heteroscedastic": 2, "categorical": 3}.get(likelihood.name, 1)
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, outputs)).double()
    x, y = torch.randn(12, 5, 3, dtype=torch.float64), torch.rand(12, 5, 1, dtype=torch.float64).round()
    if likelihood.name == "categorical":
        y = y[..., 0].long()
    for inputs, targets in ((x, y), (x.flatten(0, 1), y.flatten(0, 1))):
        lw.fit(model.eval(), (inputs, targets), lw.Full(), params=lw.last_layer, likelihood=likelihood)
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-6)
    assert bounds[0] > 0


@pytest.mark.parametrize("method", [lw.Full(), lw.KFAC(), lw.Diagonal(), lw.ELLA(8, 30, "prior")])
def test_the_effective_dimension_is_a_trace(method):
    """`γ = tr(I - δ Σ)` over the directions whose variance the data change."""
    model, loader, _ = overfitted()
    posterior = lw.fit(model, loader, method, likelihood=lw.Gaussian(0.09), prior_precision=0.7, params=lw.everything)
    found = posterior.covariance.effective_dimension(posterior.prior.precision, posterior.scale.of_curvature)
    dense = posterior.covariance.to_dense()
    assert float(found.sum()) == pytest.approx(float((1 - 0.7 * dense.diagonal()).sum()), rel=1e-6)


@made_once
def overfitted(steps=300):
    """A network that fits a noisy curve too closely, its data in two batches, and other data."""
    x = torch.randn(260, 3, dtype=torch.float64)
    y = (x[:, :1] * x[:, 1:2]).sin() + 0.3 * torch.randn(260, 1, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    train(model, lambda: (model(x[:60]) - y[:60]).square().mean(), steps, 0.01)
    return model.eval(), list(zip(x[:60].split(40), y[:60].split(40), strict=True)), (x[60:], y[60:])


def residual(model, loader):
    """The mean squared residual, batch by batch."""
    with torch.no_grad():
        squares = torch.cat([(model(x) - y).square() for x, y in loader])
    return float(squares.mean())


def total(posterior, loader):
    """The width of predictions of the training data, σ² plus the mean variance, sample by sample."""
    ones = [x[i : i + 1] for x, _ in loader for i in range(len(x))]
    return posterior.noise_variance + float(torch.cat([posterior.latent(one).variance for one in ones]).mean())


def expected(posterior, loader, exact):
    """The width of predictions of the training data by the rule, from the process's own δ and σ²."""
    precision = torch.full_like(posterior.prior.precision, exact.precision)
    start = total(posterior.at(precision, exact.noise_variance), loader)
    return exact.width * start / exact.width_at_unseen_inputs(start)


WIDE = [lw.Diagonal(), lw.KFAC(), lw.EKFAC(), lw.ELLA(rank=10, rows=30), lw.SubsetOfWeights(20)]


@pytest.mark.parametrize("method", others_slow(WIDE, WIDE[1:2] + WIDE[4:]), ids=repr)
def test_predictions_are_as_wide_as_left_out_at_the_ratio_of_the_exact_process(method, caplog):
    model, loader, (x, y) = overfitted()
    plain = lw.fit(model, loader, method, tune=lw.Evidence())
    exact = leave_one_out(plain, loader)
    with caplog.at_level(logging.INFO, "lapwing"):
        tuned = lw.fit(model, loader, method)
    assert f"left out have a variance of {exact.width:.3g} by the exact linearised model of 1081 weights" in caplog.text
    assert total(tuned, loader) == pytest.approx(expected(tuned, loader, exact), rel=1e-6)
    ratio = exact.noise_variance * exact.precision
    assert tuned.noise_variance * tuned.prior_precision == pytest.approx(ratio, rel=1e-6)
    assert not tuned.noise_fixed
    assert tuned.tuned
    assert tuned.predict(x).log_prob(y).mean() > plain.predict(x).log_prob(y).mean() + 0.5
    own = lw.fit(model, loader, method, tune=None).with_prior(1e8, noise_variance=residual(model, loader))
    assert tuned.predict(x).log_prob(y).mean() > own.predict(x).log_prob(y).mean() + 0.5


def test_the_exact_posterior_is_that_of_the_process_as_wide_as_its_errors():
    model, loader, _ = overfitted()
    exact = leave_one_out(lw.fit(model, loader, lw.Full(), tune=None), loader)
    tuned = lw.fit(model, loader, lw.Full())
    factor = exact.width / exact.variance
    assert tuned.noise_variance == pytest.approx(factor * exact.noise_variance, rel=1e-6)
    assert tuned.prior_precision == pytest.approx(exact.precision / factor, rel=1e-6)
    assert total(tuned, loader) == pytest.approx(factor * exact.training_variance, rel=1e-2)


@pytest.mark.parametrize("method", others_slow([None, lw.Full(), lw.Diagonal()], [None]), ids=repr)
def test_noise_of_the_last_layer_has_the_width_of_the_whole_network(method, caplog):
    """The layers before it were trained on the targets too, so the residuals are far below the noise."""
    model, loader, (x, y) = overfitted()
    options = {"params": lw.last_layer, "likelihood": "gaussian"}
    plain = lw.fit(model, loader, method, tune=lw.Evidence(), **options)
    known, whole = leave_one_out(plain, loader), leave_one_out(lw.fit(model, loader, lw.Diagonal(), tune=None), loader)
    assert (known.weights, whole.weights, known.samples) == (1081, 1081, 60)
    assert known.width == pytest.approx(whole.width, rel=1e-9)
    tuned = lw.fit(model, loader, method, **options)
    assert total(tuned, loader) == pytest.approx(expected(tuned, loader, known), rel=1e-6)
    assert tuned.noise_variance > 2 * plain.noise_variance
    assert tuned.predict(x).log_prob(y).mean() > plain.predict(x).log_prob(y).mean() + 1.0


@pytest.mark.parametrize("method", [lw.SubsetOfData(10), lw.VaLLA(5), lw.Full()], ids=repr)
def test_a_posterior_that_is_far_too_wide_at_a_few_inputs_has_noise(method):
    """The mean variance, of few inputs far away, gives both numbers, and most inputs hardly had any noise."""
    x = torch.randn(300, 4, dtype=torch.float64) * torch.where(torch.arange(300) % 30 == 0, 30.0, 0.3)[:, None]
    model = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 1)).double().eval()
    y = model(x).detach() + 0.1 * (3 * x[:, :1]).sin()  # could be fitted better
    fits = [lw.fit(model, [(x[:150], y[:150])], each) for each in (method, lw.KFAC())]
    found, other = (-fit.predict(x[150:]).log_prob(y[150:]).mean() for fit in fits)
    assert fits[0].noise_variance > 0.2 * residual(model, [(x[:150], y[:150])])
    assert found < other + 0.3


def test_width_of_unseen_targets_by_the_training_variance():
    exact = LeaveOneOut(3.0, 2.0, 0.5, 1.0, 1.0, 0.25, 100, 10)
    assert exact.width_at_unseen_inputs(0.5) == 2.0  # the exact one
    assert exact.width_at_unseen_inputs(0.4) == 0.4  # a subspace
    assert exact.width_at_unseen_inputs(0.98) == pytest.approx(0.98**0.75 * 2**0.25)  # KFAC
    assert exact.width_at_unseen_inputs(2.5) == 2.5
    assert replace(exact, learning_ratio=0.5).width_at_unseen_inputs(0.5) == pytest.approx(0.5**0.75)
    assert replace(exact, learning_ratio=0.5).width_at_unseen_inputs(0.2) == 0.2


@pytest.mark.parametrize("name", ["MAX_WEIGHTS", "MAX_MULTIPLY_ADDS"])
def test_of_too_many_weights_only_the_treated_ones_count(name, monkeypatch, caplog):
    """The kernel of all weights would be too expensive, which is logged."""
    model, loader, _ = overfitted()
    posterior = lw.fit(model, loader, params=lw.last_layer, likelihood="gaussian", tune=None)
    monkeypatch.setattr(f"lapwing.tuning.leave_one_out.{name}", 100)
    with caplog.at_level(logging.INFO, "lapwing"):
        assert leave_one_out(posterior, loader).weights == 31
    assert "too many trained weights to use all of them" in caplog.text


def test_frozen_layers_have_not_seen_the_targets():
    model, loader, _ = overfitted()
    for layer in model[:-1]:
        layer.requires_grad_(False)
    posterior = lw.fit(model, loader, params=lw.last_layer, likelihood="gaussian", tune=None)
    assert leave_one_out(posterior, loader).weights == 31


def test_predictions_are_never_narrower_than_the_residuals():
    x = torch.randn(60, 3, dtype=torch.float64)
    y = x[:, :1] + 0.1 * torch.randn(60, 1, dtype=torch.float64)
    model = nn.Linear(3, 1).double().eval()  # not trained: the best linear model fits far better
    for method in WIDE[:2]:
        tuned = lw.fit(model, [(x, y)], method, params=lw.everything)
        narrow, exact = (leave_one_out(tuned, [(x, y)], residual=low) for low in (0.0, residual(model, [(x, y)])))
        assert narrow.width < 0.1 * residual(model, [(x, y)])
        assert exact.precision * exact.noise_variance > narrow.precision * narrow.noise_variance
        width = exact.training_variance / exact.noise_variance * residual(model, [(x, y)])  # 1 + γ/N
        assert 0.9 * width < total(tuned, [(x, y)]) < 1.000001 * width


def test_the_width_holds_under_scaled_data_and_a_temperature():
    model, loader, _ = overfitted()
    for options in ({"data_size": 600}, {"temperature": 2.0}):
        plain = lw.fit(model, loader, lw.Diagonal(), tune=lw.Evidence(), **options)
        tuned = lw.fit(model, loader, lw.Diagonal(), **options)
        exact = leave_one_out(plain, loader, options.get("data_size"))
        assert total(tuned, loader) == pytest.approx(expected(tuned, loader, exact), rel=0.02)


@pytest.mark.quick(2)
@pytest.mark.parametrize("delta", [0.01, 1.0])
@pytest.mark.parametrize("method", [lw.Full(), lw.KFAC(), None], ids=repr)
def test_noise_at_a_given_prior_precision_is_about_the_best(method, delta):
    """No other noise variance predicts other data much better, and none is above the error of unseen targets."""
    model, loader, (x, y) = overfitted()
    params = {} if method else {"params": lw.last_layer}
    tuned = lw.fit(model, loader, method, likelihood="gaussian", prior_precision=delta, **params)
    exact = leave_one_out(lw.fit(model, loader, lw.Diagonal(), tune=None), loader)
    assert (tuned.prior_precision, tuned.noise_fixed) == (delta, False)
    assert tuned.noise_variance <= exact.width
    found, *others = (
        float(tuned.with_noise(tuned.noise_variance * 10**decade).predict(x).log_prob(y).mean())
        for decade in (0, -1.5, -1, -0.5, 0.5, 1)
    )
    assert found > max(others) - 0.3


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((6, 1), {}), ((3, 2), {"params": lw.last_layer}), ((3, 2), {"prior_precision": 1.0}),
        ((1, 2, 3), {"method": lw.KFAC()}),
    ],
)  # fmt: skip
def test_outputs_with_positions_have_the_fit_of_the_flattened_outputs(options, shape):
    """A sample is left out with all positions, so an overfitted forecaster has the same intervals in any shape."""
    x = torch.randn(30, 3, dtype=torch.float64)
    flat = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)).double().eval()
    y, w = flat(2 * x).detach() + 0.1 * torch.randn(30, 6, dtype=torch.float64), torch.rand(30) + 0.5
    y[4, 2] = math.nan
    likelihood, fits = lw.Gaussian(missing=True), []
    for model, targets in ((flat, y), (nn.Sequential(flat, nn.Unflatten(1, shape)), y.unflatten(1, shape))):
        loader = [(x[:20], targets[:20], w[:20]), (x[20:], targets[20:], w[20:])]
        fits.append(lw.fit(model, loader, likelihood=likelihood, sample_weights=True, **options))
    wanted, found = fits
    assert found.method == wanted.method
    assert found.noise_variance == pytest.approx(wanted.noise_variance, rel=1e-6)
    assert found.prior_precision == pytest.approx(wanted.prior_precision, rel=1e-6)
    torch.testing.assert_close(found.predict(x).std.flatten(1), wanted.predict(x).std, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("params", [lw.last_layer, lw.everything])
def test_many_positions_whose_number_varies(params, monkeypatch):
    """Some positions of each sample are left out; weights that positions share learn from the others too."""
    monkeypatch.setattr("lapwing.tuning.training_kernel.MAX_ROWS", 300)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double().eval()
    loader = []
    for count in (150, 210):
        x = torch.randn(15, count, 3, dtype=torch.float64)
        loader.append((x, model(x).detach() + 0.1 * torch.randn(15, count, 1, dtype=torch.float64)))
    model[1].bias.data += 3  # a bias of the targets is no error
    loader = [(x, y + 3) for x, y in loader]
    tuned = lw.fit(model, loader, likelihood="gaussian", params=params)
    assert tuned.noise_variance == pytest.approx(0.01, rel=0.25)


def test_a_width_far_below_that_of_a_gaussian_process_on_the_inputs_is_warned_of(caplog):
    x = torch.cat([torch.arange(120.0)[:, None], torch.randn(120, 2), torch.ones(120, 1)], 1)  # the last is constant
    y = x[:, 1:2] + 0.3 * torch.randn(120, 1)
    with torch.no_grad():
        recall = lambda net, x: net.head(y[(x[:, :1].round().long() % len(y))[:, 0]])  # noqa: E731
        model = Net(recall, head=nn.Linear(1, 1)).eval()  # looks the target of each training row up
        model.head.weight.fill_(0.99), model.head.bias.zero_()
        linear = nn.Linear(4, 1).eval()
        linear.weight.copy_(torch.tensor([[0.0, 1.0, 0.0, 0.0]])), linear.bias.zero_()
    lw.fit(linear, [(x, y)])
    assert "overfitted" not in caplog.text
    loader = [(x[:100], y[:100]), (x[100:], y[100:])]
    lw.fit(model, loader)
    assert "tune=lw.Refit()" not in caplog.text  # it was tried, but the fresh copy has the same memory
    caplog.clear()
    narrow = lw.fit(model, loader, tune=lw.BoundedEvidence())
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("Net may have overfitted: its intervals have a variance of")
    assert "validation=held_out" in line
    assert "tune=lw.Refit()" in line
    table = x, y.double(), torch.ones_like(y)
    found = width_by_inputs(*table, 120)
    assert 0.07 < found < 0.15  # the noise variance is 0.09
    fitted = found - residual(model, [(x, y)])  # noise that the network has fitted, which comes back at unseen inputs
    needs = float(line.partition("it needs ")[2].partition(". Pass")[0])
    assert needs == pytest.approx(found + fitted, rel=0.1)  # by the 100 and 20 rows in their order
    assert narrow.noise_variance < found / 10
    assert width_by_inputs(*table, 120, least=100.0) is None
    assert table_of(narrow, [Samples(Inputs(x.long()), y)]) is None


@pytest.mark.parametrize("times", [1.2, 1000.0])
def test_a_yardstick_far_above_the_width_multiplies_all_variances(times, caplog):
    model, loader, (x, _) = overfitted()
    posterior = lw.fit(model, loader, lw.KFAC(), tune=None)
    posterior = replace(posterior, noise_fixed=False)
    arguments = posterior, residual(model, loader), Training(loader, (), 60), 2000
    plain = with_left_out_width(*arguments)
    exact = leave_one_out(posterior, loader)
    checked = with_left_out_width(*arguments, lambda *_: times * exact.width)
    ratio = checked.predict(x).variance / plain.predict(x).variance
    torch.testing.assert_close(ratio, torch.full_like(ratio, times if times > 1.3 else 1.0))
    assert ("All variances were multiplied by 1e+03" in caplog.text) is (times > 1.3)


@pytest.mark.parametrize(("scale", "positions"), [(1.0, False), (1000.0, True)])
def test_error_of_a_fresh_copy(scale, positions):
    x = torch.randn(200, 3)
    y = scale * (7 + x @ torch.tensor([[1.0, 2.0], [-1.0, 0.0], [0.5, 1.0]]) + 0.1 * torch.randn(200, 2))
    model = nn.Sequential(nn.Linear(3, 10), nn.Linear(10, 2)).eval()
    y = y[..., None] if positions else y
    model = nn.Sequential(model, nn.Unflatten(1, (2, 1))).eval() if positions else model
    train(model, lambda: nn.functional.mse_loss(model(x), y), 300, 0.03 if scale == 1 else 30.0)
    loader, before = list(zip(x.split(90), y.split(90), strict=True)), copy.deepcopy(model.state_dict())
    posterior = lw.fit(model, loader, lw.Diagonal(), likelihood="gaussian", tune=lw.Evidence())
    drawn = torch.random.get_rng_state()
    error = lw.Refit(steps=300)._error(posterior, Training(loader, (), 200))
    assert 0.005 * scale**2 < error < 0.02 * scale**2
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("outlier", [0.0, 1000.0])
def test_a_copy_that_learns_nothing_and_an_outlier_show_no_overfitting(outlier):
    x, y = torch.randn(200, 3), 5 + torch.randn(200, 1)
    model = nn.Linear(3, 1).eval()
    posterior = lw.fit(model, [(x, y)], tune=None, likelihood="gaussian")
    fresh, _ = fresh_copy(model)
    drawn = torch.random.get_rng_state()
    y[torch.randperm(200)[0]] += outlier  # a row that the copy is not trained on
    torch.random.set_rng_state(drawn)
    error = error_of_copy(fresh, posterior.tangent, x, y.double(), torch.ones(200, 1).double(), 100, 0.1)
    assert error < 0.1 + 0.5 * float(y.var())


def test_a_copy_is_fresh_but_for_frozen_layers_or_is_not_trained(caplog):
    model, loader, _ = overfitted()
    model[0].requires_grad_(False)
    fresh, kept = fresh_copy(model)
    assert not kept
    assert torch.equal(fresh[0].weight, model[0].weight)
    assert not torch.equal(fresh[2].weight, model[2].weight)
    model[2].reset_parameters = lambda: None
    tuned, plain = (lw.fit(model, loader, lw.KFAC(), tune=tune) for tune in (lw.Refit(), lw.BoundedEvidence()))
    assert "reset_parameters does not change 2.weight, 2.bias" in caplog.text
    assert tuned.noise_variance == plain.noise_variance
    maps = nn.Sequential(nn.Flatten(), nn.Linear(4, 1)).eval(), (torch.randn(30, 2, 2), torch.randn(30, 1))
    widths = [lw.fit(*maps, tune=tune).noise_variance for tune in (lw.Refit(), lw.BoundedEvidence())]
    assert "its inputs are not a table (B, D) of floats" in caplog.text
    assert widths[0] == widths[1]


@pytest.mark.parametrize("y", [torch.tensor([[2.0]]), torch.full((6, 1), 1e6), torch.zeros(6, 1)], ids=str)
def test_one_sample_and_constant_targets(y):
    x, model = torch.randn(len(y), 3, dtype=torch.float64), nn.Linear(3, 1).eval().double()
    if not y.any():
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)  # nothing to explain, and no residual
    tuned = lw.fit(model, [(x, y.double())], lw.Diagonal())
    assert math.isfinite(tuned.noise_variance)
    assert math.isfinite(tuned.prior_precision)
    assert tuned.predict(x).variance.isfinite().all()


def process(model, loader, pairs, mean):
    """The Gaussian process of the linearised network: J (M, P), y - f + J(θ̂ - μ0) (M,), and outputs (M, C) as 0, 1."""
    inputs, targets = (torch.cat(parts) for parts in zip(*loader, strict=True))
    samples, outputs = torch.tensor(pairs).T
    rows = jacobian(model, inputs)[samples, outputs]
    weights = torch.cat([part.detach().flatten() - mean for part in model.parameters()])
    labels = (targets - model(inputs).detach())[samples, outputs] + rows @ weights
    return rows, labels, (outputs[:, None] == outputs.unique()).double()


@pytest.mark.parametrize(("outputs", "rows"), [(200, 2000), (201, 500)])
def test_outputs_of_a_map_have_a_small_kernel(outputs, rows):
    x, model = torch.randn(30, 2), nn.Sequential(nn.Linear(2, outputs), nn.Unflatten(1, (outputs, 1))).eval()
    y = model(x).detach()
    posterior = lw.fit(model, [(x, y)], lw.Diagonal(), likelihood="gaussian", tune=None)
    found, _ = process_of(posterior, posterior.tangent, [Samples(Inputs(x), y)])
    assert (len(found.same), len(found.labels)) == (20, rows)
    assert found.outputs_per_pair == outputs / (rows / 20)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("outputs", "most", "twice"), [(1, 1000, 0), (2, 1000, 0), (3, 1000, 9), (3, 45, 0), (3, 60, 0)]
)
def test_left_out_width_against_a_process_refitted_without_each_sample(outputs, most, twice, monkeypatch):
    monkeypatch.setattr("lapwing.tuning.training_kernel.MAX_ROWS", most)
    x = torch.randn(30, 4, dtype=torch.float64)
    x[30 - twice :] = x[:twice]  # samples that tell each other's targets
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, outputs)).double().eval()
    y = model(2 * x).detach() + 0.1 * torch.randn(30, outputs, dtype=torch.float64)
    y[30 - twice :] = y[:twice]
    loader = list(zip(x.split([12, 0, 11, 7]), y.split([12, 0, 11, 7]), strict=True))
    posterior = lw.fit(model, loader, lw.Diagonal(), likelihood="gaussian", prior_mean=0.1, tune=None)
    found = leave_one_out(posterior, loader)
    count = min(30, max(20, most // outputs))
    each = min(outputs, most // count)
    pairs = [(i // each * 30 // count, i % outputs) for i in range(count * each)]
    assert len(set(pairs)) == len(pairs)
    j, raw, ones = process(model, loader, pairs, 0.1)
    precision, copies = found.precision, 30 / (30 - twice)
    assert found.weight == pytest.approx(copies, rel=1e-12)

    def covariance(precision, noise):  # a row has the weight 1/copies
        return j @ j.T / precision + copies * noise * torch.eye(len(j)).double()

    def centred(precision, noise):  # by the likeliest constant of each output
        inverse = covariance(precision, noise).inverse()
        return raw - ones @ torch.linalg.solve(ones.T @ inverse @ ones, ones.T @ inverse @ raw)

    def evidence(precision, noise):
        law = MultivariateNormal(torch.zeros(len(j)).double(), covariance(precision, noise))
        without_row = len(j) / copies - len(j)  # differences of copies
        return float(law.log_prob(centred(precision, noise))) - 0.5 * without_row * math.log(noise)

    best = evidence(precision, found.noise_variance)
    for factor in (0.9, 1.1):
        assert evidence(precision, found.noise_variance * factor) < best
        assert evidence(precision * factor, found.noise_variance) < best
        assert evidence(precision * factor, found.noise_variance * factor) < best
    full, variances, errors = covariance(precision, found.noise_variance), [], []
    labels = centred(precision, found.noise_variance)
    for sample in range(30):
        mine = [m for m, (n, _) in enumerate(pairs) if n == sample]
        like = {sample}
        if each == outputs:
            kernel = lambda a, b: float((a * b).sum())  # noqa: E731
            rows = {n: j[[m for m, (k, _) in enumerate(pairs) if k == n]] for n, _ in pairs}
            own = rows.get(sample)
            like |= {
                n for n, r in rows.items()
                if own is not None and kernel(own, r) >= 0.98 * (kernel(own, own) * kernel(r, r)) ** 0.5
                and (y[n] == y[sample]).all()
            }  # fmt: skip
        rest = [m for m, (n, _) in enumerate(pairs) if n not in like]
        if mine:
            gain = torch.linalg.solve(full[rest][:, rest], full[rest][:, mine])
            left = (full[mine][:, mine] - full[mine][:, rest] @ gain).diagonal()
            variances += (left - (copies - 1) * found.noise_variance).tolist()
            errors += (labels[mine] - gain.T @ labels[rest]).square().tolist()
    assert (found.learning_ratio == 1) is (count == 30)
    assert found.width == pytest.approx(found.learning_ratio * max(sum(variances), sum(errors)) / len(pairs), rel=1e-6)
    assert found.variance == pytest.approx(sum(variances) / len(pairs), rel=1e-6)
    of_output = lambda values, k: [v for v, (_, output) in zip(values, pairs, strict=True) if output == k]  # noqa: E731
    widths = [max(sum(of_output(part, k)) for part in (variances, errors)) for k in range(outputs)]
    counts = [len(of_output(errors, k)) for k in range(outputs)]
    overall = max(sum(variances), sum(errors)) / len(pairs)
    wanted = [total / count / overall for total, count in zip(widths, counts, strict=True) if count]
    if len(wanted) == len(found.of_outputs):  # not if few rows have the same output
        assert found.of_outputs.tolist() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [{}, {"prior_precision": 1.0}, {"params": lw.last_layer}, {"method": lw.Full()}])
def test_an_offset_of_the_targets_changes_no_width(given, dtype):
    x = torch.randn(150, 3, dtype=dtype)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Tanh(), nn.Linear(2, 2)).to(dtype).eval()
    y = model(x).detach().float() + 0.3 * torch.randn(150, 2)
    moved = copy.deepcopy(model)
    offset = torch.tensor([64.0, -16.0])
    with torch.no_grad():
        moved[3].bias += offset.to(dtype)
    method = {"method": lw.KFAC(), "likelihood": "gaussian"} | given
    widths = [
        lw.fit(network, [(x[:1], targets[:1]), (x[1:], targets[1:])], **method).predict(x[:5]).std
        for network, targets in ((model, y), (moved, y + moved(x).detach().float() - model(x).detach().float()))
    ]
    torch.testing.assert_close(widths[1], widths[0], rtol=0.05 if dtype == torch.bfloat16 else 1e-3, atol=0.0)


def test_a_network_without_a_bias_has_the_noise_of_its_residuals():
    x, model = torch.randn(100, 3) + 5, nn.Linear(3, 1, bias=False).eval()
    nn.init.constant_(model.weight, 2.0)
    y = model(x).detach() + 0.1 * torch.randn(100, 1)
    assert lw.fit(model, (x, y)).noise_variance == pytest.approx(0.01, rel=0.5)  # 3 if the labels lost their mean


@pytest.mark.parametrize("method", [lw.Full(), lw.KFAC(), lw.Diagonal()], ids=repr)
def test_one_far_input_does_not_decide_the_width(method):
    x, model = torch.randn(200, 3), nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)).eval()
    x[7] *= 1000
    y = model(x).detach() + 0.1 * torch.randn(200, 1)
    new = torch.randn(500, 3)
    low, high = lw.fit(model, (x, y), method, params=lw.everything).predict(new).interval(0.9)
    targets = model(new).detach() + 0.1 * torch.randn(500, 1)
    assert 0.85 < float(((low <= targets) & (targets <= high)).float().mean()) < 0.97


def test_training_variance_and_the_part_that_weights_explain_at_most():
    model, loader, _ = overfitted(steps=3000)
    exact = leave_one_out(lw.fit(model, loader, lw.Diagonal(), tune=None), loader)
    j, *_ = process(model, loader, [(n, 0) for n in range(60)], 0.0)
    kernel, noise = j @ j.T / exact.precision, exact.noise_variance
    hat = kernel @ torch.linalg.inv(kernel + noise * torch.eye(60).double())
    assert exact.training_variance == pytest.approx(noise * float(1 + hat.diagonal().mean()), rel=1e-6)
    assert hat.diagonal().mean() <= 0.9 + 1e-9


@pytest.mark.parametrize("factor", [1.0, 2.0, 50.0])
def test_learning_curve(factor):
    """Its widths solve the equation."""
    values, noise = torch.logspace(3, -6, 40, dtype=torch.float64), 0.1
    grid = noise * torch.linspace(0, math.log(1 + float(values.mean()) / noise), 40_001, dtype=torch.float64).exp()
    widths = []
    for more in (factor, 1.0):
        right = noise + sum(value / (1 + more * value / grid) for value in values) / len(values)
        widths.append(float(grid[(right > grid).sum()]))
    assert learning_curve(values, noise, factor, len(values)) == pytest.approx(widths[0] / widths[1], rel=1e-3)


def test_crossing():
    points = [0.0, 1.0, 2.0, 3.0]
    assert crossing(points, [0.1, 0.1, 0.1, 0.1], 0.2) == 0
    assert crossing(points, [1.0, 1.0, 1.0, 1.0], 0.2) == 3
    assert crossing(points, [100.0, 10.0, 1.0, 0.1], 3.1622776601683795) == pytest.approx(1.5)
    assert crossing(points, [0.1, 1.0, 0.1, 0.1], 1 / math.sqrt(10)) == pytest.approx(1.5)  # the last crossing counts
    assert crossing(points, [3.0, 1.0, -1.0, -1.0], 0.5) == pytest.approx(1.25)
    assert crossing(points, [math.nan, math.inf, 0.1, 0.1], 0.5) == 2
    assert crossing(points, [math.nan] * 4, 0.5) == 3


DRAWS = lw.SampledLLA(8, lw.ConjugateGradients(200, 1e-8), em_steps=0)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "delta"), [(lw.MeanField(20, learning_rate=1e-3), None), (DRAWS, 100.0)])
def test_covariances_that_chose_their_own_prior_get_the_width_by_the_noise_alone(method, delta):
    x, new = torch.randn(60, 3, dtype=torch.float64), torch.randn(200, 3, dtype=torch.float64)
    y, targets = (z.sum(1, keepdim=True).sin() + 0.5 * torch.randn(len(z), 1, dtype=z.dtype) for z in (x, new))
    model = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 1)).double()
    train(model, lambda: (model(x) - y).square().mean(), 300)
    model.eval()
    plain = lw.fit(model, [(x, y)], method, prior_precision=delta, tune=None)
    posterior = lw.fit(model, [(x, y)], method, prior_precision=delta)
    assert posterior.noise_variance > 3 * plain.noise_variance
    torch.testing.assert_close(posterior.predict(new).epistemic_variance, plain.predict(new).epistemic_variance)
    given = lw.fit(model, [(x, y)], method, likelihood=lw.Gaussian(plain.noise_variance), prior_precision=delta)
    assert given.noise_variance == plain.noise_variance

    validated = lw.fit(model, [(x, y)], method, prior_precision=delta, validation=(new, targets))
    noises = torch.logspace(-3, 1, 100, dtype=x.dtype)
    nll = [-plain.with_noise(float(noise)).predict(new).log_prob(targets).mean() for noise in noises]
    assert -validated.predict(new).log_prob(targets).mean() <= min(nll) + 1e-3


def test_exact_draws_are_as_wide_as_the_posterior_that_they_are_drawn_from():
    torch.manual_seed(1)
    x, y = torch.randn(30, 2, dtype=torch.float64), torch.randn(30, 1, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double().eval()
    posterior = lw.fit(model, [(x, y)], DRAWS, tune=None)
    found = leave_one_out(posterior, [(x, y)]).variance_of_draws
    delta, noise = posterior.prior_precision, posterior.noise_variance
    rows, *_ = process(model, [(x, y)], [(n, 0) for n in range(30)], 0.0)
    kernel = rows @ rows.T / delta + noise * torch.eye(30, dtype=x.dtype)
    assert found == pytest.approx(float((1 / torch.linalg.inv(kernel).diagonal()).mean()), rel=1e-8)


def test_rounded_targets_make_no_copies_of_neighbours():
    x = torch.linspace(-2, 2, 100, dtype=torch.float64)[:, None]
    rounded = (4 * (2 * x).sin()).round() / 4
    distinct = rounded + 1e-9 * torch.arange(len(x))[:, None]
    model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1)).double().eval()
    fitted = lw.fit(model, [(x, rounded)], lw.Full(), tune=None)
    width = leave_one_out(fitted, [(x, rounded)]).width
    assert width == pytest.approx(leave_one_out(fitted, [(x, distinct)]).width, rel=0.05)
    twice = [(torch.cat([x, x]), torch.cat([rounded, rounded]))]
    assert leave_one_out(fitted, twice).width == pytest.approx(width, rel=0.1)  # copies are left out together


def keeping(net, x):
    """Keeps a hidden layer with its graph, which `copy.deepcopy` refuses."""
    net.kept = torch.tanh(net.first(x))
    return net.last(net.kept)


def test_a_network_that_cannot_be_copied_gets_the_default_without_a_copy():
    x, y = torch.randn(60, 4), torch.randn(60, 1)
    model = Net(keeping, first=nn.Linear(4, 8), last=nn.Linear(8, 1), kept=None).eval()
    model(x)
    assert torch.isfinite(lw.fit(model, (x, y)).predict(x).std).all()
    with pytest.raises(lw.LapwingError, match=r"cannot copy Net: .* Let forward\(\) keep no tensors"):
        lw.fit(model, (x, y), tune=lw.Refit())


def test_a_copy_that_takes_gradients_is_trained():
    def slopes(net, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(net.energy(x).sum(), x, create_graph=True)[0]

    x, energy = torch.randn(60, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    posterior = lw.fit(Net(slopes, energy=energy).eval(), (x, torch.randn(60, 4)), tune=lw.Refit(steps=20))
    assert torch.isfinite(posterior.predict(x).std).all()


def test_a_layer_that_keeps_its_first_weights_is_reset_although_the_seed_is_that_of_the_copy(caplog):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x, y = torch.randn(60, 4), torch.randn(60, 1)
    with torch.no_grad():
        model[2].weight.mul_(2.0)
    lw.fit(model.eval(), (x, y), tune=lw.Refit(seed=0, steps=20))
    assert "reset_parameters does not change" not in caplog.text


def test_each_pixel_of_the_kernel_costs_a_backward_pass(monkeypatch):
    """All weights count only if the rows of the kernel, not the images, are cheap."""
    x = torch.randn(20, 1, 8, 8)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 1)).eval()
    fitted = lw.fit(model, [(x, x)], lw.KFAC(), params=lw.last_layer, tune=None)
    each = 64 * (40 + 5)  # multiply-adds of a row of all weights
    for rows, weights in ((20 * 64, 45), (20 * 64 - 1, 5)):
        monkeypatch.setattr("lapwing.tuning.leave_one_out.MAX_MULTIPLY_ADDS", each * rows)
        assert leave_one_out(fitted, [(x, x)]).weights == weights


@pytest.mark.parametrize("case", ["unequal noise", "few known targets"])
def test_each_output_has_the_noise_of_its_own_left_out_targets(case):
    """One squared error overfits the noisiest output most, and the output with the fewest targets."""
    torch.manual_seed(1)
    x, part = torch.randn(1000, 4), torch.tensor([0.99, 0.9, 0.5, 0.1]) if case == "unequal noise" else 0.9
    signal = (x @ torch.randn(4, 4)).tanh()
    signal = (signal - signal.mean(0)) / signal.std(0)
    y = torch.as_tensor(part).sqrt() * signal + (1 - torch.as_tensor(part)).sqrt() * torch.randn(1000, 4)
    targets = y[:200].clone()
    if case == "few known targets":
        targets[14:, 3] = math.nan
    known = ~targets.isnan()
    model = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4))
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(400):
        optimiser.zero_grad()
        ((model(x[:200]) - targets.nan_to_num()).square() * known).sum().div(known.sum()).backward()
        optimiser.step()
    for tune in (lw.BoundedEvidence(), lw.Refit(steps=200)):
        posterior = lw.fit(model.eval(), (x[:200], targets), likelihood=lw.Gaussian(missing=True), tune=tune)
        low, high = posterior.predict(x[200:]).interval(0.9)
        coverage = ((y[200:] >= low) & (y[200:] <= high)).float().mean(0)
        assert coverage.min() > 0.75
        assert coverage[3] > 0.8
