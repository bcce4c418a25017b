"""Predictions against brute force, integration and torch.distributions."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import multivariate_normal, norm
from torch import distributions as dist

from lapwing.covariance import JointLatent, LatentDraws
from lapwing.likelihoods import (
    Bernoulli,
    Categorical,
    ClassPrediction,
    Gaussian,
    HeteroscedasticGaussian,
    LaplaceBridge,
    MixturePrediction,
    Poisson,
    Prediction,
    Probit,
    SampledLink,
)
from lapwing.likelihoods.mixtures import mixture_quantile
from tests.likelihoods.latents import dense_latent, integral, joint_latent, marginal_latent, random_latent

F64 = torch.float64


def some_draws(count=9, batch=3, size=2, seed=0, joint=False):
    generator = torch.Generator().manual_seed(seed)
    return LatentDraws(2 * torch.randn(count, batch, size, generator=generator, dtype=F64), joint)


# ---- every likelihood


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()], ids=lambda value: value.name)
def test_labels_are_drawn_with_their_probabilities(likelihood):
    """Draws 40 000 labels: five standard errors of at most 0.0025."""
    prediction = likelihood.predict(random_latent())
    labels = prediction.sample(40_000)
    assert labels.shape == (40_000, *prediction.classes.shape)
    assert labels.dtype == torch.int64
    assert torch.equal(labels, prediction.sample(40_000))
    assert not torch.equal(labels, prediction.sample(40_000, torch.Generator().manual_seed(1)))
    if likelihood == Categorical():
        labels = torch.nn.functional.one_hot(labels, 3)
    torch.testing.assert_close(labels.double().mean(0), prediction.probs, atol=0.0125, rtol=0)


@pytest.mark.quick(2)
@pytest.mark.parametrize("draws", [False, True], ids=["gaussian latent", "weight draws"])
@pytest.mark.parametrize(
    ("likelihood", "targets"),
    [
        (Categorical(), torch.tensor([0, 1])),
        (Bernoulli(), torch.tensor([[1, 0], [0, 1]])),
        (Gaussian(0.3), torch.zeros(2, 2)),
        (HeteroscedasticGaussian(), torch.zeros(2, 1)),
    ],
    ids=["categorical", "bernoulli", "gaussian", "heteroscedastic"],
)
def test_predictions_are_differentiable(likelihood, targets, draws):
    latent = random_latent(batch=2, size=2)

    def numbers(mean, root):
        made = LatentDraws(mean + root) if draws else dense_latent(mean, root @ root.mT)
        prediction = likelihood.predict(made)
        if likelihood.name in ("categorical", "bernoulli"):
            more = (prediction.confidence, prediction.entropy(), prediction.mutual_information(100))
        else:
            more = (prediction.mean, prediction.std, *prediction.interval())
        return prediction.log_prob(targets), *more

    root = torch.linalg.cholesky(latent.covariance).requires_grad_()
    assert torch.autograd.gradcheck(numbers, (latent.mean.requires_grad_(), root))


# ---- classes


def test_class_prediction_numbers():
    latent = random_latent(batch=5)
    prediction = Categorical().predict(latent)
    probs = prediction.probs
    assert isinstance(prediction, Prediction)
    torch.testing.assert_close(probs.sum(-1), torch.ones(5, dtype=F64))
    torch.testing.assert_close(prediction.confidence, probs.max(-1).values)
    assert torch.equal(prediction.classes, probs.argmax(-1))
    reference = prediction.distribution()
    torch.testing.assert_close(prediction.entropy(), reference.entropy())
    labels = torch.tensor([0, 1, 2, 1, 0])
    torch.testing.assert_close(prediction.log_prob(labels), reference.log_prob(labels))
    assert "5 inputs, 3 classes, link=Probit(scale='mean')" in repr(prediction)


def test_entropy_is_finite_at_certainty():
    latent = marginal_latent(torch.tensor([[300.0, 0.0]], requires_grad=True), torch.zeros(1, 2))
    entropy = Categorical().predict(latent).entropy()
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(0, abs=1e-6)
    assert latent.mean.grad.isfinite().all()


def test_labels_of_a_joint_latent_are_drawn_together():
    """Two inputs with the same uncertain logits: their labels agree more often than independent labels."""
    block = 4 * torch.eye(2, dtype=F64)
    covariance = block[None, :, None, :].expand(2, 2, 2, 2) + 1e-6 * torch.eye(4, dtype=F64).reshape(2, 2, 2, 2)
    latent = JointLatent(torch.zeros(2, 2, dtype=F64), covariance)
    labels = Categorical().predict(latent).sample(20_000)
    agreement = (labels[:, 0] == labels[:, 1]).double().mean()
    exact = integral(lambda f: f.softmax(-1).square().sum(-1), torch.zeros(2, dtype=F64), block)
    assert labels.shape == (20_000, 2)
    assert float(agreement) == pytest.approx(float(exact), abs=0.018)
    assert float(exact) > 0.6


@pytest.mark.parametrize("link", [Probit(), LaplaceBridge(), SampledLink(16)])
def test_mutual_information_of_a_gaussian_latent_against_integration(link):
    """20 000 draws against Gauss-Hermite integrals for every link; tolerance 0.01 nats."""
    latent = random_latent(size=2, scale=2.0)
    information = Categorical().predict(latent, link).mutual_information(draws=20_000)

    def entropy(probs):
        return torch.special.entr(probs).sum(-1)

    for value, mean, covariance in zip(information, latent.mean, latent.covariance, strict=True):
        average = integral(lambda f: f.softmax(-1), mean, covariance)
        inside = integral(lambda f: entropy(f.softmax(-1)), mean, covariance)
        assert float(value) == pytest.approx(float(entropy(average) - inside), abs=0.01)


def test_mutual_information_of_weight_draws_against_brute_force():
    latent = some_draws(size=3)
    information = Categorical().predict(latent).mutual_information()
    probs = latent.draws.softmax(-1)
    for b in range(3):
        mean = probs[:, b].mean(0)
        brute = sum(float((p * (p / mean).log()).sum()) for p in probs[:, b]) / len(probs)
        assert float(information[b]) == pytest.approx(brute, abs=1e-12)


def test_mutual_information_limits_and_randomness():
    latent = random_latent()
    prediction = Categorical().predict(latent)
    first = prediction.mutual_information(draws=64)
    assert torch.equal(first, prediction.mutual_information(draws=64))
    assert not torch.equal(first, prediction.mutual_information(draws=64, generator=torch.Generator().manual_seed(3)))
    certain = LatentDraws(torch.zeros(4, 2, 3) + torch.tensor([5.0, 0.0, -80.0]))
    assert (Categorical().predict(certain).mutual_information() < 1e-12).all()
    assert (first >= 0).all()
    assert (first <= math.log(3)).all()


# ---- regression, Gaussian latent


def test_regression_moments_and_interval():
    latent = random_latent()
    prediction = Gaussian(0.3).predict(latent)
    assert isinstance(prediction, Prediction)
    torch.testing.assert_close(prediction.epistemic_variance, latent.variance)
    torch.testing.assert_close(prediction.aleatoric_variance, torch.full((4, 3), 0.3, dtype=F64))
    torch.testing.assert_close(prediction.variance, latent.variance + 0.3)
    torch.testing.assert_close(prediction.std, (latent.variance + 0.3).sqrt())
    lower, upper = prediction.interval(0.9)
    normal = torch.distributions.Normal(prediction.mean, prediction.std)
    torch.testing.assert_close(normal.cdf(lower), torch.full((4, 3), 0.05, dtype=F64))
    torch.testing.assert_close(normal.cdf(upper), torch.full((4, 3), 0.95, dtype=F64))
    assert "4 inputs, 3 outputs, noise_variance=0.3" in repr(prediction)


def test_log_prob_survives_a_tiny_noise_in_float32():
    """Two almost perfectly correlated outputs and σ² = 1e-4: float32 would lose the digits in its Cholesky factor."""
    covariance = torch.tensor([[[1.0, 0.9999], [0.9999, 1.0]]])
    targets = torch.tensor([[0.1, 0.11]])
    value = Gaussian(1e-4).predict(dense_latent(torch.zeros(1, 2), covariance)).log_prob(targets)
    exact = multivariate_normal([0, 0], covariance[0].double().numpy() + 1e-4 * torch.eye(2).double().numpy())
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(exact.logpdf(targets[0].double()), rel=1e-5)


# ---- regression, weight draws


@pytest.mark.parametrize("noise", [0.3, [0.1, 0.5]])
def test_mixture_log_prob_against_brute_force(noise):
    latent, targets = some_draws(), torch.randn(3, 2, dtype=F64)
    prediction = Gaussian(noise).predict(latent)
    value = prediction.log_prob(targets)
    for b in range(3):
        densities = [multivariate_normal(draw[b], noise).pdf(targets[b]) for draw in latent.draws]
        assert float(value[b]) == pytest.approx(math.log(sum(densities) / len(densities)))
    torch.testing.assert_close(prediction.distribution().log_prob(targets), value)
    far = prediction.log_prob(targets + 1e4)  # underflows outside log space
    assert far.isfinite().all()


def test_mixture_quantile_between_far_components_stays_in_its_bracket():
    """With half the mass at -100 and half at 100, any point between them is a median."""
    draws = torch.tensor([-100.0, 100.0], dtype=F64).reshape(2, 1, 1)
    assert abs(float(mixture_quantile(draws, 0.01 + 0 * draws, 1 / len(draws) + 0 * draws, 0.5))) <= 100


def test_quantiles_far_inside_their_bracket_have_derivatives():
    """Half the mass is within 1e-8, the widest normal has a standard deviation of 1e40."""
    means, weights = torch.tensor([0.3, 0.3, -0.2]).double().reshape(3, 1, 1), torch.tensor([0.5, 0.4, 0.1]).double()
    logs = torch.tensor([-37.0, 1.0, 184.0]).double().reshape(3, 1, 1)
    for probability in (0.06, 0.3, 0.9):
        assert torch.autograd.gradcheck(
            lambda m, s, p=probability: mixture_quantile(m, s.exp(), weights.reshape(3, 1, 1), p),
            (means.clone().requires_grad_(), logs.clone().requires_grad_()),
            atol=1e-6,
        )


def test_the_crps_of_narrow_draws_is_that_of_points():
    """Also if one draw is far from the others."""
    draws, y = torch.randn(20, 3, 2, generator=torch.Generator().manual_seed(0)).double(), torch.randn(3, 2).double()
    draws[0] = 1e4
    wanted = (draws - y).abs().mean(0) - (draws - draws[:, None]).abs().mean((0, 1)) / 2
    torch.testing.assert_close(Gaussian(1e-18).predict(LatentDraws(draws)).crps(y), wanted, rtol=1e-6, atol=0)


# ---- mixtures of any family


def normals(event):
    """Return a mixture of Normals with drawn means and standard deviations, and its components; C = 2 if `event`."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, 7, 2) if event else (4, 7)
    normal = dist.Normal(
        torch.randn(shape, generator=generator, dtype=F64), 0.2 + torch.rand(shape, generator=generator, dtype=F64)
    )
    return MixturePrediction(dist.Independent(normal, 1) if event else normal), normal


@pytest.mark.parametrize("event", [False, True])
def test_mixture_moments_density_and_intervals(event):
    prediction, normal = normals(event)
    second = (normal.scale.square() + normal.loc.square()).mean(1)
    torch.testing.assert_close(prediction.variance, second - prediction.mean.square())
    torch.testing.assert_close(prediction.std.square(), prediction.epistemic_variance + prediction.aleatoric_variance)
    torch.testing.assert_close(prediction.aleatoric_variance, normal.scale.square().mean(1))
    y = prediction.mean + 0.3
    densities = torch.tensor(norm.pdf(y.unsqueeze(1), normal.loc, normal.scale))
    wanted = (densities.prod(-1) if event else densities).mean(1).log()
    torch.testing.assert_close(prediction.log_prob(y), wanted)
    if not event:
        torch.testing.assert_close(prediction.log_prob(y[:, None]), wanted)  # (B, 1), as other predictions take it
    for level in (0.5, 0.9, 0.999):
        for end, probability in zip(prediction.interval(level), ((1 - level) / 2, (1 + level) / 2), strict=True):
            below = torch.tensor(norm.cdf(end.unsqueeze(1), normal.loc, normal.scale)).mean(1)
            torch.testing.assert_close(below, torch.full_like(below, probability), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "family", [dist.LogNormal, dist.Gamma, dist.Uniform, dist.Cauchy, dist.Gumbel], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("validated", [True, False])  # compiling anything turns torch's own checks of supports off
def test_mixture_intervals_of_other_supports_come_from_draws(family, validated, monkeypatch):
    monkeypatch.setattr(dist.Distribution, "_validate_args", validated)
    low, high = torch.tensor([[0.5, 1.0], [0.6, 2.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    if family is dist.Gumbel:  # its `cdf` checks a support that is not its own
        low, high = 1000 * low, 0.001 * high
    prediction = MixturePrediction(family(low, high))
    lower, upper = prediction.interval(0.8)
    draws = prediction.sample(20000, torch.Generator().manual_seed(1))
    inside = ((draws >= lower) & (draws <= upper)).float().mean(0)
    torch.testing.assert_close(inside, torch.full_like(inside, 0.8), rtol=0, atol=0.03)


# ---- other units


@pytest.mark.parametrize("size", [1, 3])
def test_scaled_predictions_are_those_of_the_scaled_gaussian(size):
    latent = random_latent(batch=4, size=size)
    prediction = Gaussian(noise_variance=0.3).predict(latent)
    shift, scale = torch.linspace(-5, 90, size, dtype=F64), torch.linspace(0.1, 40, size, dtype=F64)
    scaled = prediction.scaled(shift.tolist(), scale.numpy())
    y = scaled.sample(1)[0]
    for i in range(4):
        noisy = latent.covariance[i] + 0.3 * torch.eye(size, dtype=F64)
        oracle = multivariate_normal(shift + scale * latent.mean[i], scale[:, None] * noisy * scale)
        assert float(scaled.log_prob(y)[i]) == pytest.approx(oracle.logpdf(y[i]), rel=1e-12)
        torch.testing.assert_close(scaled.variance[i], torch.from_numpy(oracle.cov).reshape(size, size).diagonal())
        torch.testing.assert_close(scaled.mean[i], torch.as_tensor(oracle.mean))
    torch.testing.assert_close(scaled.distribution().log_prob(y), scaled.log_prob(y))
    torch.testing.assert_close(scaled.aleatoric_variance, (0.3 * scale**2).expand(4, size))
    low, high = scaled.interval(0.8)
    torch.testing.assert_close((high - low) / 2, norm.ppf(0.9) * scaled.std)
    torch.testing.assert_close((high + low) / 2, scaled.mean)
    torch.testing.assert_close(scaled.sample(3), shift + scale * prediction.sample(3))
    whole = scaled.scaled(-shift / scale, 1 / scale)  # back again
    torch.testing.assert_close(whole.log_prob(latent.mean), prediction.log_prob(latent.mean))
    assert set(scaled.for_metrics(y)) == set(prediction.for_metrics(y))
    assert "ScaledPrediction(RegressionPrediction(4 inputs" in repr(scaled)


READERS = {
    "array": lambda y: y.numpy(),
    "array of float32": lambda y: y.float().numpy() if y.is_floating_point() else y.to(torch.int16).numpy(),
    "frame": lambda y: pytest.importorskip("pandas").DataFrame(y.numpy()),
}


@pytest.mark.parametrize("form", READERS)
@pytest.mark.parametrize("name", ["gaussian", "scaled", "draws", "poisson", "heteroscedastic", "bernoulli", "mixture"])
def test_log_prob_reads_arrays_and_frames(name, form):
    latent = random_latent(size=4)
    real, counts = torch.randn(len(latent.mean), 4, dtype=F64), torch.arange(4).expand(len(latent.mean), 4)
    prediction, y = {
        "gaussian": lambda: (Gaussian(0.3).predict(latent), real),
        "scaled": lambda: (Gaussian(0.3).predict(latent).scaled(100.0, 20.0), 100 + 20 * real),
        "draws": lambda: (Gaussian(0.3).predict(some_draws(batch=3, size=4)), real[:3]),
        "poisson": lambda: (Poisson().predict(latent), counts),
        "heteroscedastic": lambda: (HeteroscedasticGaussian().predict(latent), real[:, :2]),
        "bernoulli": lambda: (Bernoulli().predict(latent), counts > 1),
        "mixture": lambda: (normals(event=True)[0], torch.randn(4, 2, dtype=F64)),
    }[name]()
    rtol = 1e-5 if "float32" in form else 1e-12
    torch.testing.assert_close(prediction.log_prob(READERS[form](y)), prediction.log_prob(y), rtol=rtol, atol=rtol)


def test_scaled_draws_flat_targets_and_joint_latents():
    mixture = Gaussian(noise_variance=0.2).predict(some_draws(size=1))
    scaled = mixture.scaled(7, 3.0)
    y = torch.tensor([6.0, 7.0, 9.0])  # (B,) float32 beside float64 predictions
    torch.testing.assert_close(scaled.log_prob(y), mixture.log_prob((y.double() - 7) / 3) - math.log(3))
    torch.testing.assert_close(scaled.interval()[0], 7 + 3 * mixture.interval()[0])
    joint = Gaussian(noise_variance=0.2).predict(joint_latent()).scaled([1.0] * joint_latent().mean.shape[1], 2.0)
    count = joint.mean.numel()
    expected = joint.prediction.distribution().log_prob(torch.zeros(count, dtype=F64)) - count * math.log(2)
    torch.testing.assert_close(joint.distribution().log_prob(torch.ones(count, dtype=F64)), expected)
    counts, _ = normals(event=False)
    scaled = counts.scaled(10.0, 2.0)
    torch.testing.assert_close(scaled.log_prob(10 + 2 * counts.mean), counts.log_prob(counts.mean) - math.log(2))


def test_a_mixture_of_labels_has_probabilities():
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(50, 6, 3, generator=generator, dtype=F64).softmax(-1)
    prediction, y = ClassPrediction.mixture(draws), torch.arange(50) % 3
    probs = draws.mean(1)
    torch.testing.assert_close(prediction.log_prob(y), probs[torch.arange(50), y].log())
    torch.testing.assert_close(prediction.entropy(), -(probs * probs.log()).sum(-1))
    inside = -(draws * draws.log()).sum(-1).mean(1)
    torch.testing.assert_close(prediction.mutual_information(), prediction.entropy() - inside)
    assert torch.equal(prediction.point, probs.argmax(-1))
    assert {"labels", "log_prob", "probs"} <= prediction.for_metrics(y).keys()  # what lw.compare reads
    frequencies = torch.nn.functional.one_hot(prediction.sample(4000), 3).double().mean(0)
    assert (frequencies - probs).abs().max() < 0.05
