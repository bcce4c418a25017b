"""Targets that are not values of y, such as (time, ended) of a lifetime, with one output."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import distributions as dist
from torch import nn

import lapwing as lw
from lapwing.evaluation.metrics import nll
from lapwing.likelihoods import MixturePrediction, NoiselessLikelihood, latent_draws
from tests.refused import refused

F64 = torch.float64


@dataclass(frozen=True)
class Lives(NoiselessLikelihood):
    """Exponential lives with log rates as outputs, right-censored; targets (time, ended)."""

    name: ClassVar[str] = "lives"

    def target_shape(self, outputs):
        return (2,)

    def check(self, outputs, targets):
        if targets.shape != (len(outputs), 2):
            raise lw.LapwingError("Pass (time, ended).")

    def log_prob(self, outputs, targets):
        time, ended = targets.to(outputs).unbind(-1)
        return ended * outputs[..., 0] - time * outputs[..., 0].exp()

    def fisher_root(self, outputs):
        return torch.ones_like(outputs).unsqueeze(-1)

    def target_weights(self, outputs, targets):
        return targets[:, 1:]

    def predict(self, latent, link=None, generator=None):
        f = latent_draws(latent, self.choose_link(latent, link).draws, generator).transpose(0, 1)
        lives = dist.Exponential(f[..., 0].exp(), validate_args=False)
        return MixturePrediction(lives, density=lambda targets: self.log_prob(f, targets[:, None]))


def setup(rows=60):
    torch.manual_seed(0)
    x = torch.randn(rows, 3, dtype=F64)
    life, limit = dist.Exponential((0.5 * x[:, 0]).exp()).sample(), 2 * torch.rand(rows, dtype=F64)
    return nn.Linear(3, 1).double().eval(), x, torch.stack([torch.minimum(life, limit), (life <= limit).double()], 1)


def test_predictions_accept_the_targets_of_their_likelihood():
    model, x, y = setup()
    posterior = lw.fit(model, (x, y), lw.Full(), likelihood=Lives())
    prediction = posterior.predict(x)
    rates = 1 / prediction.components.mean  # (B, S)
    wanted = (rates.log() * y[:, 1:] - rates * y[:, :1]).exp().mean(1).log()
    torch.testing.assert_close(prediction.log_prob(y), wanted)
    torch.testing.assert_close(prediction.log_prob(y.numpy()), wanted)
    torch.testing.assert_close(prediction.mean, (1 / rates).mean(1))
    high = prediction.interval(0.9)[1]
    assert ((-rates * high[:, None]).exp().mean(1) - 0.05).abs().max() < 0.02  # from draws
    table = lw.compare({"lives": posterior}, (x, y))
    assert table["lives"]["NLL"] == pytest.approx(float(nll(prediction.log_prob(y))))
    assert set(table["lives"]) == {"NLL", "passes"}


def test_held_out_data_and_other_calls_accept_them():
    model, x, y = setup(120)
    posterior = lw.fit(model, (x[:60], y[:60]), lw.Full(), likelihood=Lives(), validation=(x[60:], y[60:]))
    assert posterior.predict(x).log_prob(y).isfinite().all()
    assert lw.scale_factor(posterior, (x[60:], y[60:])).factor > 0
    assert posterior.influence((x, y), x[:2]).isfinite().all()
    assert posterior.update((x[60:], y[60:])).predict(x).log_prob(y).isfinite().all()


def test_censored_rows_have_no_curvature():
    model, x, y = setup()
    ended = y[:, 1] == 1
    full = lw.fit(model, (x, y), lw.Full(), likelihood=Lives(), prior_precision=1.0)
    part = lw.fit(model, (x[ended], y[ended]), lw.Full(), likelihood=Lives(), prior_precision=1.0)
    torch.testing.assert_close(full.latent(x).variance, part.latent(x).variance)


def test_scores_of_y_refuse_such_targets():
    model, x, y = setup()
    prediction = lw.fit(model, (x, y), lw.Full(), likelihood=Lives(), prior_precision=1.0).predict(x)
    for score in (prediction.pit, prediction.crps, prediction.scaled(0.0, 2.0).log_prob):
        refused(partial(score, y), "such as (time, ended)")
    assert prediction.pit(y[:, 0]).shape == (60,)


def test_a_report_of_predictions_without_pictures(tmp_path):
    model, x, y = setup()
    table = lw.compare({"lives": lw.fit(model, (x, y), lw.Full(), likelihood=Lives())}, (x, y))
    text = table.report(tmp_path / "lives.html").read_text()
    assert "lowest NLL" in text
    assert "90 %" not in text
    refused(table.plot, "No picture fits")


def test_a_report_of_several_heads(tmp_path):
    _, x, y = setup()
    heads = {"size": y[:, 0], "ended": y[:, 1].long()}
    likelihood = lw.Joint({"size": lw.Gaussian(), "ended": lw.Categorical()}, {"size": [0], "ended": [1, 2]})
    posterior = lw.fit(nn.Linear(3, 3).double().eval(), (x, heads), lw.Full(), likelihood=likelihood)
    text = lw.compare({"both": posterior}, (x, heads)).report(tmp_path / "heads.html").read_text()
    assert "<h3>size</h3>" in text
