"""One noise variance an output: densities, curvature, evidence and tuning, as if outputs were measured in its unit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import distributions as dist
from torch import nn

import lapwing as lw
import lapwing.fitting.fit_data
from tests.conformance import close
from tests.likelihoods.latents import random_latent
from tests.zoo_modules import Net

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


def test_densities_are_those_of_correlated_outputs():
    likelihood, latent, noise = lw.Gaussian(noise_variance=NOISE), random_latent(size=2), torch.tensor(NOISE, dtype=F64)
    assert likelihood == lw.Gaussian(np.array(NOISE)) == lw.Gaussian(noise)
    y = latent.mean + 1
    wanted = dist.MultivariateNormal(latent.mean, latent.covariance + noise.diag())
    prediction = likelihood.predict(latent)
    close(prediction.log_prob(y), wanted.log_prob(y), 1e-8)
    close(prediction.distribution().log_prob(y), wanted.log_prob(y), 1e-8)
    close(likelihood.log_power_mean(latent.mean, latent.covariance, y), wanted.log_prob(y), 1e-8)
    close(prediction.variance, wanted.variance)
    close(likelihood.ratios(latent.mean) * likelihood.noise_variance, noise, 1e-14)


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
    divided = Net(lambda net, x: net.model(x) / SCALE, model=model).eval()  # outputs in units of their noise
    wanted = lw.fit(divided, [(x, y / SCALE)], method, likelihood="gaussian", params=lw.everything, **options[1])
    assert given.prior_precision == pytest.approx(wanted.prior_precision, rel=1e-3)
    assert given.noise_variance == pytest.approx(wanted.noise_variance, rel=1e-3)


def test_selected_outputs_and_linearised_draws_have_the_noise_of_their_output():
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


def in_other_units(factor=100.0):
    """A network whose second output and its targets are in a unit that is `factor` times smaller; held-out rows."""
    model, x, _ = data()
    with torch.no_grad():
        model[2].weight[1] *= factor
        model[2].bias[1] *= factor
    x = x.repeat(4, 1) + 0.1
    torch.manual_seed(1)
    return model, x, model(x).detach() + torch.tensor([0.2, 0.3 * factor]) * torch.randn(96, 2, dtype=F64)


def naive_ratios(model, x, y, weights=None):
    """Mean squared residuals of the known targets of each output, divided by their mean."""
    residuals, outputs = [], model(x).detach()
    for c in range(y.shape[1]):
        total = count = 0.0
        for n in range(len(x)):
            if not y[n, c].isnan():
                weight = 1.0 if weights is None else float(weights[n])
                total += weight * float(y[n, c] - outputs[n, c]) ** 2
                count += weight
        residuals.append(total / count)
    return [one * len(residuals) / sum(residuals) for one in residuals]


@pytest.mark.quick(2)
@pytest.mark.parametrize("method", [None, lw.KFAC(), lw.SampledLLA(4)], ids=repr)
@pytest.mark.parametrize("tune", ["default", "evidence", "validation", "tune", "weights", "missing"])
def test_ratios_of_the_residuals_are_those_of_a_user(method, tune):
    model, x, y = in_other_units()
    training, held_out, options = (x[:48], y[:48]), (x[48:], y[48:]), {}
    ratios, missing = naive_ratios(model, *training), False
    if tune == "evidence":
        options["tune"] = lw.Evidence()
    if tune in ("validation", "tune"):
        ratios = naive_ratios(model, *held_out)
        options = {"validation": held_out} if tune == "validation" else {"tune": lw.Validation(held_out)}
    if tune == "weights":
        weights = torch.rand(48) + 0.5
        training, options = [(*training, weights)], {"sample_weights": True}
        ratios = naive_ratios(model, x[:48], y[:48], weights)
    if tune == "missing":
        y[3, 1] = y[5, 0] = y[6] = torch.nan
        ratios, missing = naive_ratios(model, *training), True
    params = None if method is None else lw.everything
    found, given = (
        lw.fit(
            model, training, method, likelihood=lw.Gaussian(noise_ratios=one, missing=missing), params=params, **options
        )
        for one in (None, ratios)
    )
    assert found.likelihood.noise_ratios == pytest.approx(ratios, rel=1e-9)
    tolerance = 0.02 if isinstance(method, lw.SampledLLA) else 1e-6  # its solver stops early
    assert found.noise_variance == pytest.approx(given.noise_variance, rel=tolerance)
    close(found.predict(x).variance, given.predict(x).variance, tolerance)
    if method is None and tune == "default":
        further = found.update(held_out)
        assert further.likelihood.noise_ratios == found.likelihood.noise_ratios
        close(further.predict(x).variance, given.update(held_out).predict(x).variance, 1e-6)


def test_intervals_in_every_unit_hold_their_level():
    model, x, y = in_other_units(1e8)
    new = torch.randn(2000, 3, dtype=F64)
    targets = model(new).detach() + torch.tensor([0.2, 0.3e8]) * torch.randn(2000, 2, dtype=F64)
    for options in ({}, {"validation": (x[48:], y[48:])}):
        low, high = lw.fit(model, (x[:48], y[:48]), **options).predict(new).interval(0.9)
        for part in ((low <= targets) & (targets <= high)).double().mean(0):
            assert 0.83 < float(part) < 0.96


SPREAD = [-1.0, 1.0] * 50  # 100 targets of variance 1


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ([(0.1, SPREAD), (0.19, SPREAD)], None),  # they differ by less than a factor of 4
        ([(0.1, SPREAD), (0.3, SPREAD)], [0.01, 0.09]),
        ([(0.1, SPREAD[:6]), (0.3, SPREAD[:6])], None),  # six samples do not show it
        ([(1e-7, SPREAD), (1e-4, SPREAD)], None),  # both are memorised
        ([(1e-7, SPREAD), (0.1, SPREAD)], [1e-4, 0.01]),
        ([(0.1, SPREAD), (0.3, SPREAD), (1e-5, [2.0] * 100)], [0.01, 0.09, 0.09]),  # constant targets
        ([(0.1, SPREAD), (0.3, SPREAD), (0.1, [float("nan")] * 100)], [0.01, 0.09, 0.09]),  # unknown targets
        ([(0.1, SPREAD), (0.0, [2.0] * 100)], None),
    ],
)
def test_which_residuals_show_other_noise(parts, wanted):
    statistics = {}
    for c, (residual, targets) in enumerate(parts):
        y = torch.tensor(targets, dtype=F64)[:, None]
        statistics[c] = lw.Gaussian(missing=True).statistics(y - residual, y)
    found = lw.Gaussian().with_residuals(statistics).noise_ratios
    if wanted is None:
        assert found is None
    else:
        assert found == pytest.approx([one * len(wanted) / sum(wanted) for one in wanted])


def test_positions_have_the_ratios_of_their_outputs():
    model, x = nn.Linear(3, 2).double().eval(), torch.randn(30, 5, 3, dtype=F64)
    y = model(x).detach() + torch.tensor([0.1, 5.0]) * torch.randn(30, 5, 2, dtype=F64)
    for options in ({}, {"validation": (x, y)}):
        posterior = lw.fit(model, (x, y), likelihood="gaussian", **options)
        assert posterior.likelihood.noise_ratios == pytest.approx(naive_ratios(model, x.flatten(0, 1), y.flatten(0, 1)))
        assert posterior.predict(x).variance.shape == (30, 5, 2)


def test_a_noise_that_is_given_or_that_is_one_number_has_no_ratios():
    model, x, y = in_other_units()
    assert lw.fit(model, (x, y), likelihood=lw.Gaussian(0.5)).likelihood.noise_ratios is None
    given = lw.Gaussian(noise_ratios=[1.0, 1.0])
    assert lw.fit(model, (x, y), likelihood=given).likelihood.noise_ratios == (1.0, 1.0)
    assert not lw.Gaussian().open_heads(1)
    assert not lw.Gaussian().open_heads(201)


def test_ratios_are_those_of_the_data_of_all_ranks(monkeypatch):
    model, x, y = in_other_units()
    gathered, parts = lapwing.fitting.fit_data.ranks.gathered, []

    def of_both(label, value, *more):
        if label != "the residuals":
            return gathered(label, value, *more)
        parts.append(value)
        return [*parts]

    monkeypatch.setattr(lapwing.fitting.fit_data.ranks, "gathered", of_both)
    posteriors = [lw.fit(model, (x[rows], y[rows]), lw.KFAC()) for rows in (slice(0, 30), slice(30, 96))]
    assert posteriors[1].likelihood.noise_ratios == pytest.approx(naive_ratios(model, x, y))
