"""Counts: probabilities and intervals against dense sums, and posteriors from fit to deployment."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import distributions as dist
from torch import nn

import lapwing as lw
from lapwing.covariance import LatentDraws
from tests.likelihoods.latents import marginal_latent
from tests.refilling import Refilling

MEANS, VARIANCES = (-2.0, 0.5, 3.0, 7.0), (1e-6, 0.01, 0.3, 4.0)


def pairs():
    mean, variance = torch.meshgrid(torch.tensor(MEANS), torch.tensor(VARIANCES), indexing="ij")
    return marginal_latent(mean.flatten()[:, None].double(), variance.flatten()[:, None].double())


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
    latent = marginal_latent(latent.mean[keep], latent.variance[keep])
    prediction = lw.Poisson().predict(latent)
    counts = torch.arange(3000.0).double()
    many = lw.Poisson().predict(marginal_latent(latent.mean.expand(-1, 3000), latent.variance.expand(-1, 3000)))
    logs = many.distribution().base_dist.log_prob(counts.expand(len(latent.mean), -1))  # at nodes, good enough here
    below = logs.exp().cumsum(-1)
    for end, share in zip(prediction.interval(0.9), (0.05, 0.95), strict=True):
        wanted = (below < share - 1e-4).sum(-1), (below < share + 1e-4).sum(-1)
        assert bool(((end[:, 0] >= wanted[0]) & (end[:, 0] <= wanted[1])).all())


def test_weight_draws_are_a_mixture():
    draws = torch.randn(7, 3, 2, generator=torch.Generator().manual_seed(0)).double()
    prediction = lw.Poisson().predict(LatentDraws(draws))
    family = dist.MixtureSameFamily(dist.Categorical(torch.ones(3, 2, 7)), dist.Poisson(draws.movedim(0, -1).exp()))
    y = torch.tensor([[0, 2], [1, 1], [5, 0]])
    torch.testing.assert_close(prediction.log_prob(y), family.log_prob(y.double()).sum(-1))
    torch.testing.assert_close(prediction.variance, family.variance)
    low, high = prediction.interval(0.8)
    mass = torch.stack([family.log_prob(torch.full((3, 2), float(k))).exp() for k in range(100)]).cumsum(0)
    assert bool((mass.gather(0, high.long()[None]) >= 0.9).all())
    assert bool((torch.where(low > 0, mass.gather(0, (low - 1).clamp_min(0).long()[None])[0], 0) < 0.1).all())


ALPHA = 0.7


def noisy(latent):
    """The latent of `f + log ε`, as the definition has it."""
    spread = math.log1p(ALPHA)
    return marginal_latent(latent.mean - spread / 2, latent.variance + spread)


def test_dispersed_counts_have_the_same_mean_and_more_variance():
    latent = marginal_latent(torch.tensor([[0.5], [2.0]]).double(), torch.tensor([[0.1], [0.3]]).double())
    plain, prediction = lw.Poisson().predict(latent), lw.Poisson(dispersion=ALPHA).predict(latent)
    same = lw.Poisson().predict(noisy(latent))
    torch.testing.assert_close(prediction.mean, plain.mean)
    torch.testing.assert_close(prediction.epistemic_variance, plain.epistemic_variance)
    torch.testing.assert_close(prediction.variance, same.variance)  # the law of total variance, both ways
    y = torch.tensor([[3.0], [0.0]])
    torch.testing.assert_close(prediction.log_prob(y), same.log_prob(y))
    torch.testing.assert_close(prediction.pit(y), same.pit(y))
    for end, wanted in zip(prediction.interval(0.9), same.interval(0.9), strict=True):
        assert torch.equal(end, wanted)
    assert bool((prediction.interval(0.9)[1] > plain.interval(0.9)[1]).all())


@pytest.mark.parametrize(("dispersion", "outputs"), [(0.0, 3), (ALPHA, 1)])
def test_moments_are_those_of_draws(dispersion, outputs):
    x, model = torch.ones(2, 2).double(), nn.Linear(2, outputs).double().eval()
    latent = lw.fit(model, [(x, torch.ones(2, outputs))], likelihood="poisson", prior_precision=4.0).latent(x)
    prediction = lw.Poisson(dispersion=dispersion).predict(latent)
    draws = prediction.sample(200_000)
    torch.testing.assert_close(draws.mean(0), prediction.mean, rtol=0.02, atol=0)
    torch.testing.assert_close(draws.var(0), prediction.variance, rtol=0.1, atol=0)


def test_weight_draws_of_dispersed_counts():
    few, y = 0.5 * torch.randn(5, 2, 1).double(), torch.tensor([[3.0], [0.0]])
    mixture = lw.Poisson(dispersion=ALPHA).predict(LatentDraws(few))
    torch.testing.assert_close(mixture.mean, few.exp().mean(0))
    each = [lw.Poisson().predict(noisy(marginal_latent(one, torch.zeros_like(one)))).log_prob(y) for one in few]
    wanted = torch.stack(each).logsumexp(0) - math.log(5)
    torch.testing.assert_close(mixture.log_prob(y), wanted, rtol=0, atol=0.03)  # 16 rates for each draw


def many_counts(dispersion, rows=800):
    """Counts with `variance = (1 + dispersion) mean`, and a network that knows the mean."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2, generator=generator).double()
    rates = (1.0 + 0.5 * x[:, :1]).exp()
    if dispersion:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            rates = dist.Gamma(rates / dispersion, 1 / dispersion).sample()
    model = nn.Linear(2, 1).double().eval()
    model.weight.data, model.bias.data = torch.tensor([[0.5, 0.0]]).double(), torch.ones(1).double()
    return model, x, torch.poisson(rates, generator)


def test_residuals_decide_on_the_dispersion():
    model, x, y = many_counts(3.0)
    posterior = lw.fit(model, (x, y), lw.Full(), likelihood="poisson", prior_precision=1.0)
    rates = model(x).exp().detach()
    alpha = float((((y - rates).square() - y) / (rates + rates**2)).sum() / (rates / (1 + rates)).sum())
    assert posterior.likelihood.alpha == pytest.approx(alpha, rel=1e-9)
    factor = 1 + alpha * float(rates.square().sum() / rates.sum())
    assert posterior.temperature == pytest.approx(factor, rel=1e-9)
    ones = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    covariance = torch.linalg.inv((ones * rates).T @ ones / factor + torch.eye(3).double())
    torch.testing.assert_close(posterior.covariance.to_dense(), covariance)
    # α does not depend on a factor of all weights
    again = lw.fit(model, [(x, y, 0.1 * torch.ones(len(x)))], lw.Full(), likelihood="poisson", sample_weights=True)
    assert again.likelihood.alpha == pytest.approx(alpha, rel=1e-6)


def test_the_dispersion_does_not_depend_on_batches_order_and_positions():
    model, x, y = many_counts(3.0, 400)
    wanted = lw.fit(model, (x, y), lw.KFAC(), likelihood="poisson", prior_precision=1.0)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(1))
    ones = [(a[None], b[None]) for a, b in zip(x, y, strict=True)]
    pairs = x.unflatten(0, (200, 2)), y.unflatten(0, (200, 2))  # two positions for each sample
    refilled = Refilling(zip(x.split(100), y.split(100), strict=True))
    for data in ((x[order], y[order]), [(x[:2], y[:2]), *ones[2:]], refilled, pairs):
        found = lw.fit(model, data, lw.KFAC(), likelihood="poisson", prior_precision=1.0)
        assert found.likelihood.alpha == pytest.approx(wanted.likelihood.alpha, rel=1e-9)
        assert found.temperature == pytest.approx(wanted.temperature, rel=1e-9)
    low = lw.fit(copy.deepcopy(model).bfloat16(), (x.bfloat16(), y), lw.KFAC(), likelihood="poisson")
    assert low.likelihood.alpha == pytest.approx(wanted.likelihood.alpha, rel=0.1)
    assert low.predict(x[:1].bfloat16()).interval(0.9)[1].isfinite().all()


def test_twenty_held_out_counts_that_are_all_right():
    model, x, y = many_counts(3.0, 400)
    right = x[:20], model(x[:20]).exp().detach().round()
    fitted = lw.fit(model, (x, y), likelihood="poisson", validation=right)
    prediction = fitted.predict(x)
    assert float(((prediction.interval(0.9)[0] <= y) & (y <= prediction.interval(0.9)[1])).double().mean()) > 0.85
    assert float((prediction.mean / model(x).exp().detach()).max()) < 1.5


@pytest.mark.parametrize("equal", [1, 2])
def test_one_or_two_counts_show_no_dispersion(equal):
    model, x, y = many_counts(0.0)
    x[:equal], y[:equal] = 0.0, 200
    assert lw.fit(model, (x, y), likelihood="poisson").likelihood.alpha == 0


@pytest.mark.parametrize("seed", range(4))
def test_twenty_counts_of_large_rates_show_their_dispersion(seed):
    """Their excess is 50 standard errors of Poisson counts. Without a dispersion 90 % intervals cover a quarter."""
    torch.manual_seed(seed)
    model, x = nn.Linear(1, 1).double().eval(), 2 * torch.rand(520, 1).double() - 1
    model.weight.data, model.bias.data = torch.tensor([[0.3]]).double(), torch.tensor([4.0]).double()
    y = torch.poisson(model(x).exp().detach() * dist.Gamma(2.0, 2.0).sample(x.shape))
    posterior = lw.fit(model, (x[:20], y[:20]), lw.Full(), likelihood="poisson", prior_precision=1.0)
    low, high = posterior.predict(x[20:]).interval(0.9)
    assert 0.75 < float(((y[20:] >= low) & (y[20:] <= high)).double().mean()) < 0.97


def test_held_out_counts_choose_the_dispersion_if_the_prior_is_given():
    model, x, y = many_counts(9.0, 800)
    plain = (x[:500], model(x[:500]).exp().detach().round())  # counts that vary too little
    fitted = lw.fit(model, plain, likelihood="poisson", prior_precision=1.0, validation=(x[500:], y[500:]))
    assert fitted.prior_precision == 1
    assert fitted.likelihood.alpha > 0.3
    assert fitted.temperature == pytest.approx(fitted.likelihood.dispersion_temperature(fitted.statistics))


@pytest.mark.parametrize("stop", ["best", "first fall"])
def test_early_stopping_keeps_the_dispersion(stop):
    model, x, y = many_counts(9.0, 1000)
    tune = lw.EarlyStopping((x[500:800], y[500:800]), stop=stop)
    fitted = lw.fit(model, (x[:500], y[:500]), lw.KFAC(), likelihood="poisson", tune=tune)
    assert fitted.likelihood.alpha > 0.3


def test_counts_of_a_poisson_law_have_no_dispersion():
    model, x, y = many_counts(0.0)
    posterior = lw.fit(model, (x, y), likelihood="poisson")
    assert (posterior.likelihood.alpha, posterior.temperature) == (0.0, 1.0)
    plain = lw.fit(model, (x, y), likelihood=lw.Poisson(dispersion=0.0))
    assert torch.equal(posterior.predict(x).variance, plain.predict(x).variance)


@pytest.mark.parametrize("held_out", [False, True])
def test_intervals_of_dispersed_counts_cover_and_the_mean_stays(held_out, tmp_path):
    model, x, y = many_counts(9.0, 1600)
    validation = (x[500:800], y[500:800]) if held_out else None
    posterior = lw.fit(model, (x[:500], y[:500]), likelihood="poisson", validation=validation)
    prediction = posterior.predict(x[800:])
    low, high = prediction.interval(0.9)
    assert 0.85 < ((low <= y[800:]) & (y[800:] <= high)).double().mean() < 0.97
    assert float((prediction.mean / model(x[800:]).exp().detach()).max()) < 1.5
    posterior.save(tmp_path / "counts.safetensors")
    loaded = lw.load(tmp_path / "counts.safetensors", model).predict(x[800:])
    assert torch.equal(loaded.log_prob(y[800:]), prediction.log_prob(y[800:]))
    deployed = lw.deploy(posterior, x[:50])
    for name, value in zip(deployed.returns, deployed(x[:20]), strict=True):
        wanted = getattr(posterior.predict(x[:20], via=deployed.via), name)
        torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("likelihood", [lw.Poisson(dispersion=0.5), lw.Poisson()], ids=["given", "of residuals"])
@pytest.mark.parametrize("rows", [20, 200])
def test_an_update_has_the_dispersion_of_all_counts(likelihood, rows, tmp_path):
    """The first rows have small rates, whose counts nearly are Poisson counts."""
    model, x = nn.Linear(1, 1).double().eval(), torch.linspace(-1, 1, 400).double()[:, None]
    model.weight.data, model.bias.data = torch.tensor([[2.5]]).double(), torch.tensor([2.0]).double()
    y = torch.poisson(model(x).exp().detach() * dist.Gamma(2.0, 2.0).sample(x.shape))
    fit = lambda part: lw.fit(model, (x[part], y[part]), lw.Full(), likelihood=likelihood, prior_precision=1.0)  # noqa: E731
    whole = fit(slice(None))
    fit(slice(rows)).save(tmp_path / "first")
    updated = lw.load(tmp_path / "first", model).update((x[rows:300], y[rows:300])).update((x[300:], y[300:]))
    assert updated.likelihood.alpha == pytest.approx(whole.likelihood.alpha, rel=1e-9)
    assert updated.temperature == pytest.approx(whole.temperature, rel=1e-9)
    torch.testing.assert_close(updated.predict(x).std, whole.predict(x).std)


def test_an_update_keeps_the_dispersion_that_held_out_counts_chose():
    model, x, y = many_counts(9.0, 800)
    plain = (x[:300], model(x[:300]).exp().detach().round())
    first = lw.fit(model, plain, lw.Full(), likelihood="poisson", prior_precision=1.0, validation=(x[500:], y[500:]))
    updated = first.update((x[300:500], y[300:500]))
    assert updated.likelihood.alpha == first.likelihood.alpha > 0.3
    wanted = first.likelihood.dispersion_temperature(updated.statistics)
    assert updated.temperature == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("mean", "std", "alpha"), [(1.0, 0.3, 0.0), (6.0, 0.5, 0.29), (5.7, 0.1, 1.0), (6.9, 1.0, 0.0)]
)
def test_the_distribution_of_large_counts_is_no_comb(mean, std, alpha):
    """Its rates lie closer than the standard deviation of a count."""
    latent = marginal_latent(torch.full((40, 1), mean).double(), torch.full((40, 1), std**2).double())
    prediction = lw.Poisson(dispersion=alpha).predict(latent)
    y = torch.linspace(0, 2 * math.exp(mean + std), 40).double().round()[:, None]
    torch.testing.assert_close(prediction.distribution().log_prob(y), prediction.log_prob(y), rtol=1e-6, atol=1e-6)
