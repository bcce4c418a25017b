"""Metrics against hand computation, loops, numerical integration and scikit-learn."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import integrate, stats
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

from lapwing.evaluation import metrics

OF_PROBS = (metrics.accuracy, metrics.brier, metrics.expected_calibration_error)


def random_classification(n: int = 400, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    probs = (2.0 * torch.randn(n, classes, dtype=torch.float64)).softmax(1)
    return probs, torch.randint(classes, (n,))


class TestClassification:
    def test_accuracy_by_hand(self):
        probs = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5], [0.1, 0.8, 0.1], [0.6, 0.3, 0.1]])
        assert metrics.accuracy(probs, torch.tensor([0, 2, 0, 0])).item() == 0.75

    def test_nll_is_sklearns_and_a_label_of_probability_zero_costs_infinity(self):
        probs, labels = random_classification()
        ours = metrics.nll(probs.log()[torch.arange(len(labels)), labels]).item()
        assert ours == pytest.approx(log_loss(labels.numpy(), probs.numpy(), labels=range(5)), abs=1e-12)
        assert metrics.nll(torch.tensor([-math.inf, 0.0])).item() == math.inf

    def test_brier_by_hand_and_twice_the_binary_one(self):
        probs = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.3, 0.5]], dtype=torch.float64)
        by_hand = ((0.3**2 + 0.2**2 + 0.1**2) + (0.8**2 + 0.3**2 + 0.5**2)) / 2
        before = probs.clone()
        assert metrics.brier(probs, torch.tensor([0, 0])).item() == pytest.approx(by_hand, abs=1e-12)
        assert torch.equal(probs, before)
        probs, labels = random_classification(classes=2)
        binary = brier_score_loss(labels.numpy(), probs[:, 1].numpy())
        assert metrics.brier(probs, labels).item() == pytest.approx(2 * binary, abs=1e-12)

    @pytest.mark.parametrize("bins", [1, 7, 15])
    def test_expected_calibration_error_is_the_loop(self, bins):
        probs, labels = random_classification()
        confidence, predicted = probs.max(1)
        total = 0.0
        for b in range(bins):
            inside = [n for n in range(len(labels)) if min(int(confidence[n] * bins), bins - 1) == b]
            if inside:
                right = sum(float(predicted[n] == labels[n]) for n in inside)
                total += abs(right - sum(float(confidence[n]) for n in inside)) / len(labels)
        ours = metrics.expected_calibration_error(probs, labels, bins=bins).item()
        assert ours == pytest.approx(total, abs=1e-12)

    def test_a_confidence_of_one_shares_the_last_bin(self):
        probs = torch.tensor([[1.0, 0.0], [0.96, 0.04]])
        # one bin, accuracy 1/2 and confidence 0.98; bins of their own would give (0 + 0.96)/2
        assert metrics.expected_calibration_error(probs, torch.tensor([0, 1])).item() == pytest.approx(0.48, abs=1e-6)

    def test_rounding_above_one_is_not_taken_for_logits(self):
        probs = torch.tensor([[1.0 + 1e-6, 0.0]] * 4)
        assert metrics.expected_calibration_error(probs, torch.zeros(4, dtype=torch.long)).item() < 1e-6

    def test_result_is_a_float64_scalar_without_a_graph(self):
        logits = torch.randn(6, 3, requires_grad=True)
        labels = torch.randint(3, (6,), dtype=torch.int32)
        for metric in OF_PROBS:
            value = metric(logits.softmax(1), labels)
            assert value.shape == ()
            assert value.dtype == torch.float64
            assert not value.requires_grad


class TestAuroc:
    def test_pairs_counted_by_hand_with_ties_and_large_scores(self):
        inside = torch.tensor([100.0, 200.0, 300.0, 300.0])
        outside = torch.tensor([300.0, 150.0, 400.0])
        wins = sum(float(o > i) + 0.5 * float(o == i) for o in outside for i in inside)
        assert metrics.auroc(inside, outside).item() == pytest.approx(wins / 12, abs=1e-12)
        assert wins / 12 == pytest.approx(roc_auc_score([0] * 4 + [1] * 3, torch.cat([inside, outside]).numpy()))


class TestRegression:
    def test_rmse_by_hand(self):
        value = metrics.rmse(torch.tensor([[0.0, 1.0]]), torch.tensor([[3.0, 5.0]])).item()
        assert value == pytest.approx(math.sqrt(12.5), abs=1e-12)

    @pytest.mark.parametrize("y", [-3.0, 0.2, 0.5, 4.0])
    def test_crps_is_its_integral(self, y):
        mean, std = 0.5, 0.8
        cdf = stats.norm(mean, std).cdf
        left, _ = integrate.quad(lambda t: cdf(t) ** 2, -12, y, epsabs=1e-11)
        right, _ = integrate.quad(lambda t: (1 - cdf(t)) ** 2, y, 12, epsabs=1e-11)
        ours = metrics.crps_gaussian(*(torch.tensor([v], dtype=torch.float64) for v in (mean, std, y))).item()
        assert ours == pytest.approx(left + right, abs=1e-8)

    def test_crps_of_a_sharp_prediction_is_the_absolute_error(self):
        mean, y = torch.randn(2, 60, dtype=torch.float64)
        ours = metrics.crps_gaussian(mean, torch.full_like(mean, 1e-9), y)
        assert ours.item() == pytest.approx((y - mean).abs().mean().item(), abs=1e-8)

    def test_interval_coverage_counts_ends_and_infinite_intervals(self):
        y = torch.tensor([0.0, 1.0, 1.5, -7.0])
        lower, upper = torch.tensor([0.0, 0.0, 0.0, -math.inf]), torch.tensor([1.0, 1.0, 1.0, math.inf])
        assert metrics.interval_coverage(lower, upper, y).item() == 0.75
