"""Held-out data choose for the way and the link that predictions use, and the posterior keeps both."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.likelihoods.predictions import PSEUDO_WEIGHT
from lapwing.prediction import Aim
from lapwing.tuning.held_out import sample_scores
from tests.trained import train

DRAWS = lw.MonteCarlo(draws=8)


def trained(kind, outputs, seed=0):
    """A trained network in float64, and its training, held-out and test data."""
    torch.manual_seed(seed)
    x = torch.randn(240, 3, dtype=torch.float64)
    clean = torch.stack([(x.sum(1) + c).sin() for c in range(outputs)], 1)
    y = clean + 0.3 * torch.randn_like(clean)
    if kind == "categorical":
        y = (2 * y + torch.randn_like(y)).argmax(1)
    elif kind == "bernoulli":
        y = (y > 0).double()
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, outputs)).double()
    losses = {
        "categorical": nn.functional.cross_entropy, "gaussian": nn.functional.mse_loss,
        "bernoulli": nn.functional.binary_cross_entropy_with_logits,
    }  # fmt: skip
    train(model, lambda: losses[kind](model(x[:80]), y[:80]), 200)
    return model, (x[:80], y[:80]), (x[80:160], y[80:160]), (x[160:], y[160:])


@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "gaussian"])
def test_scores_by_a_way_are_those_of_single_predictions(kind):
    """At each temperature or noise variance, with the pseudo-row of labels, over batches of unequal size."""
    model, train, (x, y), _ = trained(kind, 2)
    posterior = lw.fit(model, train, lw.KFAC(), likelihood=kind, prior_precision=1.0, tune=None)
    held_out = [(x[:50], y[:50]), (x[50:], y[50:])]
    options = {"noises": (0.1, 0.4)} if kind == "gaussian" else {"temperatures": (0.0, 0.3)}
    scores = sample_scores(
        [posterior], lambda one: [one.at(delta) for delta in (1.0, 5.0)], held_out, aim=Aim(DRAWS), **options
    )
    assert scores.shape == (1, 2, 2, 80)
    for i, delta in enumerate((1.0, 5.0)):
        draws = posterior.with_prior(delta).latent(x, via=DRAWS).draws
        for k in (0, 1):
            if kind == "gaussian":
                noise = options["noises"][k]
                each = -0.5 * ((y - draws).square() / noise + math.log(2 * math.pi * noise)).sum(-1)
                expected = (each.logsumexp(0) - math.log(8)).mean()
            else:
                moved = draws + draws.mean(0) * (1 / 10 ** options["temperatures"][k] - 1)
                if kind == "categorical":
                    logs = moved.softmax(-1).mean(0).log()
                    expected = logs[range(80), y].mean() + PSEUDO_WEIGHT * logs.mean() / 80
                else:
                    p = moved.sigmoid().mean(0)
                    uniform = ((p.log() + (1 - p).log()) / 2).sum(-1).mean()
                    expected = torch.where(y > 0, p, 1 - p).log().sum(-1).mean() + PSEUDO_WEIGHT * uniform / 80
            assert float(scores[0, i, k].mean()) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_draws_are_tuned_for_draws(kind):
    """The prior precision of linearised predictions is too wide for draws; the posterior then predicts by draws."""
    model, train, held_out, (x, y) = trained(kind, 2)
    linear = lw.fit(model, train, lw.KFAC(), likelihood=kind, validation=held_out)
    drawn = lw.fit(model, train, lw.KFAC(), likelihood=kind, tune=lw.Validation(held_out, via=DRAWS))
    assert drawn.aim == Aim(DRAWS)
    assert "predictions by MonteCarlo(draws=8, seed=0)>" in repr(drawn)
    assert linear.aim == Aim()
    prediction = drawn.predict(x)
    assert torch.equal(prediction.log_prob(y), drawn.predict(x, via=DRAWS).log_prob(y))
    assert prediction.latent.draws.shape[0] == 8
    gain = float((prediction.log_prob(y) - linear.predict(x, via=DRAWS).log_prob(y)).mean())
    assert gain > (-0.01 if kind == "categorical" else 0.1)
    if kind == "gaussian":
        assert drawn.prior_precision > linear.prior_precision
    assert linear.predict(x).latent.draws is None


def test_a_given_noise_variance_and_methods_without_a_prior_are_kept():
    model, train, held_out, (x, _) = trained("gaussian", 1)
    tune = lw.Validation(held_out, via=DRAWS)
    given = lw.fit(model, train, lw.KFAC(), likelihood=lw.Gaussian(noise_variance=0.2), tune=tune)
    assert given.noise_variance == 0.2
    prior = lw.fit(model, train, lw.KFAC(), prior_precision=50.0, tune=tune)
    assert prior.prior_precision == 50.0
    assert prior.noise_variance != lw.fit(model, train, lw.KFAC(), prior_precision=50.0).noise_variance
    sampled = lw.fit(model, train, lw.SampledLLA(draws=4), tune=tune)
    closed = lw.fit(model, train, lw.KFAC(), likelihood=lw.Gaussian(0.1), prior_precision=1.0, tune=tune)
    for posterior in (sampled, closed):  # the way is kept if nothing is open too
        assert posterior.predict(x).latent.draws is not None


def test_a_link_is_scored_as_it_predicts():
    """The best of all prior precisions and temperatures by the draws of the link."""
    model, train, held_out, _ = trained("categorical", 3)
    link = lw.SampledLink(draws=64)
    tune = lw.Validation(held_out, link=link, points=5, decades=(-2.0, 4.0), tolerance=0.0)
    posterior = lw.fit(model, train, lw.Diagonal(), tune=tune)
    prediction = posterior.predict(held_out[0])
    assert prediction.link == link
    best = prediction.log_prob(held_out[1]).mean()
    others = [posterior.with_prior(10.0**k).predict(held_out[0]).log_prob(held_out[1]).mean() for k in (-2, 0, 2, 4)]
    assert best > max(others) - 0.02


def test_early_stopping_compares_parts_by_the_way():
    model, train, held_out, (x, _) = trained("categorical", 3)
    tune = lw.EarlyStopping(held_out, prefixes=2, points=5, link=lw.SampledLink(draws=32))
    assert lw.fit(model, train, lw.ELLA(rank=4, rows=20), tune=tune).predict(x).link == tune.link
    drawn = lw.fit(model, train, lw.KFAC(), tune=lw.EarlyStopping(held_out, prefixes=2, points=5, via=DRAWS))
    assert drawn.predict(x).latent.draws is not None
    assert drawn.samples in (20, 40, 80)


def test_files_keep_the_way_and_the_link(reloaded):
    model, train, held_out, (x, _) = trained("categorical", 3)
    posterior = lw.fit(model, train, lw.KFAC(), tune=lw.Validation(held_out, via=DRAWS))
    again = reloaded(posterior, model)
    assert again.aim == posterior.aim
    torch.testing.assert_close(again.predict(x).probs, posterior.predict(x).probs)
    for aim in (Aim(), Aim(lw.Streamlined(), lw.Probit(scale="weighted")), Aim(lw.Linearized(outputs=[0, 2]))):
        assert Aim.from_json(aim.to_json()) == aim


def test_another_way_or_link_warns_once_with_the_line(caplog):
    model, train, held_out, (x, _) = trained("categorical", 3)
    posterior = lw.fit(model, train, lw.KFAC(), validation=held_out)
    plain = lw.fit(model, train, lw.KFAC())
    caplog.clear()
    for via in (None, lw.Linearized(), lw.Linearized(draws=4), lw.Scaled(lw.Streamlined(), 0.5)):
        posterior.predict(x, via=via)
    posterior.predict(x, link=lw.Probit(scale="weighted"))
    plain.predict(x, via=DRAWS)
    plain.predict(x, link=lw.Quadrature())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    for _ in range(2):
        posterior.predict(x, via=DRAWS)
    assert caplog.text.count("tune=lw.Validation(held_out, via=lw.MonteCarlo(draws=8, seed=0))") == 1
    posterior.predict(x, link=lw.Quadrature())
    assert caplog.text.count("tune=lw.Validation(held_out, link=lw.Quadrature(nodes=48))") == 1


def test_ways_through_a_last_layer_share_the_choice(caplog):
    model, train, held_out, (x, _) = trained("categorical", 3)
    tune = lw.Validation(held_out, link=lw.Probit(scale="weighted"))
    posterior = lw.fit(model, train, lw.KFAC(), params=lw.last_layer, tune=tune)
    caplog.clear()
    through = posterior.predict(x, via=lw.deploy(posterior, x).via)
    torch.testing.assert_close(through.probs, posterior.predict(x).probs)
    assert through.link == tune.link
    assert "other predictions" not in caplog.text


JOINT = lw.Joint({"a": lw.Categorical(), "b": lw.Gaussian()}, {"a": slice(0, 2), "b": [2]})


@pytest.mark.parametrize("likelihood", [lw.Categorical(), lw.Bernoulli(), lw.Gaussian(), lw.Ordinal(), JOINT])
@pytest.mark.parametrize(
    "given", [{"via": DRAWS}, *({"link": link} for link in (lw.Probit(), lw.LaplaceBridge(), lw.SampledLink()))]
)
def test_the_line_of_a_warning_is_accepted(likelihood, given, caplog):
    """A link that no tuning accepts is refused without advice to tune for it."""
    model, x, real = nn.Linear(3, 3).eval(), torch.randn(60, 3), torch.randn(60, 3)
    targets = {
        "bernoulli": (real > 0).float(),
        "gaussian": real,
        "joint": {"a": real[:, :2].argmax(1), "b": real[:, 2]},
    }
    data = x, targets.get(likelihood.name, real.argmax(1))
    posterior = lw.fit(model, data, lw.KFAC(), likelihood=likelihood, tune=lw.Validation(data))
    caplog.clear()
    try:
        posterior.predict(x, **given)
    except lw.LapwingError:
        assert "Held-out data chose" not in caplog.text
    if "tune=" in caplog.text:
        lw.fit(model, data, lw.KFAC(), likelihood=likelihood, tune=lw.Validation(data, **given)).predict(x, **given)
    assert ("Leave via= out." in caplog.text) == (likelihood is JOINT and "via" in given)


def test_candidates_whose_draws_overflow_do_not_stop_the_fit():
    """At the widest prior precisions the parameters of the distribution are infinite or 0."""
    likelihood = lw.FromDistribution(lambda f: torch.distributions.Gamma(f[..., 0].exp(), f[..., 1].exp()))
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(160, 3)
        y = torch.distributions.Gamma(2.0, (0.3 * x[:, 0]).exp()).sample()
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        train(model, lambda m=model, x=x, y=y: -likelihood.log_prob(m(x[:80]), y[:80]).mean())
        tune = lw.Validation((x[80:], y[80:]), via=lw.MonteCarlo(draws=20))
        posterior = lw.fit(model, (x[:80], y[:80]), likelihood=likelihood, tune=tune)
        with torch.no_grad():
            network = likelihood.log_prob(model(x[80:]), y[80:]).mean()
        assert posterior.predict(x[80:]).log_prob(y[80:]).mean() > network - 0.2


def test_a_scaled_way_takes_its_own_link_if_it_draws():
    model, train, held_out, (x, _) = trained("categorical", 3)
    posterior = lw.fit(model, train, tune=lw.Validation(held_out, link=lw.Probit(scale="class")))
    assert posterior.predict(x, via=lw.Scaled(DRAWS, 0.5)).link == lw.SampledLink()
    assert posterior.predict(x, via=lw.Scaled(lw.Streamlined(), 0.5)).link == lw.Probit(scale="class")


def test_a_posterior_that_is_tuned_for_one_pass_is_deployed_so():
    model, train, held_out, (x, _) = trained("categorical", 3)
    posterior = lw.fit(model, train, lw.KFAC(), tune=lw.Validation(held_out, via=lw.Streamlined()))
    predictor = lw.deploy(posterior, x)
    assert predictor.via == lw.Streamlined()
    torch.testing.assert_close(predictor(x), posterior.predict(x).probs)
