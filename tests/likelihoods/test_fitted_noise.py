"""Noise that a fit finds in residuals: the formula, computed from a hook, holds wherever a regression is predicted."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from functools import cache
from statistics import NormalDist
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.likelihoods.input_noise import InputNoise
from lapwing.tuning.noise_shape import ResidualRows
from tests.pretended_device import Device
from tests.refilling import Refilling
from tests.refused import refused
from tests.trained import train
from tests.zoo_modules import Net

F64 = torch.float64


def data(rows: int, seed: int, outputs: int = 1) -> tuple[Tensor, Tensor]:
    """Rows whose noise has a standard deviation that grows with the first input from .05 to .8."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(rows, 3, generator=generator, dtype=F64) - 1
    noise = (0.05 + 0.375 * (x[:, :1] + 1)) * torch.randn(rows, outputs, generator=generator, dtype=F64)
    return x, (x.sum(1, keepdim=True) * (1 + torch.arange(outputs))).sin() + noise


X, Y = data(400, 1)
HELD_OUT, TEST = data(150, 2), data(60, 3)
FAR = torch.cat([TEST[0], 20 * TEST[0][:5]])


@cache
def network(kind: str = "mlp") -> Any:
    torch.manual_seed(0)
    layers = nn.Linear(3, 8), nn.Tanh()
    model: nn.Module = {
        "mlp": lambda: nn.Sequential(*layers, nn.Linear(8, 1)),
        "three outputs": lambda: nn.Sequential(*layers, nn.Linear(8, 3)),
        "squeezed": lambda: nn.Sequential(*layers, nn.Linear(8, 1), nn.Flatten(0)),
        "norm at the end": lambda: nn.Sequential(*layers, nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 1)),
        "squashed": lambda: nn.Sequential(*layers, nn.Linear(8, 1), nn.Softsign(), nn.Softsign()),
    }[kind]()
    model = model.double()
    x, y = data(400, 1, 3 if kind == "three outputs" else 1)
    return train(model, lambda: (model(x).reshape(y.shape) - y).square().mean(), 150, 0.03)


@cache
def fitted(kind: str = "mlp", held_out: bool = True, **options: Any) -> lw.Posterior:
    outputs = 3 if kind == "three outputs" else 1
    validation = data(150, 2, outputs) if held_out else None
    return lw.fit(network(kind), data(400, 1, outputs), validation=validation, **options)


def inputs_of(layer: nn.Module, model: nn.Module, x: Any) -> Tensor:
    """The inputs of a layer in a plain call of the network."""
    found: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, arguments: found.append(arguments[0].detach()))
    with torch.no_grad():
        model(x)
    handle.remove()
    return found[-1]


def naive(noise: InputNoise, features: Tensor, latent: Tensor) -> Tensor:
    """σ²(x) of rows of features, row by row; `latent` are the variances of f (N, C)."""
    rows = []
    for phi, variance in zip(features.double(), latent.double(), strict=True):
        z = torch.stack([((p - m) * s).clamp(-6, 6) for p, m, s in zip(phi, noise.centre, noise.scale, strict=True)])
        far = float((noise.whitening.T @ z).square().sum()) > float(noise.reach)
        for c, (w, low, high) in enumerate(zip(noise.weights, noise.low, noise.high, strict=True)):
            value = (noise.offset[c] + max(low, min(high, w @ z))).exp()
            if far:
                least = noise.floor[c] + max(0.0, 1 / float(noise.spread) - 1) * variance[c]
                value = max(value, least / (1 - 2 / noise.df))
            rows.append(value)
    return torch.stack(rows).reshape(latent.shape)


def check_noise(posterior: lw.Posterior, layer: nn.Module, x: Tensor = FAR, via: Any = None) -> Tensor:
    """Checks σ²(x) of predictions against `naive`, and that it varies; returns it."""
    noise = posterior.likelihood.input_noise
    assert noise is not None
    assert bool(noise.weights.any())
    prediction = posterior.predict(x, via=via)
    features = inputs_of(layer, posterior.model, x)
    found, latent = prediction.aleatoric_variance, prediction.epistemic_variance
    wanted = naive(noise, features.flatten(0, -2), latent.reshape(-1, len(noise.offset)))
    torch.testing.assert_close(found, wanted.reshape(found.shape).to(found), rtol=1e-6, atol=0)
    assert found.max() > 2 * found.min()
    return found


@pytest.mark.parametrize("held_out", [True, False])
def test_noise_follows_the_inputs_of_the_last_layer(held_out):
    posterior = fitted(held_out=held_out)
    found = check_noise(posterior, posterior.model[-1])
    true = (0.05 + 0.375 * (TEST[0][:, :1] + 1)).square()
    assert torch.corrcoef(torch.stack([found[:60].log().flatten(), true.log().flatten()]))[0, 1] > 0.7
    constant = fitted(held_out=held_out, likelihood=lw.Gaussian(noise="constant"))
    assert constant.likelihood.input_noise is None
    gain = posterior.predict(TEST[0]).log_prob(TEST[1]) - constant.predict(TEST[0]).log_prob(TEST[1])
    assert gain.mean() > 0.05


@pytest.mark.parametrize("likelihood", [lw.Gaussian(), lw.StudentT(df=4.0)], ids=["normal", "student"])
@pytest.mark.parametrize("kind", ["mlp", "three outputs"])
def test_all_parts_of_a_prediction_have_the_same_noise(kind, likelihood):
    posterior = fitted(kind, likelihood=likelihood)
    x, y = TEST[0], data(60, 3, 3 if kind == "three outputs" else 1)[1]
    check_noise(posterior, posterior.model[-1])
    prediction = posterior.predict(x)
    mean, total = prediction.mean, prediction.epistemic_variance + prediction.aleatoric_variance
    torch.testing.assert_close(prediction.variance, total)
    torch.testing.assert_close(prediction.distribution().log_prob(y).reshape(60, -1).sum(1), prediction.log_prob(y))
    draws = prediction.sample(20_000)
    torch.testing.assert_close(draws.var(0), total, rtol=0.2, atol=0)
    low, high = prediction.interval(0.8)
    inside = ((draws >= low) & (draws <= high)).double().mean((0, 1))
    torch.testing.assert_close(inside, torch.full_like(inside, 0.8), rtol=0, atol=3e-3)
    if likelihood.tails == "normal":
        covariance = prediction.latent.covariance + prediction.aleatoric_variance.diag_embed()
        wanted = torch.distributions.MultivariateNormal(mean, covariance).log_prob(y)
        torch.testing.assert_close(prediction.log_prob(y), wanted)
        torch.testing.assert_close(high, mean + total.sqrt() * NormalDist().inv_cdf(0.9))
    else:
        assert prediction.df == 4


@pytest.mark.parametrize("via", [
    lw.Linearized(draws=20), lw.MonteCarlo(20), lw.Streamlined(), lw.Scaled(lw.Linearized(), 2.0),
], ids=repr)  # fmt: skip
def test_noise_is_the_same_by_every_way(via):
    posterior = fitted("three outputs")
    check_noise(posterior, posterior.model[-1], via=via)


def test_selected_outputs_have_their_own_noise():
    posterior = fitted("three outputs")
    every, some = posterior.predict(FAR), posterior.predict(FAR, via=lw.Linearized(outputs=2))
    chosen = some.latent.outputs
    torch.testing.assert_close(some.aleatoric_variance, every.aleatoric_variance.gather(1, chosen))
    torch.testing.assert_close(some.interval()[1], every.interval()[1].gather(1, chosen))


@pytest.mark.parametrize("likelihood", [lw.Gaussian(), lw.StudentT(df=4.0)], ids=["normal", "student"])
def test_a_joint_latent_has_the_noise_of_each_input(likelihood):
    posterior = fitted("three outputs", likelihood=likelihood)
    x, y = data(6, 3, 3)
    latent, noise = posterior.latent(x, joint=True), posterior.likelihood
    features = inputs_of(posterior.model[-1], posterior.model, x)
    prediction, rows = noise.predicted(latent, features=features), posterior.predict(x)
    torch.testing.assert_close(prediction.aleatoric_variance, rows.aleatoric_variance)
    torch.testing.assert_close(prediction.log_prob(y), rows.log_prob(y))
    law = prediction.distribution()
    torch.testing.assert_close(law.variance, rows.variance.flatten())
    if likelihood.tails == "normal":
        dense = latent.covariance.reshape(18, 18) + rows.aleatoric_variance.flatten().diag()
        torch.testing.assert_close(law.covariance_matrix, dense)


@pytest.mark.parametrize(("kind", "params", "layer"), [
    ("squeezed", None, 2), ("squashed", None, 2), ("norm at the end", None, 4),
    ("norm at the end", lw.matching("2.*", "3.*"), 2), ("mlp", lw.matching("0.*"), 0),
], ids=str)  # fmt: skip
def test_features_are_the_inputs_of_the_last_treated_linear_layer(kind, params, layer):
    posterior = lw.fit(network(kind), (X, Y), lw.KFAC(), params=params, likelihood=lw.Gaussian(noise="input"),
                       validation=HELD_OUT)  # fmt: skip
    check_noise(posterior, posterior.model[layer])


def test_features_are_the_outputs_if_no_linear_layer_is_treated():
    shifted = lambda net, x: (x * net.slope).sum(1, keepdim=True).sinh() + net.shift  # noqa: E731
    shift, slope = nn.Parameter(torch.zeros(1, dtype=F64)), nn.Parameter(torch.ones(3, dtype=F64))
    model, (x, y) = Net(shifted, shift=shift, slope=slope).eval(), data(400, 1)
    y = x.sum(1, keepdim=True).sinh() + (0.05 + 0.3 * (x.sum(1, keepdim=True) + 3)) * torch.randn(400, 1).double()
    posterior = lw.fit(model, (x, y), lw.Diagonal(), likelihood=lw.Gaussian(noise="input"), tune=lw.Validation((x, y)))
    noise = posterior.likelihood.input_noise
    assert posterior.likelihood.features_read == ""
    prediction = posterior.predict(FAR)
    wanted = naive(noise, model(FAR).detach(), prediction.epistemic_variance)
    torch.testing.assert_close(prediction.aleatoric_variance, wanted, rtol=1e-6, atol=0)
    assert "by the outputs" in str(posterior.likelihood)


def test_a_frozen_trunk_gives_the_features_of_the_trained_head():
    model = copy.deepcopy(network())
    model[0].requires_grad_(False)
    posterior = lw.fit(model, (X, Y), validation=HELD_OUT)
    check_noise(posterior, model[-1])


def test_positions_have_the_features_of_their_position():
    """Outputs (B, T, C): the noise of a position depends on the hidden units at this position."""
    model, x, y = network("three outputs"), *data(400, 1, 3)
    rows = lambda values: values.unflatten(0, (-1, 4))  # noqa: E731
    held_out = tuple(map(rows, data(152, 2, 3)))
    likelihood = lw.Gaussian(noise="input", noise_ratios=[1.0, 1.0, 1.0])
    posterior = lw.fit(model, (rows(x), rows(y)), lw.KFAC(), likelihood=likelihood, validation=held_out)
    test = rows(FAR[:64])
    found = check_noise(posterior, model[-1], test)
    assert found.shape == (16, 4, 3)
    prediction = posterior.predict(test)
    law = torch.distributions.MultivariateNormal(prediction.mean, prediction.latent.covariance + found.diag_embed())
    targets = rows(data(64, 3, 3)[1])
    torch.testing.assert_close(prediction.log_prob(targets), law.log_prob(targets))


@pytest.mark.parametrize("size", [1, 3])
def test_pixels_have_the_features_of_their_patch(size):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Tanh(), nn.Conv2d(4, 1, size, padding=size // 2)).double()
    x, y = (values.reshape(25, 4, 4, -1).movedim(3, 1).contiguous() for values in (X, Y))
    train(model, lambda: (model(x) - y).square().mean(), 100, 0.03)
    held_out = tuple(v[:144].reshape(9, 4, 4, -1).movedim(3, 1).contiguous() for v in HELD_OUT)
    posterior = lw.fit(model, (x, y), lw.KFAC(), likelihood=lw.Gaussian(noise="input"), validation=held_out)
    prediction, noise = posterior.predict(held_out[0]), posterior.likelihood.input_noise
    patches = nn.functional.unfold(inputs_of(model[2], model, held_out[0]), size, padding=size // 2).mT  # (B, T, F)
    wanted = naive(noise, patches.flatten(0, 1), prediction.epistemic_variance.reshape(-1, 1))
    torch.testing.assert_close(prediction.aleatoric_variance.flatten(), wanted.flatten(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("make", [
    lambda: fitted(method=lw.ELLA(20, 60)), lambda: fitted(method=lw.OptimalSubspace(10)),
    lambda: fitted(method=lw.KFAC(), params=lw.last_layer), lambda: fitted(method=lw.EKFAC()),
    lambda: fitted(method=lw.SampledLLA(8)), lambda: fitted(method=lw.VaLLA(10)),
    lambda: fitted(method=lw.MeanField(steps=20)),
], ids=["ELLA", "subspace", "last layer", "EKFAC", "SampledLLA", "VaLLA", "MeanField"])  # fmt: skip
def test_noise_is_found_for_every_method(make):
    posterior = make()
    check_noise(posterior, posterior.model[-1])


def test_loaders_give_the_rows_in_their_order():
    posterior = fitted("three outputs")
    whole = posterior.predict(FAR)
    parts = posterior.predict([FAR[:7], FAR[7:8], FAR[8:]])
    torch.testing.assert_close(parts.aleatoric_variance, whole.aleatoric_variance)
    order: list[Tensor] = []

    def joined(rows):
        order.append(torch.stack([number for _, number in rows]))
        return torch.stack([x for x, _ in rows])

    shuffled = DataLoader(TensorDataset(FAR, torch.arange(65)), 16, shuffle=True, collate_fn=joined)
    prediction = posterior.predict(shuffled)
    torch.testing.assert_close(prediction.aleatoric_variance, whole.aleatoric_variance[torch.cat(order)])


def test_the_noise_has_a_gradient_in_x():
    posterior = fitted()
    x = TEST[0][:4].clone().requires_grad_()
    (slope,) = torch.autograd.grad(posterior.predict(x).aleatoric_variance.sum(), x)
    step = 1e-5 * torch.eye(3, dtype=F64)
    with torch.no_grad():
        ends = [[posterior.predict(x + sign * one).aleatoric_variance for sign in (1, -1)] for one in step]
    wanted = torch.stack([(high - low)[:, 0] / 2e-5 for high, low in ends], 1)
    torch.testing.assert_close(slope, wanted, rtol=1e-4, atol=1e-7)
    assert slope.abs().max() > 0


def test_a_network_in_bfloat16():
    model = copy.deepcopy(network()).bfloat16()
    posterior = lw.fit(model, (X.bfloat16(), Y.bfloat16()), validation=tuple(v.bfloat16() for v in HELD_OUT))
    x = TEST[0].bfloat16()
    noise, prediction = posterior.likelihood.input_noise, posterior.predict(x)
    wanted = naive(noise, inputs_of(model[-1], model, x), prediction.epistemic_variance)
    assert prediction.aleatoric_variance.dtype == torch.float32
    torch.testing.assert_close(prediction.aleatoric_variance, wanted.float(), rtol=1e-5, atol=0)
    assert wanted.max() > 4 * wanted.min()


def test_missing_targets_do_not_count():
    """A training row whose only target is missing is no row, and one of three outputs is missing for some rows."""
    x, y = torch.cat([X, 5 * X[:50]]), torch.cat([Y, torch.full((50, 1), torch.nan, dtype=F64)])
    options: dict[str, Any] = {"likelihood": lw.Gaussian(missing=True, noise="input"), "validation": HELD_OUT}
    some, every = (lw.fit(network(), rows, lw.KFAC(), **options) for rows in ((X, Y), (x, y)))
    torch.testing.assert_close(every.predict(FAR).aleatoric_variance, some.predict(FAR).aleatoric_variance,
                               rtol=1e-3, atol=0)  # fmt: skip
    x, y = data(400, 1, 3)
    holes = torch.where(torch.arange(400)[:, None] % 4 == torch.arange(3), torch.nan, y)
    options["validation"] = data(150, 2, 3)
    some, every = (lw.fit(network("three outputs"), (x, targets), lw.KFAC(), **options) for targets in (holes, y))
    found, wanted = (check_noise(posterior, posterior.model[-1]) for posterior in (some, every))
    torch.testing.assert_close(found.log()[:60], wanted.log()[:60], rtol=0, atol=0.5)


# --- numbers that are given ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", [
    lw.Gaussian(noise_variance=0.1), lw.Gaussian(noise_variance=0.1, tails=None),
    lw.StudentT(df=5.0, noise_variance=0.1),
    lw.StudentT(noise_variance=0.1),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("held_out", [True, False])
def test_a_given_noise_variance_is_kept(likelihood, held_out):
    """It is the variance of y near the data and far from them, whatever the tails."""
    posterior = fitted(held_out=held_out, likelihood=likelihood)
    assert posterior.noise_variance == 0.1
    prediction = posterior.predict(FAR)
    torch.testing.assert_close(prediction.aleatoric_variance, torch.full((65, 1), 0.1, dtype=F64))
    open_tails = likelihood.tails != "normal" and getattr(likelihood, "df", None) is None
    assert (prediction.df is None) == (likelihood.tails == "normal") or open_tails


# --- posteriors ------------------------------------------------------------------------------------------------------

KEPT: dict[str, dict[str, Any]] = {
    "normal": {}, "student": {"likelihood": lw.StudentT()}, "outputs": {"kind": "three outputs"},
    "constant student": {"likelihood": lw.StudentT(noise="constant")},
    "constant": {"likelihood": lw.Gaussian(noise="constant")},
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 4, 5])
def test_a_training_row_at_the_edge_of_the_data_has_one_noise_in_all_batches(seed):
    """The row at the quantile of the distances is not far, however its features are rounded."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 2)).double().eval()
    torch.manual_seed(seed)
    y, x = 0.3 * torch.randn(300, 2, dtype=F64), torch.randn(300, 3, dtype=F64)
    options: dict[str, Any] = {"likelihood": lw.StudentT(df=4.0, noise="constant"), "validation": (x[200:], y[200:])}
    posterior = lw.fit(model, (x[:200], y[:200]), lw.KFAC(), **options)
    alone = torch.cat([posterior.predict(row[None]).std for row in x[:200]])
    torch.testing.assert_close(alone, posterior.predict(x[:200]).std)


@pytest.mark.parametrize("df", [3.0, 10.0])
def test_given_tails_have_the_level_of_their_own_likelihood(df):
    """Outliers would give a normal law, and so its σ², twenty times the width."""
    model, x = nn.Linear(2, 1).double().eval(), torch.randn(600, 2, dtype=F64)
    y = model(x).detach() + 0.3 * torch.randn(600, 1, dtype=F64)
    y[::50] += 30.0
    train, held_out = (x[:300], y[:300]), (x[300:], y[300:])
    likelihood = lw.StudentT(df=df, noise="constant")
    posterior = lw.fit(model, train, likelihood=likelihood, prior_precision=1e8, validation=held_out)
    _, _, scale = stats.t.fit((held_out[1] - model(held_out[0])).detach().numpy(), floc=0, fdf=df)
    low, high = posterior.predict(x[:5]).interval(0.9)
    torch.testing.assert_close(high - low, torch.full_like(low, 2 * stats.t.ppf(0.95, df) * scale), rtol=0.05, atol=0)


def almost_equal(found: Tensor, wanted: Tensor) -> bool:
    """Whether float64 tensors agree up to rounding: products depend on where their factors lie in memory."""
    return torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", KEPT)
def test_a_saved_posterior_predicts_the_same(name, reloaded):
    posterior = fitted(**KEPT[name])
    loaded = reloaded(posterior)
    wanted = posterior.predict(FAR)
    y = FAR.new_zeros(wanted.mean.shape)
    for copied in (loaded, copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))):
        prediction = copied.predict(FAR)
        for name in ("mean", "variance", "aleatoric_variance", "df"):
            found, expected = getattr(prediction, name), getattr(wanted, name)
            assert found == expected if name == "df" else almost_equal(found, expected), name
        assert almost_equal(prediction.log_prob(y), wanted.log_prob(y))
        assert almost_equal(prediction.interval()[0], wanted.interval()[0])
        assert str(copied.likelihood) == str(posterior.likelihood)
        assert copied.likelihood.noise == posterior.likelihood.noise
        assert copied.likelihood.tails == posterior.likelihood.tails


def test_a_damaged_noise_is_refused(tmp_path):
    posterior = fitted()
    noise = posterior.likelihood.input_noise
    for name, value in (("offset", torch.nan), ("df", torch.nan), ("weights", torch.inf)):
        wrong = replace(noise, **{name: value if name == "df" else torch.full_like(getattr(noise, name), value)})
        broken = replace(posterior, likelihood=replace(posterior.likelihood, input_noise=wrong))
        refused(lambda: broken.save(tmp_path / "x.safetensors"), f"noise/{name} holds NaN or infinite")  # noqa: B023


def test_the_posterior_says_what_its_noise_depends_on():
    posterior = fitted(likelihood=lw.StudentT(noise="input"))
    text, noise = str(posterior), posterior.likelihood.input_noise
    low, high = (float((noise.offset + end).exp()) for end in (noise.low, noise.high))
    assert f"noise variance from {low:.2g} to {high:.2g} by the inputs of layer 2" in text
    assert f"Student t with {float(noise.df):.2g} degrees of freedom" in text


def test_another_prior_keeps_the_noise_and_another_noise_variance_replaces_it():
    posterior = fitted()
    prior = posterior.with_prior(3.0)
    near = TEST[0]
    torch.testing.assert_close(prior.predict(near).aleatoric_variance, posterior.predict(near).aleatoric_variance,
                               rtol=0.3, atol=0)  # fmt: skip
    assert prior.likelihood.input_noise is posterior.likelihood.input_noise
    constant = posterior.with_prior(3.0, noise_variance=0.3)
    assert constant.likelihood.input_noise is None
    torch.testing.assert_close(constant.predict(FAR).aleatoric_variance, torch.full((65, 1), 0.3, dtype=F64))


@pytest.mark.parametrize("kind", ["mlp", "three outputs"])
def test_noise_of_totals_and_explanations(kind):
    posterior = fitted(kind)
    noise = posterior.predict(FAR).aleatoric_variance
    torch.testing.assert_close(posterior.explain(FAR).noise, noise)
    slopes = torch.linspace(1, 2, 65, dtype=F64)[:, None]
    total = lambda f: (slopes * f(FAR)).sum(0)  # noqa: E731
    known, observed = (posterior.of(total, observed=flag).covariance for flag in (False, True))
    torch.testing.assert_close(observed - known, (slopes.square() * noise).sum(0).diag(), rtol=1e-6, atol=1e-9)


def test_an_update_keeps_the_noise():
    posterior = lw.fit(network(), (X[:300], Y[:300]), lw.KFAC(), validation=HELD_OUT)
    whole = posterior.update((X[300:], Y[300:]))
    assert whole.samples == 400
    assert whole.likelihood.input_noise == posterior.likelihood.input_noise
    check_noise(whole, whole.model[-1])


@pytest.mark.parametrize("likelihood", [lw.Gaussian(noise="input"), lw.StudentT(), lw.StudentT(df=4.0)], ids=repr)
def test_an_update_with_held_out_data_finds_another_level_for_the_shape(likelihood):
    """Targets are twice as noisy in the further data: σ²(x) is about four times larger, in the same proportions."""
    posterior = lw.fit(network(), (X[:200], Y[:200]), lw.KFAC(), likelihood=likelihood, validation=HELD_OUT)
    f = lambda x: network()(x).detach()  # noqa: E731
    noisier = lambda x, y: (x, f(x) + 2 * (y - f(x)))  # noqa: E731
    whole = posterior.update(noisier(X[200:], Y[200:]), tune=lw.Validation(noisier(*HELD_OUT)))
    before, after = posterior.likelihood.input_noise, whole.likelihood.input_noise
    assert torch.equal(before.weights, after.weights)
    torch.testing.assert_close(after.offset - before.offset, torch.full((1,), math.log(4), dtype=F64), rtol=0, atol=0.5)
    assert whole.predict(FAR).df == 4 if getattr(likelihood, "df", None) else True
    check_noise(whole, whole.model[-1])
    # no other level, factor and tails predict the held-out rows better
    x, y = noisier(*HELD_OUT)
    best = whole.predict(x).log_prob(y).mean()
    for change in ({"offset": after.offset + 0.2}, {"offset": after.offset - 0.2}, {"df": after.df * 1.5}):
        other = replace(whole, likelihood=replace(whole.likelihood, input_noise=replace(after, **change)))
        assert other.predict(x).log_prob(y).mean() < best + 5e-3


def test_an_update_with_few_held_out_rows_keeps_the_shape():
    """The level of twelve rows has a standard error of about .4 in log σ²."""
    posterior = lw.fit(network(), (X[:300], Y[:300]), lw.KFAC(), validation=HELD_OUT)
    changes = []
    for seed in range(6):
        whole = posterior.update((X[300:], Y[300:]), tune=lw.Validation(data(12, 100 + seed)))
        before, after = posterior.likelihood.input_noise, whole.likelihood.input_noise
        assert torch.equal(after.weights, before.weights)
        changes.append(float(after.offset - before.offset))
    assert abs(sum(changes) / 6) < 0.5
    assert max(map(abs, changes)) < 1.5


def test_held_out_data_scale_the_noise_of_a_mixture():
    """The factor multiplies σ²(x) of each member, and is the best of the candidates for the mixture."""
    members = [fitted(), fitted(likelihood=lw.Gaussian(noise="input"), method=lw.KFAC())]
    x, y = HELD_OUT[0], members[0].predict(HELD_OUT[0]).mean + 3 * (HELD_OUT[1] - members[0].predict(HELD_OUT[0]).mean)
    mixture = lw.mixture(members, (x, y))
    ratio = mixture.members[0].noise_variance / members[0].noise_variance
    assert ratio > 3
    for before, after in zip(members, mixture.members, strict=True):
        torch.testing.assert_close(after.predict(FAR).variance, ratio * before.predict(FAR).variance, rtol=1e-5, atol=0)

    def score(factor):
        parts = [replace(p, latent=p.latent.scaled(factor), noise_variance=p.noise_variance * factor)
                 for p in (member.predict(x) for member in members)]  # fmt: skip
        return torch.stack([part.log_prob(y) for part in parts]).logsumexp(0).mean()

    assert score(ratio) > max(score(0.8 * ratio), score(1.25 * ratio))


def test_a_network_on_a_gpu_has_the_same_noise(reloaded):
    options: dict[str, Any] = {"method": lw.KFAC(), "likelihood": lw.StudentT(noise="input")}
    wanted = lw.fit(network(), (X, Y), validation=HELD_OUT, **options)
    expected = wanted.update((X[:20], Y[:20]), tune=lw.Validation(HELD_OUT)).predict(FAR)
    with Device("cuda") as device:
        model, held_out, x = device.module(copy.deepcopy(network())), device.put(HELD_OUT), device.put(FAR)
        posterior = lw.fit(model, device.put((X, Y)), validation=held_out, **options)
        assert posterior.likelihood.input_noise.weights.device.type == "cuda"
        for one in (posterior, reloaded(posterior, model)):
            prediction = one.predict(x)
            torch.testing.assert_close(prediction.aleatoric_variance.cpu(), wanted.predict(FAR).aleatoric_variance)
            assert prediction.log_prob(device.put(FAR[:, :1])).device.type == "cuda"
        updated = posterior.update(device.put((X[:20], Y[:20])), tune=lw.Validation(held_out))
        torch.testing.assert_close(updated.predict(x).aleatoric_variance.cpu(), expected.aleatoric_variance)
        noise = posterior.explain(x).noise
        assert noise.device.type == "cuda"


# --- heads of lw.Joint -----------------------------------------------------------------------------------------------


def joint(noise: Any = None) -> lw.Joint:
    """A class, two outputs of one head, and one output of another, in an order of their own."""
    every = {"kind": lw.Bernoulli(), "pair": lw.Gaussian(noise=noise), "one": lw.StudentT()}
    return lw.Joint(every, {"pair": [2, 0], "one": [3], "kind": [1]})


@cache
def heads() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x, y = targets(400, 1)

    def loss() -> Tensor:
        f = model(x)
        squares = (f[:, [2, 0]] - y["pair"]).square().mean() + (f[:, 3] - y["one"]).square().mean()
        return squares + nn.functional.binary_cross_entropy_with_logits(f[:, 1], y["kind"].double())

    return train(model, loss, 150, 0.03)


def targets(rows: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Targets of the three heads; the noise of the pair grows with the first input, and the other head has tails."""
    x, y = data(rows, seed, 3)
    student = torch.distributions.StudentT(torch.tensor(4.0, dtype=F64))
    torch.manual_seed(seed)
    return x, {"pair": y[:, 1:], "one": x[:, 1] + 0.2 * student.sample((rows,)), "kind": (y[:, 0] > 0).long()}


@cache
def of_heads(held_out: bool = True, noise: Any = None, **options: Any) -> lw.Posterior:
    validation = targets(200, 2) if held_out else None
    return lw.fit(heads(), targets(400, 1), lw.KFAC(), likelihood=joint(noise), validation=validation, **options)


@pytest.mark.parametrize("held_out", [True, False])
def test_a_head_has_the_noise_of_a_fit_of_its_own(held_out):
    """With hardly any variance of the weights: the curvatures of the fits have other outputs."""
    every = of_heads(held_out, "input", prior_precision=1e6)
    (x, y), (known, of_known), options = targets(400, 1), targets(200, 2), {"prior_precision": 1e6}
    prediction, test = every.predict(FAR), targets(60, 3)[1]
    for key, columns, likelihood in (("pair", [2, 0], lw.Gaussian(noise="input")), ("one", [3], lw.StudentT())):
        alone = lw.fit(
            heads(), (x, y[key]), lw.KFAC(), forward=lambda model, x, columns=columns: model(x)[:, columns],
            likelihood=likelihood, validation=(known, of_known[key]) if held_out else None, **options,
        )  # fmt: skip
        mine, theirs = every.likelihood.likelihoods[key].input_noise, alone.likelihood.input_noise
        torch.testing.assert_close(mine.weights, theirs.weights)
        level = every.likelihood.likelihoods[key].noise_variance / alone.noise_variance
        near, expected = prediction[key].aleatoric_variance[:60], alone.predict(FAR).aleatoric_variance[:60]
        rtol = 0.05 if held_out else 0.08  # `level` is one number, and each output has its own ratio to training rows
        torch.testing.assert_close(near, expected * (1 if held_out else level), rtol=rtol, atol=0)
        assert mine.df == pytest.approx(theirs.df, rel=0.02)
        assert near.max() > 4 * near.min() or key == "one"
    wanted = naive(every.likelihood.likelihoods["pair"].input_noise, inputs_of(heads()[2], heads(), FAR),
                   prediction["pair"].epistemic_variance)  # fmt: skip
    torch.testing.assert_close(prediction["pair"].aleatoric_variance, wanted)
    constant = of_heads(held_out, "constant", prior_precision=1e6)
    gain = [posterior.predict(TEST[0])["pair"].log_prob(test["pair"]).mean() for posterior in (every, constant)]
    assert gain[0] > gain[1] + 0.05


def test_parts_of_a_prediction_of_heads_have_the_same_noise():
    posterior, (x, y) = of_heads(), targets(60, 3)
    prediction, draws = posterior.predict(x), posterior.predict(x).sample(20_000)
    assert prediction["one"].df == posterior.likelihood.likelihoods["one"].input_noise.df
    for key in ("pair", "one"):
        one = prediction[key]
        torch.testing.assert_close(draws[key].var(0), one.variance, rtol=0.35, atol=0)
        torch.testing.assert_close(one.distribution().log_prob(y[key].reshape(one.mean.shape)).reshape(60, -1).sum(1),
                                   one.log_prob(y[key]))  # fmt: skip
        low, high = one.interval(0.8)
        inside = ((draws[key] >= low) & (draws[key] <= high)).double().mean((0, 1))
        torch.testing.assert_close(inside, torch.full_like(inside, 0.8), rtol=0, atol=3e-3)
        known = y[key].reshape(one.mean.shape)
        crps = (draws[key] - known).abs().mean() - (draws[key][::2] - draws[key][1::2]).abs().mean() / 2
        torch.testing.assert_close(one.crps(known).mean(), crps, rtol=0.03, atol=0)
    explained = posterior.explain(x).noise  # one, pair and kind in the order of the keys
    torch.testing.assert_close(explained[:, 1:2], prediction["one"].aleatoric_variance)
    assert "by the inputs of layer 2" in str(posterior)


def test_heads_are_saved_and_updated(reloaded):
    posterior, x = of_heads(), FAR
    again = reloaded(posterior, heads(), likelihood=joint())
    updated = posterior.update(targets(100, 4))
    for other in (again, copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior)), updated):
        for key in ("pair", "one"):
            mine, theirs = (p.likelihood.likelihoods[key].input_noise for p in (other, posterior))
            assert all(torch.equal(value, theirs.tensors[name]) for name, value in mine.tensors.items())
            if other is not updated:
                assert torch.equal(other.predict(x)[key].interval()[0], posterior.predict(x)[key].interval()[0])
    # a fourfold variance of one head moves the level of this head
    f, (known, y) = heads()(targets(200, 2)[0]).detach(), targets(200, 2)
    noisier = {**y, "pair": f[:, [2, 0]] + 2 * (y["pair"] - f[:, [2, 0]])}
    tuned = posterior.update(targets(100, 4), tune=lw.Validation((known, noisier)))
    for key, factor in (("pair", 4.0), ("one", 1.0)):
        mine, theirs = (p.likelihood.likelihoods[key].input_noise for p in (tuned, posterior))
        assert torch.equal(mine.weights, theirs.weights)
        ratio = tuned.predict(TEST[0])[key].aleatoric_variance / posterior.predict(TEST[0])[key].aleatoric_variance
        assert float(ratio.median()) == pytest.approx(factor, rel=0.4)


@pytest.mark.parametrize("held_out", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_noise_of_heads_does_not_depend_on_batches_refilled_tensors_or_the_order_of_rows(held_out, seed):
    generator = torch.Generator().manual_seed(seed)

    def reordered(x: Tensor, y: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        rows = torch.randperm(len(x), generator=generator)
        return x[rows], {key: value[rows] for key, value in y.items()}

    def refilling(x: Tensor, y: dict[str, Tensor], size: int) -> Refilling:
        parts = [slice(i, i + size) for i in range(0, len(x), size)]
        return Refilling((x[part], {key: value[part] for key, value in y.items()}) for part in parts)

    other, held = reordered(*targets(400, 1)), reordered(*targets(200, 2))
    wanted = of_heads(held_out, "input")
    for train_data, validation in ((other, held), (refilling(*other, 50), refilling(*held, 40))):
        options = {"validation": validation} if held_out else {}
        found = lw.fit(heads(), train_data, lw.KFAC(), likelihood=joint("input"), **options)
        for key in ("pair", "one"):
            stds = [posterior.predict(FAR)[key].std for posterior in (found, wanted)]
            torch.testing.assert_close(*stds, rtol=1e-3, atol=0)
            torch.testing.assert_close(found.predict(FAR[:1])[key].std, stds[0][:1])


def test_missing_targets_and_weights_of_heads():
    x, y = targets(400, 1)
    options: dict[str, Any] = {"method": lw.KFAC(), "likelihood": joint("input"),
                               "validation": targets(200, 2)}  # fmt: skip
    weights = 1 + (torch.arange(400) % 3 == 0).double()
    repeated = torch.arange(400).repeat_interleave(weights.long())
    weighed = lw.fit(heads(), (x, y, weights), sample_weights=True, **options)
    plain = lw.fit(heads(), (x[repeated], {key: one[repeated] for key, one in y.items()}), **options)
    for key in ("pair", "one"):
        found, wanted = (p.predict(TEST[0])[key].std for p in (weighed, plain))
        torch.testing.assert_close(found, wanted, rtol=3e-3, atol=0)
    # rows without a target of the pair are no rows for its noise
    more, holes = torch.cat([x, 5 * x[:50]]), torch.full((50, 2), torch.nan, dtype=F64)
    some = {"pair": torch.cat([y["pair"], holes]), **{key: torch.cat([y[key], y[key][:50]]) for key in ("one", "kind")}}
    found, wanted = (lw.fit(heads(), rows, **options).likelihood.likelihoods["pair"].input_noise
                     for rows in ((more, some), (x, y)))  # fmt: skip
    torch.testing.assert_close(found.weights, wanted.weights)
    torch.testing.assert_close(found.offset, wanted.offset, rtol=0.02, atol=0)


def test_heads_are_deployed():
    posterior = of_heads(params=lw.last_layer)
    predictor = lw.deploy(posterior, FAR[:40])
    found, prediction = dict(zip(predictor.returns, predictor(FAR[:20]), strict=True)), posterior.predict(FAR[:20])
    for key in ("pair", "one"):
        torch.testing.assert_close(found[f"{key}_mean"], prediction[key].mean)
        torch.testing.assert_close(found[f"{key}_variance"], prediction[key].variance, rtol=1e-6, atol=1e-9)
    assert float(found["one_df"]) == prediction["one"].df


@pytest.mark.parametrize("missing", [False, True])
def test_copies_become_the_weight_of_one_row(missing):
    """Copies are rounded differently in other batches; rows that were measured again, or cannot be told, stay."""
    features, residuals = torch.randn(50, 100).double(), torch.randn(50, 2).double()
    residuals[:9, 1] = math.nan if missing else 0.0
    counts = torch.randint(4, (50,))
    copies = torch.arange(50).repeat_interleave(counts)
    copies = copies[torch.randperm(len(copies))]
    rounded = features[copies] * (1 + 1e-7 * torch.randn(len(copies), 1))
    rows = ResidualRows(rounded, residuals[copies], torch.full((len(copies),), 3.0).double(), residuals[copies] * 0)
    found = rows.distinct()
    shown = counts.nonzero()[:, 0]
    order, wanted = found.features[:, 0].argsort(), shown[features[shown, 0].argsort()]
    torch.testing.assert_close(found.features[order], features[wanted], rtol=1e-6, atol=0)
    torch.testing.assert_close(found.residuals[order], residuals[wanted], equal_nan=True)
    torch.testing.assert_close(found.weights[order], counts[wanted] / counts[shown].double().mean())
    again = rows._replace(residuals=torch.where(torch.rand(len(copies), 1) < 0.5, 1.0, rows.residuals))
    assert len(again.distinct().weights) == len(copies)
    assert again.distinct().weights.unique() == 1
    once = ResidualRows(features, residuals, torch.ones(50).double(), residuals)
    for one, same in zip(once.distinct(), once, strict=True):
        assert torch.equal(one.nan_to_num(), same.nan_to_num())
