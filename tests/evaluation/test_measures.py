"""Measures between posteriors against dense algebra, torch.distributions, scipy and explicit Jacobians."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import linalg as scipy_linalg
from torch import Tensor
from torch.distributions import Categorical, MultivariateNormal, kl_divergence

import lapwing as lw
from lapwing.errors import LapwingError
from lapwing.evaluation import measures
from tests import oracle
from tests.zoo import ZOO


def psd(*shape: int, rank: int | None = None) -> Tensor:
    """Random covariances (*shape, shape[-1]) of unit scale."""
    size = shape[-1]
    factor = torch.randn(*shape, size if rank is None else rank, dtype=torch.float64)
    return factor @ factor.mT / size


def rotation(size: int) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]


class TestRelativeErrorAndTrace:
    @pytest.mark.parametrize("shape", [(6, 6), (4, 3, 3), (4, 3, 4, 3), (5, 1, 1)])
    def test_is_the_frobenius_ratio_of_the_matrix_they_stand_for(self, shape):
        found, exact = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)

        def matrix(value: Tensor) -> Tensor:
            if value.ndim == 3:
                return torch.block_diag(*value)
            return value.reshape(math.isqrt(value.numel()), -1)

        by_hand = torch.linalg.matrix_norm(matrix(found) - matrix(exact)) / torch.linalg.matrix_norm(matrix(exact))
        assert measures.relative_error(found, exact).item() == pytest.approx(by_hand.item(), rel=1e-12)
        assert measures.trace(exact).item() == pytest.approx(matrix(exact).trace().item(), rel=1e-12)
        assert measures.relative_error(exact, exact).item() == 0.0

    def test_the_trace_of_variances_is_that_of_covariances(self):
        covariance = psd(5, 3)
        variance = covariance.diagonal(dim1=1, dim2=2)
        assert measures.trace(variance=variance).item() == pytest.approx(measures.trace(covariance).item())
        square = torch.rand(3, 3)  # B = C: not taken for a matrix
        assert measures.trace(variance=square).item() == pytest.approx(square.sum().item(), rel=1e-6)

    def test_the_optimal_subspace_has_the_eckart_young_error_and_the_largest_trace(self):
        G, J = psd(12) + 0.1 * torch.eye(12, dtype=torch.float64), torch.randn(4, 2, 12, dtype=torch.float64)
        Sigma = oracle.laplace_covariance(G, 1.0)
        exact = oracle.joint_output_covariance(J, Sigma)
        values, vectors = torch.linalg.eigh(exact.reshape(8, 8))
        P = Sigma @ J.flatten(0, 1).T @ vectors[:, -3:]  # (12, 3), equation 23
        optimal = oracle.joint_output_covariance(J, P @ torch.linalg.inv(P.T @ torch.linalg.inv(Sigma) @ P) @ P.T)
        by_hand = values[:-3].norm() / values.norm()
        assert measures.relative_error(optimal, exact).item() == pytest.approx(by_hand.item(), rel=1e-9)
        assert measures.trace(optimal).item() == pytest.approx(values[-3:].sum().item(), rel=1e-9)
        other = torch.randn(12, 3, dtype=torch.float64)
        subspace = other @ torch.linalg.inv(other.T @ torch.linalg.inv(Sigma) @ other) @ other.T
        worse = oracle.joint_output_covariance(J, subspace)
        assert measures.relative_error(worse, exact) > measures.relative_error(optimal, exact)
        assert measures.trace(worse) < measures.trace(optimal) < measures.trace(exact)

    def test_posteriors_of_the_library(self):
        model, x = ZOO["mlp"].build(), ZOO["mlp"].inputs(10, 0)
        loader, x = [(x, ZOO["mlp"].targets(10, 0))], ZOO["mlp"].inputs(3, 1)
        exact = lw.fit(model, loader, lw.Full(), prior_precision=1.0).latent(x, joint=True)
        near = lw.fit(model, loader, lw.ELLA(rank=30, rows="all"), prior_precision=1.0).latent(x, joint=True)
        far = lw.fit(model, loader, lw.ELLA(rank=2, rows="all"), prior_precision=1.0).latent(x, joint=True)
        errors = [measures.relative_error(found.covariance, exact.covariance).item() for found in (near, far)]
        assert errors[0] < errors[1]
        assert measures.trace(far.covariance) < measures.trace(near.covariance) < measures.trace(exact.covariance)
        assert measures.trace(variance=near.variance).item() == pytest.approx(measures.trace(near.covariance).item())

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: measures.relative_error(torch.ones(2, 2), torch.ones(3, 3)), r"found \(2, 2\), exact \(3, 3\)"),
            (lambda: measures.relative_error(torch.ones(2, 3), torch.ones(2, 3)), r"accepted are \(n, n\)"),
            (lambda: measures.relative_error(torch.ones(2, 3, 3, 2), torch.ones(2, 3, 3, 2)), r"\(B, C, B, C\)"),
            (lambda: measures.relative_error(torch.ones(0, 2, 2), torch.ones(0, 2, 2)), r"\(0, 2, 2\)"),
            (lambda: measures.relative_error(torch.ones(3), torch.ones(3)), r"found \(3,\)"),
            (lambda: measures.relative_error(torch.ones(2, 2), torch.zeros(2, 2)), r"1 of 1 to be 0"),
            (lambda: measures.relative_error(torch.full((2, 2), math.nan), torch.ones(2, 2)), r"4 of 4 .*found.*NaN"),
            (lambda: measures.trace(), "neither"),
            (lambda: measures.trace(torch.eye(2), variance=torch.ones(2, 2)), "both"),
            (lambda: measures.trace(variance=torch.full((2, 2), math.inf)), "4 of 4"),
        ],
    )
    def test_other_arguments_are_refused(self, call, message):
        with pytest.raises(LapwingError, match=message):
            call()


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

    @pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-9])
    def test_keeps_its_digits_for_nearly_equal_arguments(self, size):
        base, turn = psd(3, 4) + torch.eye(4, dtype=torch.float64), torch.randn(3, 4, 4, dtype=torch.float64)
        near = base + size * (turn + turn.mT)
        mean = torch.randn(3, 4, dtype=torch.float64)
        ratio = torch.linalg.solve(near, base - near)  # the difference as it was rounded
        series = ratio @ ratio / 4 - ratio @ ratio @ ratio / 6 + ratio @ ratio @ ratio @ ratio / 8
        expected = series.diagonal(dim1=1, dim2=2).sum(-1)
        torch.testing.assert_close(measures.gaussian_kl(mean, base, mean, near), expected, rtol=1e-5, atol=0.0)
        assert (measures.gaussian_kl(mean, base, mean, base) == 0).all()

    def test_low_rank_covariances_need_noise_and_the_noise_cancels_in_their_difference(self):
        mean, low, other = torch.zeros(3, 5), psd(3, 5, rank=2), psd(3, 5, rank=2)
        with pytest.raises(LapwingError, match="3 of 3 are singular"):
            measures.gaussian_kl(mean, other, mean, low)
        noise = 1e-3 * torch.eye(5, dtype=torch.float64)
        expected = kl_divergence(
            MultivariateNormal(mean.double(), other + noise), MultivariateNormal(mean.double(), low + noise)
        )
        torch.testing.assert_close(measures.gaussian_kl(mean, other, mean, low, 1e-3), expected, rtol=1e-8, atol=0.0)
        assert (measures.gaussian_kl(mean, low, mean, psd(3, 5)) == math.inf).all()
        with pytest.raises(LapwingError, match="3 of 3 are singular"):  # its rounding noise is no variance
            measures.gaussian_kl(mean, psd(3, 5).float(), mean, low.float())
        assert (measures.gaussian_kl(mean, low.float(), mean, psd(3, 5).float()) == math.inf).all()

    def test_many_classes_in_half_precision(self):
        mean, factor = torch.randn(1, 1000).bfloat16(), torch.randn(1, 1000, 3).bfloat16()
        covariance = factor @ factor.mT
        found = measures.gaussian_kl(mean, covariance, mean, covariance, noise_variance=1.0)
        assert found.dtype == torch.float64
        assert found.item() == 0.0


class TestGaussianWasserstein:
    @pytest.mark.parametrize("outputs", [1, 4])
    @pytest.mark.parametrize("noise", [0.0, 0.3])
    def test_is_the_formula_with_scipys_square_roots(self, outputs, noise):
        means = torch.randn(2, 5, outputs, dtype=torch.float64)
        covariances = [psd(5, outputs), psd(5, outputs)]
        found = measures.gaussian_wasserstein(means[0], covariances[0], means[1], covariances[1], noise)
        for n in range(5):
            S1, S2 = (c[n].numpy() + noise * np.eye(outputs) for c in covariances)
            root = np.real(scipy_linalg.sqrtm(S2))
            cross = np.real(scipy_linalg.sqrtm(root @ S1 @ root))
            squared = float((means[0, n] - means[1, n]).square().sum()) + np.trace(S1 + S2 - 2 * cross)
            assert found[n].item() == pytest.approx(math.sqrt(squared), rel=1e-7)

    @pytest.mark.parametrize("size", [1e-3, 1e-8, 1e-12])
    def test_keeps_its_digits_for_nearly_equal_arguments(self, size):
        turn, values = rotation(4), torch.rand(4, dtype=torch.float64) + 0.5
        moved = (values.sqrt() + size * torch.randn(4, dtype=torch.float64)).square()
        one, other = ((turn * v @ turn.T)[None] for v in (values, moved))
        expected = (values.sqrt() - moved.sqrt()).norm().item()  # covariances that commute
        found = measures.gaussian_wasserstein(torch.zeros(1, 4), one, torch.zeros(1, 4), other).item()
        assert found == pytest.approx(expected, rel=1e-3, abs=3e-15)

    def test_singular_covariances_and_equal_ones(self):
        mean, low = torch.randn(3, 5, dtype=torch.float64), psd(3, 5, rank=2)
        assert measures.gaussian_wasserstein(mean, low, mean, low).max().item() < 1e-14
        zero = torch.zeros(3, 5, 5)
        found = measures.gaussian_wasserstein(mean, low, mean, zero)  # to a point: the root of the trace
        torch.testing.assert_close(found.square(), low.diagonal(dim1=1, dim2=2).sum(-1))
        there = measures.gaussian_wasserstein(mean, low, 0 * mean, 2 * low, 0.1)
        torch.testing.assert_close(there, measures.gaussian_wasserstein(0 * mean, 2 * low, mean, low, 0.1))

    @pytest.mark.parametrize("measure", [measures.gaussian_kl, measures.gaussian_wasserstein])
    def test_other_arguments_are_refused(self, measure):
        mean, cov = torch.zeros(2, 3), torch.eye(3).repeat(2, 1, 1)
        for bad in (-0.1, math.nan, math.inf, "0.1", True):
            with pytest.raises(LapwingError, match="noise_variance is"):
                measure(mean, cov, mean, cov, bad)
        for one, other in ((mean[:1], mean), (mean, mean[:, :1]), (mean[0], mean[0])):
            with pytest.raises(LapwingError, match=r"mean1 .*means \(B, C\)"):
                measure(one, cov, other, cov)
        with pytest.raises(LapwingError, match=r"accepted are \(B, C, C\)"):
            measure(mean, torch.eye(3), mean, torch.eye(3))
        with pytest.raises(LapwingError, match="6 of 6 values of mean2"):
            measure(mean, cov, mean * math.nan, cov)
        with pytest.raises(LapwingError, match="18 of 18 values of cov1"):
            measure(mean, cov * math.nan, mean, cov)


class TestCategoricalKL:
    def test_is_that_of_torch_distributions(self):
        p, q = (torch.randn(7, 5, dtype=torch.float64).softmax(1) for _ in range(2))
        expected = kl_divergence(Categorical(probs=p), Categorical(probs=q))
        torch.testing.assert_close(measures.categorical_kl(p, q), expected, rtol=1e-12, atol=1e-15)

    def test_keeps_its_digits_for_nearly_equal_arguments(self):
        p = torch.randn(7, 5, dtype=torch.float64).softmax(1)
        step = torch.randn(7, 5, dtype=torch.float64)
        q = p + 1e-8 * (step - step.mean(1, keepdim=True))
        expected = ((q - p).square() / p).sum(1) / 2
        torch.testing.assert_close(measures.categorical_kl(p, q), expected, rtol=1e-5, atol=0.0)
        assert (measures.categorical_kl(p, p) == 0).all()

    def test_zeros(self):
        p, q = torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([[0.5, 0.5], [0.0, 1.0]])
        assert measures.categorical_kl(p, q).tolist() == [pytest.approx(math.log(2)), math.inf]

    def test_rounded_probabilities_are_accepted(self):
        p = torch.randn(4, 1000).softmax(1)
        assert measures.categorical_kl(p.bfloat16(), p.bfloat16()).max() == 0.0
        assert 0.0 < measures.categorical_kl(p, p.bfloat16()).max() < 1e-4

    @pytest.mark.parametrize(
        ("p", "q", "message"),
        [
            (torch.ones(3, 1), torch.ones(3, 1), "C > 1"),
            (torch.ones(3), torch.ones(3), r"\(3,\)"),
            (torch.full((3, 2), 0.5), torch.full((2, 2), 0.5), r"p has shape \(3, 2\) and q \(2, 2\)"),
            (torch.full((3, 2), 0.5), torch.ones(3, 2), "3 of 3 rows of q.*q.softmax"),
            (torch.tensor([[1.5, -0.5]]), torch.tensor([[0.5, 0.5]]), "1 of 1 rows of p"),
            (torch.tensor([[math.nan, 0.5]]), torch.tensor([[0.5, 0.5]]), "1 of 1 rows of p"),
        ],
    )
    def test_other_arguments_are_refused(self, p, q, message):
        with pytest.raises(LapwingError, match=message):
            measures.categorical_kl(p, q)


def test_results_are_float64_without_a_graph():
    cov = psd(2, 3).float().requires_grad_()
    mean, probs = torch.zeros(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True).softmax(1)
    for value in (
        measures.relative_error(cov, cov),
        measures.trace(cov),
        measures.trace(variance=mean),
        measures.gaussian_kl(mean, cov, mean, cov, 0.1),
        measures.gaussian_wasserstein(mean, cov, mean, cov, 0.1),
        measures.categorical_kl(probs, probs),
    ):
        assert value.dtype == torch.float64
        assert not value.requires_grad
