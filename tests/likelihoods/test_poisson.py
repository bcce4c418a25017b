"""Counts: probabilities and intervals against dense sums, and posteriors from fit to deployment."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import distributions as dist
from torch import nn

import lapwing as lw
from tests.likelihoods.fakes import FakeDraws, MarginalLatent

MEANS, VARIANCES = (-2.0, 0.5, 3.0, 7.0), (1e-6, 0.01, 0.3, 4.0)


def pairs():
    mean, variance = torch.meshgrid(torch.tensor(MEANS), torch.tensor(VARIANCES), indexing="ij")
    return MarginalLatent(mean.flatten()[:, None].double(), variance.flatten()[:, None].double())


def dense(mean, variance, count):
    """`log E[Poisson(count; e^f)]` by half a million points."""
    near, reach = sorted((mean, math.log(count + 0.5))), 12 * math.sqrt(variance)
    f = np.linspace(near[0] - reach, near[1] + reach, 500_001)
    logs = count * f - np.exp(f) - math.lgamma(count + 1) - (f - mean) ** 2 / (2 * variance)
    top = logs.max()
    return top + math.log(np.exp(logs - top).sum() * (f[1] - f[0]) / math.sqrt(2 * math.pi * variance))


@pytest.mark.parametrize("count", [0, 3, 1500])
def test_probabilities_are_the_dense_integrals(count):
    latent = pairs()
    logs = lw.Poisson().predict(latent).log_prob(torch.full((16, 1), float(count)))
    wanted = [dense(float(m), float(v), count) for m, v in zip(latent.mean, latent.variance, strict=True)]
    np.testing.assert_allclose(logs.numpy(), wanted, rtol=1e-7, atol=1e-6)


def test_intervals_are_the_quantiles_of_sums():
    """And, of a wide latent of large rates, those of the rates."""
    latent = pairs()
    high = lw.Poisson().predict(latent).interval(0.9)[1]
    torch.testing.assert_close(high[-1].log(), 7 + 1.6449 * 2 * torch.ones(1).double(), rtol=1e-4, atol=0)
    keep = (latent.mean[:, 0] < 5) & (latent.variance[:, 0] < 1)
    latent = MarginalLatent(latent.mean[keep], latent.variance[keep])
    prediction = lw.Poisson().predict(latent)
    counts = torch.arange(3000.0).double()
    many = lw.Poisson().predict(MarginalLatent(latent.mean.expand(-1, 3000), latent.variance.expand(-1, 3000)))
    logs = many.distribution().base_dist.log_prob(counts.expand(len(latent.mean), -1))  # at nodes, good enough here
    below = logs.exp().cumsum(-1)
    for end, share in zip(prediction.interval(0.9), (0.05, 0.95), strict=True):
        wanted = (below < share - 1e-4).sum(-1), (below < share + 1e-4).sum(-1)
        assert bool(((end[:, 0] >= wanted[0]) & (end[:, 0] <= wanted[1])).all())


def test_moments_are_those_of_draws():
    latent = lw.fit(nn.Linear(2, 3).double().eval(), [(torch.zeros(4, 2).double(), torch.ones(4, 3))],
                    likelihood="poisson", prior_precision=4.0).latent(torch.ones(2, 2).double())  # fmt: skip
    prediction = lw.Poisson().predict(latent)
    draws = prediction.sample(200_000)
    torch.testing.assert_close(draws.mean(0), prediction.mean, rtol=0.02, atol=0)
    torch.testing.assert_close(draws.var(0), prediction.variance, rtol=0.1, atol=0)


def test_weight_draws_are_a_mixture():
    draws = torch.randn(7, 3, 2, generator=torch.Generator().manual_seed(0)).double()
    prediction = lw.Poisson().predict(FakeDraws(draws))
    family = dist.MixtureSameFamily(dist.Categorical(torch.ones(3, 2, 7)), dist.Poisson(draws.movedim(0, -1).exp()))
    y = torch.tensor([[0, 2], [1, 1], [5, 0]])
    torch.testing.assert_close(prediction.log_prob(y), family.log_prob(y.double()).sum(-1))
    torch.testing.assert_close(prediction.variance, family.variance)
    low, high = prediction.interval(0.8)
    mass = torch.stack([family.log_prob(torch.full((3, 2), float(k))).exp() for k in range(100)]).cumsum(0)
    assert bool((mass.gather(0, high.long()[None]) >= 0.9).all())
    assert bool((torch.where(low > 0, mass.gather(0, (low - 1).clamp_min(0).long()[None])[0], 0) < 0.1).all())
