"""Likelihoods from `torch.distributions`: Fisher information, predictions, files; ordered classes; transformed y."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as dist
from torch.special import polygamma

import lapwing as lw
from lapwing.covariance import LatentDraws
from lapwing.likelihoods import Gaussian, MixturePrediction
from lapwing.likelihoods.links import DENSE_OUTPUTS, latent_points
from lapwing.tuning.held_out import spread_costs
from tests.likelihoods.latents import dense_latent, integral, joint_latent, random_latent

F64 = torch.float64
EULER = 0.5772156649015329
A, B = 0.4, -0.3  # the outputs
RISE = math.pi**2 / 6 + (1 - EULER) ** 2


def trigamma(x):
    return float(polygamma(1, torch.tensor(x, dtype=F64)))


def gamma_information(a, b):
    return [[a * a * trigamma(a), -a], [-a, a]]


def beta_information(a, b):
    both = trigamma(a + b)
    return [[a * a * (trigamma(a) - both), -a * b * both], [-a * b * both, b * b * (trigamma(b) - both)]]


a, b, p = math.exp(A), math.exp(B), 1 / (1 + math.exp(-A))
two = torch.tensor([A, B], dtype=F64).softmax(0)
EXACT = {
    "bernoulli": (lambda f: dist.Bernoulli(logits=f[..., 0]), [[p * (1 - p), 0], [0, 0]]),
    "binomial": (lambda f: dist.Binomial(10, logits=f[..., 0]), [[10 * p * (1 - p), 0], [0, 0]]),
    "categorical": (lambda f: dist.Categorical(logits=f), (two.diag() - two.outer(two)).tolist()),
}
DRAWN = {
    "poisson": (lambda f: dist.Poisson(f[..., 0].exp()), [[a, 0], [0, 0]]),
    "exponential": (lambda f: dist.Exponential(f[..., 0].exp()), [[1, 0], [0, 0]]),
    "geometric": (lambda f: dist.Geometric(logits=f[..., 0]), [[1 - p, 0], [0, 0]]),
    "negative binomial": (lambda f: dist.NegativeBinomial(3.0, logits=f[..., 0]), [[3 * p, 0], [0, 0]]),
    "gamma": (lambda f: dist.Gamma(f[..., 0].exp(), f[..., 1].exp()), gamma_information(a, b)),
    "beta": (lambda f: dist.Beta(f[..., 0].exp(), f[..., 1].exp()), beta_information(a, b)),
    "normal": (lambda f: dist.Normal(f[..., 0], f[..., 1].exp()), [[1 / b**2, 0], [0, 2]]),
    "lognormal": (lambda f: dist.LogNormal(f[..., 0], f[..., 1].exp()), [[1 / b**2, 0], [0, 2]]),
    "laplace": (lambda f: dist.Laplace(f[..., 0], f[..., 1].exp()), [[1 / b**2, 0], [0, 1]]),
    "cauchy": (lambda f: dist.Cauchy(f[..., 0], f[..., 1].exp()), [[0.5 / b**2, 0], [0, 0.5]]),
    "student": (lambda f: dist.StudentT(5.0, f[..., 0], f[..., 1].exp()), [[0.75 / b**2, 0], [0, 1.25]]),
    "gumbel": (
        lambda f: dist.Gumbel(f[..., 0], f[..., 1].exp()),
        [[1 / b**2, (EULER - 1) / b], [(EULER - 1) / b, RISE]],
    ),
    "weibull": (
        lambda f: dist.Weibull(f[..., 0].exp(), f[..., 1].exp()),
        [[b**2, b * (EULER - 1)], [b * (EULER - 1), RISE]],
    ),
    "multivariate": (lambda f: dist.MultivariateNormal(f, torch.eye(2, dtype=f.dtype)), [[1, 0], [0, 1]]),
}
GAMMA = lw.FromDistribution(DRAWN["gamma"][0])


@pytest.mark.parametrize("name", EXACT)
def test_information_of_a_finite_support_is_exact(name):
    function, wanted = EXACT[name]
    root = lw.FromDistribution(function).fisher_root(torch.tensor([[A, B]], dtype=F64).expand(2, 2))
    torch.testing.assert_close(root @ root.mT, torch.tensor(wanted, dtype=F64).expand(2, 2, 2), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", DRAWN)
def test_information_of_other_families_has_only_sampling_error(name):
    function, wanted = DRAWN[name]
    outputs = torch.tensor([[A, B]], dtype=F64).expand(60, 2)
    root = lw.FromDistribution(function, draws=1000).fisher_root(outputs)
    found = root @ root.mT
    wanted = torch.tensor(wanted, dtype=F64)
    error = found.std(0) / 60**0.5
    assert ((found.mean(0) - wanted).abs() <= 4.5 * error + 1e-12).all(), (found.mean(0), wanted)
    assert (error <= 0.03 * wanted.abs().max()).all()  # so that the first line could fail


def test_independent_targets_have_a_block_each_and_one_column_for_each_output():
    function = lambda f: dist.Gamma(f[..., ::2].exp(), f[..., 1::2].exp())  # noqa: E731
    outputs = torch.tensor([[A, B, A, B]], dtype=F64)
    for draws in (1, 500):
        root = lw.FromDistribution(function, draws=draws).fisher_root(outputs)
        assert root.shape == (1, 4, 4)  # a pass takes as many backward passes for any number of draws
        information = (root @ root.mT)[0]
        assert not information[:2, 2:].any()
    torch.testing.assert_close(information[:2, :2], torch.tensor(gamma_information(a, b), dtype=F64), rtol=0.2, atol=0)


@pytest.mark.parametrize("name", [*DRAWN, *EXACT])
@pytest.mark.parametrize(("dtype", "size"), [(F64, 300.0), (torch.float32, 40.0)])
def test_information_at_extreme_outputs_is_finite(name, dtype, size):
    function = (DRAWN | EXACT)[name][0]
    if name in ("poisson", "negative binomial", "geometric"):
        size = 20.0 if name == "poisson" else 12.0  # torch draws no larger counts
    outputs = torch.tensor([[-size, 0.0], [0.0, -size], [size, 0.0], [0.0, size]], dtype=dtype)
    root = lw.FromDistribution(function).fisher_root(outputs)
    assert root.dtype == dtype
    assert root.isfinite().all()


# ---- predictions


def spread_normal(f):
    return dist.Normal(f[..., 0], (0.5 * f[..., 1]).exp())


def test_a_normal_predicts_as_the_gaussian_likelihood():
    latent = random_latent(batch=6, size=1)
    mine = lw.FromDistribution(lambda f: dist.Normal(f, 0.7)).predict(latent, lw.SampledLink(20000))
    wanted = Gaussian(noise_variance=0.49).predict(latent)
    y = wanted.sample(1)[0]
    for name in ("mean", "std", "epistemic_variance"):
        torch.testing.assert_close(getattr(mine, name), getattr(wanted, name), rtol=0.04, atol=0.03)
    torch.testing.assert_close(mine.aleatoric_variance, wanted.aleatoric_variance)
    torch.testing.assert_close(mine.log_prob(y), wanted.log_prob(y), rtol=0, atol=0.06)
    torch.testing.assert_close(mine.interval(0.9), wanted.interval(0.9), rtol=0.03, atol=0.05)
    scores = torch.stack(
        [lw.evaluation.metrics.crps_gaussian(*row) for row in zip(wanted.mean, wanted.std, y, strict=True)]
    )
    torch.testing.assert_close(mine.crps(y)[:, 0].double(), scores, rtol=0.08, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("size", [1, 2])
def test_points_of_one_or_two_outputs_have_the_moments_of_the_latent(size, dtype):
    wide = random_latent(batch=6, size=size)
    points = latent_points(dense_latent(wide.mean.to(dtype), wide.covariance.to(dtype)), 512)
    assert points.dtype == dtype
    near = {"rtol": 1e-9, "atol": 1e-9} if dtype == F64 else {"rtol": 1e-5, "atol": 1e-5}
    for mean, covariance, cloud in zip(wide.mean, wide.covariance, points.double().unbind(1), strict=True):
        torch.testing.assert_close(cloud.mean(0), mean, **near)
        torch.testing.assert_close(cloud.T.cov(correction=0).reshape(size, size), covariance, **near)
    others = points.double()[:, :, 0].T.corrcoef().fill_diagonal_(0.0)
    assert others.abs().max() < 0.2  # inputs are independent, as a Gaussian without joint covariances is


@pytest.mark.parametrize(("size", "joint"), [(3, False), (2, True), (DENSE_OUTPUTS + 1, False)])
def test_more_outputs_and_joint_latents_have_pairs_around_the_mean(size, joint):
    latent = joint_latent(size=size) if joint else random_latent(size=size)
    points = latent_points(latent, 2048)
    assert points.shape == (2048, *latent.mean.shape)
    torch.testing.assert_close(points.mean(0), latent.mean)
    torch.testing.assert_close(points.var(0), latent.variance, rtol=0.25, atol=0)


def test_points_are_certain_where_the_latent_is_and_differentiable():
    mean, variance = torch.zeros(3, 1, dtype=F64), torch.tensor([0.0, 1e-3, 4.0], dtype=F64).requires_grad_()
    points = latent_points(dense_latent(mean, variance[:, None, None]), 512)
    assert points[:, 0].abs().max() < 1e-5
    (slopes,) = torch.autograd.grad(points.square().mean(0).sum(), variance)
    torch.testing.assert_close(slopes, torch.ones_like(slopes))


@pytest.mark.parametrize(("function", "size"), [(lambda f: dist.Normal(f[..., 0], 0.5), 1), (spread_normal, 2)])
def test_predictions_at_one_or_two_outputs_agree_with_integrals(function, size):
    latent = random_latent(batch=5, size=size, scale=0.3)
    prediction = lw.FromDistribution(function).predict(latent)
    y = latent.mean[:, 0] + torch.tensor([-2.0, -0.5, 0.0, 1.0, 2.0])
    logs = prediction.log_prob(y)
    for mean, covariance, one, log, center, variance in zip(
        latent.mean, latent.covariance, y, logs, prediction.mean, prediction.variance, strict=True
    ):
        density = integral(lambda f, one=one: function(f).log_prob(one).exp(), mean, covariance)
        second = integral(lambda f: function(f).variance + function(f).mean.square(), mean, covariance)
        assert float(log.exp()) == pytest.approx(float(density), rel=0.02)
        assert float(center) == pytest.approx(float(mean[0]), abs=1e-9)
        assert float(variance) == pytest.approx(float(second - mean[0] ** 2), rel=0.005)


def test_draws_that_the_user_names_and_weight_draws_stay():
    latent = random_latent(batch=4, size=1)
    likelihood = lw.FromDistribution(lambda f: dist.Normal(f[..., 0], 1.0))
    drawn = likelihood.predict(latent, lw.SampledLink(300))
    assert torch.equal(drawn.components.mean, latent.sample(300, torch.Generator().manual_seed(0))[..., 0].T)
    weights = LatentDraws(latent.sample(20))
    assert torch.equal(likelihood.predict(weights).components.mean, weights.draws[..., 0].T)


# ---- mixtures of several supports, and angles


def uniforms(f):
    """A mixture of two uniform distributions, from 0 to 1 and from 0 to 1 + exp(f)."""
    ends = torch.stack([torch.ones_like(f[..., 0]), 1.0 + f[..., 0].exp()], -1)
    chances = dist.Categorical(torch.tensor([0.3, 0.7]).to(f).expand_as(ends))
    return dist.MixtureSameFamily(chances, dist.Uniform(0.0 * ends, ends))


def test_each_part_of_a_mixture_counts_within_its_own_support():
    f, y = torch.tensor([[[0.0], [1.0]]], dtype=F64), torch.tensor([[0.5], [2.5], [9.0], [-1.0]], dtype=F64)
    f = f.expand(4, 2, 1)
    wanted = [
        [0.3 + 0.7 / (1 + math.exp(a)), 0.7 / (1 + math.exp(a)) * (y < 1 + math.exp(a))]
        for a, y in ((0.0, 2.5), (1.0, 2.5))
    ]
    inside, beyond = (sum(values) / 2 for values in zip(*wanted, strict=True))
    for components in (uniforms(f), dist.Independent(uniforms(f.unsqueeze(-2)), 1)):
        targets = y[:, 0] if components.event_shape == () else y
        found = MixturePrediction(components).log_prob(targets).exp()
        torch.testing.assert_close(found, torch.tensor([inside, beyond, 0.0, 0.0], dtype=F64))


@pytest.mark.parametrize("validated", [True, False])
def test_a_value_outside_the_support_of_a_part_does_not_count(validated, monkeypatch):
    """`Exponential.log_prob` is finite below 0, where its density is 0."""
    monkeypatch.setattr(dist.Distribution, "_validate_args", validated)
    rate, ends = torch.ones(1, 2, 2, dtype=F64), torch.tensor([0.0, -2.0], dtype=F64)
    parts = dist.TransformedDistribution(dist.Exponential(rate), [dist.AffineTransform(ends, torch.ones(2, dtype=F64))])
    prediction = MixturePrediction(dist.MixtureSameFamily(dist.Categorical(torch.ones_like(rate)), parts))
    assert float(prediction.log_prob(torch.tensor([-1.0]))) == pytest.approx(math.log(0.5) - 1.0)


def test_a_mixture_of_several_supports_is_fitted_and_tuned(caplog):
    y = 3.0 * torch.rand(60)
    likelihood = lw.FromDistribution(lambda f: uniforms(f.clamp(1.5, 3.0)))
    posterior, x = fitted(likelihood, y, outputs=1)
    assert posterior.predict(x).log_prob(y).isfinite().all()
    assert "nan" not in caplog.text
    with pytest.raises(lw.LapwingError, match="1 of 60 targets .* under MixtureSameFamily") as refused:
        fitted(likelihood, torch.cat([y[1:], torch.tensor([99.0])]), outputs=1)
    assert "tensor(" not in str(refused.value)


class Unpacked(dist.Normal):
    """A distribution whose `log_prob` reads two columns, although its draws have one."""

    def log_prob(self, y):
        return super().log_prob(y[..., 0]) + y[..., 1]


def test_an_error_within_the_log_prob_of_a_user_is_told_as_such():
    likelihood = lw.FromDistribution(lambda f: Unpacked(f[..., 0], 1.0))
    with pytest.raises(
        lw.LapwingError, match="The log_prob of Unpacked raised IndexError .* at values of shape"
    ) as told:
        fitted(likelihood, torch.randn(60), outputs=1)
    assert isinstance(told.value.__cause__, IndexError)


def angles(f):
    return dist.VonMises(f[..., 0], f[..., 1].exp())


def two_directions(f):
    parts = dist.VonMises(torch.stack([f[..., 0], f[..., 0] + 0.5], -1), f[..., 1:].exp().expand(*f.shape[:-1], 2))
    return dist.MixtureSameFamily(dist.Categorical(torch.tensor([0.25, 0.75]).to(f).expand_as(parts.loc)), parts)


@pytest.mark.parametrize("function", [angles, two_directions])
@pytest.mark.parametrize("several", [False, True])
def test_angles_have_a_circular_mean_and_arcs(function, several):
    latent = dense_latent(
        torch.tensor([[3.1, 2.0], [0.2, 2.0]], dtype=F64), 0.04 * torch.eye(2, dtype=F64).expand(2, 2, 2)
    )
    whole = (lambda f: function(f.unsqueeze(-2).expand(*f.shape[:-1], 3, 2))) if several else function
    prediction = lw.FromDistribution(whole).predict(latent)
    y = prediction.sample(10_000, torch.Generator().manual_seed(1)).double()
    centre = torch.atan2(y.sin().mean(0), y.cos().mean(0))
    length = torch.hypot(y.sin().mean(0), y.cos().mean(0))
    torch.testing.assert_close(prediction.mean, centre, rtol=0, atol=0.03)
    torch.testing.assert_close(prediction.variance, 2 - 2 * length, rtol=0.05, atol=0)
    assert (prediction.epistemic_variance > 0.02).all()
    low, high = prediction.interval(0.9)
    assert (high - low < 3.0).all()  # also next to the seam
    turned = centre + torch.remainder(y - centre + math.pi, 2 * math.pi) - math.pi
    torch.testing.assert_close(((turned >= low) & (turned <= high)).double().mean(0), 0.9 + 0 * low, rtol=0, atol=0.03)
    target = -3.1 + 0 * centre  # next to the mean of the first input, beyond the seam
    rows = prediction.for_metrics(target)
    assert float((rows["y"] - rows["mean"])[0].abs().max()) < 0.6
    torch.testing.assert_close(rows["log_prob"], prediction.log_prob(target + 2 * math.pi))
    assert rows["crps"][0].max() < 0.3


def test_a_family_without_moments_has_those_of_draws():
    latent = random_latent(batch=5, size=1)
    narrow = lambda f: dist.Normal(0.2 * f[..., 0], 0.5)  # noqa: E731
    plain = lw.FromDistribution(lambda f: dist.LogNormal(narrow(f).loc, 0.5)).predict(latent)
    moved = lambda f: dist.TransformedDistribution(narrow(f), [dist.SigmoidTransform(), dist.AffineTransform(0.0, 3.0)])  # noqa: E731
    prediction = lw.FromDistribution(moved).predict(latent)
    draws = prediction.sample(20000)
    torch.testing.assert_close(prediction.mean, draws.mean(0), rtol=0.02, atol=0)
    torch.testing.assert_close(prediction.std, draws.std(0), rtol=0.04, atol=0)
    low, high = plain.interval(0.9)
    assert (((plain.sample(20000) >= low) & (plain.sample(20000) <= high)).double().mean(0) - 0.9).abs().max() < 0.02


def falling(f):
    return dist.TransformedDistribution(dist.Gamma(f[..., 0].exp(), f[..., 1].exp()), [dist.AffineTransform(1.0, -2.0)])


def two_gammas(f):
    parts = dist.Gamma(torch.stack([f[..., 2].exp(), 3 + f[..., 2].exp()], -1), torch.ones_like(f[..., :2]))
    return dist.MixtureSameFamily(dist.Categorical(logits=f[..., :2]), parts)


BY_FORMULA = {
    **{name: (DRAWN[name][0], 2) for name in ("gamma", "lognormal", "cauchy", "weibull", "laplace", "gumbel")},
    "pareto": (lambda f: dist.Pareto(f[..., 0].exp(), f[..., 1].exp()), 2),
    "uniform": (lambda f: dist.Uniform(f[..., 0], f[..., 0] + f[..., 1].exp()), 2),
    "kumaraswamy": (lambda f: dist.Kumaraswamy(f[..., 0].exp(), f[..., 1].exp()), 2),
    "two targets": (lambda f: dist.Gamma(f[..., :2].exp(), f[..., 2:].exp()), 4),
    "mixture": (two_gammas, 3),
    "falling": (falling, 2),
}


@pytest.mark.parametrize("name", BY_FORMULA)
def test_a_prediction_of_one_input_is_that_of_any_batch(name):
    function, size = BY_FORMULA[name]
    model, x = nn.Linear(3, size).double().eval(), torch.randn(30, 3, dtype=F64)
    y = function(model(x)).sample()
    posterior = lw.fit(model, (x, y), likelihood=lw.FromDistribution(function), prior_precision=1.0)
    whole = posterior.predict(x)
    for place in (0, 7, 29):
        alone, some = posterior.predict(x[place : place + 1]), slice(place, place + 1)
        wanted = tuple(end[some] for end in whole.interval(0.9))
        torch.testing.assert_close(alone.interval(0.9), wanted, rtol=1e-9, atol=1e-12, equal_nan=True)
    for end, probability in zip(whole.interval(0.9), (0.05, 0.95), strict=True):
        torch.testing.assert_close(whole.pit(end), torch.full_like(end, probability), rtol=1e-9, atol=0)
        draws = whole.sample(20000, torch.Generator().manual_seed(1))
        below = (draws <= end).double().mean(0)
        torch.testing.assert_close(below, torch.full_like(below, probability), rtol=0, atol=0.009)


def negative_binomial(f):
    return dist.NegativeBinomial(f[..., 1].exp(), logits=f[..., 0])


def test_rounding_noise_is_no_density():
    """The log mass of 5 at r = 1e8 is 36.5 by torch in float32, and at r = 1e17 noise in float64."""
    for r, logit, known in ((8 * math.log(10), -18.0, True), (17 * math.log(10), -38.0, False)):
        latent = dense_latent(torch.tensor([[logit, r]]), 1e-12 * torch.eye(2)[None])
        found = float(lw.FromDistribution(negative_binomial).predict(latent).log_prob(torch.tensor([5.0])))
        rate = math.exp(r + logit)  # so many failures make a Poisson
        assert (
            found == pytest.approx(5 * math.log(rate) - rate - math.lgamma(6), abs=1e-2)
            if known
            else found == -math.inf
        )


class Plain(dist.Distribution):
    """A family of a user's own, which declares nothing."""

    def __init__(self, mean):
        super().__init__(mean.shape, validate_args=False)
        self._normal = dist.Normal(mean, 1.0)

    def log_prob(self, value):
        return self._normal.log_prob(value)

    def sample(self, sample_shape=()):
        return self._normal.sample(sample_shape)


@pytest.mark.parametrize(
    "function",
    [
        lambda f: dist.Gumbel(f[..., 0], 1 + 0 * f[..., 0]),
        lambda f: dist.Uniform(f[..., 0] - 5, f[..., 0] + 5),
        lambda f: dist.Kumaraswamy(f[..., 0].exp(), 1 + 0 * f[..., 0]),
        lambda f: dist.Normal(1e13 * f[..., 0], 1e13 + 0 * f[..., 0]),
        lambda f: dist.Exponential(1e13 * f[..., 0].exp()),
        lambda f: Plain(f[..., 0]),
    ],
    ids=["gumbel", "uniform", "kumaraswamy", "large unit", "small unit", "own"],
)
def test_log_densities_of_certain_outputs_are_those_of_the_family(function):
    outputs = torch.linspace(-1, 1, 5, dtype=F64)[:, None]
    y = function(outputs).sample()
    found = lw.FromDistribution(function).predict(dense_latent(outputs, torch.zeros(5, 1, 1).double())).log_prob(y)
    torch.testing.assert_close(found, function(outputs).log_prob(y), rtol=1e-5, atol=1e-4)


def test_held_out_data_do_not_choose_rounding_noise():
    x = torch.randn(400, 2)
    y = dist.NegativeBinomial(2.0, logits=0.5 * x[:, 0] - 0.3).sample()
    model = nn.Linear(2, 2).eval()
    model.weight.data, model.bias.data = torch.tensor([[0.5, 0.0], [0.0, 0.0]]), torch.tensor([-0.3, math.log(2.0)])
    posterior = lw.fit(model, (x[:200], y[:200]), likelihood=lw.FromDistribution(negative_binomial),
                       validation=(x[200:300], y[200:300]))  # fmt: skip
    assert posterior.temperature < 100
    scores = posterior.predict(x[300:]).log_prob(y[300:])
    assert float(scores.max()) < 0
    with torch.no_grad():
        assert scores.mean() > negative_binomial(model(x[300:])).log_prob(y[300:]).mean() - 0.1


def test_a_quantile_far_below_the_mean_has_its_digits():
    shape = torch.full((1, 2), 0.05, dtype=F64)
    prediction = MixturePrediction(dist.Gamma(shape, torch.ones_like(shape)))
    low = prediction.quantile(0.01)
    # F(y) = y^a / Γ(a + 1) for small y
    wanted = (math.log(0.01) + math.lgamma(1.05)) / 0.05
    assert float(low.log()) == pytest.approx(wanted, rel=1e-9)


def test_intervals_of_counts_are_whole():
    latent = random_latent(batch=60, size=1)
    prediction = lw.FromDistribution(lambda f: dist.NegativeBinomial(4.0, logits=f[..., 0])).predict(latent)
    low, high = prediction.interval(0.9)
    assert torch.equal(low, low.round())
    y = prediction.sample(2000)
    assert ((y < low).double().mean() <= 0.06).all()
    assert ((y > high).double().mean() <= 0.06).all()
    assert prediction.log_prob(-torch.ones(60)).isneginf().all()  # outside the support


# ---- fits


def fitted(likelihood, y, outputs=2, positions=False, **options):
    torch.manual_seed(0)
    x = torch.randn(len(y), *((5,) if positions else ()), 3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, outputs)).eval()
    return lw.fit(model, [(x, y)], likelihood=likelihood, progress=False, **options), x


def test_fit_tuning_evidence_comparison_and_file(tmp_path):
    y = dist.Gamma(2.0, 1.0).sample((60,))
    state = torch.get_rng_state()
    posterior, x = fitted(GAMMA, y, tune=lw.Evidence())
    torch.manual_seed(3)
    state = torch.get_rng_state()
    held_out = lw.fit(posterior.model, [(x[:40], y[:40])], likelihood=GAMMA, validation=[(x[40:], y[40:])])
    prediction = held_out.predict(x)
    prediction.interval(0.9), prediction.mean, prediction.crps(y)
    assert torch.equal(state, torch.get_rng_state())  # the user's draws stay
    assert math.isfinite(posterior.log_marginal_likelihood())
    table = lw.compare({"mine": posterior}, [(x, y)])
    assert table["mine"]["CRPS"] == pytest.approx(float(posterior.predict(x).crps(y).mean()))
    posterior.save(tmp_path / "gamma.safetensors")
    with pytest.raises(lw.LapwingError, match=r"lw.load\(path, model, likelihood=likelihood\)"):
        lw.load(tmp_path / "gamma.safetensors", posterior.model)
    again = lw.load(tmp_path / "gamma.safetensors", posterior.model, likelihood=GAMMA)
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)


def test_several_positions():
    y = dist.Gamma(2.0, 1.0).sample((20, 5))
    posterior, x = fitted(GAMMA, y, positions=True)
    prediction = posterior.predict(x)
    assert prediction.mean.shape == prediction.interval()[0].shape == prediction.log_prob(y).shape == (20, 5)
    assert lw.compare({"mine": posterior}, [(x, y)])["mine"]["90 % interval"] > 0


# ---- ordered classes


def test_ordinal_probabilities_and_information():
    likelihood = lw.Ordinal()
    f = torch.tensor([[0.3, -1.0, 0.5], [4.0, 2.0, -3.0]], dtype=F64)
    above = f[:, :1] - torch.cat([torch.zeros(2, 1), torch.nn.functional.softplus(f[:, 1:])], 1).cumsum(1)
    ends = torch.ones(2, 1, dtype=F64), torch.zeros(2, 1, dtype=F64)
    wanted = -torch.cat([ends[0], above.sigmoid(), ends[1]], 1).diff()
    for y in range(4):
        torch.testing.assert_close(likelihood.log_prob(f, torch.tensor([y, y])).exp(), wanted[:, y])
    hessian = torch.zeros(2, f.shape[1], f.shape[1], dtype=F64)  # -E[∂² log p]
    for y in range(4):
        for i in range(2):
            one = lambda g, i=i, y=y: likelihood.log_prob(g[None], torch.tensor([y]))[0]  # noqa: E731
            hessian[i] -= wanted[i, y] * torch.autograd.functional.hessian(one, f[i])
    root = likelihood.fisher_root(f)
    torch.testing.assert_close(root @ root.mT, hessian)
    narrow = torch.tensor([[0.0, -200.0]])  # a gap of e^-200, which float32 rounds to 0
    close = likelihood.log_prob(narrow, torch.tensor([1]))
    torch.testing.assert_close(close, torch.tensor([-200.0 - 2 * math.log(2)]))
    assert likelihood.log_prob(1000 * f, torch.tensor([3, 0])).isfinite().all()


# ---- functions of y


def test_exp_of_a_gaussian_is_a_lognormal():
    prediction = Gaussian(noise_variance=0.2).predict(random_latent(batch=4, size=1))
    moved = prediction.transformed(torch.exp)
    wanted = dist.LogNormal(prediction.mean, prediction.std)
    torch.testing.assert_close(moved.mean, wanted.mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(moved.variance, wanted.variance, rtol=1e-3, atol=0)
    given = dist.LogNormal(prediction.mean, prediction.epistemic_variance.sqrt())  # of exp(f), times exp(σ²/2)
    torch.testing.assert_close(moved.epistemic_variance, given.variance * math.exp(0.2), rtol=1e-3, atol=0)
    torch.testing.assert_close(moved.interval(0.8)[1], prediction.interval(0.8)[1].exp())
    y = wanted.sample()
    torch.testing.assert_close(moved.log_prob(y), wanted.log_prob(y).sum(-1))
    torch.testing.assert_close(moved.distribution().log_prob(y), moved.log_prob(y))
    assert moved.log_prob(-y).isneginf().all()  # beyond the range of exp
    torch.testing.assert_close(moved.sample(3), prediction.sample(3).exp())
    torch.testing.assert_close(prediction.scaled(1.0, 2.0).transformed(torch.exp).interval()[0],
                               prediction.scaled(1.0, 2.0).interval()[0].exp())  # fmt: skip


def test_large_values_have_finite_moments():
    """Of a function of some outputs, and of one that is NaN only far from the mean."""
    latent = dense_latent(torch.tensor([[100.0, 1.0]]), 0.01 * torch.eye(2)[None])
    prediction = Gaussian(noise_variance=0.01).predict(latent)
    some = prediction.transformed(lambda y: torch.cat([y[..., :1], y[..., 1:].exp()], -1))
    low, high = some.interval(0.9)
    assert (high - low).isfinite().all()
    torch.testing.assert_close(some.mean, torch.tensor([[100.0, math.exp(1.01)]]), rtol=1e-5, atol=0)
    far = Gaussian(noise_variance=0.5).predict(dense_latent(torch.tensor([[5.0]]), torch.tensor([[[0.5]]])))
    y = far.sample(100_000)
    torch.testing.assert_close(far.transformed(torch.log).mean, y.log().mean(0), rtol=1e-3, atol=0)
    torch.testing.assert_close(far.transformed(torch.log).std, y.log().std(0), rtol=2e-2, atol=0)


def test_a_falling_function_several_outputs_and_missing_targets():
    prediction = Gaussian(noise_variance=0.2, missing=True).predict(random_latent(batch=4, size=3))
    moved = prediction.transformed(lambda y: -(y + 0.1 * y**3))
    low, high = moved.interval(0.9)
    assert (low < high).all()
    z = prediction.sample(1)[0]
    slopes = (1 + 0.3 * z**2).log()
    torch.testing.assert_close(moved.log_prob(-(z + 0.1 * z**3)), prediction.log_prob(z) - slopes.sum(-1))
    z[:, 1], slopes[:, 1] = torch.nan, 0.0
    torch.testing.assert_close(moved.log_prob(-(z + 0.1 * z**3)), prediction.log_prob(z) - slopes.sum(-1))


def test_moments_under_weight_draws_are_those_of_samples():
    draws = 0.3 * random_latent(batch=4, size=2).sample(30)
    prediction = Gaussian(noise_variance=0.1).predict(LatentDraws(draws))
    moved = prediction.transformed(torch.asinh)
    draws = moved.sample(20000)
    torch.testing.assert_close(moved.mean, draws.mean(0), rtol=0.02, atol=0.06)
    torch.testing.assert_close(moved.std, draws.std(0), rtol=0.06, atol=0)


@pytest.mark.parametrize("function", [torch.round, torch.relu, lambda y: -torch.relu(y)])
def test_values_that_a_function_repeats_have_no_density(function):
    prediction = Gaussian(noise_variance=4.0).predict(random_latent(batch=4, size=2))
    moved = prediction.transformed(function)
    assert moved.std.isfinite().all()
    with pytest.raises(lw.LapwingError, match="is constant around [48] of 8 targets, where it has no density"):
        moved.log_prob(torch.tensor([0.0, 1.5]).expand(4, 2))


def test_a_tuning_takes_fewer_points_and_no_moments_of_each_candidate() -> None:
    """17 candidates and the network, at 128 points each; the moments of a mixture cost as much as its density."""
    evaluated: list[int] = []

    class Noted(dist.Normal):
        mean = property(lambda self: pytest.fail("a tuning needs no moments"))

        def log_prob(self, value: Tensor) -> Tensor:
            evaluated.append(torch.broadcast_shapes(value.shape, self.loc.shape).numel())
            return super().log_prob(value)

    x, y, model = torch.randn(30, 2), torch.randn(30), nn.Linear(2, 2).eval()
    likelihood = lw.FromDistribution(lambda f: Noted(f[..., 0], f[..., 1].exp()))
    posterior = lw.fit(model, (x, y), lw.Full(), likelihood=likelihood, prior_precision=1.0)
    evaluated.clear()
    spread_costs([posterior.with_prior(10.0**k) for k in range(17)], [(x, y)])
    assert sum(evaluated) <= 30 * (128 * 18 + 1)


def test_draws_of_angles_follow_their_density(monkeypatch) -> None:
    """Only rejected angles are drawn again. torch draws all of them until the last one is accepted."""
    monkeypatch.setattr(dist.VonMises, "sample", lambda *args: pytest.fail("all angles are drawn again"))
    kappa = torch.tensor([[1e-6], [0.1], [2.0], [50.0], [1e4]]).expand(-1, 8)
    components = dist.VonMises(torch.full_like(kappa, 3.0), kappa)
    prediction = MixturePrediction(components)
    low, high = prediction.interval(0.8)
    angles = torch.linspace(-math.pi, math.pi, 20001, dtype=F64)
    below = dist.VonMises(0.0, kappa[:, :1].double(), validate_args=False).log_prob(angles).exp().cumsum(1)
    below = (below / below[:, -1:]).contiguous()
    for end, part in ((low, 0.1), (high, 0.9)):
        exact = angles[torch.searchsorted(below, torch.full((5, 1), part, dtype=F64)).clamp_max(20000)[:, 0]]
        turned = (end.double() - 3.0 + math.pi) % (2 * math.pi) - math.pi
        assert ((turned - exact).abs()[1:] <= 0.12 * kappa[1:, 0].rsqrt().clamp_max(1.5)).all()
    resultant = dist.VonMises(3.0, kappa[:, 0]).variance.sub(1).neg()
    drawn = torch.polar(torch.ones(4096, 5), prediction.sample(4096)).mean(0).abs()
    assert ((drawn - resultant).abs() < 0.05).all()


@pytest.mark.parametrize("events", [0, 1])
def test_rankings_are_integers_and_their_support_may_forget_the_event(events):
    """Plackett-Luce: a ranking of four items is drawn as integers, and each of its numbers is between 0 and 3."""
    places = dist.constraints.integer_interval(0, 3)

    class PlackettLuce(dist.Distribution):
        arg_constraints: ClassVar[dict] = {}
        support = dist.constraints.independent(places, 1) if events else places

        def __init__(self, scores: Tensor) -> None:
            self.scores = scores
            super().__init__(scores.shape[:-1], scores.shape[-1:], validate_args=False)

        def log_prob(self, value: Tensor) -> Tensor:
            scores, value = torch.broadcast_tensors(self.scores, value)
            chosen = scores.gather(-1, value.long())
            return (chosen - chosen.flip(-1).logcumsumexp(-1).flip(-1)).sum(-1)

        def sample(self, shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
            return (self.scores - torch.empty(shape + self.scores.shape).exponential_().log()).argsort(-1)

    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y, likelihood = x @ torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), lw.FromDistribution(PlackettLuce)
    posterior = lw.fit(nn.Linear(3, 4).eval(), (x, y.argsort(1)), likelihood=likelihood)
    prediction = posterior.predict(x)
    torch.testing.assert_close(prediction.mean.sum(1), torch.full((40,), 6.0))
    assert prediction.sample(5).shape == (5, 40, 4)
    assert prediction.log_prob(y.argsort(1)).isfinite().all()
