"""Measures between posteriors against dense algebra, torch.distributions, scipy and explicit Jacobians."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from papers.common import measures
from papers.common.measures import relative_error
from tests.refused import refused


def psd(*shape: int, rank: int | None = None) -> Tensor:
    """Random covariances (*shape, shape[-1]) of unit scale."""
    size = shape[-1]
    factor = torch.randn(*shape, size if rank is None else rank, dtype=torch.float64)
    return factor @ factor.mT / size


class TestRelativeError:
    @pytest.mark.parametrize("shape", [(6, 6), (4, 3, 3), (4, 3, 4, 3), (5, 1, 1)])
    def test_is_the_frobenius_ratio_of_the_matrix_they_stand_for(self, shape):
        found, exact = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)

        def matrix(value: Tensor) -> Tensor:
            if value.ndim == 3:
                return torch.block_diag(*value)
            return value.reshape(math.isqrt(value.numel()), -1)

        by_hand = torch.linalg.matrix_norm(matrix(found) - matrix(exact)) / torch.linalg.matrix_norm(matrix(exact))
        assert relative_error(found, exact).item() == pytest.approx(by_hand.item(), rel=1e-12)
        assert relative_error(exact, exact).item() == 0.0


class TestGaussianKL:
    @pytest.mark.parametrize("outputs", [1, 4])
    @pytest.mark.parametrize("noise", [0.0, 0.3])
    def test_is_that_of_torch_distributions(self, outputs, noise):
        means = torch.randn(2, 6, outputs, dtype=torch.float64)
        covariances = [psd(6, outputs) + 0.05 * torch.eye(outputs, dtype=torch.float64) for _ in range(2)]
        full = [c + noise * torch.eye(outputs, dtype=torch.float64) for c in covariances]
        expected = kl_divergence(MultivariateNormal(means[0], full[0]), MultivariateNormal(means[1], full[1]))
        found = measures.gaussian_kl(means[0], covariances[0], means[1], covariances[1], noise)
        assert found.shape == (6,)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)

    def test_low_rank_covariances_need_noise_and_the_noise_cancels_in_their_difference(self):
        mean, low, other = torch.zeros(3, 5), psd(3, 5, rank=2), psd(3, 5, rank=2)
        refused(lambda: measures.gaussian_kl(mean, other, mean, low), "3 of 3 are singular")
        noise = 1e-3 * torch.eye(5, dtype=torch.float64)
        expected = kl_divergence(
            MultivariateNormal(mean.double(), other + noise), MultivariateNormal(mean.double(), low + noise)
        )
        torch.testing.assert_close(measures.gaussian_kl(mean, other, mean, low, 1e-3), expected, rtol=1e-8, atol=0.0)
        assert (measures.gaussian_kl(mean, low, mean, psd(3, 5)) == math.inf).all()
        single = psd(3, 5).float(), mean, low.float()  # rounding noise is not a variance
        refused(lambda: measures.gaussian_kl(mean, *single), "3 of 3 are singular")
        assert (measures.gaussian_kl(mean, low.float(), mean, psd(3, 5).float()) == math.inf).all()


class TestCqm:
    def test_is_the_integral_of_the_definition(self):
        mean, std = torch.randn(60, dtype=torch.float64), torch.rand(60, dtype=torch.float64) + 0.1
        y = mean + 1.7 * std * torch.randn(60, dtype=torch.float64)
        grid = (np.arange(200_000) + 0.5) / 200_000  # midpoints: the integrand jumps
        half = stats.norm.ppf((1 + grid) / 2)
        distance = ((y - mean).abs() / std).numpy()
        inside = np.searchsorted(np.sort(distance), half) / len(distance)  # P(y in I(x, alpha))
        assert measures.cqm(mean, std, y).item() == pytest.approx(np.abs(inside - grid).mean(), abs=1e-5)
