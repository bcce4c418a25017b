"""One noise variance an output: densities, curvature, evidence and tuning, as if outputs were measured in its unit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import distributions as dist
from torch import nn

import lapwing as lw
from lapwing.errors import LapwingError
from tests import oracle
from tests.conformance import close
from tests.likelihoods.fakes import joint_latent, random_latent

F64 = torch.float64
NOISE = [0.1, 0.5]
SCALE = torch.tensor(NOISE, dtype=F64).sqrt()


def data():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(24, 3, generator=generator, dtype=F64)
    y = torch.stack([x[:, 0].sin(), 3 * x[:, 1] * x[:, 2]], -1) + 0.3 * torch.randn(
        24, 2, generator=generator, dtype=F64
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double().eval()
    return model, x, y


class Divided(nn.Module):
    """The network with outputs in units of their noise."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x) / SCALE


def test_everything_but_the_tuning_is_the_dense_one(tmp_path):
    model, x, y = data()
    likelihood = lw.Gaussian(noise_variance=NOISE)
    assert likelihood == lw.Gaussian(np.array(NOISE)) == lw.Gaussian(torch.tensor(NOISE, dtype=F64))
    posterior = lw.fit(model, [(x[:9], y[:9]), (x[9:], y[9:])], lw.Full(), likelihood=likelihood, prior_precision=2.0)
    J, f = oracle.jacobian(model, x), oracle.outputs(model, x)
    noise = torch.tensor(NOISE, dtype=F64).diag()
    G = oracle.ggn(J, torch.linalg.inv(noise).expand(24, 2, 2))
    covariance = oracle.output_covariance(J, oracle.laplace_covariance(G, 2.0))
    close(posterior.latent(x).covariance, covariance)
    logs = dist.Normal(f, SCALE).log_prob(y).sum()
    evidence = logs - oracle.flat_parameters(model).square().sum()
    evidence = evidence - 0.5 * torch.logdet(torch.eye(len(G), dtype=F64) + G / 2)
    assert posterior.log_marginal_likelihood() == pytest.approx(float(evidence))
    prediction = posterior.predict(x)
    wanted = dist.MultivariateNormal(f, covariance + noise)
    close(prediction.log_prob(y), wanted.log_prob(y), 1e-8)
    close(prediction.distribution().log_prob(y), wanted.log_prob(y), 1e-8)
    close(likelihood.log_power_mean(f, covariance, y), wanted.log_prob(y), 1e-8)
    close(prediction.variance, wanted.variance)
    posterior.save(tmp_path / "it.safetensors")
    again = lw.load(tmp_path / "it.safetensors", model)
    close(again.predict(x).variance, prediction.variance, 1e-14)
    close(again.likelihood.ratios(f) * again.noise_variance, torch.tensor(NOISE, dtype=F64), 1e-14)
    torch.testing.assert_close(lw.deploy(posterior, x, via=lw.Streamlined())(x)[1],
                               posterior.predict(x, via=lw.Streamlined()).variance)  # fmt: skip


@pytest.mark.parametrize("latent", [random_latent(size=2), joint_latent(batch=4, size=2)], ids=["batch", "joint"])
def test_draws_have_the_noise_of_their_output(latent):
    prediction = lw.Gaussian(NOISE).predict(latent)
    draws = prediction.sample(200_000)
    torch.testing.assert_close(draws.var(0), prediction.variance, rtol=0.02, atol=0)
    low, high = prediction.interval(0.9)
    torch.testing.assert_close(
        ((draws >= low) & (draws <= high)).double().mean(0), torch.full_like(low, 0.9), rtol=0, atol=4e-3
    )
    whole = prediction.distribution()
    torch.testing.assert_close(whole.variance.flatten(), prediction.variance.flatten())


@pytest.mark.quick(2)
@pytest.mark.parametrize("method", [lw.Full(), lw.KFAC(), lw.SampledLLA(4)], ids=repr)
@pytest.mark.parametrize("tune", [lw.BoundedEvidence(), lw.Evidence(), "validation"], ids=repr)
def test_the_tuning_is_that_of_outputs_in_units_of_their_noise(method, tune):
    model, x, y = data()
    ratios = lw.Gaussian(noise_ratios=NOISE)
    options = (
        [{"tune": tune}] * 2 if tune != "validation" else [{"validation": (x[:12], z[:12])} for z in (y, y / SCALE)]
    )
    given = lw.fit(model, [(x, y)], method, likelihood=ratios, params=lw.everything, **options[0])
    wanted = lw.fit(
        Divided(model).eval(), [(x, y / SCALE)], method, likelihood="gaussian", params=lw.everything, **options[1]
    )
    assert given.prior_precision == pytest.approx(wanted.prior_precision, rel=1e-3)
    assert given.noise_variance == pytest.approx(wanted.noise_variance, rel=1e-3)


def test_a_fit_with_ratios_of_other_outputs_is_refused():
    x = torch.randn(9, 3)
    with pytest.raises(LapwingError, match="noise variances of 3 outputs, and the outputs have shape"):
        lw.fit(nn.Linear(3, 2).eval(), [(x, x[:, :2])], likelihood=lw.Gaussian(noise_ratios=[1.0, 2.0, 3.0]))


def test_selected_outputs_and_linearised_draws_have_the_noise_of_their_output():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    x, y, noise = torch.randn(9, 3).double(), torch.randn(9, 3).double(), torch.tensor([0.1, 0.5, 2.0]).double()
    for missing in (False, True):
        likelihood = lw.Gaussian(noise_variance=noise.tolist(), missing=missing)
        posterior = lw.fit(model, [(x, y)], lw.KFAC(), likelihood=likelihood, prior_precision=1.0)
        whole = posterior.predict(x)
        total = whole.latent.covariance + noise.diag()
        some = posterior.predict(x, via=lw.Linearized(outputs=2))  # other outputs for each input
        at = some.latent.outputs
        close(some.variance, whole.variance.gather(1, at))
        picked = total.gather(1, at[..., None].expand(-1, -1, 3)).gather(2, at[:, None].expand(-1, 2, -1))
        targets = y.gather(1, at)
        wanted = torch.distributions.MultivariateNormal(some.mean, picked).log_prob(targets)
        close(some.log_prob(targets), wanted)
        close(some.distribution().log_prob(targets), wanted)

        drawn = posterior.predict(x, via=lw.Linearized(draws=20))
        wanted = torch.distributions.MultivariateNormal(drawn.mean, drawn.latent.covariance + noise.diag()).log_prob(y)
        close(drawn.log_prob(y), wanted)
        close(drawn.distribution().log_prob(y), wanted)
    joint = posterior.latent(x, joint=True, via=lw.Linearized(outputs=[0]))
    with pytest.raises(LapwingError, match="noise variances of 3 outputs"):
        posterior.likelihood.predict(joint)
