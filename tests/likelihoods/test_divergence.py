"""The α-divergence term, ``1/α log E[p(y|f)^α]``, against numerical integration, its limits and its derivatives."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from lapwing.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    LaplaceBridge,
    Poisson,
    Probit,
    Quadrature,
    SampledLink,
    quadrature,
)
from tests.likelihoods.latents import normal_grid, random_latent

F64 = torch.float64
ALPHAS = (0.0, 0.5, 1.0)


class Shifted(Categorical):
    """A softmax with a last logit of 0, to integrate in one dimension less."""

    def log_prob(self, outputs, targets):
        return super().log_prob(torch.cat([outputs, torch.zeros_like(outputs[:, :1])], 1), targets)


DRAWN = SampledLink(400_000)
INTEGRALS = {
    "gaussian": (Gaussian(0.4), torch.tensor([[0.7], [-0.3], [0.6], [1.2]], dtype=F64), None, 1e-9),
    "two outputs": (Gaussian(0.4), torch.tensor([[0.7, 1], [-0.3, 0], [0.6, -1], [1.2, 2]], dtype=F64), None, 1e-9),
    "bernoulli": (Bernoulli(), torch.tensor([[1], [0], [0], [1]]), None, 1e-7),
    "two labels": (Bernoulli(), torch.tensor([[1, 0], [0, 0], [1, 1], [0, 1]]), DRAWN, 1e-2),
    "two classes": (Categorical(), torch.tensor([0, 1, 1, 0]), None, 1e-7),
    "two classes, drawn": (Categorical(), torch.tensor([0, 1, 1, 0]), DRAWN, 2e-2),
    "three classes": (Categorical(), torch.tensor([0, 1, 2, 0]), DRAWN, 2e-2),
    "three classes, 512 draws": (Categorical(), torch.tensor([0, 1, 2, 0]), None, 0.5),
    "poisson": (Poisson(), torch.tensor([[0.0], [1.0], [3.0], [2.0]], dtype=F64), DRAWN, 4e-2),
}


@pytest.mark.quick(18)
@pytest.mark.parametrize(("alpha", "scale"), [*((alpha, 4.0) for alpha in ALPHAS), (0.5, 0.3)])
@pytest.mark.parametrize("case", INTEGRALS)
def test_power_means_are_integrals(case, alpha, scale):
    """Draws are within five standard errors."""
    likelihood, targets, link, tolerance = INTEGRALS[case]
    size = int(targets.max()) + 1 if targets.ndim == 1 else targets.shape[1]
    latent = random_latent(size=size, scale=0.3 * scale if case == "poisson" else scale)
    mean, covariance, integrand = latent.mean, latent.covariance, likelihood
    if targets.ndim == 1:
        # logits less the last one, (B, C - 1): all that a softmax sees
        H = torch.cat([torch.eye(size - 1, dtype=F64), -torch.ones(size - 1, 1, dtype=F64)], 1)
        mean, covariance, integrand = mean @ H.T, H @ covariance @ H.T, Shifted()
    values = []  # ``1/α log ∫ p(y|f)^α N(f) df``, or ``∫ log p(y|f) N(f) df``, one input at a time
    for m, k, y in zip(mean, covariance, targets, strict=True):
        f, weights = normal_grid(m, k, 4001 if mean.shape[1] == 1 else 301)
        logs = integrand.log_prob(f, y.expand(len(f), *y.shape))
        values.append((weights * logs).sum() if alpha == 0 else (weights * (alpha * logs).exp()).sum().log() / alpha)
    wanted = torch.stack(values)
    if case == "two labels" and alpha == 0:  # exact, since it sees no correlation
        link, tolerance = None, 1e-7
    found = likelihood.log_power_mean(latent.mean, latent.covariance, targets, alpha, link=link)
    torch.testing.assert_close(found, wanted, rtol=tolerance if link is None and tolerance < 0.1 else 0, atol=tolerance)


def test_link_of_a_prediction_at_one():
    """At α = 1 it is the log predictive probability, whichever link gives it."""
    latent, labels = random_latent(batch=4, size=3), torch.tensor([0, 1, 2, 0])
    for link in (Probit(), Probit(scale="marginal"), LaplaceBridge()):
        found = Categorical().log_power_mean(latent.mean, latent.covariance, labels, 1.0, link=link)
        torch.testing.assert_close(found, Categorical().predict(latent, link).log_prob(labels))
    gaussian = Gaussian(0.3)
    density = gaussian.predict(latent).log_prob(latent.mean + 1)
    found = gaussian.log_power_mean(latent.mean, latent.covariance, latent.mean + 1, 1.0)
    torch.testing.assert_close(found, density)
    one = random_latent(size=1)
    answers = torch.tensor([1, 0, 1, 1])
    found = Bernoulli().log_power_mean(one.mean, one.covariance, answers, 1.0, link=Quadrature(64))
    torch.testing.assert_close(found, Bernoulli().predict(one, Quadrature(64)).log_prob(answers), rtol=0, atol=1e-9)


CASES = {
    "gaussian": (Gaussian(0.4), 2, lambda n: torch.randn(n, 2, dtype=F64)),
    "bernoulli": (Bernoulli(), 1, lambda n: torch.arange(n) % 2),
    "two labels": (Bernoulli(), 2, lambda n: torch.randint(2, (n, 2))),
    "two classes": (Categorical(), 2, lambda n: torch.arange(n) % 2),
    "three classes": (Categorical(), 3, lambda n: torch.arange(n) % 3),
    "poisson": (Poisson(), 2, lambda n: torch.randint(4, (n, 2)).double()),
}


@pytest.mark.parametrize("case", CASES)
class TestEveryLikelihood:
    @pytest.mark.quick(5)
    @pytest.mark.parametrize("alpha", [0.0, 1e-6, 0.5, 1.0])
    def test_derivatives(self, case, alpha):
        likelihood, size, make = CASES[case]
        latent, targets = random_latent(batch=3, size=size), make(3)
        noise = torch.tensor(0.7, dtype=F64, requires_grad=True) if case == "gaussian" else None

        def values(mean, root, *noise):
            link = SampledLink(16) if case in ("three classes", "poisson", "two labels") else None
            if case in ("bernoulli", "two classes"):
                link = Quadrature(100)
            return likelihood.log_power_mean(
                mean, root @ root.mT, targets, alpha, *noise, link=link if alpha or case != "two labels" else None
            )

        root = torch.linalg.cholesky(latent.covariance).requires_grad_()
        inputs = (latent.mean.requires_grad_(), root, *([] if noise is None else [noise]))
        assert torch.autograd.gradcheck(values, inputs, atol=1e-4 if alpha == 1e-6 else 1e-5)

    def test_small_alpha_goes_to_the_expected_log_likelihood(self, case):
        """``1/α log E[p^α] = E[log p] + α/2 Var[log p] + ...``: continuous, monotone in α, and right to rounding."""
        likelihood, size, make = CASES[case]
        latent, targets = random_latent(batch=3, size=size), make(3)
        link = SampledLink(64) if case in ("two labels", "three classes", "poisson") else None
        at = lambda a: likelihood.log_power_mean(latent.mean, latent.covariance, targets, a, link=link)  # noqa: E731
        for alpha in (1e-14, 1e-10, 1e-6):
            torch.testing.assert_close(at(alpha), at(0.0), rtol=1e-5, atol=2e-5 if case == "poisson" else 5e-6)
        slopes = [(at(a) - at(0.0)) / a for a in (1e-4, 1e-3)]
        torch.testing.assert_close(slopes[0], slopes[1], rtol=0.05, atol=1e-3)
        values = torch.stack([at(a) for a in (0.0, 0.1, 0.5, 1.0)])
        assert (values.diff(dim=0) > -1e-12).all()

    def test_no_variance_is_the_log_probability(self, case):
        likelihood, size, make = CASES[case]
        mean, targets = random_latent(batch=3, size=size).mean.requires_grad_(), make(3)
        for alpha in (0.0, 0.5, 1.0):
            found = likelihood.log_power_mean(mean, torch.zeros(3, size, size, dtype=F64), targets, alpha)
            torch.testing.assert_close(found, likelihood.log_prob(mean, targets), rtol=1e-6, atol=1e-6)
            assert torch.autograd.grad(found.sum(), mean)[0].isfinite().all()

    def test_singular_covariances_large_means_and_half_precision(self, case):
        likelihood, size, make = CASES[case]
        targets, factor = make(3), torch.randn(3, size, 1)
        for mean in (torch.zeros(3, size), torch.full((3, size), 3.0), torch.full((3, size), -30.0)):
            for dtype in (torch.float32, torch.bfloat16):
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    found = likelihood.log_power_mean(mean.to(dtype), factor @ factor.mT, targets, 1.0)
                assert found.dtype == torch.float32
                assert found.shape == (3,)
                assert found.isfinite().all()


def test_gaussian_of_a_small_noise_in_float32():
    """A covariance 10⁹ times the noise, of rank 1: its rounded eigenvalues are not those of float32."""
    factor, mean = 1e3 * torch.randn(5, 4, 1), torch.zeros(5, 4)
    found = Gaussian(1e-3).log_power_mean(mean, factor @ factor.mT, mean, 1.0)
    wide = factor.double()
    volume = torch.logdet(torch.eye(4).double() + 1e3 * wide @ wide.mT)
    wanted = -2 * math.log(2 * math.pi * 1e-3) - 0.5 * volume
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=30.0)  # the covariance itself is rounded
    assert found.isfinite().all()
    root = torch.eye(3, dtype=F64).expand(2, 3, 3).clone().requires_grad_()  # equal eigenvalues
    y = torch.randn(2, 3, dtype=F64)
    assert torch.autograd.gradcheck(lambda r: Gaussian(0.3).log_power_mean(y, r @ r.mT, 0 * y, 0.7), (root,))


def test_power_mean_where_the_sum_underflows_or_is_all_but_one():
    logs = torch.tensor([-1e5, -2e5, -3e5], dtype=F64)
    weights = torch.full((3,), -math.log(3.0), dtype=F64)
    at = lambda a: float(quadrature.weighted_log_power_mean(logs, weights, a, 0))  # noqa: E731
    assert at(1.0) == pytest.approx(-1e5 - math.log(3), abs=1e-6)
    assert at(0.0) == pytest.approx(-2e5)
    assert at(1e-12) == pytest.approx(-2e5, rel=1e-6)
    impossible = torch.full((3,), -math.inf, dtype=F64)
    assert float(quadrature.weighted_log_power_mean(impossible, weights, 1.0, 0)) == -math.inf
    tiny = torch.tensor([-1e-3, -2e-3], dtype=F64)
    exact = math.log(0.5 * math.exp(-1e-13) + 0.5 * math.exp(-2e-13)) / 1e-10  # what plain logarithms give: digits lost
    found = float(quadrature.weighted_log_power_mean(tiny, torch.full((2,), -math.log(2), dtype=F64), 1e-10, 0))
    assert found == pytest.approx(-1.5e-3, rel=1e-12)
    assert exact != pytest.approx(-1.5e-3, rel=1e-7)
