"""Temperature scaling: the best T, the network's classes, and every use of a posterior."""

from __future__ import annotations

import pytest
import torch
from scipy.optimize import minimize_scalar

import lapwing as lw


def data(outputs=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, outputs)).double().eval()
    x = torch.randn(100, 4, dtype=torch.float64)
    with torch.no_grad():
        logits = 2 * model(x)
        y = (
            logits.sigmoid().bernoulli().bool()
            if outputs < 3
            else torch.distributions.Categorical(logits=logits).sample()
        )
        model[2].weight.mul_(8)
        model[2].bias.mul_(8)
    return model, x, y


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_the_temperature_is_scipys(outputs):
    model, x, y = data(outputs)
    scaled = lw.fit(model, [(x[:64], y[:64]), (x[64:], y[64:])], lw.TemperatureScaling())
    with torch.no_grad():
        logits = model(x)
    best = minimize_scalar(
        lambda t: -float(scaled.likelihood.log_prob(logits / 10**t, y).mean()), bounds=(-2, 2), options={"xatol": 1e-9}
    )
    assert scaled.logit_temperature == pytest.approx(10**best.x, rel=2e-3)
    assert -scaled.predict(x).log_prob(y).mean() == pytest.approx(best.fun, abs=1e-5)


def test_a_temperature_is_a_posterior(tmp_path):
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
    scaled.save(tmp_path / "scaled.safetensors")
    assert torch.equal(lw.load(tmp_path / "scaled.safetensors", model).predict(x).probs, prediction.probs)
    table = lw.compare({"temperature": scaled, "KFAC": lw.fit(model, [(x, y)])}, [(x, y)], repeats=1)
    assert table["temperature"]["accuracy"] == table["network"]["accuracy"]
    assert table["temperature"]["NLL"] < table["network"]["NLL"]


@pytest.mark.slow
def test_a_temperature_is_deployed():
    model, x, y = data()
    scaled = lw.fit(model, [(x, y)], lw.TemperatureScaling())
    torch.testing.assert_close(lw.deploy(scaled, x, via=lw.Linearized())(x), scaled.predict(x).probs)
    torch.testing.assert_close(lw.deploy(scaled, x)(x), scaled.predict(x).probs)


def test_separable_data_have_no_best_temperature(caplog):
    model, x, _ = data()
    lw.fit(model, [(x, model(x).argmax(1))], lw.TemperatureScaling())
    assert "the end of the range. The network predicts every class correctly" in caplog.text
