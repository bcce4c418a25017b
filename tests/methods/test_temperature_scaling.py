"""Temperature scaling: the best T, the network's classes, and every use of a posterior."""

from __future__ import annotations

import pytest
import torch
from scipy.optimize import minimize_scalar

import lapwing as lw
from lapwing.likelihoods.predictions import PSEUDO_WEIGHT
from tests.trained import overconfident


def data(outputs=3):
    return overconfident(4, outputs, 100, slope=2.0, factor=8.0, answers=outputs < 3)


def loss(likelihood, logits, y):
    """The mean loss of n samples, and its part of a pseudo-row with a uniform label."""
    labels = range(logits.shape[1]) if logits.shape[1] > 1 else (False, True)
    uniform = torch.stack([likelihood.log_prob(logits, torch.full_like(y, label)) for label in labels]).mean()
    return -float(likelihood.log_prob(logits, y).mean() + PSEUDO_WEIGHT * uniform / len(y))


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_the_temperature_is_scipys(outputs):
    model, x, y = data(outputs)
    scaled = lw.fit(model, [(x[:64], y[:64]), (x[64:], y[64:])], lw.TemperatureScaling())
    with torch.no_grad():
        logits = model(x)
    best = minimize_scalar(
        lambda t: loss(scaled.likelihood, logits / 10**t, y), bounds=(-2, 2), options={"xatol": 1e-9}
    )
    assert scaled.logit_temperature == pytest.approx(10**best.x, rel=2e-3)
    assert loss(scaled.likelihood, logits / scaled.logit_temperature, y) == pytest.approx(best.fun, abs=1e-5)


def test_a_temperature_is_a_posterior(reloaded):
    """Classes are the network's; files, draws and a comparison need no special case."""
    model, x, y = data()
    scaled = lw.fit(model, [(x, y)], lw.TemperatureScaling())
    prediction = scaled.predict(x)
    with torch.no_grad():
        logits = model(x)
    assert torch.equal(prediction.classes, logits.argmax(1))
    torch.testing.assert_close(prediction.probs, (logits / scaled.logit_temperature).softmax(1))
    assert not prediction.latent.variance.any()
    torch.testing.assert_close(scaled.predict(x, via=lw.MonteCarlo(2)).probs, prediction.probs)
    assert torch.equal(reloaded(scaled, model).predict(x).probs, prediction.probs)
    table = lw.compare({"temperature": scaled, "KFAC": lw.fit(model, [(x, y)])}, [(x, y)], repeats=1)
    assert table["temperature"]["accuracy"] == table["network"]["accuracy"]
    assert table["temperature"]["NLL"] < table["network"]["NLL"]


@pytest.mark.parametrize("batch", [7, 40])
def test_weights_and_batches_do_not_change_the_pseudo_row(batch):
    """A weight of 2 equals a sample that is shown twice; samples of weight 0, and ignored labels, do not count."""
    model, x, y = data()
    weights = torch.tensor([2.0, 1.0, 0.0, 1.0]).repeat(10)
    labels = torch.where(torch.arange(40) % 4 == 3, -100, y[:40])
    once = list(zip(x[:40].split(batch), labels.split(batch), weights.split(batch), strict=True))
    weighted = lw.fit(model, once, lw.TemperatureScaling(), sample_weights=True)
    kept = torch.cat([torch.arange(0, 40, 4), torch.arange(0, 40, 4), torch.arange(1, 40, 4)])
    shown = lw.fit(model, [(x[kept], y[kept])], lw.TemperatureScaling())
    assert weighted.logit_temperature == pytest.approx(shown.logit_temperature, rel=1e-9)


@pytest.mark.parametrize(
    ("factor", "temperature", "words"),
    [(1e-6, 1e-2, "hardly differ between the classes"), (-1e3, 1e2, "do not predict the classes")],
)
def test_a_temperature_at_the_end_of_the_range_is_warned_of(factor, temperature, words, caplog):
    model, x, y = data()
    scaled = lw.fit(model, [(x, y)], lw.TemperatureScaling(), forward=lambda model, x: factor * model(x))
    assert scaled.logit_temperature == pytest.approx(temperature)
    (line,) = [record.getMessage() for record in caplog.records if "end of the range" in record.getMessage()]
    assert words in line
