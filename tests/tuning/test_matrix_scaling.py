"""Matrix scaling: the map of the latent, its choice, files, `lw.compare` and `lw.deploy`, against dense oracles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.covariance import Latent
from lapwing.covariance.terms import DenseTerm
from lapwing.likelihoods.predictions import PSEUDO_WEIGHT
from lapwing.tuning.held_out import spread_costs
from lapwing.tuning.matrix_scaling import FOLDS, PAYS, STRENGTHS, chosen_map

SEED = torch.Generator().manual_seed(0)
X, Y = torch.randn(240, 4, generator=SEED).double(), torch.randint(3, (240,), generator=SEED)
ROWS = torch.tensor([[1.2, 0.1, -0.3, 0.5], [0.0, 0.7, 0.2, -0.4], [-0.1, 0.3, 0.9, 0.1]]).double()
W, B = ROWS[:, :-1], ROWS[:, -1]
MAPPED = lw.Categorical(logit_temperature=1.7, logit_map=tuple(ROWS.flatten().tolist()))


@pytest.fixture(scope="module")
def posterior() -> lw.Posterior:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    return lw.fit(
        model, (X[:60], Y[:60]), lw.Full(), likelihood=lw.Categorical(logit_temperature=1.7), prior_precision=2.0
    )


def mapped(posterior: lw.Posterior) -> lw.Posterior:
    return replace(posterior, likelihood=MAPPED)


def test_predictions_are_of_the_mapped_gaussian(posterior: lw.Posterior) -> None:
    latent = posterior.latent(X[:7])
    mean, covariance = latent.mean / 1.7 @ W.T + B, W @ latent.covariance @ W.T
    expected = Latent(mean, (DenseTerm(covariance),))
    plain = lw.Categorical()
    for link in (None, lw.LaplaceBridge(), lw.Quadrature()):
        prediction, wanted = mapped(posterior).predict(X[:7], link=link), plain.predict(expected, link)
        assert torch.allclose(prediction.probs, wanted.probs, atol=1e-12)
        assert torch.allclose(prediction.mutual_information(), wanted.mutual_information(), atol=1e-10)
    drawn = mapped(posterior).predict(X[:7], link=lw.SampledLink(20_000)).probs
    assert torch.allclose(drawn, plain.predict(expected, lw.Quadrature()).probs, atol=0.02)
    joint = MAPPED.tempered(posterior.latent(X[:4], joint=True))
    assert torch.allclose(torch.stack([joint.covariance[i, :, i] for i in range(4)]), covariance[:4], atol=1e-12)
    cross = posterior.latent(X[:4], joint=True).covariance[0, :, 3]
    assert torch.allclose(joint.covariance[0, :, 3], W @ cross @ W.T, atol=1e-12)


def test_tunings_score_the_mapped_logits(posterior: lw.Posterior) -> None:
    """A given map stays, and the other numbers are the best ones for predictions with the map."""
    model, likelihood = posterior.model, replace(MAPPED, logit_temperature=1.0)
    with torch.no_grad():
        logits = 9 * model(X)
    y = torch.multinomial((logits / 3 @ W.T + B).softmax(1), 1, generator=torch.Generator().manual_seed(0))[:, 0]

    def nll(temperature: float) -> float:
        return float(nn.functional.cross_entropy(logits / temperature @ W.T + B, y))

    (found,) = spread_costs([mapped(posterior)], [(X, y)])[0]
    certain = (logits / 9 / 1.7 @ W.T + B).log_softmax(1)[range(240), y]
    cost = (certain - mapped(posterior).predict(X).log_prob(y)).mean()
    assert found == pytest.approx(float(cost), abs=1e-9)
    options: Any = {"likelihood": likelihood, "forward": lambda model, x: 9 * model(x)}
    temperature = lw.fit(model, (X, y), lw.TemperatureScaling(), **options).logit_temperature
    assert nll(temperature) < min(nll(0.97 * temperature), nll(1.03 * temperature))
    tuned = lw.fit(model, (X, y), lw.Full(), prior_precision=1e9, tune=lw.Validation([(X, y)]), **options)
    assert tuned.logit_temperature == pytest.approx(temperature, rel=0.02)
    for tune in (lw.Evidence(), lw.Validation([(X, y)]), lw.EarlyStopping([(X, y)]), lw.BoundedEvidence()):
        assert lw.fit(model, (X, y), lw.Full(), tune=tune, **options).likelihood.logit_map == MAPPED.logit_map
    assert tuned.update((X[:9], y[:9]), tune=lw.Evidence()).likelihood == tuned.likelihood


def test_draws_of_the_weights_are_mapped_one_by_one(posterior: lw.Posterior) -> None:
    way = lw.MonteCarlo(8)
    draws = posterior.latent(X[:5], via=way).draws
    draws = (draws + draws.mean(0) * (1 / 1.7 - 1)) @ W.T + B
    assert torch.allclose(mapped(posterior).predict(X[:5], via=way).probs, draws.softmax(-1).mean(0), atol=1e-12)
    linear = MAPPED.tempered(posterior.latent(X[:5], via=lw.Linearized(draws=6)))
    plain = posterior.latent(X[:5], via=lw.Linearized(draws=6))
    assert torch.allclose(linear.covariance, W @ plain.covariance @ W.T, atol=1e-12)
    assert torch.allclose(linear.mean, plain.mean / 1.7 @ W.T + B, atol=1e-12)


def test_classes_that_cannot_be_stay_so() -> None:
    mean = torch.tensor([[1.0, 2.0, -1e9]]).double()
    latent = MAPPED.tempered(Latent(mean * 1.7, (DenseTerm(torch.eye(3)[None].double()),)))
    assert torch.allclose(latent.mean[0, :2], (mean[:, :2] @ W[:, :2].T + B)[0, :2])
    assert latent.mean[0, 2] == -1e9


def objective(rows: Tensor, z: Tensor, y: Tensor, strength: float, spread: Tensor) -> Tensor:
    """The penalised log likelihood of a map of certain logits, written out entry by entry."""
    penalty = torch.zeros((), dtype=torch.float64)
    for i in range(3):
        for j in range(3):
            penalty = penalty + spread * (rows[i, j] - float(i == j)) ** 2 * (1 if i == j else 3**0.5)
        penalty = penalty + rows[i, 3] ** 2
    return scores(rows, z, y).sum() - strength / 2 * penalty


def scores(rows: Tensor, z: Tensor, y: Tensor) -> Tensor:
    """The log likelihood of each of 120 samples, and its part of a pseudo-row with a uniform label."""
    logs = (z @ rows[:, :-1].T + rows[:, -1]).log_softmax(1)
    return logs[range(len(y)), y] + PSEUDO_WEIGHT * logs.mean() / 120


def shifted(count: int) -> tuple[Tensor, Tensor, Latent]:
    """Returns logits, labels of shifted and stretched logits, and the latent of the logits without spread."""
    generator = torch.Generator().manual_seed(1)
    z = 2 * torch.randn(count, 3, generator=generator).double()
    probs = (z * torch.tensor([1.0, 0.5, 2.0]) + torch.tensor([2.0, 0.0, -1.0])).softmax(1)
    y = torch.multinomial(probs, 1, generator=generator)[:, 0]
    return z, y, Latent(z, (DenseTerm(torch.zeros(count, 3, 3).double()),))


@pytest.mark.slow
def test_the_map_is_the_maximum_at_the_strength_of_cross_validation() -> None:
    z, y, latent = shifted(120)
    spread = (z - z.mean(1, keepdim=True)).square().mean()
    rows = torch.tensor(chosen_map(lw.Categorical(), latent, y)).double().reshape(3, 4).requires_grad_()

    def best(keep: Tensor, strength: float) -> Tensor:
        point = torch.eye(3, 4).double().requires_grad_()
        optimiser = torch.optim.LBFGS([point], max_iter=300, tolerance_change=1e-14, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            value = -objective(point, z[keep], y[keep], strength, spread)
            (point.grad,) = torch.autograd.grad(value, point)
            return value

        optimiser.step(loss)
        return point.detach()

    fold = torch.randperm(120, generator=torch.Generator().manual_seed(0)) % FOLDS
    table, without = [], scores(torch.eye(3, 4).double(), z, y)
    for strength in STRENGTHS:
        maps = [best(fold != k, strength) for k in range(FOLDS)]
        gains = -without
        for k, rows_k in enumerate(maps):
            gains[fold == k] += scores(rows_k, z[fold == k], y[fold == k])
        table.append(float(gains.mean() - PAYS * gains.std() / 120**0.5))
    strength = STRENGTHS[table.index(max(table))]
    (gradient,) = torch.autograd.grad(objective(rows, z, y, strength, spread), rows)
    assert gradient.abs().max() < 1e-3


def test_no_map_unless_it_pays() -> None:
    generator = torch.Generator().manual_seed(2)
    z = 2 * torch.randn(100, 3, generator=generator).double()
    y = torch.multinomial(z.softmax(1), 1, generator=generator)[:, 0]
    latent = Latent(z, (DenseTerm(torch.zeros(100, 3, 3).double()),))
    assert chosen_map(lw.Categorical(), latent, y) == ()
    assert chosen_map(lw.Categorical(), latent.taken(torch.arange(6)), y[:6]) == ()


@pytest.fixture(scope="module")
def calibrated() -> lw.Posterior:
    """A network whose logits have a wrong offset and wrong sizes."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double().eval()
    y = torch.multinomial(
        (2 * model(X).detach() @ W.T + 3 * B).softmax(1), 1, generator=torch.Generator().manual_seed(3)
    )
    held_out = (X[60:160], y[60:160, 0])
    return lw.fit(model, (X[:60], y[:60, 0]), tune=lw.Validation(held_out, calibration="matrix"))


def test_a_fit_keeps_and_saves_the_map(calibrated: lw.Posterior, reloaded: Any) -> None:
    assert len(calibrated.likelihood.logit_map) == 12  # type: ignore[attr-defined]
    assert "logit_map=(" in repr(calibrated)
    assert "calibration='matrix'" in str(calibrated.method.tuning)
    assert torch.equal(reloaded(calibrated).predict(X).probs, calibrated.predict(X).probs)


@pytest.mark.slow
def test_a_deployed_network_has_the_map(calibrated: lw.Posterior, tmp_path: Path) -> None:
    x, onnxruntime = X[160:], pytest.importorskip("onnxruntime")
    expected, predictor = calibrated.predict(x), lw.deploy(calibrated, x, lw.Linearized(), "scores")
    session = onnxruntime.InferenceSession(predictor.to_onnx(tmp_path / "network.onnx", x))
    (deployed,) = session.run(["probabilities"], {"x": x.numpy()})
    assert torch.allclose(torch.from_numpy(deployed), expected.probs, atol=1e-9)
    probabilities, entropy, information = predictor(x)
    assert torch.allclose(probabilities, expected.probs, atol=1e-9)
    assert torch.allclose(entropy, expected.entropy(), atol=1e-9)
    assert torch.allclose(information, expected.mutual_information(), atol=1e-9)


@pytest.mark.slow
def test_compare_has_a_row_of_the_network_with_a_map(calibrated: lw.Posterior) -> None:
    y = torch.multinomial(
        (2 * calibrated.model(X).detach() @ W.T + 3 * B).softmax(1), 1, generator=torch.Generator().manual_seed(3)
    )
    data = [(X[160:], y[160:, 0])]
    table = lw.compare({"matrix": calibrated}, data, {"far": 5 * X[:9]}, repeats=1)
    assert list(table.rows) == ["network", "temperature scaling", "matrix scaling", "matrix"]
    assert max(table[name]["NLL"] for name in ("matrix scaling", "matrix")) < table["temperature scaling"]["NLL"]
    log_probs = calibrated.model(X[160:]).detach().log_softmax(1)
    assert table["network"]["NLL"] == pytest.approx(-float(log_probs[range(80), y[160:, 0]].mean()))
    assert "an affine map of the logits" in " ".join(table.notes)
    plain = lw.fit(calibrated.model, (X[:60], y[:60, 0]), prior_precision=1.0)
    assert "matrix scaling" not in lw.compare({"plain": plain}, data, repeats=1).rows


@pytest.mark.parametrize("outputs", [1, 2])
def test_each_sigmoid_has_an_affine_map_of_its_own_logit(outputs: int) -> None:
    model = nn.Linear(4, outputs).double().eval()
    y = torch.bernoulli((3 * model(X).detach() + 2).sigmoid(), generator=torch.Generator().manual_seed(0)).bool()
    held_out = (X[60:], y[60:])
    posterior = lw.fit(model, (X[:60], y[:60]), tune=lw.Validation(held_out, calibration="matrix"))
    rows = torch.tensor(posterior.likelihood.logit_map).double().reshape(outputs, -1)  # type: ignore[attr-defined]
    assert torch.equal(rows[:, :-1] != 0, torch.eye(outputs).bool())
    assert (rows[:, -1] > 0.5).all()
    latent, temperature = posterior.latent(X[:9]), posterior.logit_temperature
    a, b = rows[:, :-1].diagonal(), rows[:, -1]
    wanted = lw.Bernoulli().predict(
        Latent(a * latent.mean / temperature + b, (DenseTerm(torch.diag_embed(a.square() * latent.variance)),))
    )
    assert torch.allclose(posterior.predict(X[:9]).probs, wanted.probs, atol=1e-10)


def test_positions_are_mapped_one_by_one() -> None:
    model, x = nn.Linear(4, 3).double().eval(), X[:40].reshape(10, 4, 4)
    y = Y[:40].reshape(10, 4)
    whole = mapped(lw.fit(model, (x, y), prior_precision=1.0)).predict(x)
    each = mapped(lw.fit(model, (X[:40], Y[:40]), prior_precision=1.0)).predict(X[:40])
    assert torch.allclose(whole.probs.reshape(40, 3), each.probs, atol=1e-9)  # type: ignore[attr-defined]
