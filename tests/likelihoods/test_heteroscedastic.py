"""Predicted noise: densities and intervals against dense integrals and draws, and posteriors from fit to deployment."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import distributions as dist
from torch import nn

import lapwing as lw
from tests import oracle
from tests.conformance import close
from tests.likelihoods.fakes import FakeDraws, joint_latent, random_latent

LIKELIHOOD = lw.HeteroscedasticGaussian()


def test_density_is_the_integral_over_mean_and_log_variance():
    """Their covariance counts, and so does each target alone."""
    latent = random_latent(batch=3, size=4)
    prediction = LIKELIHOOD.predict(latent)
    y = torch.tensor([[0.3, -1.0], [4.0, 0.0], [-9.0, 2.0]]).double()
    z = torch.linspace(-9, 9, 301).double()
    grid = torch.cartesian_prod(z, z)
    mass = (-0.5 * grid.square().sum(-1)).softmax(0)
    wanted = torch.zeros(3).double()
    for b, k in itertools.product(range(3), range(2)):
        pair = [k, 2 + k]
        f = latent.mean[b, pair] + grid @ torch.linalg.cholesky(latent.covariance[b][pair][:, pair]).T
        density = dist.Normal(f[:, 0], (0.5 * f[:, 1]).exp()).log_prob(y[b, k]).exp()
        wanted[b] += (mass @ density).log()
    torch.testing.assert_close(prediction.log_prob(y), wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(prediction.distribution().log_prob(y), prediction.log_prob(y))


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
    prediction = LIKELIHOOD.predict(FakeDraws(draws))
    family = dist.MixtureSameFamily(
        dist.Categorical(torch.ones(3, 7).double()), dist.Normal(draws[..., 0].T, (0.5 * draws[..., 1]).exp().T)
    )
    y = torch.randn(3).double()
    torch.testing.assert_close(prediction.log_prob(y), family.log_prob(y))
    torch.testing.assert_close(prediction.variance[:, 0], family.variance)
    low, high = prediction.interval(0.8)
    torch.testing.assert_close(family.cdf(high[:, 0]) - family.cdf(low[:, 0]), torch.full((3,), 0.8).double())


def fitted(method=None, **options):
    torch.manual_seed(0)
    x = torch.rand(60, 2).double()
    y = x.sum(1).sin() + (0.1 + x[:, 0]) * torch.randn(60).double()
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double().eval()
    loader = [(x[:25], y[:25]), (x[25:50], y[25:50]), (x[50:], y[50:])]
    return lw.fit(model, loader, method, likelihood=LIKELIHOOD, **options), model, x, y


def test_the_curvature_and_the_evidence_are_the_dense_ones():
    posterior, model, x, y = fitted(lw.Full(), prior_precision=2.0)
    J, f = oracle.jacobian(model, x), oracle.outputs(model, x)
    Lam = torch.diag_embed(torch.stack([(-f[:, 1]).exp(), torch.full_like(f[:, 1], 0.5)], -1))
    G = oracle.ggn(J, Lam)
    close(posterior.latent(x[:3]).covariance, oracle.output_covariance(J[:3], oracle.laplace_covariance(G, 2.0)))
    logs = dist.Normal(f[:, 0], (0.5 * f[:, 1]).exp()).log_prob(y).sum()
    theta = oracle.flat_parameters(model)
    evidence = logs - theta.square().sum() - 0.5 * torch.logdet(torch.eye(len(G)).double() + G / 2.0)
    assert posterior.log_marginal_likelihood() == pytest.approx(float(evidence))


def test_from_fit_to_file_and_deployment(tmp_path):
    posterior, model, x, y = fitted(params=lw.last_layer)
    posterior.save(tmp_path / "it.safetensors")
    again = lw.load(tmp_path / "it.safetensors", model)
    assert again.likelihood == LIKELIHOOD
    prediction = again.predict(x)
    torch.testing.assert_close(prediction.log_prob(y), posterior.predict(x).log_prob(y))
    assert prediction.mean.shape == (60, 1)
    torch.testing.assert_close(lw.deploy(posterior, x)(x), (prediction.mean, prediction.variance))
    streamlined = posterior.predict(x, via=lw.Streamlined())
    torch.testing.assert_close(streamlined.variance, prediction.variance)  # of the last layer
    assert bool(posterior.predict(x, via=lw.MonteCarlo(5)).log_prob(y).isfinite().all())
    table = lw.compare({"it": posterior}, [(x, y)])
    assert "it" in str(table)


def test_missing_targets_have_no_effect():
    """Densities, curvature and evidence are those of the known targets."""
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
    J = torch.stack([torch.kron(torch.eye(4).double(), torch.cat([row, row.new_ones(1)])[None]) for row in x])
    J = J.reshape(40, 4, 4, 4)  # of output c: weights of output c and its bias
    order = [*(J[:, :, c, :3] for c in range(4)), *(J[:, :, c, 3:] for c in range(4))]
    J = torch.cat(order, -1)
    precision = torch.cat([(-f[:, 2:]).exp(), torch.full((40, 2), 0.5).double()], -1) * torch.cat([known, known], -1)
    covariance = torch.linalg.inv(torch.einsum("ncp,nc,ncq->pq", J, precision, J) + torch.eye(16))
    close(fitted.latent(x).covariance, torch.einsum("ncp,pq,ndq->ncd", J, covariance, J), 1e-8)
    prediction = fitted.predict(x)
    alone = lw.HeteroscedasticGaussian().predict(prediction.latent).log_prob(y.nan_to_num())
    torch.testing.assert_close(prediction.log_prob(y)[known.all(1)], alone[known.all(1)])
    assert float(prediction.log_prob(y)[5]) == 0
    values = prediction.for_metrics(y)
    assert values["y"].shape == (int(known.sum()),)
