"""Bernoulli outputs: quadrature against scipy, agreement with two classes, predictions, and fits."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from scipy.integrate import quad

import lapwing as lw
from lapwing.covariance import Latent, LatentDraws
from lapwing.likelihoods import Bernoulli, BernoulliPrediction, Categorical, Probit, Quadrature, SampledLink, quadrature
from tests.likelihoods.latents import dense_latent, marginal_latent, random_latent

F64 = torch.float64


def sigmoid(f: float) -> float:
    return 1 / (1 + math.exp(-f)) if f > 0 else math.exp(f) / (1 + math.exp(f))


def integral(function, mean: float, std: float) -> float:
    """E[function(f)] by scipy, broken at the mean and where the sigmoid turns."""
    density = lambda z: function(mean + std * z) * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)  # noqa: E731
    breaks = sorted({-12.0, 0.0, 12.0, *(min(12.0, max(-12.0, (t - mean) / std)) for t in (-30, -5, 0, 5, 30))})
    return sum(quad(density, a, b, epsabs=1e-13, limit=200)[0] for a, b in pairwise(breaks))


def marginal(mean, std) -> Latent:
    """Return a latent with one output per input, from means and standard deviations."""
    return marginal_latent(torch.tensor(mean, dtype=F64)[:, None], torch.tensor(std, dtype=F64)[:, None] ** 2)


GRID = [(m, s) for s in (1e-3, 0.3, 1.0, 3.0, 10.0, 100.0, 1000.0) for m in (0.0, 0.7, -2.0, 3.0 * s, -1.5 * s)]


def one_answer(mean: float, std: float) -> float:
    """`E[σ log(σ/p)]` with `p = E[σ(f)]`."""
    p = integral(sigmoid, mean, std)
    return integral(lambda f: sigmoid(f) * math.log(max(sigmoid(f), 1e-300) / p), mean, std)


class TestQuadrature:
    @pytest.mark.parametrize(("nodes", "tolerance"), [(32, 1e-4), (48, 1e-7), (64, 1e-10)])
    def test_probabilities_at_every_scale(self, nodes, tolerance):
        means, stds = zip(*GRID, strict=True)
        found = Bernoulli().predict(marginal(means, stds), Quadrature(nodes)).probs[:, 0]
        for p, (m, s) in zip(found.tolist(), GRID, strict=True):
            assert p == pytest.approx(integral(sigmoid, m, s), abs=tolerance, rel=0), (m, s)

    @pytest.mark.parametrize(
        ("mean", "std"), [(-60.0, 1e-3), (-60.0, 3.0), (-400.0, 10.0), (-30.0, 5.0), (-800.0, 1.0)]
    )
    def test_logarithms_of_tiny_probabilities(self, mean, std):
        """``σ(f) = e^f σ(-f)``, so ``E σ(f) = e^{m + v/2} E_{N(m + v, v)} σ(-f)``, whose expectation is large."""
        tilted = mean + std**2
        assert tilted <= 0.5
        wanted = mean + 0.5 * std**2 + math.log(integral(lambda f: sigmoid(-f), tilted, std))
        found = float(quadrature.log_sigmoid_mean(torch.tensor([mean], dtype=F64), torch.tensor([std**2], dtype=F64)))
        assert found == pytest.approx(wanted, abs=1e-6)
        assert float(Bernoulli().predict(marginal([mean], [std])).log_odds) == pytest.approx(wanted, abs=1e-6)

    def test_information(self):
        for m, s in GRID:
            wanted = one_answer(m, s) + one_answer(-m, s)
            found = quadrature.information(torch.tensor([[m]], dtype=F64), torch.tensor([[s * s]], dtype=F64))
            assert float(found) == pytest.approx(wanted, abs=1e-7)

    def test_no_variance_is_the_sigmoid(self):
        mean = torch.linspace(-700, 700, 29, dtype=F64)[:, None].requires_grad_()
        variance = torch.zeros(29, 1, dtype=F64, requires_grad=True)
        odds = Quadrature().log_odds(marginal_latent(mean, variance))
        torch.testing.assert_close(odds, mean, rtol=1e-9, atol=1e-7)
        odds.sum().backward()
        torch.testing.assert_close(mean.grad, torch.ones_like(mean), rtol=1e-6, atol=1e-6)
        assert variance.grad.isfinite().all()

    def test_extremes_are_finite(self):
        latent = marginal([0.0, 1e4, -1e4, 1e6, -1e6, 5.0, 1e8], [1e6, 0.0, 0.0, 1e3, 1e3, 1e8, 1e8])
        prediction = Bernoulli().predict(latent)
        for value in (prediction.log_odds, prediction.probs, prediction.entropy(), prediction.mutual_information()):
            assert value.isfinite().all()
        wanted = torch.tensor([0.5, 0.5, 0.8413447461], dtype=F64)
        torch.testing.assert_close(prediction.probs[[0, 5, 6], 0], wanted, rtol=0, atol=2e-5)

    def test_derivatives(self):
        mean = torch.tensor([[0.0], [0.4], [-2.0], [3.0]], dtype=F64, requires_grad=True)
        variance = torch.tensor([[0.5], [1e-3], [30.0], [4.0]], dtype=F64, requires_grad=True)
        link = Quadrature(100)
        assert torch.autograd.gradcheck(lambda m, v: link.log_odds(marginal_latent(m, v)), (mean, variance))

    def test_derivative_in_the_variance_where_it_is_zero(self):
        """``∂/∂v E[σ(f)] = 1/2 E[σ''(f)]``."""
        mean = torch.tensor([[0.8]], dtype=F64)
        variance = torch.zeros(1, 1, dtype=F64, requires_grad=True)
        p = quadrature.log_sigmoid_mean(mean, variance).exp()
        p.backward()
        s = mean.sigmoid()
        torch.testing.assert_close(variance.grad, 0.5 * s * (1 - s) * (1 - 2 * s), rtol=1e-6, atol=1e-9)

    def test_chunks_and_empty_inputs(self, monkeypatch):
        latent = random_latent(batch=7, size=3)
        whole = Quadrature().log_odds(latent)
        monkeypatch.setattr(quadrature, "_CHUNK_NUMBERS", 5 * 48)
        torch.testing.assert_close(Quadrature().log_odds(latent), whole, rtol=1e-13, atol=1e-13)
        empty = torch.zeros(0, 2)
        assert Quadrature().log_odds(marginal_latent(empty, empty)).shape == (0, 2)


class TestTwoClasses:
    """One logit f is two classes with logits (0, f)."""

    def pair(self, scale: float) -> tuple[Latent, Latent]:
        latent = random_latent(batch=6, size=1, scale=scale)
        mean = torch.cat([torch.zeros_like(latent.mean), latent.mean], 1)
        covariance = torch.zeros(6, 2, 2, dtype=F64)
        covariance[:, 1, 1] = latent.variance[:, 0]
        return latent, dense_latent(mean, covariance)

    @pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
    def test_probit(self, scale):
        one, two = self.pair(scale)
        answers = torch.tensor([0, 1, 1, 0, 1, 0])
        binary, classes = Bernoulli().predict(one, Probit()), Categorical().predict(two, Probit())
        torch.testing.assert_close(binary.probs[:, 0], classes.probs[:, 1])
        torch.testing.assert_close(binary.log_prob(answers), classes.log_prob(answers))
        torch.testing.assert_close(binary.confidence, classes.confidence)
        torch.testing.assert_close(binary.entropy(), classes.entropy())
        assert torch.equal(binary.classes[:, 0], classes.classes)

    def test_weight_draws(self):
        draws = 3 * torch.randn(9, 5, 1, generator=torch.Generator().manual_seed(0), dtype=F64)
        binary = Bernoulli().predict(LatentDraws(draws))
        classes = Categorical().predict(LatentDraws(torch.cat([torch.zeros_like(draws), draws], -1)))
        assert binary.link == SampledLink()
        torch.testing.assert_close(binary.probs[:, 0], classes.probs[:, 1])
        torch.testing.assert_close(binary.mutual_information(), classes.mutual_information())


class TestPrediction:
    def test_numbers(self):
        prediction = Bernoulli().predict(random_latent(batch=5))
        assert isinstance(prediction, BernoulliPrediction)
        assert "5 inputs, 3 outputs, link=Quadrature(nodes=48)" in repr(prediction)
        reference = prediction.distribution()
        assert reference.batch_shape == (5,)
        assert reference.event_shape == (3,)
        torch.testing.assert_close(reference.mean, prediction.probs)
        torch.testing.assert_close(prediction.entropy(), reference.entropy())
        answers = torch.rand(5, 3) < 0.5
        for targets in (answers, answers.long(), answers.float()):
            torch.testing.assert_close(prediction.log_prob(targets), reference.log_prob(answers.double()))
        likeliest = torch.maximum(prediction.probs, 1 - prediction.probs)
        torch.testing.assert_close(prediction.confidence, likeliest.prod(-1))
        assert torch.equal(prediction.classes, (prediction.probs > 0.5).long())

    def test_mutual_information_against_brute_force(self):
        draws = 2 * torch.randn(9, 3, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
        found = Bernoulli().predict(LatentDraws(draws)).mutual_information()
        p = draws.sigmoid()
        mean = p.mean(0)
        entropy = lambda p: -(p * p.log() + (1 - p) * (1 - p).log())  # noqa: E731
        torch.testing.assert_close(found, (entropy(mean) - entropy(p).mean(0)).sum(-1))

    def test_mutual_information_vanishes_with_the_variance(self):
        information = Bernoulli().predict(marginal([0.3, 5.0], [0.0, 1e-4])).mutual_information()
        assert (information >= 0).all()
        assert (information < 1e-8).all()


def test_the_link_of_a_tuning_agrees_with_quadrature():
    """A table: 1e-4 for each answer, 1e-5 in the mean; also for no variance, and beyond the table."""
    generator = torch.Generator().manual_seed(0)
    mean = 4 * torch.randn(5000, generator=generator)
    variance = (4 * torch.rand(5000, generator=generator)).square()
    exact, fast = quadrature.log_odds(mean, variance), quadrature.tabulated_log_odds(mean, variance)
    errors = (torch.nn.functional.logsigmoid(exact) - torch.nn.functional.logsigmoid(fast)).abs()
    assert errors.max() < 1e-4
    assert errors.mean() < 1e-5
    few = torch.tensor([0.0, -7.0, 300.0])
    torch.testing.assert_close(quadrature.tabulated_log_odds(few, torch.zeros(3)), few, rtol=1e-5, atol=0.0)
    assert quadrature.tabulated_log_odds(few, torch.full((3,), 1e30)).abs().max() < 1e-4


def test_tuning_takes_no_longer_than_its_softmax(monkeypatch):
    """The scores of a tuning use the table, and no quadrature for each candidate."""
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    y, model = x[:, :3] > 0, torch.nn.Linear(4, 3).eval()
    quadrature.tabulated_log_odds(x, x.square())  # makes the table
    monkeypatch.setattr(quadrature, "log_odds", None)
    for options in ({}, {"validation": (x, y)}):
        lw.fit(model, (x, y), **options)


def test_weights_of_labels_beside_held_out_data(caplog):
    """A warning names the shift of the logits, with which each label is calibrated; a comparison shows each label."""
    x, weights = torch.randn(2500, 3), torch.tensor([4.0, 1.0, 8.0])
    true = torch.nn.Linear(3, 3).eval()
    y = torch.rand(2500, 3) < (true(x) - 1).sigmoid()
    trained = {"forward": lambda model, inputs: model(inputs) - 1 + weights.log()}  # the minimum of the weighted loss
    first, held_out, test = [(x[rows], y[rows]) for rows in (slice(100), slice(100, 600), slice(600, 2500))]
    likelihood = lw.Bernoulli(pos_weight=weights.tolist())
    weighted = lw.fit(true, first, lw.KFAC(), likelihood=likelihood, validation=held_out, **trained)
    assert caplog.text.count("leave the weights out of the likelihood") == 1
    shift = {"forward": lambda model, inputs: trained["forward"](model, inputs) - weights.log()}
    shifted = lw.fit(true, first, lw.KFAC(), validation=held_out, **shift)
    assert caplog.text.count("leave the weights out of the likelihood") == 1
    for posterior, low, high in ((weighted, 0.1, 0.5), (shifted, 0.0, 0.06)):
        row = lw.compare({"one": posterior}, test)["one"]
        assert low < max(row[f"ECE {label}"] for label in range(3)) < high
        assert row["ECE"] <= max(row[f"ECE {label}"] for label in range(3)) + 1e-9
