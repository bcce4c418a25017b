"""MAPIE's sets and intervals of a posterior's predictions cover, and are those of the textbook."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import lapwing as lw

pytest.importorskip("mapie")
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import StdConformityScore
from mapie.exchangeability_testing import OnlineMartingaleTest
from mapie.regression import SplitConformalRegressor

from lapwing.integrations.mapie import PredictionClassifier, PredictionRegressor, matrix_of
from tests.trained import train

pytestmark = pytest.mark.filterwarnings("ignore")
HELD_OUT = slice(0, 400)
TEST = slice(400, 4400)


def data(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4400, 3, generator=generator)
    noise = torch.randn(4400, 3, generator=generator)
    return x, (x + noise).argmax(1) if kind == "classes" else x[:, :1] + (0.2 + x[:, 1:2].abs()) * noise[:, :1]


def posterior(kind: str) -> lw.Posterior:
    x, y = data(kind)
    torch.manual_seed(1)
    network = nn.Linear(3, 3 if kind == "classes" else 1).eval()
    with torch.no_grad():
        network.weight.copy_(torch.eye(3)[: len(network.weight)])
        network.bias.zero_()
    return lw.fit(network, (x[:50], y[:50]), lw.Full(), prior_precision=0.1)


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
def test_sets_cover(score):
    x, y = data("classes")
    X = matrix_of(posterior("classes").predict(x))
    sets = SplitConformalClassifier(
        PredictionClassifier(3), confidence_level=0.9, conformity_score=score, prefit=True, random_state=0
    )
    sets.conformalize(X[HELD_OUT], y[HELD_OUT].numpy())
    labels, inside = sets.predict_set(X[TEST])
    assert np.array_equal(labels, X[TEST].argmax(1))
    covered = inside[np.arange(4000), y[TEST].numpy(), 0].mean()
    assert 0.87 < covered < 0.98
    assert inside.sum(1).mean() < 2.5
    if score == "lac":  # the classes whose 1 - p is at most the quantile of the held-out scores
        scores = np.sort(1 - X[np.arange(400), y[HELD_OUT].numpy()])
        limit = scores[math.ceil(401 * 0.9) - 1]
        assert np.mean(inside[:, :, 0] == (1 - X[TEST] <= limit)) > 0.999


def test_intervals_are_scaled_by_the_standard_deviation():
    x, y = data("real")
    X, y = matrix_of(posterior("real").predict(x)), y[:, 0].numpy()
    widths = {}
    for name, score in {"absolute": "absolute", "std": StdConformityScore()}.items():
        intervals = SplitConformalRegressor(
            PredictionRegressor(), confidence_level=0.9, conformity_score=score, prefit=True
        )
        intervals.conformalize(X[HELD_OUT], y[HELD_OUT])
        mean, ends = intervals.predict_interval(X[TEST])
        low, high = ends[:, 0, 0], ends[:, 1, 0]
        np.testing.assert_allclose(mean, X[TEST, 0])
        assert 0.87 < np.mean((low <= y[TEST]) & (y[TEST] <= high)) < 0.93
        widths[name] = high - low
    assert np.ptp(widths["absolute"]) < 1e-6 < np.ptp(widths["std"])
    ratio = widths["std"] / X[TEST, 1]
    np.testing.assert_allclose(ratio, ratio.mean(), rtol=0.02)
    scores = np.sort(abs(y[HELD_OUT] - X[HELD_OUT, 0]) / X[HELD_OUT, 1])
    assert ratio.mean() / 2 == pytest.approx(scores[math.ceil(401 * 0.9) - 1], rel=0.02)


def test_normalised_scores_read_the_noise_of_each_input():
    """Intervals cover in each quarter of the spread; with one width they are too wide and too narrow."""
    x, y = data("real")
    fitted, tuned, rest = slice(3400, 4400), slice(400, 900), slice(900, 3400)
    network = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    train(network, lambda: (network(x[fitted]) - y[fitted]).square().mean(), 100)
    noisy = lw.fit(network, (x[fitted], y[fitted]), validation=(x[tuned], y[tuned]))
    X, y = matrix_of(noisy.predict(x)), y[:, 0].numpy()
    quarters, coverages = np.array_split(X[rest, 1].argsort(), 4), {}
    for name, score in {"absolute": "absolute", "std": StdConformityScore()}.items():
        conformal = SplitConformalRegressor(
            PredictionRegressor(), confidence_level=0.9, conformity_score=score, prefit=True
        )
        conformal.conformalize(X[HELD_OUT], y[HELD_OUT])
        _, ends = conformal.predict_interval(X[rest])
        inside = (ends[:, 0, 0] <= y[rest]) & (y[rest] <= ends[:, 1, 0])
        coverages[name] = [inside[rows].mean() for rows in quarters]
    assert coverages["absolute"][0] > 0.97
    assert coverages["absolute"][3] < 0.83
    assert all(0.83 < covered < 0.96 for covered in coverages["std"])


def alarm(known: np.ndarray, stream: np.ndarray) -> bool:
    """Whether a martingale at level 0.05 rejects a stream whose scores are ranked among known and earlier ones."""
    watch, scores = OnlineMartingaleTest(test_level=0.05, random_state=0), known.tolist()
    for score in stream.tolist():
        watch.update_simple_jumper_martingale(watch.compute_p_value(score, scores))
        scores.append(score)
    return max(watch.martingale_value_history) > watch.reject_threshold


def test_a_martingale_finds_drifts_and_seldom_raises_false_alarms():
    """Streams of the detector's scores, and of log densities if only the relation of the labels has changed."""
    (x, y), fitted = data("classes"), posterior("classes")
    detector = lw.novelty(fitted, (x[:50], y[:50]), by="knn", held_out=(x[50:250], y[50:250]))
    known, strange = detector(x[250:]).numpy(), detector(x[:300] + 3).numpy()
    surprise = -fitted.predict(x).log_prob(y).numpy()
    relabelled = -fitted.predict(x[:600]).log_prob((y[:600] + 1) % 3).numpy()
    orders = [np.random.default_rng(seed).permutation(len(known))[:500] for seed in range(150)]
    assert 1 <= sum(alarm(known[order[:100]], known[order[100:]]) for order in orders) <= 15  # 7.5 are expected at most
    assert alarm(known[:100], np.concatenate([known[100:400], strange]))
    assert alarm(surprise[1000:1200], np.concatenate([surprise[2000:2300], relabelled]))


def test_the_matrix_of_each_kind_of_prediction():
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    yes = lw.fit(nn.Linear(4, 1).eval(), (x, y[:, None]), likelihood="bernoulli", prior_precision=1.0).predict(x)
    np.testing.assert_allclose(matrix_of(yes)[:, 1], yes.probs[:, 0].numpy(), rtol=1e-6)
    np.testing.assert_allclose(matrix_of(yes).sum(1), 1.0)
    real = [lw.fit(nn.Linear(4, 1).eval(), (x, x[:, 0]), prior_precision=1.0) for _ in range(2)]
    for prediction in (real[0].predict(x), lw.mixture(real).predict(x)):
        expected = torch.cat([prediction.mean, prediction.std], 1)
        np.testing.assert_allclose(matrix_of(prediction), expected.numpy(), rtol=1e-5)
    tokens = lw.fit(nn.Linear(4, 3).eval(), (x.reshape(5, 4, 4), y.reshape(5, 4)), prior_precision=1.0)
    assert matrix_of(tokens.predict(x.reshape(5, 4, 4))).shape == (20, 3)
    several = lw.fit(nn.Linear(4, 2).eval(), (x, x[:, :2]), prior_precision=1.0).predict(x)
    with pytest.raises(lw.LapwingError, match=r"one target for each input.*np.stack"):
        matrix_of(several)
