"""The BoTorch model: joint moments, conditioning and gradients against dense algebra and a fit to all the data."""

from __future__ import annotations

import runpy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests.refused import refused
from tests.trained import train

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("botorch")
    from botorch.acquisition import LogExpectedImprovement, qKnowledgeGradient, qLogExpectedImprovement
    from botorch.acquisition.objective import ScalarizedPosteriorTransform
    from botorch.optim import optimize_acqf
    from botorch.sampling import SobolQMCNormalSampler

    from lapwing.integrations.botorch import LaplaceModel

pytestmark = pytest.mark.filterwarnings("ignore")
NOISE, PRECISION = 0.3, 0.7


def fitted(outputs: int = 1, likelihood: lw.Likelihood | None = None) -> lw.Posterior:
    network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs)).double().eval()
    data = [(torch.randn(9, 2).double(), torch.randn(9, outputs).double())]
    return lw.fit(network, data, lw.KFAC(), likelihood=likelihood or lw.Gaussian(NOISE), prior_precision=PRECISION)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("shape", [(4, 2), (5, 1, 2), (2, 25, 3, 2)])
def test_moments_are_those_of_each_batch_by_itself(outputs: int, shape: tuple[int, ...]) -> None:
    posterior = fitted(outputs)
    X = torch.randn(shape).double()
    result = LaplaceModel(posterior).posterior(X)
    assert result.mean.shape == (*shape[:-1], outputs)
    size = shape[-2] * outputs
    covariances = result.distribution.covariance_matrix.reshape(-1, size, size)
    for x, mean, covariance in zip(X.reshape(-1, *shape[-2:]), result.mean.reshape(-1, size), covariances, strict=True):
        latent = posterior.latent(x, joint=True)
        assert torch.allclose(mean, latent.mean.flatten())
        assert torch.allclose(covariance, latent.covariance.reshape(size, size))
    assert result.rsample(torch.Size([3])).shape == (3, *result.mean.shape)


def linear(x: Tensor, y: Tensor) -> nn.Module:
    """Returns the linear network at its posterior mode, whose linearisation is exact."""
    network, rows = nn.Linear(2, 1).double().eval(), torch.cat([x, torch.ones(len(x), 1)], 1)
    precision = rows.T @ rows / NOISE + PRECISION * torch.eye(3)
    mode = torch.linalg.solve(precision, rows.T @ y / NOISE)[:, 0]
    with torch.no_grad():
        network.weight.copy_(mode[None, :2])
        network.bias.copy_(mode[2:])
    return network


def test_conditioning_is_the_fit_to_all_the_data() -> None:
    x, y = torch.randn(12, 2).double(), torch.randn(12, 1).double()

    def fit(count: int) -> LaplaceModel:
        data = [(x[:count], y[:count])]
        network = linear(*data[0])
        return LaplaceModel(lw.fit(network, data, lw.Full(), likelihood=lw.Gaussian(NOISE), prior_precision=PRECISION))

    X = torch.randn(6, 4, 2).double()
    whole, part = fit(12).posterior(X), fit(5)
    at_once = part.condition_on_observations(x[5:], y[5:])
    in_turn = part.condition_on_observations(x[5:8], y[5:8]).condition_on_observations(x[8:], y[8:])
    for model in (at_once, in_turn):
        result = model.posterior(X)
        assert torch.allclose(result.mean, whole.mean)
        assert torch.allclose(result.distribution.covariance_matrix, whole.distribution.covariance_matrix)
    assert torch.allclose(fit(12).posterior(X[0]).mean, at_once.posterior(X[0]).mean)
    assert not torch.allclose(part.posterior(X).mean, whole.mean)
    exact = part.condition_on_observations(x[5:], y[5:], noise=torch.tensor(1e-9)).posterior(x[5:8])
    assert torch.allclose(exact.distribution.covariance_matrix, torch.zeros(3, 3).double(), atol=1e-6)


@pytest.mark.parametrize("outputs", [1, 2])
def test_fantasies_are_batches_of_conditioned_models(outputs: int) -> None:
    model = LaplaceModel(fitted(outputs))
    X, points = torch.randn(3, 2, 2).double(), torch.randn(3, 4, 2).double()
    fantasy = model.fantasize(X, SobolQMCNormalSampler(torch.Size([5]), seed=0))
    assert fantasy.batch_shape == (5, 3)
    result = fantasy.posterior(points)
    drawn = SobolQMCNormalSampler(torch.Size([5]), seed=0)(model.posterior(X, observation_noise=True))
    for i in range(5):
        for j in range(3):
            alone = model.condition_on_observations(X[j], drawn[i, j]).posterior(points[j])
            assert torch.allclose(result.mean[i, j], alone.mean)
            assert torch.allclose(
                result.distribution.covariance_matrix[i, j], alone.distribution.covariance_matrix, atol=1e-12
            )


def test_noise_outputs_and_transforms() -> None:
    model, X = LaplaceModel(fitted(2)), torch.randn(4, 3, 2).double()
    plain, noisy = model.posterior(X), model.posterior(X, observation_noise=True)
    assert torch.allclose(noisy.variance, plain.variance + NOISE)
    own = torch.tensor([0.1, 0.2]).double()
    assert torch.allclose(model.posterior(X, observation_noise=own).variance, plain.variance + own)
    second = model.posterior(X, output_indices=[1])
    assert torch.allclose(second.mean, plain.mean[..., 1:])
    assert torch.allclose(second.variance, plain.variance[..., 1:])
    weights = torch.tensor([1.0, -2.0]).double()
    mixed = model.posterior(X, posterior_transform=ScalarizedPosteriorTransform(weights))
    assert torch.allclose(mixed.mean[..., 0], plain.mean @ weights)


def noisy(outputs: int = 1) -> lw.Posterior:
    """A posterior whose noise grows with the first input, and has tails."""
    torch.manual_seed(0)
    x = torch.randn(400, 2).double()
    y = x @ torch.ones(2, outputs).double() + (1.5 * x[:, :1]).exp() * torch.randn(400, outputs).double()
    network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs)).double()
    train(network, lambda: (network(x) - y).square().mean(), 100)
    likelihood = lw.Gaussian(noise="input", tails=None)
    return lw.fit(network, (x, y), lw.KFAC(), likelihood=likelihood, tune=lw.BoundedEvidence())


NOISES: dict[str, Callable[[], lw.Posterior]] = {
    "of each output": lambda: fitted(2, lw.Gaussian([0.1, 2.0])),
    "in ratios": lambda: fitted(2, lw.Gaussian(noise_ratios=[1, 25])),
    "of each input": noisy,
    "of each input and output": lambda: noisy(2),
}


@pytest.mark.parametrize("kind", NOISES)
def test_each_output_and_input_has_its_own_noise(kind: str) -> None:
    posterior = NOISES[kind]()
    model, X = LaplaceModel(posterior), torch.randn(4, 3, 2).double()
    plain, with_noise = model.posterior(X), model.posterior(X, observation_noise=True)
    prediction = posterior.predict(X.flatten(0, 1))
    noise = prediction.aleatoric_variance.view_as(plain.mean)
    assert noise.amax() > 5 * noise.amin()
    assert torch.allclose(with_noise.mean, prediction.mean.view_as(noise))
    assert torch.allclose(with_noise.variance, prediction.variance.view_as(noise))
    assert torch.allclose(with_noise.variance - plain.variance, noise)

    x, y = torch.randn(5, 2).double(), torch.randn(5, model.num_outputs).double()
    of_x, latent = posterior.predict(x).aleatoric_variance.flatten(), posterior.latent(torch.cat([x, X[0]]), joint=True)
    n, mean, covariance = len(of_x), latent.mean.flatten(), latent.covariance.flatten(2).flatten(0, 1)
    gain = covariance[n:, :n] @ torch.linalg.inv(covariance[:n, :n] + torch.diag(of_x))
    after = model.condition_on_observations(x, y).posterior(X[0])
    assert torch.allclose(after.mean.flatten(), mean[n:] + gain @ (y.flatten() - mean[:n]))
    assert torch.allclose(after.distribution.covariance_matrix, covariance[n:, n:] - gain @ covariance[:n, n:])

    Y = torch.randn(4, 3, model.num_outputs).double()
    seen, wanted = (model.condition_on_observations(X, Y, each).posterior(X + 0.1) for each in (None, noise))
    assert torch.allclose(seen.mean, wanted.mean)
    assert torch.allclose(seen.variance, wanted.variance)
    one_by_one = model.condition_on_observations(X[:, :1], Y[:, :1]).condition_on_observations(X[:, 1:], Y[:, 1:])
    assert torch.allclose(one_by_one.posterior(X + 0.1).mean, wanted.mean)
    first, again = (SobolQMCNormalSampler(torch.Size([5]), seed=0) for _ in range(2))
    fantasies, wanted = model.fantasize(X, first), model.condition_on_observations(X, again(with_noise), noise)
    assert torch.allclose(fantasies.posterior(X).mean, wanted.posterior(X).mean)

    def moments(X: Tensor) -> Tensor:
        return model.posterior(X, observation_noise=True).variance

    assert torch.autograd.gradcheck(moments, torch.randn(2, 2, 2).double().requires_grad_())


@pytest.mark.parametrize("seen", [False, True])
def test_gradients_reach_the_inputs(seen: bool) -> None:
    model = LaplaceModel(fitted())
    if seen:
        model = model.condition_on_observations(torch.randn(2, 2).double(), torch.randn(2, 1).double())

    def moments(X: Tensor) -> tuple[Tensor, Tensor]:
        result = model.posterior(X)
        return result.mean, result.distribution.covariance_matrix

    assert torch.autograd.gradcheck(moments, torch.randn(2, 2, 2).double().requires_grad_())


def test_acquisition_functions_are_optimised_and_the_network_stays() -> None:
    posterior = fitted()
    model = LaplaceModel(posterior).train()
    assert not posterior.model.training
    bounds = torch.tensor([[-1.0, -1.0], [1.0, 1.0]]).double()
    for acquisition, q in (
        (LogExpectedImprovement(model, best_f=0.2), 1),
        (qLogExpectedImprovement(model, 0.2, sampler=SobolQMCNormalSampler(torch.Size([16]), seed=0)), 2),
    ):
        X, value = optimize_acqf(acquisition, bounds, q, num_restarts=2, raw_samples=8, options={"maxiter": 5})
        assert X.shape == (q, 2)
        assert value.isfinite()
    gradient = qKnowledgeGradient(model, num_fantasies=3)
    assert gradient(torch.randn(2, 4, 2).double()).shape == (2,)
    assert all(weight.grad is None for weight in posterior.model.parameters())


def test_what_is_refused() -> None:
    refused(lambda: LaplaceModel(nn.Linear(2, 1)), "needs a posterior")
    classifier = lw.fit(nn.Linear(2, 3).eval(), [(torch.randn(9, 2), torch.arange(9) % 3)], prior_precision=1.0)
    model = LaplaceModel(classifier)
    assert model.posterior(torch.randn(4, 1, 2)).mean.shape == (4, 1, 3)
    refused(lambda: model.posterior(torch.randn(4, 1, 2), observation_noise=True), "no noise variance")
    options = {"likelihood": lw.HeteroscedasticGaussian(), "prior_precision": 1.0}
    other = lw.fit(nn.Linear(2, 2).eval(), [(torch.randn(9, 2), torch.randn(9, 1))], **options)
    refused(lambda: LaplaceModel(other), "HeteroscedasticGaussian")
    real = LaplaceModel(fitted())
    for y in (torch.randn(4).double(), torch.randn(4, 2).double(), torch.randn(3, 1).double()):
        refused(lambda y=y: real.condition_on_observations(torch.randn(4, 2).double(), y), "write y[:, None]")


@pytest.mark.slow
def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "bayesian_optimisation.py"
    runpy.run_path(str(example))["main"](steps=1, seeds=1)
    assert "below the maximum by expected improvement" in capsys.readouterr().out
