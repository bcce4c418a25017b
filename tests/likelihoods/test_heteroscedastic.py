"""Predicted noise: densities and intervals against dense integrals and draws, and posteriors from fit to deployment."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import distributions as dist
from torch import nn

import lapwing as lw
from lapwing.covariance import LatentDraws
from tests.likelihoods.latents import dense_latent, integral, joint_latent, random_latent

LIKELIHOOD, F64 = lw.HeteroscedasticGaussian(), torch.float64


def test_density_is_the_integral_over_mean_and_log_variance():
    """Their covariance counts, and so does each target alone."""
    latent = random_latent(batch=3, size=4)
    prediction = LIKELIHOOD.predict(latent)
    y = torch.tensor([[0.3, -1.0], [4.0, 0.0], [-9.0, 2.0]]).double()
    wanted = torch.zeros(3).double()
    for b, k in itertools.product(range(3), range(2)):
        pair = [k, 2 + k]
        density = lambda f, y=y[b, k]: dist.Normal(f[:, 0], (0.5 * f[:, 1]).exp()).log_prob(y).exp()  # noqa: E731
        wanted[b] += integral(density, latent.mean[b, pair], latent.covariance[b][pair][:, pair], 301).log()
    torch.testing.assert_close(prediction.log_prob(y), wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(prediction.distribution().log_prob(y), prediction.log_prob(y))


@pytest.mark.parametrize(("spread", "tolerance"), [(0.3, 1e-12), (10.0, 1e-12), (30.0, 1e-5), (100.0, 1e-4)])
def test_the_crps_of_a_very_uncertain_noise(spread, tolerance):
    """Pairs of the normals give it exactly: `E|Y - y| - 1/2 E|Y - Y'|`."""
    mean = torch.tensor([[0.3, -0.7]]).double().expand(20, 2)
    covariance = torch.tensor([[0.2, 0.1], [0.1, spread]]).double().expand(20, 2, 2)
    prediction = LIKELIHOOD.predict(dense_latent(mean, covariance))
    y, (means, variances, weights) = torch.linspace(-5, 5, 20)[:, None].double(), prediction._normals

    def size(gap, variance):
        return (
            gap * (gap / (2 * variance).sqrt()).erf()
            + (2 * variance / math.pi).sqrt() * (-(gap**2) / 2 / variance).exp()
        )

    pairs = [weights * size(means - m, variances + v) * w for m, v, w in zip(means, variances, weights, strict=True)]
    wanted = (weights * size(y - means, variances)).sum(0) - 0.5 * torch.stack(pairs).sum((0, 1))
    torch.testing.assert_close(prediction.crps(y), wanted, rtol=tolerance, atol=0)


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 6.0, 8.0, 10.0, 13.0, 20.0, 30.0])
def test_quantiles_and_crps_at_any_standard_deviation_of_the_log_variance(spread):
    """A dense grid over s gives F, and the CRPS is `∫ (F(t) - 1[t ≥ y])² dt` over logarithms of the distance from m."""
    mean, variance, slope, log_variance = -0.7, 0.5, 0.3, -2.0
    moments = torch.tensor([[mean, log_variance]], dtype=F64)
    covariance = torch.tensor([[[variance, slope * spread], [slope * spread, spread**2]]], dtype=F64)
    prediction = LIKELIHOOD.predict(dense_latent(moments, covariance))
    z = torch.linspace(-14, 14, max(401, int(56 * spread)), dtype=F64)
    weights = (-0.5 * z.square()).softmax(0)
    means, stds = mean + slope * z, (variance - slope**2 + (log_variance + spread * z).exp()).sqrt()

    def below(y, side=1.0):
        return torch.cat([torch.special.ndtr(side * (part[:, None] - means) / stds) @ weights for part in y.split(256)])

    levels = torch.tensor([1e-6, 0.05, 0.3, 0.499, 0.5, 0.501, 0.7, 0.95, 1 - 1e-6], dtype=F64)
    quantiles = torch.cat([prediction.quantile(level)[0] for level in levels.tolist()])
    assert bool((quantiles.diff() > 0).all())
    torch.testing.assert_close(below(quantiles), levels, rtol=0, atol=1e-8)
    torch.testing.assert_close(torch.cat([prediction.pit(q[None, None])[0] for q in quantiles]), levels)
    u, step = torch.arange(-600, 4000, dtype=F64) / 20, 0.05
    x = u.exp()
    lower, upper, above = below(mean - x), below(mean + x), below(mean + x, -1.0)
    for place in (300, 580, 680):  # y - m is e^-15, 0.4 or 55
        error = torch.where(u < u[place], upper.square(), above.square())
        error[place] = 0.5 * (upper[place].square() + above[place].square())
        wanted = float(((lower.square() + error) * x).sum() * step)
        assert float(prediction.crps((mean + x[place]).reshape(1, 1))) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("latent", [random_latent(size=4, scale=0.5), joint_latent(size=4)], ids=["batch", "joint"])
def test_moments_and_intervals_are_those_of_draws(latent):
    prediction = LIKELIHOOD.predict(latent)
    draws = prediction.sample(200_000)
    torch.testing.assert_close(draws.mean(0), prediction.mean, rtol=0, atol=0.03)
    torch.testing.assert_close(draws.var(0), prediction.variance, rtol=0.05, atol=0)
    low, high = prediction.interval(0.9)
    for end, share in ((low, 0.05), (high, 0.95)):
        torch.testing.assert_close((draws <= end).double().mean(0), torch.full_like(end, share), rtol=0, atol=3e-3)


def test_weight_draws_are_a_mixture():
    draws = torch.randn(7, 3, 2, generator=torch.Generator().manual_seed(0)).double()
    prediction = LIKELIHOOD.predict(LatentDraws(draws))
    family = dist.MixtureSameFamily(
        dist.Categorical(torch.ones(3, 7).double()), dist.Normal(draws[..., 0].T, (0.5 * draws[..., 1]).exp().T)
    )
    y = torch.randn(3).double()
    torch.testing.assert_close(prediction.log_prob(y), family.log_prob(y))
    wanted = draws[..., 0].var(0) + draws[..., 1].exp().mean(0)  # the variance of means is the unbiased one
    torch.testing.assert_close(prediction.variance[:, 0], wanted)
    low, high = prediction.interval(0.8)
    torch.testing.assert_close(family.cdf(high[:, 0]) - family.cdf(low[:, 0]), torch.full((3,), 0.8).double())


def test_missing_targets_have_no_effect():
    """Densities are those of the known targets; `test_fits.py` has the curvature and the evidence."""
    likelihood, generator = lw.HeteroscedasticGaussian(missing=True), torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    y[::3, 1] = torch.nan
    y[5] = torch.nan
    model = nn.Linear(3, 4).double().eval()
    f, known = model(x).detach(), ~y.isnan()
    wanted = torch.where(known, dist.Normal(f[:, :2], (0.5 * f[:, 2:]).exp()).log_prob(y.nan_to_num()), 0.0).sum(-1)
    torch.testing.assert_close(likelihood.log_prob(f, y), wanted)
    fitted = lw.fit(model, (x, y), lw.Full(), likelihood=likelihood, prior_precision=1.0)
    prediction = fitted.predict(x)
    alone = lw.HeteroscedasticGaussian().predict(prediction.latent).log_prob(y.nan_to_num())
    torch.testing.assert_close(prediction.log_prob(y)[known.all(1)], alone[known.all(1)])
    assert float(prediction.log_prob(y)[5]) == 0
    values = prediction.for_metrics(y)
    assert values["y"].shape == (int(known.sum()),)


@pytest.mark.parametrize("weighted", [False, True])
def test_variances_in_the_place_of_log_variances_are_warned_of(weighted, caplog):
    x = torch.randn(200, 1)
    y = x + 0.3 * torch.randn(200, 1)
    y[::4], law = torch.nan, lw.HeteroscedasticGaussian(missing=True)
    batch = (x, y, 3 * torch.ones(200)) if weighted else (x, y)
    model = nn.Linear(1, 2).eval()
    for variance, told in ((math.log(0.09), False), (0.09, True)):
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0], [0.0]]))
            model.bias.copy_(torch.tensor([0.0, variance]))
        lw.fit(model, [batch], lw.KFAC(), prior_precision=1.0, likelihood=law, sample_weights=weighted)
        assert ("torch.cat([m, v.log()], 1)" in caplog.text) == told


def test_standard_deviations_by_noise_that_will_not_be_seen_are_warned_of(caplog):
    x = torch.randn(40, 2)
    posterior = lw.fit(torch.nn.Linear(2, 2).eval(), (x, x[:, 0]), likelihood=lw.HeteroscedasticGaussian())
    near, far = x[:3], 1e3 * x[:2]
    posterior.predict(near)
    assert "log variances" not in caplog.text
    prediction = posterior.predict(torch.cat([near, far]))
    assert "The log variances of 2 of 5 inputs have standard deviations above 4" in caplog.text
    low, high = prediction.interval(0.9)
    assert (low < high).all()
