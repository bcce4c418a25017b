"""Mean-field variational inference: draws against their distributions, fine-tuning against closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.covariance.base import join_blocks
from lapwing.data.inputs import Inputs
from lapwing.fitting.mean_field.fine_tuning import divergence, drawn_outputs, per_sample_axes
from lapwing.tangent import Tangent
from tests import oracle
from tests.conformance import EVERY, Setup, close, sampled_from
from tests.fitting.test_swag import NETWORKS
from tests.network.test_untouched import untouched
from tests.zoo import ZOO
from tests.zoo_modules import Net

SHORT = lw.MeanField(steps=4, initial_std=0.05)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loader_of(name: str) -> tuple[nn.Module, list[Any], Any]:
    """A network of the zoo, its data in uneven batches, and test inputs."""
    problem = Setup(ZOO[name], EVERY)
    return problem.model, problem.loader, problem.test


def test_divergence_equals_torch_distributions():
    log_std, offset = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    for precision in (torch.tensor(3.0, dtype=torch.float64), torch.rand(7, dtype=torch.float64) + 0.1):
        q = torch.distributions.Normal(offset, log_std.exp())
        p = torch.distributions.Normal(torch.zeros(7, dtype=torch.float64), precision.rsqrt().expand(7))
        close(divergence(log_std, offset, precision), torch.distributions.kl_divergence(q, p).sum())


# --- the draws -------------------------------------------------------------------------------------------------------


def by_hand() -> nn.Module:
    """A linear layer at two positions by the transpose of its weight."""
    return Net(lambda net, x: (x @ net.weight.T).flatten(1), weight=nn.Parameter(torch.randn(2, 3)))


def recurrent() -> nn.Module:
    """A GRU, whose weights serve the batch with one draw, and a head."""
    layer = nn.GRU(3, 4, batch_first=True)
    return Net(lambda net, x: net.head(net.layer(x)[1][0]), layer=layer, head=nn.Linear(4, 2))


def positions() -> nn.Module:
    """A linear layer at several positions, a convolution with one, a norm, then a linear layer."""
    parts = {"tokens": nn.Linear(3, 4), "conv": nn.Conv1d(4, 5, 2), "norm": nn.LayerNorm(5), "head": nn.Linear(5, 2)}
    return Net(lambda net, x: net.head(net.norm(net.conv(net.tokens(x).mT).flatten(1))), **parts)


def problem(model: nn.Module, x: Any, spread: float = 0.1) -> tuple[Tangent, dict[str, Tensor], dict[str, Tensor]]:
    """The surveyed network, its weights, and a σ of each."""
    tangent = Tangent.survey(model, x, EVERY)
    means = {name: value.detach() for name, value in tangent.parameters.items()}
    stds = {n: spread * (0.5 + torch.rand(m.shape, generator=generator(5), dtype=m.dtype)) for n, m in means.items()}
    return tangent, means, stds


CASES: dict[str, tuple[Any, Any]] = {
    "one position": (lambda: nn.Sequential(nn.Linear(3, 2)), (2, 3)),
    "without bias": (lambda: nn.Sequential(nn.Linear(3, 2, bias=False)), (2, 3)),
    "tokens": (lambda: nn.Sequential(nn.Linear(3, 2), nn.Flatten()), (2, 2, 3)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 2, 2, padding=1), nn.Flatten()), (2, 2, 2, 2)),
    "conv with one position": (lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten()), (2, 2, 2, 2)),
    "transposed by hand": (by_hand, (2, 2, 3)),
    "transposed conv": (lambda: nn.Sequential(nn.ConvTranspose1d(2, 2, 2, 2), nn.Flatten()), (2, 2, 2)),
    "grouped conv": (lambda: nn.Sequential(nn.Conv2d(2, 4, 2, 2, 1, groups=2), nn.Flatten()), (2, 2, 2, 2)),
}  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", CASES)
def test_draws_of_one_layer_have_the_moments_of_shared_weights(case):
    """The outputs of a sample, all positions together, have the mean and covariance `J diag(σ²) Jᵀ`."""
    build, shape = CASES[case]
    model = build().double().eval()
    x = torch.randn(shape, dtype=torch.float64)
    tangent, means, stds = problem(model, x)
    axes, source = per_sample_axes(tangent), generator(2)
    assert set(axes) == set(means)
    with torch.no_grad():
        draws = torch.stack([drawn_outputs(tangent, Inputs(x), means, stds, axes, source) for _ in range(1500)])
    names = list(means)
    sigma = torch.diag(torch.cat([stds[n].flatten() for n in names]).square())
    wanted = oracle.output_covariance(oracle.jacobian(model, x, names), sigma)
    for n, (mean, covariance) in enumerate(zip(oracle.outputs(model, x), wanted, strict=True)):
        sampled_from(draws[:, n] - mean, covariance)
    between = (draws[:, 0] - oracle.outputs(model, x)[0]).T @ (draws[:, 1] - oracle.outputs(model, x)[1]) / len(draws)
    limit = 5.5 * (wanted[0].diagonal()[:, None] * wanted[1].diagonal() / len(draws)).sqrt()
    assert (between.abs() <= limit).all()  # samples draw their own weights: shared ones would be correlated


@pytest.mark.parametrize("kind", [positions, recurrent])
def test_draws_of_a_network_have_the_distribution_of_shared_weights(kind):
    """A deep network: mean and covariance of a sample's outputs, and of products, within their standard errors."""
    model = kind().double().eval()
    x = torch.randn(2, 2, 3, dtype=torch.float64)
    tangent, means, stds = problem(model, x, 0.3)
    axes = per_sample_axes(tangent)
    assert set(axes) == {name for name in means if "norm" not in name}
    with torch.no_grad():
        source = generator(3)
        mine = torch.stack([drawn_outputs(tangent, Inputs.of(x), means, stds, axes, source) for _ in range(1500)])
    source, theirs = generator(1), []  # outputs (1500, B, C) of the network itself at drawn weights
    for _ in range(1500):
        w = {n: m + stds[n] * torch.randn(m.shape, generator=source, dtype=m.dtype) for n, m in means.items()}
        with torch.no_grad():
            theirs.append(torch.func.functional_call(tangent.model, w, (x,)))
    for power in (lambda f: f, lambda f: f.square(), lambda f: (f > 0).double(), lambda f: f.prod(-1, keepdim=True)):
        a, b = power(mine), power(torch.stack(theirs))
        error = ((a.var(0) + b.var(0)) / 1500).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() <= 5 * error).all()


def test_weights_used_twice_share_a_draw():
    for name in ("tied", "shared_module"):
        model, batches, _ = loader_of(name)
        tangent = Tangent.survey(model, batches[0][0], EVERY)
        names = [n for use in tangent.plan.order for _, n in use.names]
        assert not {n for n in per_sample_axes(tangent) if names.count(n) > 1}
        assert any(names.count(n) > 1 for n in names)


# --- fine-tuning -----------------------------------------------------------------------------------------------------


def regression(outputs: int = 1) -> tuple[nn.Linear, Tensor, Tensor]:
    """A linear model, not at its mode, with correlated inputs."""
    x = torch.randn(40, 3, generator=generator(1), dtype=torch.float64)
    x[:, 2] += 0.7 * x[:, 0]
    y = x @ torch.randn(3, outputs, generator=generator(2), dtype=torch.float64)
    y = y + 0.5 * torch.randn(y.shape, generator=generator(3), dtype=torch.float64)
    return nn.Linear(3, outputs, bias=False).double().eval(), x, y


CONJUGATE = lw.MeanField(steps=1000, learning_rate=0.02, std_rate=0.01, initial_std=0.1)


def test_conjugate_regression_reaches_the_closed_form():
    """The best diagonal Gaussian has the exact mean, and variances 1 / diagonal of the exact precision.

    Within 0.1 standard deviations and 5 % of one: the steps are random, off by about 2 %, and without bias.
    """
    temperature, centre = 3.0, 0.4
    model, x, y = regression(2)
    posterior = lw.fit(
        model, [(x[:20], y[:20]), (x[20:], y[20:])], CONJUGATE, likelihood=lw.Gaussian(0.25), prior_precision=4.0,
        prior_mean=centre, temperature=temperature,
    )  # fmt: skip
    precision = x.T @ x / 0.25 / temperature + 4 * torch.eye(3, dtype=torch.float64)
    mean = torch.linalg.solve(precision, x.T @ y / 0.25 / temperature + 4 * centre).T
    std = precision.diagonal().rsqrt().expand(2, 3)
    assert ((posterior.model.weight.detach() - mean).abs() <= 0.1 * std).all()
    found = posterior.covariance.diagonal()[posterior.tangent.blocks[0].name].reshape(2, 3)
    torch.testing.assert_close(found.sqrt(), std.contiguous(), rtol=0.05, atol=0)
    assert (model.weight - mean).abs().max() > 5 * std.max()  # it did move


def test_prior_and_noise_are_learned():
    """At the optimum δ = P / (‖m‖² + Σσ²), and σ² = E‖y - f‖² / N, both with the closed form's own values."""
    model, x, y = regression(2)
    posterior = lw.fit(model, [(x, y)], CONJUGATE, tune=None)
    block = posterior.tangent.blocks[0].name
    mean, variance = posterior.model.weight.detach(), posterior.covariance.diagonal()[block].reshape(2, 3)
    delta = float(posterior.prior.precision[0])
    assert delta == pytest.approx(6 / float(mean.square().sum() + variance.sum()), rel=1e-9)
    residual = (y - x @ mean.T).square().sum() + (x.square() @ variance.T).sum()
    assert posterior.noise_variance == pytest.approx(float(residual) / 80, rel=0.05)
    precision = x.T @ x / posterior.noise_variance + delta * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(
        variance.rsqrt(), precision.diagonal().sqrt().expand(2, 3).contiguous(), rtol=0.05, atol=0
    )
    close(mean, torch.linalg.solve(precision, x.T @ y / posterior.noise_variance).T, 0.03)
    assert posterior.history["noise_variance"][-1] == pytest.approx(posterior.noise_variance, rel=0.02)
    assert posterior.history["prior_precision"][-1] == pytest.approx(delta, rel=0.01)
    assert posterior.prior_precision == pytest.approx(delta, rel=0.01)


def test_objective_is_the_lower_bound():
    """With tiny steps it is `-E log p + KL`, E in closed form, up to the noise of the draws; below log evidence."""
    model, x, y = regression()
    still = lw.MeanField(steps=400, learning_rate=1e-12, std_rate=1e-12, initial_std=0.05)
    posterior = lw.fit(model, [(x, y)], still, likelihood=lw.Gaussian(0.25), prior_precision=4.0)
    w = model.weight.detach()[0]
    squares = (y[:, 0] - x @ w).square().sum() + 0.05**2 * x.square().sum()
    log_likelihood = -0.5 * squares / 0.25 - 20 * math.log(2 * math.pi * 0.25)
    apart = divergence(torch.full((3,), math.log(0.05), dtype=torch.float64), w, torch.tensor(4.0, dtype=torch.float64))
    history = posterior.history
    error = history["objective"].std() / 20
    assert abs(history["objective"].mean() - (apart - log_likelihood)) < 5 * error
    close(history["divergence"], apart.expand(400), 1e-6)
    close(history["objective"], history["divergence"] - 40 * history["log_likelihood"])
    covariance = 0.25 * torch.eye(40, dtype=torch.float64) + x @ x.T / 4
    zero = torch.zeros(40, dtype=torch.float64)
    evidence = torch.distributions.MultivariateNormal(zero, covariance).log_prob(y[:, 0])
    assert -history["objective"].mean() < evidence
    tuned = lw.fit(model, [(x, y)], CONJUGATE, likelihood=lw.Gaussian(0.25), prior_precision=4.0)
    assert evidence - 1.5 < -tuned.history["objective"][-300:].mean() < evidence


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", NETWORKS)
def test_any_network_can_be_tuned(name):
    """The user's network is untouched, the mean has moved, and every way of prediction works on the copy."""
    model, batches, test = loader_of(name)
    before = oracle.outputs(model, test)
    (posterior,) = untouched(model, lambda: lw.fit(model, batches, SHORT, params=EVERY, seed=3))
    linearized, drawn = untouched(
        model, lambda: posterior.latent(test), lambda: posterior.predict(test, via=lw.MonteCarlo(5))
    )
    close(oracle.outputs(model, test), before)
    assert posterior.model is not oracle.uncompiled(model)
    close(linearized.mean, oracle.outputs(posterior.model, test))
    assert not torch.allclose(linearized.mean, before, rtol=1e-9, atol=0)
    assert (linearized.variance > 0).all()
    assert drawn.log_prob(ZOO[name].targets(3, 2)).isfinite().all()
    diagonal = join_blocks(posterior.tangent.blocks, posterior.covariance.diagonal())
    assert diagonal.shape == (posterior.tangent.size,)
    assert ((diagonal > 0.045**2) & (diagonal < 0.055**2)).all()


def test_steps_that_end_before_the_data_do():
    """Statistics and scale are those of the samples seen, at the moved mean."""
    model, x, y = regression()
    batches = [(x[:10], y[:10]), (x[10:20], y[10:20]), (x[20:], y[20:])]
    posterior = lw.fit(model, batches, lw.MeanField(steps=2, learning_rate=0.1), likelihood=lw.Gaussian(0.25))
    assert posterior.samples == 20
    assert posterior.data_factor == pytest.approx(2.0)
    residual = (y[:20] - x[:20] @ posterior.model.weight.detach().T).square().sum()
    close(posterior.statistics["squared_error"], residual)
    whole = lw.fit(model, batches, lw.MeanField(steps=4, learning_rate=0.1), likelihood=lw.Gaussian(0.25))
    assert (whole.samples, whole.data_factor) == (40, 1.0)
    close(whole.statistics["squared_error"], (y - x @ whole.model.weight.detach().T).square().sum())


def test_divergence_raises_and_leaves_the_network():
    model, x, y = regression()
    model.float()

    def diverge() -> None:
        with pytest.raises(lw.LapwingError, match=r"not finite\. Take smaller.*MeanField\(learning_rate=1e\+15"):
            lw.fit(model, [(1e20 * x.float(), y.float())], lw.MeanField(steps=50, learning_rate=1e16))

    untouched(model, diverge)


# --- an optimiser's state, and given variances ------------------------------------------------------------------------


class Ivon(torch.optim.Optimizer):
    """The state that an IVON optimiser has, with random curvatures."""

    def __init__(self, parameters: Any, ess: float = 50.0, weight_decay: float = 0.1) -> None:
        super().__init__(parameters, {"ess": ess, "weight_decay": weight_decay})
        for number, group in enumerate(self.param_groups):
            size = sum(value.numel() for value in group["params"])
            group["hess"] = torch.rand(size, generator=generator(number), dtype=group["params"][0].dtype)

    def step(self, closure: Any = None) -> None: ...


def flat_variances(posterior: lw.Posterior) -> dict[str, Tensor]:
    """σ² by parameter."""
    return {n: v for b in posterior.tangent.blocks for n, v in b.split(posterior.covariance.diagonal()[b.name]).items()}


def test_variances_of_several_groups_are_exact():
    """Groups in another order than the network's parameters, each with its own numbers; biases apart from weights."""
    model, batches, test = loader_of("cnn_bn_inplace")
    named = dict(model.named_parameters())
    biases = [name for name in named if name.endswith("bias")][::-1]
    weights = [name for name in named if name not in biases]
    optimiser = Ivon([{"params": [named[n] for n in biases], "ess": 7.0},
                      {"params": [named[n] for n in weights], "weight_decay": 0.3}])  # fmt: skip
    (posterior,) = untouched(model, lambda: lw.MeanField.from_optimizer(model, optimiser, batches))
    untouched(model, lambda: posterior.predict(test, via=lw.MonteCarlo(3)))
    assert posterior.model is model
    found = flat_variances(posterior)
    for names, group in zip((biases, weights), optimiser.param_groups, strict=True):
        parts = group["hess"].split([named[name].numel() for name in names])
        for name, h in zip(names, parts, strict=True):
            close(found[name].flatten(), 1 / (group["ess"] * (h + group["weight_decay"])), 1e-12)
    close(posterior.latent(test).mean, oracle.outputs(model, test))
    twice = flat_variances(lw.MeanField.from_optimizer(model, optimiser, batches, scale=2.0))
    assert all(torch.allclose(twice[name], 2 * value) for name, value in found.items())


def test_given_variances(reloaded):
    model, batches, test = loader_of("mlp")
    variances = {"0.weight": torch.rand(model[0].weight.shape).double(), "2.bias": torch.zeros_like(model[2].bias)}
    posterior = lw.MeanField.from_variances(model, variances, batches)
    found = flat_variances(posterior)
    assert set(found) == set(variances)
    assert all(torch.equal(found[name], value) for name, value in variances.items())
    close(reloaded(posterior, model).latent(test).variance, posterior.latent(test).variance)
