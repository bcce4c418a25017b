"""Validation: candidates scored together equal predictions made one by one, and the best of them is chosen."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import torch

import lapwing as lw
import lapwing.tuning.held_out_choice as choice
from lapwing.likelihoods.predictions import PSEUDO_WEIGHT
from lapwing.tuning.held_out import sample_scores, width_scores
from lapwing.tuning.held_out_choice import WIDER, best_of, widest_of_equals
from tests.conformance import covering
from tests.data.test_loaders import fresh, refilling
from tests.quick import others_slow
from tests.trained import overconfident
from tests.zoo import ZOO

METHODS = {
    "diagonal": lw.Diagonal(), "kfac": lw.KFAC(uncovered="dense"), "ella": lw.ELLA(rank=5, rows=12),
    "residual": lw.ELLA(5, 12, "prior"), "full": lw.Full(),
}  # fmt: skip


def setup(name, method):
    case = ZOO[name]
    loader = [(case.inputs(6, 1), case.targets(6, 1)), (case.inputs(3, 2), case.targets(3, 2))]
    held_out = [(case.inputs(5, 3), case.targets(5, 3)), (case.inputs(2, 4), case.targets(2, 4))]
    likelihood = lw.Categorical() if case.classification else lw.Gaussian(0.5)
    posterior = lw.fit(case.build(), loader, method, likelihood=likelihood, params=lw.matching("*"), tune=None)
    return posterior, held_out


def with_pseudo_row(posterior, held_out):
    """The mean log likelihood of n samples, and its part of a pseudo-row with a uniform label."""
    logs = torch.cat([posterior.predict(x).log_prob(y) for x, y in held_out]).mean()
    if posterior.likelihood.activation is None:
        return float(logs)
    uniform = torch.cat([posterior.predict(x).probs.log().mean(-1) for x, _ in held_out])
    return float(logs + PSEUDO_WEIGHT * uniform.mean() / len(uniform))


@pytest.mark.quick(5)
@covering(["mlp_scalar", "cnn_bn_inplace", "conv1d", "gpt2"], ["mlp_scalar", "cnn_bn_inplace"], METHODS, "kfac")
def test_candidates_scored_together_equal_predictions(name, method):
    posterior, held_out = setup(name, method)
    precisions = [0.1, 1.0, 30.0]
    logs = sample_scores([posterior], lambda one: [one.at(delta) for delta in precisions], held_out)
    scores = logs.mean(-1, dtype=torch.float64)[0, :, 0].tolist()
    for precision, score in zip(precisions, scores, strict=True):
        one = posterior.with_prior(precision)
        assert score == pytest.approx(with_pseudo_row(one, held_out), rel=1e-9)


@pytest.mark.parametrize(
    "method", others_slow([lw.KFAC(), lw.Diagonal(), lw.ELLA(5, 12, "prior")], [lw.KFAC()]), ids=repr
)
@pytest.mark.parametrize("prior", [None, 2.0])
def test_open_noise_is_chosen_on_held_out_data_too(method, prior):
    """No pair (δ, σ²) around the chosen one predicts the held-out data better."""
    case = ZOO["conv1d"]
    loader = [(case.inputs(9, 1), case.targets(9, 1))]
    x, y = case.inputs(30, 3), case.targets(30, 3)
    fitted = lw.fit(
        case.build(), loader, method, params=lw.matching("*"), prior_precision=prior, tune=lw.Validation([(x, y)])
    )
    assert prior is None or fitted.prior_precision == prior

    def score(delta, noise):
        return float(fitted.with_prior(delta, noise_variance=noise).predict(x).log_prob(y).mean())

    chosen = score(fitted.prior_precision, fitted.noise_variance)
    by_evidence = lw.fit(case.build(), loader, method, params=lw.matching("*"), prior_precision=prior)
    assert chosen >= score(by_evidence.prior_precision, by_evidence.noise_variance) - 1e-6
    for factor in (0.5, 2.0):
        assert chosen >= score(fitted.prior_precision, fitted.noise_variance * factor) - 2e-2
        if prior is None:
            assert chosen >= score(fitted.prior_precision * factor, fitted.noise_variance) - 2e-2


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("dtype", others_slow([torch.float32, torch.bfloat16], [torch.float32]))
def test_an_underconfident_network_is_sharpened(classes, dtype, caplog):
    """T is that of temperature scaling, beside a spread that hardly changes predictions; others keep T >= 1."""
    x, model = torch.randn(400, 3, dtype=dtype), torch.nn.Linear(3, classes).to(dtype).eval()
    with torch.no_grad():
        model.weight.mul_(6.0)
        logits = model(x).float()
    y = torch.distributions.Bernoulli(logits=logits).sample().bool()
    if classes > 1:
        y = torch.distributions.Categorical(logits=logits).sample()
    for factor, unsure in ((0.4, True), (1.0, False), (2.0, False)):
        loader, held_out = [(x[:100], y[:100])], [(x[100:150], y[100:150]), (x[150:], y[150:])]
        scaled = {"forward": lambda m, i, f=factor: f * m(i)}
        posterior = lw.fit(model, loader, lw.Diagonal(), validation=held_out, **scaled)
        assert (posterior.logit_temperature < 0.6) is unsure
        if unsure:
            alone = lw.fit(model, held_out, lw.TemperatureScaling(), **scaled)
            assert posterior.logit_temperature == pytest.approx(alone.logit_temperature, rel=0.02)
            assert score(posterior, held_out) == pytest.approx(score(alone, held_out), abs=5e-3)
            assert posterior.predict(x[:50]).mutual_information().mean() > 1e-5
        else:
            assert posterior.logit_temperature >= 1
    assert "underconfident" not in caplog.text


def test_no_uncertainty_of_the_weights_is_said_with_the_call_for_a_map(caplog):
    """Labels that follow the network exactly, so any spread costs: the mutual information is rounding noise."""
    x, model = torch.randn(1000, 3), torch.nn.Linear(3, 2).eval()
    y = torch.distributions.Categorical(logits=model(x)).sample()
    posterior = lw.fit(model, (x[:10], y[:10]), lw.KFAC(), tune=lw.Validation((x[10:], y[10:]), decades=(5.0, 9.0)))
    assert posterior.predict(x).mutual_information().max() < 1e-4
    lw.fit(model, (x[:10], y[:10]), lw.KFAC(),
           tune=lw.Validation((x[10:], y[10:]), decades=(5.0, 9.0), via=lw.MonteCarlo(draws=4)))  # fmt: skip
    assert caplog.text.count("leaves no uncertainty of the weights") == 1
    assert "lw.fit(model, loader, lw.KFAC())" in caplog.text
    assert lw.fit(model, (x[:10], y[:10]), lw.KFAC()).predict(x).mutual_information().max() > 1e-4


def too_sure(scale=4.0, outputs=3):
    """A network whose logits are too large, its training data, and held-out data, in float64."""
    model, x, y = overconfident(2, outputs, 160, slope=3.0, factor=3 * scale, answers=outputs == 1)
    return model, [(x[:60], y[:60])], [(x[60:120], y[60:120]), (x[120:], y[120:])]


def score(posterior, loader):
    return torch.cat([posterior.predict(x).log_prob(y) for x, y in loader]).mean().item()


@pytest.mark.parametrize("outputs", others_slow([3, 1], [3]))
def test_prior_and_temperature_are_the_best_pair(outputs):
    """Against a brute-force grid of single predictions; the likelihood at T is the mean of the logits divided."""
    model, loader, held_out = too_sure(outputs=outputs)
    chosen = lw.fit(model, loader, lw.KFAC(), tune=lw.Validation(held_out, tolerance=0.0))
    around = [chosen.with_prior(10**e) for e in (-1.0, 0.0, 1.0, 1.5, 2.0, 2.5, 3.0)]
    grid = max(
        score(replace(one, likelihood=type(one.likelihood)(logit_temperature=10**t)), held_out)
        for one in around
        for t in (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8)
    )
    assert score(chosen, held_out) >= grid - 2e-3
    assert chosen.logit_temperature > 2
    plain = lw.fit(model, loader, lw.KFAC(), tune=None, prior_precision=chosen.prior_precision)
    latent = plain.latent(held_out[0][0])
    by_hand = plain.likelihood.predict(type(latent)(latent.mean / chosen.logit_temperature, latent.terms))
    torch.testing.assert_close(by_hand.probs, chosen.predict(held_out[0][0]).probs)


def test_logits_are_tempered_only_if_allowed():
    """Without `tempered` T stays 1; beside a given prior precision T is free, since no spread can make up for it."""
    model, loader, held_out = too_sure(scale=0.3)
    tuning = lw.Validation(held_out)
    assert lw.fit(model, loader, lw.KFAC(), prior_precision=1e6, tune=tuning).logit_temperature < 0.6
    model, loader, held_out = too_sure()
    assert lw.fit(model, loader, lw.KFAC(), tune=lw.Validation(held_out, tempered=False)).logit_temperature == 1.0


def test_the_widest_of_equally_good_spreads_is_chosen():
    model, loader, held_out = too_sure()
    best, wide = (lw.fit(model, loader, lw.KFAC(), tune=lw.Validation(held_out, tolerance=e)) for e in (0.0, 1.0))
    assert wide.prior_precision < best.prior_precision
    assert abs(score(best, held_out) - score(wide, held_out)) < WIDER + 2e-4


def test_the_widest_spread_is_chosen_by_paired_differences():
    """Scores that differ between samples, with candidates that differ from the best by a constant, or by noise."""
    common, noise = torch.randn(2, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = noise - noise.mean()
    best = common
    assert widest_of_equals(torch.stack([best - 0.5, best - 5e-4, best]), 2, 0.5) == 2  # surely worse, though by little
    assert widest_of_equals(torch.stack([best - 0.5, best - 5e-4 + 0.1 * noise, best]), 2, 0.5) == 1
    assert widest_of_equals(torch.stack([best - 0.5, best - 2e-3 + noise, best]), 2, 0.5) == 2  # by more than WIDER
    assert widest_of_equals(torch.stack([best - 5e-4 + 0.1 * noise, best]), 1, 0.0) == 1
    alike = torch.stack([best, best + 1e-5, best + 2e-5, best - 0.5])
    assert widest_of_equals(alike, 2, 0.5) == 2  # those below predict the same


def test_a_value_between_grid_points_is_that_of_a_parabola():
    """The parabola through three points of another parabola is exact; at an end of the grid there is none."""
    parabola = lambda x: x**2 - 5 * x + 7  # noqa: E731
    points = [1.0, 1.5, 2.0, 2.5]
    values = [*map(parabola, points)]
    for at, point in ((1, 1.3), (2, 2.2), (2, 2.0)):
        assert choice._between(points, values, at, point) == pytest.approx(parabola(point))
    assert choice._between(points, values, 0, 1.1) == values[0]
    assert choice._between([*points[:2], 1e3], [math.inf, *values[:2]], 1, 2.0) == values[0]


@pytest.mark.parametrize("name", ["mlp_scalar", "deep_linear"])
def test_the_factor_of_a_regression_is_the_best_one(name):
    """(δ/c, c σ²) has c times the covariance of y, and no other c scores better: one output and several."""
    case = ZOO[name]
    loader, held_out = [(case.inputs(9, 1), case.targets(9, 1))], [(case.inputs(4, 2), case.targets(4, 2))] * 2
    posterior = lw.fit(case.build(), loader, lw.KFAC(), likelihood=lw.Gaussian(0.5), params=lw.matching("*"), tune=None)
    one = posterior.with_prior(3.0)
    scores, factors = width_scores([one], lambda posterior: [posterior], held_out)
    best = 10 ** factors.item()
    assert score(one.with_prior(3.0 / best, 0.5 * best), held_out) == pytest.approx(float(scores.mean()), rel=1e-9)
    for other in (0.9 * best, 1.1 * best):
        assert score(one.with_prior(3.0 / other, 0.5 * other), held_out) < scores.mean()


def test_a_regression_keeps_the_product_of_its_training_data(monkeypatch):
    """δσ² is the default's unless held-out data are sure of another; σ² is the one that they need beside it."""
    case = ZOO["mlp_scalar"]
    loader, held_out = [(case.inputs(40, 1), case.targets(40, 1))], [(case.inputs(20, 2), case.targets(20, 2))]
    plain = lw.fit(case.build(), loader, lw.KFAC(), params=lw.matching("*"))
    product = plain.prior_precision * plain.noise_variance
    untuned = lw.fit(case.build(), loader, lw.KFAC(), params=lw.matching("*"), tune=None)
    for sure, kept in ((3.0, True), (-1e9, False)):
        monkeypatch.setattr(choice, "SURE", sure)
        chosen = best_of([untuned], (-5.0, 7.0), 25, held_out, trained=(plain.prior_precision, plain.noise_variance))
        assert (abs(chosen.prior_precision * chosen.noise_variance / product - 1) < 1e-6) == kept
    monkeypatch.undo()
    tuned = lw.fit(case.build(), loader, lw.KFAC(), params=lw.matching("*"), validation=held_out)
    assert tuned.prior_precision * tuned.noise_variance == pytest.approx(product, rel=1e-3)
    for factor in (0.9, 1.1):
        other = tuned.with_prior(tuned.prior_precision / factor, tuned.noise_variance * factor)
        assert score(other, held_out) < score(tuned, held_out)


def test_a_regression_that_interpolates_gets_its_width():
    """The mean squared training residual, 0, says nothing of the noise: the search starts at held-out residuals."""
    x = torch.randn(200, 10, dtype=torch.float64)
    y = x[:, :1] + 0.5 * torch.randn(200, 1, dtype=torch.float64)
    model = torch.nn.Linear(10, 1).double().eval()
    with torch.no_grad():
        solution = torch.linalg.pinv(torch.cat([x[:8], torch.ones(8, 1, dtype=x.dtype)], 1)) @ y[:8]
        model.weight.copy_(solution[:10].T)
        model.bias.copy_(solution[10])
    posterior = lw.fit(model, [(x[:8], y[:8])], tune=lw.Validation([(x[8:100], y[8:100])]))
    lower, upper = posterior.predict(x[100:]).interval(0.9)
    assert 0.8 < ((lower <= y[100:]) & (y[100:] <= upper)).double().mean() < 0.98


@pytest.mark.parametrize("noise", others_slow([0.0, 1e-7], [1e-7]))
def test_held_out_targets_that_are_met_up_to_rounding(noise):
    """No residual is below rounding, so that predictions are about as wide as 1e-6 of the targets' size."""
    generator = torch.Generator().manual_seed(0)
    x, errors = torch.randn(2, 40, 4, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.ReLU(), torch.nn.Linear(7, 1)).eval()
    y = model(x).detach() + noise * errors[:, :1]
    for tune in (lw.Validation([(x[20:], y[20:])]), lw.EarlyStopping([(x[20:], y[20:])])):
        prediction = lw.fit(model, [(x[:20], y[:20])], lw.KFAC(), tune=tune).predict(x[20:])
        assert 1e-13 < prediction.variance.mean() / y[20:].square().mean() < 1e-10


def test_predictions_and_files_follow_the_temperature(reloaded):
    """Linearised, joint and drawn predictions and files; not the network alone in a comparison."""
    model, loader, held_out = too_sure()
    options = {"params": lw.last_layer, "prior_precision": 5.0}
    plain = lw.fit(model, loader, lw.KFAC(), tune=None, **options)
    warm = lw.fit(model, loader, lw.KFAC(), tune=lw.Validation(held_out), **options)
    x, _ = held_out[0]
    assert warm.logit_temperature > 1.5
    assert warm.prior_precision == 5.0
    for via in (lw.Linearized(), lw.MonteCarlo(200), lw.Streamlined()):
        cold, tempered = plain.latent(x, via=via), warm.predict(x, via=via)
        torch.testing.assert_close(tempered.latent.mean, cold.mean / warm.logit_temperature)
        torch.testing.assert_close(tempered.latent.covariance, cold.covariance)
        assert tempered.confidence.mean() < plain.predict(x, via=via).confidence.mean() - 0.05
    torch.testing.assert_close(lw.deploy(warm, x)(x), warm.predict(x, via=lw.Streamlined()).probs)
    joint = warm.likelihood.predict(warm.latent(x, joint=True))
    torch.testing.assert_close(joint.probs, warm.predict(x).probs)
    again = reloaded(warm, model)
    assert again.logit_temperature == warm.logit_temperature
    torch.testing.assert_close(again.predict(x).probs, warm.predict(x).probs)
    alone = [lw.compare({"posterior": one}, held_out, repeats=1)["network"]["NLL"] for one in (plain, warm)]
    assert alone[0] == alone[1]


def test_a_likelihood_names_its_temperature():
    assert repr(lw.Categorical()) == "Categorical()"
    assert repr(lw.Bernoulli(logit_temperature=2)) == "Bernoulli(logit_temperature=2)"


def test_a_shift_of_rare_classes_is_measured_by_their_nll(caplog):
    """The constant is worth more than 8 % of an NLL of 0.15, and less than 0.05 nats."""
    model, generator = torch.nn.Linear(1, 2).double().eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-0.5], [0.5]]))
        model.bias.copy_(torch.tensor([1.8, -1.8]))
    x = 2 * torch.randn(4000, 1, dtype=torch.float64, generator=generator)
    y = torch.bernoulli((x[:, 0] - 5).sigmoid(), generator=generator).long()
    lw.fit(model, (x[:400], y[:400]), validation=(x[400:], y[400:]))
    (said,) = (r.getMessage() for r in caplog.records if "constant for each logit" in r.getMessage())
    gain, nll = map(float, re.search(r"gains (\S+) of (\S+) nats", said).groups())
    assert 0.08 * nll < gain < 0.05


@pytest.mark.parametrize("temperature", [1.07, 1.1])
def test_a_temperature_between_two_candidates_is_found(temperature):
    """The candidates are 1 and 1.26, and no spread may take the place of a temperature between them."""
    generator = torch.Generator().manual_seed(0)
    model, x = torch.nn.Linear(2, 3).double().eval(), torch.randn(6000, 2, dtype=torch.float64, generator=generator)
    logits = 1.5 * x @ torch.tensor([[1.0, 0.0, -1.0], [0.5, -1.0, 0.5]], dtype=torch.float64)
    y = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    with torch.no_grad():
        model.weight.copy_(temperature * torch.linalg.lstsq(x, logits).solution.T)
        model.bias.zero_()
    grid = torch.linspace(0.9, 1.4, 501, dtype=torch.float64)
    losses = [torch.nn.functional.cross_entropy(model(x[1000:]) / t, y[1000:]).item() for t in grid]
    best = float(grid[losses.index(min(losses))])
    posterior = lw.fit(model, (x[:1000], y[:1000]), validation=(x[1000:], y[1000:]))
    assert posterior.logit_temperature == pytest.approx(best, abs=0.01)
    assert best > 1.02


@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_classes_without_a_held_out_label_are_named_and_get_no_constant(shift, caplog):
    generator, x = torch.Generator().manual_seed(0), torch.randn(600, 2, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Linear(2, 4).eval()
    y = torch.multinomial(model(x).detach().softmax(1), 1, generator=generator)[:, 0]
    with torch.no_grad():
        model.bias[1] += shift
    lw.fit(model, (x[:200], y[:200]), validation=(x[200:][y[200:] < 2], y[200:][y[200:] < 2]))
    assert "The classes [2, 3] have no held-out label, and Linear expects about" in caplog.text
    constants = re.findall(r"torch\.tensor\((.*)\)\. Or", caplog.text)
    assert [json.loads(found)[2:] for found in constants] == [[0.0, 0.0]] * (shift > 0)


@pytest.mark.parametrize("weight", [1.5, None])
def test_weights_of_labels_make_a_small_shift_worth_a_word(weight, caplog):
    """The shift is worth less than 0.05 nats and 8 % of the NLL, and a label's ECE is 0.03 higher by it."""
    generator = torch.Generator().manual_seed(0)
    model, x = torch.nn.Linear(1, 1).double().eval(), torch.randn(4000, 1, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(math.log(1.5) - 2)
    y = torch.bernoulli((x - 2).sigmoid(), generator=generator)
    lw.fit(model, (x[:400], y[:400]), likelihood=lw.Bernoulli(pos_weight=weight), validation=(x[400:], y[400:]))
    assert ("constant for each logit" in caplog.text) is (weight is not None)


@pytest.mark.parametrize("likelihood", [lw.Categorical(), lw.Bernoulli()], ids=["softmax", "sigmoid"])
def test_a_shift_of_the_logits_is_seen(likelihood, caplog):
    """A network that was trained on balanced data predicts a rare class far too often, whatever the temperature."""
    generator, outputs = torch.Generator().manual_seed(0), 2 if likelihood.activation == "softmax" else 1
    x = 2 * torch.randn(600, 1, dtype=torch.float64, generator=generator)
    y = torch.bernoulli((x - 3).sigmoid(), generator=generator)  # the truth; the network has learned sigmoid(x)
    y = y[:, 0].long() if outputs == 2 else y
    model = torch.nn.Linear(1, outputs).double().eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-0.5], [0.5]][2 - outputs :]) * (1 if outputs == 2 else 2))
        model.bias.zero_()
    numbers = r"\[(1\.\d+), -\1\]" if outputs == 2 else r"\[-[23]\.\d+\]"
    lw.fit(model, [(x[:100], y[:100])], likelihood=likelihood, validation=[(x[100:], y[100:])])
    (said,) = (r.getMessage() for r in caplog.records if "constant for each logit" in r.getMessage())
    assert re.search(r"torch\.tensor\(" + numbers, said), said
    caplog.clear()
    shift = torch.tensor([1.5, -1.5] if outputs == 2 else [-3.0])
    lw.fit(
        model, [(x[:100], y[:100])], likelihood=likelihood, validation=[(x[100:], y[100:])],
        forward=lambda model, inputs: model(inputs) + shift,
    )  # fmt: skip
    assert "constant for each logit" not in caplog.text


@pytest.mark.parametrize("method", [None, lw.Full()])
def test_held_out_rows_show_the_noise_of_each_output(method, caplog):
    std = torch.tensor([0.12, 0.15, 0.2]).repeat(2)  # ratios above 4 are in the curvature too: test_noise_ratios.py
    x, model = torch.randn(700, 3), torch.nn.Linear(3, 6).eval()
    every, equal = (model(x).detach() + noise * torch.randn(700, 6) for noise in (std, 0.2))
    options = {"likelihood": "gaussian"}
    posterior = lw.fit(model, (x[:40], every[:40]), method, validation=(x[200:400], every[200:400]), **options)
    assert "one noise variance for both" not in caplog.text
    low, high = posterior.predict(x[400:]).interval(0.9)
    cover = ((low <= every[400:]) & (every[400:] <= high)).float().mean(0)
    assert cover.min() > 0.84
    assert cover.max() < 0.95
    further = (x[200:400], every[200:400])
    alone = replace(posterior, likelihood=replace(posterior.likelihood, noise_ratios=None)).update(further)
    torch.testing.assert_close(
        posterior.update(further).latent(x[:5]).variance, alone.latent(x[:5]).variance, rtol=0, atol=0
    )
    alike = lw.fit(model, (x[:40], equal[:40]), method, validation=(x[200:400], equal[200:400]), **options)
    assert alike.likelihood.noise_ratios is None
    given = lw.Gaussian(noise_ratios=[1.0] * 6)
    kept = lw.fit(model, (x[:40], every[:40]), method, validation=(x[200:400], every[200:400]), likelihood=given)
    assert kept.likelihood.noise_ratios == given.noise_ratios


@pytest.mark.parametrize("shape", [(6, 1), (2, 3)])
@pytest.mark.parametrize(
    ("method", "params"), [(None, None), (lw.KFAC(), lw.everything), (lw.KFAC(), None)], ids=["full", "kfac", "last"]
)
def test_outputs_with_positions_have_the_noise_of_the_flattened_outputs(method, params, shape, reloaded):
    std = torch.tensor([0.21, 0.23, 0.26, 0.31, 0.36, 0.4])  # flat outputs have ratios above 4 in the curvature too
    x = torch.randn(500, 3, dtype=torch.float64)
    flat = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 6)).double().eval()
    model = torch.nn.Sequential(flat, torch.nn.Unflatten(1, shape)).eval()
    y = flat(x).detach() + std * torch.randn(500, 6)
    whole = y.unflatten(1, shape)
    posteriors = [
        lw.fit(
            network, (x[:100], targets[:100]), method, likelihood="gaussian", params=params,
            validation=[(x[100:250], targets[100:250]), (x[250:400], targets[250:400])],
        )
        for network, targets in ((flat, y), (model, whole[..., 0] if shape[-1] == 1 else whole))
    ]  # fmt: skip
    ratios, noise = zip(*((one.likelihood.noise_ratios, one.noise_variance) for one in posteriors), strict=True)
    assert len(ratios[0]) == len(ratios[1]) == 6
    torch.testing.assert_close(torch.tensor(ratios[0]), torch.tensor(ratios[1]), rtol=1e-9, atol=0)
    assert noise[0] == pytest.approx(noise[1], rel=1e-9)
    rows, steps = (one.predict(x[400:]) for one in posteriors)
    for read in (
        lambda p: p.mean, lambda p: p.variance, lambda p: p.aleatoric_variance, lambda p: p.interval(0.9)[1],
    ):  # fmt: skip
        torch.testing.assert_close(read(steps).flatten(1), read(rows), rtol=1e-9, atol=1e-12)
    again = reloaded(posteriors[1], model).predict(x[400:])
    torch.testing.assert_close(again.variance, steps.variance, rtol=1e-12, atol=0)
    for way in (lw.MonteCarlo(draws=20), lw.Linearized(draws=20)):
        drawn, targets = posteriors[1].predict(x[400:], via=way), whole[400:]
        torch.testing.assert_close(
            drawn.log_prob(targets).flatten(), drawn.distribution().log_prob(targets.flatten(0, 1)), rtol=1e-9, atol=0
        )
        torch.testing.assert_close(drawn.aleatoric_variance, steps.aleatoric_variance, rtol=1e-12, atol=0)
    assert steps.sample(3).shape == (3, 100, *shape)
    assert lw.scale_factor(posteriors[1], (x[250:400], whole[250:400])).factor > 0


@pytest.mark.parametrize(("method", "dtype"), [(None, torch.float32), (lw.KFAC(), torch.bfloat16)], ids=str)
def test_forecasts_of_either_shape_from_a_loader_that_fills_the_same_tensors(method, dtype):
    """Targets (B, 6) of a list and (B, 6, 1) behind a frozen layer give the same widths, also for one sample."""
    x = torch.randn(118, 3).to(dtype)
    rows = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 6)).to(dtype).eval()
    rows[0].requires_grad_(False)
    steps = torch.nn.Sequential(rows, torch.nn.Unflatten(1, (6, 1))).eval()
    y = rows(x).detach().float() + torch.tensor([0.2, 0.2, 0.2, 0.33, 0.33, 0.33]) * torch.randn(118, 6)
    widths = []
    for model, targets, kind in ((rows, y, fresh), (steps, y[..., None], refilling)):
        loader, held_out = kind(x[:18], targets[:18]), kind(x[18:], targets[18:])
        posterior = lw.fit(model, loader, method, likelihood="gaussian", validation=held_out)
        assert len(posterior.likelihood.noise_ratios) == 6
        widths.append(torch.cat([posterior.predict(x[:n]).std for n in (5, 1)]).flatten(1))
    assert torch.equal(*widths)


def test_a_number_of_positions_that_varies_keeps_one_noise_for_each_output():
    model, x = torch.nn.Linear(3, 2).eval(), torch.randn(300, 6, 3)
    y = model(x).detach() + torch.tensor([0.1, 0.18]) * torch.randn(300, 6, 2)
    held_out = [(x[100:200], y[100:200]), (x[200:, :4], y[200:, :4])]
    posterior = lw.fit(model, (x[:100], y[:100]), likelihood="gaussian", validation=held_out)
    assert len(posterior.likelihood.noise_ratios) == 2
    assert posterior.predict(x[:5, :3]).variance.shape == (5, 3, 2)
    fixed = lw.fit(model, (x[:100], y[:100]), likelihood="gaussian", validation=held_out[:1])
    with pytest.raises(lw.LapwingError, match=r"noise variances of 12 outputs, .* by='validation'"):
        lw.scale_factor(fixed, held_out[:1], by="evidence")
    with pytest.raises(lw.LapwingError, match=r"noise of 12 outputs of a sample, .* 3 positions of 2 outputs"):
        fixed.predict(x[:5, :3])


def test_scores_at_the_top_of_a_parabola():
    """Scores that are quadratic in log10 T are exact there; T stays at least 1, and a score of -inf counts nowhere."""
    grid = [-0.1, 0.0, 0.1, 0.2]
    t = torch.tensor(grid, dtype=torch.float64)
    centres = torch.tensor([0.04, 0.13, -0.08, 0.5], dtype=torch.float64)
    noise = torch.randn(4, 1, 9, dtype=torch.float64)
    scores = 0.3 * noise - (1 + noise.square()) * (t[:, None] - centres[:, None, None]).square()  # (points, K, N)
    tops, rows = choice._at_tops(scores[None], grid)
    torch.testing.assert_close(tops[0], torch.tensor([0.04, 0.13, 0.0, 0.2], dtype=torch.float64))
    wanted = 0.3 * noise[:, 0] - (1 + noise[:, 0].square()) * (tops[0] - centres)[:, None].square()
    torch.testing.assert_close(rows[0], wanted)
    scores[0, 0, 3] = -torch.inf
    tops, rows = choice._at_tops(scores[None], grid)
    assert float(tops[0, 0]) in grid
    assert rows[0, 0].isfinite().all()


def test_a_wider_range_does_not_hide_a_point_that_is_surely_better(monkeypatch):
    """The point with the best mean has the largest paired errors. The next one is surely better than the trained λ."""
    posterior, held_out = setup("mlp_scalar", lw.Full())
    noisy = torch.tensor([30.0, -20.0]).repeat(50)
    scores = torch.stack([noisy, torch.full((100,), 0.5), torch.full((100,), 0.2), torch.zeros(100)])  # last the λ
    monkeypatch.setattr(choice, "width_scores", lambda *_: (scores[None].double(), torch.zeros(1, 4).double()))
    found = choice._best_width([posterior], [-2.0, 0.0, 2.0], 0.5, held_out, trained=(1e3, 0.5))
    assert 0.09 < found.prior_precision < 1.1
