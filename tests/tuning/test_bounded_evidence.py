"""The bounded evidence: its cost against predictions made one by one, its δ against the bound, and where it stays."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import lapwing as lw
from lapwing import batches
from lapwing.errors import LapwingError
from lapwing.tuning import Training
from lapwing.tuning.bounded_evidence import BoundedEvidence, crossing
from tests.zoo import ZOO

METHODS = [lw.Diagonal(), lw.KFAC(uncovered="dense"), lw.ELLA(rank=5, rows=12), lw.ELLA(5, 12, "prior"), lw.Full()]


def memorised(dtype=torch.float64, classes=3, steps=300):
    """A network that is sure of random labels, and its data in batches of 20, 10 and 10."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 4, dtype=dtype), torch.randint(classes, (40,))
    model = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, classes)).to(dtype)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimiser.zero_grad()
        cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval(), list(zip(x.split([20, 10, 10]), y.split([20, 10, 10]), strict=True))


def cost(posterior, loader):
    """What predictions lose against the network's own, sample by sample."""
    lost = []
    for x, y in loader:
        for i in range(len(y)):
            one, label = batches.take(x, slice(i, i + 1)), y[i : i + 1]
            own = posterior.likelihood.log_prob(posterior.tangent.outputs_of(one), label)
            lost.append(float(own - posterior.predict(one).log_prob(label)))
    return sum(lost) / len(lost)


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("name", ["cnn_bn_inplace", "gpt2", "mlp"])
def test_costs_equal_predictions_made_one_by_one(name, method):
    case = ZOO[name]
    loader = [(case.inputs(6, 1), case.targets(6, 1)), (case.inputs(3, 2), case.targets(3, 2))]
    fitted = lw.fit(case.build(), loader, method, likelihood="categorical", params=lw.matching("*"), tune=None)
    candidates = [fitted.with_prior(delta) for delta in (0.1, 1.0, 30.0)]
    for found, candidate in zip(BoundedEvidence().costs(candidates, loader), candidates, strict=True):
        assert found == pytest.approx(cost(candidate, loader), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("nats", [0.002, 0.005, 0.05])
@pytest.mark.parametrize("params", [lw.everything, lw.last_layer], ids=["everything", "last_layer"])
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


def test_where_the_spread_costs_little_the_evidence_stays():
    model, loader = memorised()
    wide = lw.fit(model, loader, lw.KFAC(), tune=lw.Evidence())
    assert BoundedEvidence(nats=cost(wide, loader) + 1e-6).tune(wide, Training(loader)).prior_precision == (
        wide.prior_precision
    )


def overfitted(dtype=torch.float64, rows=60):
    """A network that fits a noisy curve too closely, its data in two batches, and other data."""
    torch.manual_seed(0)
    x = torch.randn(rows + 200, 3, dtype=dtype)
    y = (x[:, :1] * x[:, 1:2]).sin() + 0.3 * torch.randn(len(x), 1, dtype=dtype)
    model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1)).to(dtype)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(300):
        optimiser.zero_grad()
        (model(x[:rows]) - y[:rows]).square().mean().backward()
        optimiser.step()
    return model.eval(), list(zip(x[:rows].split(40), y[:rows].split(40), strict=True)), (x[rows:], y[rows:])


def residual(model, loader):
    """The mean squared residual, batch by batch."""
    with torch.no_grad():
        squares = torch.cat([(model(x) - y).square() for x, y in loader])
    return float(squares.mean())


def scatter(loader):
    """The variance of the targets, all outputs together."""
    y = torch.cat([y for _, y in loader])
    return float((y - y.mean(0)).square().mean())


WIDE = [lw.Diagonal(), lw.KFAC(), lw.EKFAC(), lw.ELLA(rank=10, rows=30), lw.SubsetOfWeights(20)]


def test_noise_within_the_targets_variance_stays_and_no_data_are_read():
    model, loader, _ = overfitted(rows=600)
    for likelihood in (lw.Gaussian(), lw.Gaussian(0.5)):
        plain = lw.fit(model, loader, lw.Full(), likelihood=likelihood, tune=lw.Evidence())
        assert plain.noise_variance <= max(0.5, 2 * residual(model, loader))
        tuned = BoundedEvidence().tune(plain)
        assert (tuned.prior_precision, tuned.noise_variance) == (plain.prior_precision, plain.noise_variance)


def test_noise_that_was_given_is_kept():
    model, loader, _ = overfitted()
    options = {"likelihood": lw.Gaussian(100 * scatter(loader))}
    tuned, plain = (lw.fit(model, loader, lw.Diagonal(), tune=t, **options) for t in (BoundedEvidence(), lw.Evidence()))
    assert (tuned.prior_precision, tuned.noise_variance) == (plain.prior_precision, plain.noise_variance)


@pytest.mark.parametrize("method", WIDE, ids=repr)
def test_noise_is_held_to_the_variance_of_the_targets_and_the_prior_is_the_best_there(method, caplog):
    model, loader, (x, y) = overfitted()
    plain, bound = lw.fit(model, loader, method, tune=lw.Evidence()), scatter(loader)
    assert plain.noise_variance > 2 * bound
    with caplog.at_level(logging.INFO, "lapwing"):
        tuned = lw.fit(model, loader, method)
    assert "is lowered to that of the targets" in caplog.text
    assert f"{bound / residual(model, loader):.3g} times the mean squared residual" in caplog.text
    assert tuned.noise_variance == pytest.approx(bound, rel=1e-9)
    assert not tuned.noise_given
    assert not tuned.tuned
    values = [
        float(tuned.log_evidence(tuned.prior.precision * factor, tuned.likelihood, lower_bound=True))
        for factor in (0.98, 1.0, 1.02)
    ]
    assert values[1] >= max(values)
    assert tuned.predict(x).log_prob(y).mean() > plain.predict(x).log_prob(y).mean() + 0.5


def test_noise_is_held_under_a_given_prior_and_scaled_data():
    model, loader, _ = overfitted()
    for options in ({"prior_precision": 0.5}, {"data_size": 600}, {"temperature": 2.0}):
        plain = lw.fit(model, loader, lw.Diagonal(), tune=lw.Evidence(), **options)
        tuned = lw.fit(model, loader, lw.Diagonal(), **options)
        assert plain.noise_variance > scatter(loader)
        assert tuned.noise_variance == pytest.approx(scatter(loader), rel=1e-9)
        if "prior_precision" in options:
            assert tuned.prior_precision == 0.5


@pytest.mark.parametrize("y", [torch.tensor([[2.0]]), torch.full((6, 1), 1e6), torch.full((6, 1), 1 / 3)], ids=str)
def test_one_sample_and_constant_targets_bound_nothing(y):
    torch.manual_seed(0)
    x, y, model = torch.randn(len(y), 3), y.double(), nn.Linear(3, 1).eval().double()
    loader = [(x.double(), y)]
    plain, tuned = (lw.fit(model, loader, lw.Diagonal(), tune=tune) for tune in (lw.Evidence(), BoundedEvidence()))
    assert tuned.likelihood.target_variance(tuned.statistics) is None
    assert (tuned.prior_precision, tuned.noise_variance) == (plain.prior_precision, plain.noise_variance)


def test_several_outputs_far_from_zero_and_saved(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(50, 3, dtype=torch.float64)
    y = torch.randn(50, 2, dtype=torch.float64) * torch.tensor([1.0, 3.0]) + torch.tensor([1e4, -5.0])
    model = nn.Linear(3, 2).double().eval()
    loader = list(zip(x.split(20), y.split(20), strict=True))
    fitted = lw.fit(model, loader, lw.Diagonal(), params=lw.everything)
    found = fitted.likelihood.target_variance(fitted.statistics)
    assert found == pytest.approx(float((y - y.mean(0)).square().mean()), rel=1e-6)
    fitted.save(tmp_path / "p.st")
    loaded = lw.load(tmp_path / "p.st", model)
    assert loaded.likelihood.target_variance(loaded.statistics) == found
    without = {key: value for key, value in fitted.statistics.items() if "targets" not in key}
    assert fitted.likelihood.target_variance(without) is None


def test_a_given_prior_is_kept():
    model, loader = memorised()
    given = lw.fit(model, loader, lw.KFAC(), prior_precision=0.01, tune=None)
    assert BoundedEvidence().tune(given, Training(loader)).prior_precision == 0.01


@pytest.mark.parametrize("samples", [1, 7, 20, 25, 40, 1000])
def test_samples_are_at_most_as_many_as_asked_and_spread_over_the_loader(samples):
    parts = [(torch.arange(start, start + 10.0)[:, None], torch.zeros(10)) for start in range(0, 90, 10)]
    parts.insert(3, (torch.zeros(0, 1), torch.zeros(0)))
    taken = list(BoundedEvidence(samples=samples)._spread(parts, 90))
    rows = torch.cat([x for x, _ in taken]).flatten()
    assert len(rows) == min(samples, 90) == len(rows.unique())
    assert all(len(x) == len(y) for x, y in taken)
    if samples >= 20:
        assert rows.max() >= 40  # not the first ones alone
    whole = [(torch.arange(90.0)[:, None], torch.zeros(90))]
    ((x, _),) = BoundedEvidence(samples=samples)._spread(whole, 90)
    assert len(x) == min(samples, 90)
    assert samples == 1 or x.max() >= 90 / 2


def test_a_second_batch_counts():
    model, loader = memorised()
    wide = lw.fit(model, loader, lw.KFAC(), tune=lw.Evidence())
    one, both = (BoundedEvidence().costs([wide], part)[0] for part in (loader[:1], loader))
    assert both == pytest.approx(cost(wide, loader), rel=1e-9)
    assert one != pytest.approx(both, rel=1e-3)


def test_the_end_of_the_range_is_said(caplog):
    model, loader = memorised()
    wide = lw.fit(model, loader, lw.KFAC(), tune=lw.Evidence())
    with caplog.at_level(logging.WARNING, "lapwing"):
        tuned = BoundedEvidence(decades=0.2, points=3).tune(wide, Training(loader))
    assert "decades=4.2" in caplog.text
    assert tuned.prior_precision == pytest.approx(wide.prior_precision * 10**0.2)


def test_bfloat16_and_frozen_layers():
    model, loader = memorised(torch.float32)
    model[0].requires_grad_(False)
    model.bfloat16()
    loader = [(x.bfloat16(), y) for x, y in loader]
    wide = lw.fit(model, loader, lw.KFAC(), params=lw.last_layer, tune=lw.Evidence())
    tuned = BoundedEvidence().tune(wide, Training(loader))
    assert math.isfinite(tuned.prior_precision)
    assert tuned.prior_precision > wide.prior_precision


def test_a_thousand_classes():
    torch.manual_seed(0)
    x, y = torch.randn(6, 5), torch.arange(6)
    model = nn.Linear(5, 1000).eval()
    wide = lw.fit(model, [(x, y)], tune=lw.Evidence())
    assert BoundedEvidence().tune(wide, Training([(x, y)])).prior_precision >= wide.prior_precision


def test_no_training_data_is_one_sentence():
    model, loader = memorised()
    with pytest.raises(LapwingError, match="the same data are needed once more"):
        BoundedEvidence().tune(lw.fit(model, loader, tune=lw.Evidence()))


@pytest.mark.parametrize(
    "options",
    [
        {"nats": 0},
        {"nats": math.nan},
        {"nats": True},
        {"samples": 0},
        {"samples": 1.5},
        {"points": 2},
        {"decades": -1},
    ],
    ids=str,
)
def test_numbers_out_of_range(options):
    with pytest.raises(LapwingError, match="write BoundedEvidence"):
        BoundedEvidence(**options)


def test_crossing():
    points = [0.0, 1.0, 2.0, 3.0]
    assert crossing(points, [0.1, 0.1, 0.1, 0.1], 0.2) == 0
    assert crossing(points, [1.0, 1.0, 1.0, 1.0], 0.2) == 3
    assert crossing(points, [100.0, 10.0, 1.0, 0.1], 3.1622776601683795) == pytest.approx(1.5)
    assert crossing(points, [0.1, 1.0, 0.1, 0.1], 1 / math.sqrt(10)) == pytest.approx(1.5)  # the last crossing counts
    assert crossing(points, [3.0, 1.0, -1.0, -1.0], 0.5) == pytest.approx(1.25)
    assert crossing(points, [math.nan, math.inf, 0.1, 0.1], 0.5) == 2
    assert crossing(points, [math.nan] * 4, 0.5) == 3
