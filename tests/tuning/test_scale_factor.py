"""Scale factors: scaled latents, the best factor by naive predictions, the bound's closed form, ends of the range."""

from __future__ import annotations

import logging
import math
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import lapwing as lw
from lapwing.likelihoods.predictions import PSEUDO_WEIGHT
from lapwing.tuning.scale_factor import LEAST_FACTOR, _as_new, scale_factor
from tests.conformance import close, cut
from tests.input_noise import with_input_noise
from tests.quick import others_slow
from tests.trained import train

WAYS = [lw.Linearized(), lw.Streamlined(), lw.Streamlined(covariance="full"), lw.MonteCarlo(20)]


def network(outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).double().eval()


@cache
def regression(outputs=1):
    """A trained network, training and held-out batches of unequal size; the held-out targets are noisier."""
    model, x = network(outputs), torch.randn(80, 3, dtype=torch.float64)
    y = torch.sin(x.sum(1, keepdim=True) + torch.arange(outputs).double())
    y = y + torch.tensor([0.1, 0.6]).repeat_interleave(40)[:, None] * torch.randn_like(y)
    train(model, lambda: mse_loss(model(x[:40]), y[:40]))
    return model, cut(x[:40], y[:40], (15, 25)), cut(x[40:], y[40:], (15, 25))


@cache
def classification(classes=3):
    """The same for classes; a third of the held-out labels are random."""
    model, x = network(classes), torch.randn(80, 3, dtype=torch.float64)
    y = ((x.sum(1) > 0).long() + (x[:, 0] > 1).long()).clamp_max(classes - 1)
    y[40::3] = torch.randint(classes, y[40::3].shape)
    train(model, lambda: cross_entropy(model(x[:40]), y[:40]))
    return model, cut(x[:40], y[:40], (15, 25)), cut(x[40:], y[40:], (15, 25))


def naive(posterior, loader, via, factor, link=None):
    """The mean log probability through `lw.Scaled`, batch by batch, with a pseudo-row.

    It has a uniform label, or pulls log s towards 0.
    """
    found = [posterior.predict(x, via=lw.Scaled(via, factor), link=link) for x, _ in loader]
    logs = torch.cat([one.log_prob(y) for one, (_, y) in zip(found, loader, strict=True)]).double()
    if posterior.likelihood.activation is None:
        return float(logs.mean()) - posterior.tangent.outputs / 4 * math.log(factor) ** 2 / len(logs)
    uniform = torch.cat([one.probs.double().log().mean(-1) for one in found]).mean()
    return float(logs.mean() + PSEUDO_WEIGHT * uniform / len(logs))


def is_best(score, factor, slack=0.0):
    """Whether no factor near or far has a better score by more than the slack."""
    others = [factor * 10**e for e in (-2, -1, -0.3, -0.05, -0.005, 0.005, 0.05, 0.3, 1, 2)]
    return all(score(factor) >= score(other) - slack for other in others)


# ---- the way


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("via", "method"),
    [*((via, lw.KFAC()) for via in WAYS), *((lw.Linearized(), method) for method in (lw.ELLA(5, 12), lw.Full()))],
    ids=repr,
)
def test_the_latent_keeps_its_mean_and_scales_its_covariance(via, method):
    """Of thin, rotated and dense terms, and across inputs: the linearised way is that of a posterior with s Σ."""
    model, loader, held_out = classification()
    posterior = lw.fit(model, loader, method, prior_precision=1.0)
    x = held_out[0][0]
    one, four = posterior.latent(x, via=via), posterior.latent(x, via=lw.Scaled(via, 4.0))
    assert type(one) is type(four)
    torch.testing.assert_close(four.mean, one.mean, rtol=1e-12, atol=1e-12)
    for name in ("covariance", "variance"):
        torch.testing.assert_close(getattr(four, name), 4 * getattr(one, name))
    if hasattr(one, "centred_variance"):
        torch.testing.assert_close(four.centred_variance, 4 * one.centred_variance)
    if via == lw.Linearized():
        joint = [posterior.latent(x, via=way, joint=True).covariance for way in (via, lw.Scaled(via, 4.0))]
        torch.testing.assert_close(joint[1], 4 * joint[0])


def test_ways_nest_and_say_what_they_are():
    way = lw.Scaled(lw.Scaled(lw.Streamlined(), 2.0), 0.25)
    assert eval(repr(way), vars(lw)) == way
    model, loader, held_out = regression()
    posterior = lw.fit(model, loader, lw.Diagonal(), prior_precision=1.0, likelihood=lw.Gaussian(0.1))
    x = held_out[0][0].clone().requires_grad_()
    variance = posterior.latent(x, via=way).variance
    torch.testing.assert_close(variance, 0.5 * posterior.latent(x, via=lw.Streamlined()).variance)
    assert torch.autograd.grad(variance.sum(), x)[0].abs().sum() > 0


# ---- by validation


@pytest.mark.quick(1)
@pytest.mark.parametrize("via", WAYS, ids=repr)
@pytest.mark.parametrize("outputs", others_slow([1, 2], [2]))
def test_no_other_factor_predicts_held_out_targets_better(via, outputs):
    model, loader, held_out = regression(outputs)
    posterior = lw.fit(model, loader, lw.Diagonal(), likelihood=lw.Gaussian(0.02), prior_precision=1.0)
    found = scale_factor(posterior, held_out, via)
    assert found.via == via
    assert 1e-2 < found.factor < 1e2
    assert is_best(lambda factor: naive(posterior, held_out, via, factor), found.factor)


@pytest.mark.parametrize("via", [lw.Linearized(), lw.MonteCarlo(20)], ids=repr)
def test_the_factor_is_best_for_noise_that_depends_on_the_input(via):
    """The noise and the tails are those of predictions, and not the constant noise of the fit."""
    model, loader, held_out = regression()
    posterior = lw.fit(model, loader, lw.Diagonal(), likelihood=lw.Gaussian(0.02), prior_precision=1.0)
    x = torch.cat([x for x, _ in loader])
    noisy = with_input_noise(posterior, x, "2")
    found = scale_factor(noisy, held_out, via)
    assert abs(math.log(found.factor / scale_factor(posterior, held_out, via).factor)) > 0.1
    assert is_best(lambda factor: naive(noisy, held_out, via, factor), found.factor)
    bound = [scale_factor(one, loader, by="evidence").factor for one in (posterior, noisy)]
    assert bound[0] == bound[1]


@pytest.mark.parametrize("link", [None, *others_slow([lw.Probit(scale="marginal"), lw.SampledLink(500)], [])], ids=repr)
@pytest.mark.parametrize("via", [lw.Linearized(), lw.Streamlined()], ids=repr)
def test_no_other_factor_predicts_held_out_labels_better(via, link):
    model, loader, held_out = classification()
    posterior = lw.fit(model, loader, lw.KFAC(), prior_precision=5.0)
    found = scale_factor(posterior, held_out, via, link=link)
    slack = 5e-3 if isinstance(link, lw.SampledLink) else 0.0  # other draws: the covariances are kept multiplied out
    assert is_best(lambda factor: naive(posterior, held_out, via, factor, link), found.factor, slack)


# ---- by the evidence


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("prior", "tempering"),
    [
        pytest.param(2.0, {}, marks=pytest.mark.slow),
        ({"0.*": 1.0, "2.*": 4.0}, {"data_size": 100, "temperature": 2.0}),
    ],
    ids=["one δ", "two δ, tempered"],
)
@pytest.mark.parametrize(
    "method", [lw.Full(), lw.Diagonal(), lw.EKFAC(), lw.KFAC(), lw.ELLA(5, 12, residual="prior")], ids=repr
)
def test_the_bound_of_a_linearised_gaussian_has_a_closed_form(method, prior, tempering):
    """`s = P / tr((G/τ + Δ) Σ)`, and 1 for the GGN posterior and for structures with its exact diagonal."""
    model, loader, _ = regression(outputs=2)
    options = {"likelihood": lw.Gaussian(0.1), "prior_precision": prior, **tempering}
    posterior = lw.fit(model, loader, method, **options)
    exact = lw.fit(model, loader, lw.Full(form="primal"), **options).covariance.to_dense().double()
    covariance = posterior.covariance.to_dense().double()
    expected = len(covariance) / float((torch.linalg.inv(exact) * covariance).sum())
    found = lw.scale_factor(posterior, loader, lw.Linearized(), by="evidence").factor
    assert found == pytest.approx(expected, rel=1e-4)
    if isinstance(method, (lw.Full, lw.Diagonal, lw.EKFAC)):
        assert found == pytest.approx(1.0, rel=1e-4)
    else:
        assert abs(found - 1) > 1e-3


def test_the_bound_counts_sample_weights():
    """For exact curvature the factor is 1, whatever the weights."""
    x, y = torch.randn(40, 3, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
    data = [(x, y, torch.arange(40.0, dtype=torch.float64) % 4)]
    model, likelihood = torch.nn.Linear(3, 2).double().eval(), lw.Gaussian(0.5)
    posterior = lw.fit(model, data, lw.Full(), likelihood=likelihood, prior_precision=1.0, sample_weights=True)
    assert lw.scale_factor(posterior, data, by="evidence").factor == pytest.approx(1.0, rel=1e-6)


def test_the_bound_of_labels_equals_a_naive_one():
    """Over draws of weights' outputs: E[log p] by a fixed grid for two classes, KL by torch.distributions."""
    model, loader, _ = classification(classes=2)
    posterior = lw.fit(model, loader, lw.KFAC(), prior_precision=2.0)
    mean = torch.cat([posterior.tangent.mean()[block.name].reshape(-1) for block in posterior.tangent.blocks])
    prior = torch.distributions.MultivariateNormal(0 * mean, torch.eye(len(mean)).double() / 2.0)
    dense = posterior.covariance.to_dense()

    def bound(factor):
        total = -torch.distributions.kl_divergence(torch.distributions.MultivariateNormal(mean, factor * dense), prior)
        z = torch.linspace(-8, 8, 801).double()
        weights = (-z.square() / 2).exp()
        for x, y in loader:
            latent = posterior.latent(x)
            gap = (latent.mean[:, 1] - latent.mean[:, 0]) * (2 * y - 1)
            contrast = latent.covariance
            spread = factor * (contrast[:, 0, 0] + contrast[:, 1, 1] - 2 * contrast[:, 0, 1])
            logs = torch.nn.functional.logsigmoid(gap[:, None] + spread.sqrt()[:, None] * z)
            total = total + (logs @ weights / weights.sum()).sum()
        return float(total)

    assert is_best(bound, lw.scale_factor(posterior, loader, lw.Linearized(), by="evidence").factor)


def test_mean_field_has_a_bound_if_it_has_a_prior():
    model, loader, _ = classification()
    posterior = lw.fit(model, loader, lw.MeanField(steps=20, initial_std=0.1))
    assert 1e-3 < lw.scale_factor(posterior, loader, by="evidence").factor < 1e3


# ---- to another way


@pytest.mark.parametrize("via", [lw.Streamlined(), lw.Scaled(lw.Linearized(), 0.3)], ids=repr)
def test_the_factor_to_another_way_gives_its_mean_variance(via):
    model, loader, held_out = classification()
    posterior = lw.fit(model, loader, lw.KFAC(), prior_precision=1.0)
    x = held_out[0][0]
    found = lw.scale_factor(posterior, x, via, to=lw.Linearized())
    wanted, narrow = posterior.latent(x).variance, posterior.latent(x, found.via).variance
    assert found.factor == pytest.approx(float(wanted.mean() / narrow.mean()), rel=1e-12)
    torch.testing.assert_close(posterior.latent(x, found).variance.mean(), wanted.mean())
    again = lw.scale_factor(posterior, [x[:9], x[9:]], via, to=lw.Linearized())  # features of the first batch
    assert again.factor == pytest.approx(found.factor, rel=1e-6 if again.via == via else 0.02)


@pytest.mark.parametrize("via", WAYS, ids=repr)
def test_each_output_has_its_own_factor(via):
    model, loader, held_out = regression(outputs=3)
    posterior = lw.fit(model, loader, lw.KFAC(), likelihood=lw.Gaussian(0.1), prior_precision=1.0)
    x, factors = held_out[0][0], torch.tensor([0.25, 1.0, 900.0], dtype=torch.float64)
    one, found = (posterior.latent(x, via=way) for way in (via, lw.Scaled(via, factors)))
    root = factors.sqrt()
    torch.testing.assert_close(found.mean, one.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.covariance, one.covariance * root[:, None] * root)
    torch.testing.assert_close(found.variance, one.variance * factors)
    if via == lw.Linearized():
        joint = [posterior.latent(x, via=way, joint=True).covariance for way in (via, lw.Scaled(via, factors))]
        torch.testing.assert_close(joint[1], torch.einsum("i,bicj,j->bicj", root, joint[0], root))
        draws = [posterior.latent(x, via=lw.Linearized(draws=9)) for _ in "ab"]
        torch.testing.assert_close(draws[1].scaled(tuple(factors.tolist())).variance, draws[0].variance * factors)


@pytest.mark.parametrize("likelihood", [lw.Gaussian(0.1), lw.HeteroscedasticGaussian()], ids=["gaussian", "noise"])
def test_each_output_has_its_mean_variance_in_another_way(likelihood):
    model, loader, held_out = regression(outputs=2)
    loader = [(x, 100 * y[:, : 1 if likelihood.name != "gaussian" else 2]) for x, y in loader]
    posterior = lw.fit(model, loader, lw.KFAC(), likelihood=likelihood, prior_precision=1.0)
    x = held_out[0][0]
    found = lw.scale_factor(posterior, x, lw.Streamlined(), to=lw.Linearized())
    wanted = posterior.latent(x).variance.mean(0)
    torch.testing.assert_close(posterior.latent(x, found).variance.mean(0), wanted)
    ratio = wanted / posterior.latent(x, found.via).variance.mean(0)
    assert found.factor == pytest.approx(ratio.tolist(), rel=1e-12)
    again = lw.scale_factor(posterior, x, found, to=lw.Linearized())
    assert again.factor == pytest.approx((1.0, 1.0))


def test_logits_share_a_factor():
    model, loader, held_out = regression(outputs=3)
    x = held_out[0][0]
    joint = lw.Joint({"kind": lw.Categorical(), "size": lw.Gaussian(0.1)}, {"kind": [0, 2], "size": [1]})
    data = [(inputs, {"kind": (y[:, 0] > 0).long(), "size": y[:, 1:2]}) for inputs, y in loader]
    posterior = lw.fit(model, data, lw.KFAC(), likelihood=joint, prior_precision=1.0)
    found = lw.scale_factor(posterior, x, lw.Streamlined(), to=lw.Linearized())
    wanted, narrow = (posterior.latent(x, way).variance.sum(0) for way in (lw.Linearized(), found.via))
    kind = float((wanted[0] + wanted[2]) / (narrow[0] + narrow[2]))
    assert found.factor == pytest.approx((kind, float(wanted[1] / narrow[1]), kind), rel=1e-12)
    ordered = [(inputs, (y[:, 0] > 0).long()) for inputs, y in loader]
    for likelihood in (lw.Ordinal(), lw.FromDistribution(lambda f: torch.distributions.Categorical(logits=f))):
        posterior = lw.fit(model, ordered, lw.KFAC(), likelihood=likelihood, prior_precision=1.0)
        assert isinstance(lw.scale_factor(posterior, x, lw.Streamlined(), to=lw.Linearized()).factor, float)


def test_an_output_with_a_variance_in_one_way_only():
    model, loader, held_out = regression(outputs=2)
    posterior = lw.fit(model, loader, lw.KFAC(), likelihood=lw.Gaussian(0.1), prior_precision=1.0)
    narrow = lw.Scaled(lw.Linearized(), (1.0, 1e-300))
    found = lw.scale_factor(posterior, held_out[0][0], to=narrow)
    assert found.factor == pytest.approx((1.0, LEAST_FACTOR))
    assert lw.scale_factor(posterior, held_out[0][0], narrow, to=narrow).factor == (1.0, 1.0)


# ---- ends of the range, bad input


def test_an_end_of_the_range_is_warned_of(caplog):
    model, loader, held_out = regression()
    posterior = lw.fit(model, loader, lw.Diagonal(), likelihood=lw.Gaussian(0.02), prior_precision=1.0)
    inside = lw.scale_factor(posterior, held_out).factor

    def told():
        return [record.getMessage() for record in caplog.records if record.name == "lapwing"]

    with caplog.at_level(logging.WARNING, "lapwing"):
        assert lw.scale_factor(posterior, held_out).factor == inside
        assert not told()
        low = math.log10(inside)
        assert lw.scale_factor(posterior, held_out, decades=(low - 2, low - 1)).factor == pytest.approx(inside / 10)
        assert lw.scale_factor(posterior, held_out, decades=(low + 1, low + 2)).factor == pytest.approx(inside * 10)
    words = told()
    assert "a wider covariance" in words[0]
    assert "a narrower covariance" in words[1]


def test_a_link_that_does_not_see_the_factor():
    model, loader, held_out = classification()
    posterior = lw.fit(model, loader, lw.KFAC(), prior_precision=5.0)
    x = held_out[0][0]
    one, ten = (posterior.predict(x, via=lw.Scaled(lw.Linearized(), s), link=lw.LaplaceBridge()) for s in (1.0, 10.0))
    torch.testing.assert_close(one.probs, ten.probs)


# ---- quantities


def slopes(f, x):
    """Returns the derivatives of the outputs by the inputs, (B, 3)."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x, create_graph=True)[0]


@cache
def of_slopes():
    """A posterior of a network of values, and held-out slopes of the function behind them."""
    model, training, _ = regression()
    posterior = lw.fit(model, training, lw.Full(), prior_precision=1.0, likelihood=lw.Gaussian(0.05))
    x = torch.randn(30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return posterior, x, 3 * x.sum(1, keepdim=True).cos().expand(-1, 3)


def test_the_factor_of_a_quantity_is_best_for_its_single_numbers():
    """It maximises the sum of log N(y; m, s v) with one more row at s = 1, whose numbers have (y - m)² = v."""
    posterior, x, y = of_slopes()
    way = lw.scale_factor(posterior, [(x[:20], y[:20]), (x[20:], y[20:])], of=slopes)
    assert way.via == lw.Linearized()
    model, named = posterior.model, dict(posterior.model.named_parameters())

    def at(weights, row):
        return torch.func.jacrev(lambda r: torch.func.functional_call(model, weights, r[None])[0, 0])(row)

    squares = []
    order = [name for block in posterior.tangent.blocks for name in block.parameters]
    for row, values in zip(x, y, strict=True):
        weights = {name: weight.detach() for name, weight in named.items()}
        rows = torch.func.jacrev(lambda w, row=row: at(w, row))(weights)
        g = torch.cat([block.join({n: rows[n] for n in order}) for block in posterior.tangent.blocks], -1)
        variance = (g @ posterior.covariance.to_dense() @ g.T).diagonal()
        squares.append((values - at(weights, row)).square() / variance)
    squares = torch.cat([torch.cat(squares), torch.ones(3, dtype=torch.float64)])
    assert way.factor == pytest.approx(float(squares.mean()), rel=1e-8)
    assert not 0.5 < way.factor < 2.0
    value = lambda s: float((-0.5 * (squares / s + math.log(s))).sum())  # noqa: E731
    assert value(way.factor) > max(value(1.01 * way.factor), value(way.factor / 1.01))


def test_a_quantity_with_the_factor_has_its_covariance_times_it():
    posterior, x, y = of_slopes()
    way = lw.scale_factor(posterior, (x, y), of=slopes)
    plain, scaled = (posterior.of(lambda f: slopes(f, x[:4]), via=via) for via in (None, way))
    torch.testing.assert_close(scaled.covariance, way.factor * plain.covariance)
    assert torch.equal(scaled.mean, plain.mean)
    noisy = posterior.of(lambda f: f(x[:4]), observed=True, via=way)
    noise = 0.05 * torch.eye(4, dtype=torch.float64).view(4, 1, 4, 1)
    wanted = way.factor * posterior.of(lambda f: f(x[:4])).covariance + noise
    torch.testing.assert_close(noisy.covariance, wanted)


def test_chunks_missing_values_and_numbers_without_variance_do_not_change_the_factor(monkeypatch):
    posterior, x, y = of_slopes()
    wanted = lw.scale_factor(posterior, (x, y), of=slopes).factor
    object.__setattr__(posterior.tangent, "memory", 64 * 3 * posterior.tangent.size * 7)
    assert lw.scale_factor(posterior, (x, y), of=slopes).factor == pytest.approx(wanted, rel=1e-9)
    with_constant = lambda f, x: torch.cat([slopes(f, x), 0 * f(x)], 1)  # noqa: E731
    y_more = torch.cat([y, torch.ones(len(y), 1, dtype=y.dtype)], 1)
    found = lw.scale_factor(posterior, (x, y_more), of=with_constant).factor
    n = y.numel()
    assert found * (n + 4) - 4 == pytest.approx(wanted * (n + 3) - 3, rel=1e-9)  # only its one more row has a fourth
    missing = y.clone()
    missing[::2] = math.nan
    rest = lw.scale_factor(posterior, (x[1::2], y[1::2]), of=slopes).factor
    assert lw.scale_factor(posterior, (x, missing), of=slopes).factor == pytest.approx(rest, rel=1e-9)


def small_task(likelihood):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    x = torch.randn(8, 2).double()
    return model, x, torch.arange(8) % 3 if likelihood == "categorical" else torch.randn(8, 3).double()


@pytest.mark.parametrize("likelihood", ["categorical", lw.Gaussian(0.3)], ids=["classes", "regression"])
@pytest.mark.parametrize("weight", [None, 3.0])
def test_training_rows_count_as_rows_that_the_fit_has_not_seen(likelihood, weight):
    """The variance of each row is that of a fit without it, at the same weights, prior and noise."""
    model, x, y = small_task(likelihood)
    known = () if weight is None else (torch.full((8,), weight).double(),)
    options = {"likelihood": likelihood, "prior_precision": 2.0, "sample_weights": weight is not None}
    fit = lambda rows: lw.fit(model, [tuple(part[rows] for part in (x, y, *known))], lw.Full(), **options)  # noqa: E731
    posterior, every = fit(slice(None)), torch.arange(8)
    wanted = torch.cat([fit(every != n).latent(x[n : n + 1]).variance for n in range(8)])
    close(_as_new(posterior, posterior.latent(x)), wanted)
    way = lw.scale_factor(posterior, x, via=lw.Streamlined(), to=lw.Linearized())
    sums = (lambda values: values.sum()) if likelihood == "categorical" else (lambda values: values.sum(0))
    close(sums(posterior.latent(x, via=way).variance), sums(wanted))


def test_new_rows_and_other_structures_keep_their_variances():
    model, x, y = small_task("regression")
    for method, rows in ((lw.Full(), 5 * x + 3), (lw.KFAC(), x), (lw.Diagonal(), x)):
        posterior = lw.fit(model, (x, y), method, likelihood=lw.Gaussian(0.3), prior_precision=2.0)
        latent = posterior.latent(rows)
        assert torch.equal(_as_new(posterior, latent), latent.variance)


@pytest.mark.parametrize("outputs", [1, 4])
def test_held_out_rows_are_told_from_training_rows(outputs):
    """Each output of a training row has a leverage below 1, so a row with several outputs has a sum of several."""
    x, shift = 2 * torch.rand(200, 4) - 1, torch.arange(outputs)
    y = (2 * x[:, :1] + shift).sin() + x[:, 1:2] * (x[:, 2:3] + 0.3 * shift) + 0.1 * torch.randn(200, outputs)
    model = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, outputs))
    train(model, lambda: (model(x[:100]) - y[:100]).square().mean(), 300, decay=1e-4)
    posterior = lw.fit(model, (x[:100], y[:100]), lw.Full())
    for rows in (x[100:], x[100:116], x[116:180]):
        latent = posterior.latent(rows)
        assert torch.equal(_as_new(posterior, latent), latent.variance)
    for rows in (x[:100], x[:16]):
        latent = posterior.latent(rows)
        assert (_as_new(posterior, latent) > latent.variance).all()
