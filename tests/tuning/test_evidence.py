"""The evidence, constants included, against dense oracles and closed forms, and its maximum by tuning."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import lapwing as lw
from tests import oracle
from tests.conformance import NOISE, Setup, close, covering, cut, picked_rows, setup, subspace
from tests.quick import others_slow
from tests.trained import train

SLOW = pytest.mark.slow
METHODS = {
    "full": lw.Full(form="primal"), "dual": lw.Full(form="dual"), "diagonal": lw.Diagonal(), "kfac": lw.KFAC(),
    "ekfac": lw.EKFAC(), "ella": lw.ELLA(rank=5, rows=8), "ella_residual": lw.ELLA(rank=5, rows=8, residual="prior"),
}  # fmt: skip
EXACT = {
    "full": lw.Full(form="primal"), "dual": lw.Full(form="dual"), "kfac": lw.KFAC(), "ekfac": lw.EKFAC(),
    "ella": lw.ELLA(rank=100, rows="all", residual="prior"),
}  # fmt: skip
CASES = ("mlp", "deep_linear", "conv1d", "prelu", "tied", "residual_block")


def every(table: dict):
    return pytest.mark.parametrize("method", table.values(), ids=table.keys())


def dense_evidence(
    problem: Setup, method: lw.Method, delta: Tensor, factor: float, tau: float, mean0: float, bound: bool
) -> Tensor:
    """The evidence of a method by dense algebra at its own curvature, δ (P,)."""
    G = problem.G * factor / tau
    eye = torch.eye(len(G)).double()
    offset = problem.theta - mean0
    root = torch.diag(delta.rsqrt())
    value = problem.log_likelihood * factor / tau - 0.5 * (offset * delta * offset).sum()
    if isinstance(method, lw.ELLA):
        V = subspace(picked_rows(problem, method.rows), method.rank)
        whitened = root @ G @ root
        value = value - 0.5 * torch.linalg.slogdet(torch.eye(len(V)).double() + V @ whitened @ V.T)[1]
        return value - 0.5 * ((eye - V.T @ V) @ whitened).trace() if bound else value
    if isinstance(method, lw.Diagonal):
        G = torch.diag(G.diagonal())
    if isinstance(method, (lw.KFAC, lw.EKFAC)):  # its Σ has an oracle of its own
        sigma = problem.fit(
            method, data_size=round(9 * factor), temperature=tau, prior_precision=float(delta[0])
        ).covariance.to_dense()
        return value + 0.5 * (torch.linalg.slogdet(sigma)[1] + delta.log().sum())
    return value - 0.5 * torch.linalg.slogdet(eye + root @ G @ root)[1]


@covering(CASES, others_slow(["conv1d", "tied"], ["conv1d"]), METHODS, "dual")
def test_evidence_equals_dense(name, method):
    problem = setup(name)
    size = len(problem.theta)
    for delta, factor, tau, mean0 in ((0.03, 4, 1.0, 0.5), (5.0, 1, 3.0, -0.2)):
        fitted = problem.fit(method, prior_precision=delta, data_size=9 * factor, temperature=tau, prior_mean=mean0)
        for bound in (False, True):
            wanted = dense_evidence(problem, method, oracle.precision_vector(delta, size), factor, tau, mean0, bound)
            assert fitted.log_marginal_likelihood(lower_bound=bound) == pytest.approx(float(wanted), rel=1e-8)


@pytest.mark.parametrize("name", ["mlp", "conv1d", "prelu"])
@pytest.mark.parametrize("form", ["primal", "dual"])
def test_evidence_by_layer(name, form):
    problem = setup(name)
    values = torch.tensor([0.3 * 1.8**i for i in range(len(problem.blocks))], dtype=torch.float64)
    by_name = {block.name: float(v) for block, v in zip(problem.blocks, values, strict=True)}
    fitted = problem.fit(lw.Full(form=form), prior_precision=by_name)
    wanted = oracle.evidence(problem.log_likelihood, problem.theta, problem.G, problem.expand(values))
    assert fitted.log_marginal_likelihood() == pytest.approx(float(wanted), rel=1e-10)
    moved = problem.fit(lw.Full(form=form)).with_prior(by_name)
    assert moved.log_marginal_likelihood() == pytest.approx(float(wanted), rel=1e-10)


def test_prior_mean_by_parameter():
    problem = setup("mlp")
    means = {"2.weight": torch.full((5, 6), 0.7).double(), "4.bias": torch.tensor([1.0, 2.0, 3.0]).double()}
    fitted = problem.fit(lw.Full(), prior_mean=means)
    full = {n: means.get(n, torch.zeros_like(p)) for n, p in problem.tangent.parameters.items()}
    mean0 = torch.cat([block.join(full) for block in problem.blocks])
    wanted = oracle.evidence(problem.log_likelihood, problem.theta, problem.G, 2.0, mean0)
    assert fitted.log_marginal_likelihood() == pytest.approx(float(wanted), rel=1e-10)


# --- linear-Gaussian models ------------------------------------------------------------------------------------------


def closed_form(x: Tensor, y: Tensor, delta: float, noise: float, mean0: float) -> float:
    """Log p(y) of Bayesian linear regression, outputs independent."""
    design = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    marginal = MultivariateNormal(design.sum(1) * mean0, design @ design.T / delta + noise * torch.eye(len(x)).double())
    return float(marginal.log_prob(y.T).sum())


@pytest.mark.quick(4)
@every(EXACT)
@pytest.mark.parametrize(("delta", "noise", "mean0"), [(0.5, 0.3, 0.0), (20.0, 0.05, 0.4), (1e-3, 2.0, -1.0)])
def test_linear_regression_is_conjugate(method, delta, noise, mean0):
    """Posterior, predictive and evidence at the mode are the closed forms."""
    x, model = torch.randn(12, 3, dtype=torch.float64), nn.Linear(3, 2).double().eval()
    y = x @ torch.randn(3, 2, dtype=torch.float64) + 0.5 + 0.4 * torch.randn(12, 2, dtype=torch.float64)
    design = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    precision = design.T @ design / noise + delta * torch.eye(4).double()
    mode = torch.linalg.solve(precision, design.T @ y / noise + delta * mean0)  # (I + 1, O)
    with torch.no_grad():
        model.weight.copy_(mode[:-1].T)
        model.bias.copy_(mode[-1])
    sigma = torch.linalg.inv(precision)  # of one output
    loader = cut(x, y, (5, 4, 3))
    fitted = lw.fit(model, loader, method, likelihood=lw.Gaussian(noise), prior_precision=delta, prior_mean=mean0)
    close(fitted.covariance.to_dense(), torch.block_diag(sigma, sigma), 1e-8)
    wanted = pytest.approx(closed_form(x, y, delta, noise, mean0), rel=1e-9)
    assert fitted.log_marginal_likelihood() == wanted
    assert fitted.log_marginal_likelihood(linearised_mode=True, loader=loader) == wanted
    new = torch.randn(4, 3, dtype=torch.float64)
    design = torch.cat([new, torch.ones(4, 1).double()], 1)
    prediction = fitted.predict(new)
    epistemic = (design @ sigma * design).sum(1)[:, None].expand(-1, 2)
    close(prediction.mean, design @ torch.cat([model.weight.T, model.bias[None]]).detach(), 1e-10)
    close(prediction.variance, epistemic + noise, 1e-8)
    close(prediction.epistemic_variance, epistemic, 1e-8)
    target = torch.randn(4, 2, dtype=torch.float64)
    density = torch.distributions.Normal(prediction.mean, (epistemic + noise).sqrt()).log_prob(target).sum(1)
    close(prediction.log_prob(target), density, 1e-8)


@pytest.mark.quick(4)
@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.parametrize("name", ["mlp_scalar", "deep_linear", "conv1d", "prelu", "lstm"])
def test_linearised_mode_is_the_linearised_networks_evidence(name, form):
    """`y ~ N(f + J(μ0 - θ̂), J Δ⁻¹ Jᵀ + σ²I)`, one δ a layer; on batches cut smaller than the loader's too."""
    problem = setup(name)
    values = torch.tensor([0.3 * 1.8**i for i in range(len(problem.blocks))], dtype=torch.float64)
    J = problem.J.flatten(0, 1)
    mean = problem.f.flatten() + J @ (0.1 - problem.theta)
    observed = J @ torch.diag(1 / problem.expand(values)) @ J.T + NOISE * torch.eye(len(J)).double()
    wanted = MultivariateNormal(mean, observed).log_prob(problem.y.flatten())
    by_name = {block.name: float(v) for block, v in zip(problem.blocks, values, strict=True)}
    fitted = problem.fit(lw.Full(form=form), prior_precision=by_name, prior_mean=0.1)
    for loader in (problem.loader, cut(problem.x, problem.y, (9,))):
        found = fitted.log_marginal_likelihood(linearised_mode=True, loader=loader)
        assert found == pytest.approx(float(wanted), rel=1e-9)


@pytest.mark.parametrize(("factor", "tau"), [(1, 1.0), (4, 1.0), (1, 3.0), (4, 3.0)])
def test_linearised_mode_of_classes(factor, tau):
    """`1/2 gᵀΣg` is added, `g = k Σ_n J_nᵀ(onehot(y_n) - p_n) - δ(θ̂ - μ0)`, k = N/(n τ)."""
    problem, k = setup("mlp"), factor / tau
    g = -0.7 * (problem.theta - 0.1)
    for J_n, f_n, y_n in zip(problem.J, problem.f, problem.y, strict=True):
        g = g + k * (J_n[y_n] - J_n.T @ torch.softmax(f_n, 0))
    wanted = oracle.evidence(k * problem.log_likelihood, problem.theta, k * problem.G, 0.7, 0.1)
    wanted = wanted + 0.5 * g @ oracle.laplace_covariance(k * problem.G, 0.7) @ g
    options = {"prior_precision": 0.7, "prior_mean": 0.1, "data_size": 9 * factor, "temperature": tau}
    found = problem.fit(lw.Full(), **options).log_marginal_likelihood(linearised_mode=True, loader=problem.loader)
    assert found == pytest.approx(float(wanted), rel=1e-9)


# --- tuning ----------------------------------------------------------------------------------------------------------


def value(posterior: lw.Posterior, shift: Tensor | float, log_noise: float = 0.0) -> float:
    """The objective of the tuning at δ exp(shift) and σ² exp(log_noise)."""
    precision = posterior.prior.precision * torch.as_tensor(shift, dtype=torch.float64).exp()
    noise = None if posterior.noise_variance is None else posterior.noise_variance * math.exp(log_noise)
    return posterior.at(precision, noise).log_marginal_likelihood(lower_bound=True)


def slope(function, step: float = 1e-3) -> float:
    return (function(step) - function(-step)) / (2 * step)


def assert_tuned(posterior: lw.Posterior, per_layer: bool, noise: bool) -> None:
    """Stationary in log δ (each of them) and log σ², and nowhere better in steps of up to four e-folds."""
    blocks, best = len(posterior.prior.precision), value(posterior, 0.0)
    directions = list(torch.eye(blocks).double()) if per_layer else [torch.ones(blocks).double()]
    tolerance = 1e-4 * max(1.0, abs(best) ** 0.5)
    for direction in directions:
        assert abs(slope(lambda h, d=direction: value(posterior, h * d))) < tolerance
    if noise:
        assert abs(slope(lambda h: value(posterior, 0.0, h))) < tolerance
    steps = (-4.0, -0.3, 0.0, 0.3, 4.0)
    for direction in directions:
        for first in steps:
            for second in steps if noise else (0.0,):
                assert value(posterior, first * direction, second) <= best + 1e-8 * abs(best)


@pytest.mark.quick(4)
@every(METHODS)
@pytest.mark.parametrize(("name", "per_layer"), [("cnn_bn_inplace", False), pytest.param("mlp", True, marks=SLOW)])
def test_tuned_precision_is_a_maximum(name, method, per_layer):
    fitted = setup(name).fit(method, prior_precision=None, tune=lw.Evidence(per_layer=per_layer))
    assert isinstance(fitted.prior_precision, dict) == per_layer
    assert_tuned(fitted, per_layer, noise=False)


@pytest.mark.quick(2)
@every(METHODS)
@pytest.mark.parametrize(("name", "per_layer"), [pytest.param("conv1d", False, marks=SLOW), ("deep_linear", True)])
def test_tuned_precision_and_noise_are_a_maximum(name, method, per_layer):
    options = {"likelihood": lw.Gaussian(), "prior_precision": None, "tune": lw.Evidence(per_layer=per_layer)}
    assert_tuned(setup(name, samples=30).fit(method, **options), per_layer, noise=True)


def test_what_is_given_is_kept():
    problem = setup("deep_linear")
    given = problem.fit(lw.Full(), prior_precision=0.7, likelihood=lw.Gaussian())
    assert given.prior_precision == 0.7
    assert abs(slope(lambda h: value(given, 0.0, h))) < 1e-4
    noisy = problem.fit(lw.Full(), prior_precision=None, likelihood=lw.Gaussian(0.2))
    assert noisy.noise_variance == 0.2
    assert abs(slope(lambda h: value(noisy, h))) < 1e-4
    both = problem.fit(lw.Full(), prior_precision=0.7, likelihood=lw.Gaussian(0.2))
    assert (both.prior_precision, both.noise_variance) == (0.7, 0.2)
    plain = problem.fit(lw.Full(), prior_precision=None, likelihood=lw.Gaussian(), tune=None)
    assert plain.prior_precision == 1.0
    residuals = (problem.f - problem.y).square().mean()
    assert plain.noise_variance == pytest.approx(float(residuals), rel=1e-12)


@pytest.mark.parametrize("per_layer", [False, True])
def test_targets_that_are_met_exactly_leave_a_finite_noise(per_layer):
    """If every residual is 0, nothing bounds σ² from below: it stays positive, and predictions stay finite."""
    problem = setup("deep_linear", samples=60)
    loader = cut(problem.x, problem.f.clone(), (35, 25))
    fitted = problem.fit(
        lw.KFAC(), loader=loader, likelihood=lw.Gaussian(), prior_precision=None, tune=lw.Evidence(per_layer=per_layer)
    )
    assert 0 < fitted.noise_variance < 1e-9
    assert torch.isfinite(fitted.predict(problem.test).log_prob(problem.y[:3])).all()


def test_effective_parameters_are_mackays_gamma():
    problem = setup("deep_linear")
    for method in (lw.Full(form="primal"), lw.Full(form="dual")):
        fitted = problem.fit(method, prior_precision=0.4)
        wanted = len(problem.theta) - 0.4 * float(oracle.laplace_covariance(problem.G, 0.4).trace())
        assert fitted.diagnose().effective_parameters == pytest.approx(wanted, rel=1e-8)


@pytest.mark.quick(3)
@every(METHODS)
def test_gradients_of_the_evidence(method):
    """In the precision of each block, in σ² and in the factor of all precisions."""
    options = {"likelihood": lw.Gaussian(), "prior_precision": None, "tune": lw.Evidence()}
    evidence = setup("deep_linear").fit(method, **options).log_evidence
    precision = torch.linspace(0.4, 1.3, len(evidence.distance), dtype=torch.float64, requires_grad=True)
    noise, factor = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.3, 1.7))
    assert torch.autograd.gradcheck(evidence, (precision, noise, factor))
    for bound in (False, True):
        ours = evidence(precision, 0.3, 1.7, lower_bound=bound).detach()
        close(ours, evidence(1.7 * precision, 0.3, lower_bound=bound).detach(), 1e-10)


@pytest.mark.slow
def test_a_fit_that_trains_no_copy_does_not_import_the_compiler():
    code = (
        "import sys, torch, lapwing as lw; data, tune = [(torch.randn(8, 2), torch.randn(8))], lw.BoundedEvidence();"
        "lw.fit(torch.nn.Linear(2, 1).eval(), data, tune=tune); sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.quick(3)
@pytest.mark.parametrize("unit", [1e-9, 1e5])
@pytest.mark.parametrize("tune", [lw.Evidence(), lw.Evidence(per_layer=True), lw.BoundedEvidence()], ids=str)
def test_units_of_the_targets_do_not_matter(tune, unit, caplog):
    """Dollars or thousands of dollars: δ scales with the inverse square, σ² with the square, and coverage stays."""
    x = torch.randn(200, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.5 * torch.randn(200, 1)
    found = []
    for scale in (1.0, unit):
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).eval()
        with torch.no_grad():
            model[0].weight.copy_(0.1 * torch.arange(24.0).sin().reshape(8, 3))
            model[0].bias.copy_(0.1 * torch.arange(8.0).cos())
            hidden = torch.cat([model[:2](x), torch.ones(200, 1)], 1)
            solution = torch.linalg.lstsq(hidden.double(), y.double()).solution.float()
            model[2].weight.copy_(scale * solution[:-1].T)
            model[2].bias.copy_(scale * solution[-1])
        model[0].requires_grad_(False)  # its weights do not scale with the unit
        posterior = lw.fit(model, [(x, scale * y)], lw.Full(), params=lw.last_layer, tune=tune)
        (delta,) = posterior.prior.precision.tolist()
        low, high = posterior.predict(x).interval(0.9)
        coverage = ((scale * y >= low) & (scale * y <= high)).float().mean()
        found.append([posterior.noise_variance / scale**2, delta * scale**2, float(coverage)])
    assert found[1] == pytest.approx(found[0], rel=1e-2)
    assert 0.85 < found[0][2] < 0.95
    assert not caplog.records


def test_an_evidence_without_a_maximum_is_warned_of_once(caplog):
    """Weights at the prior's mean: the evidence always grows with the prior precision."""
    model = nn.Linear(2, 1, bias=False).eval()
    nn.init.zeros_(model.weight)
    x = torch.randn(20, 2)
    posterior = lw.fit(model, [(x, torch.randn(20, 1))], lw.Full(), tune=lw.Evidence())
    (record,) = [record for record in caplog.records if "no maximum" in record.message]
    assert "it ends at 1e+10" in record.message
    assert posterior.prior_precision == pytest.approx(1e10, rel=0.2)


def test_an_evidence_far_above_the_residual_is_warned_of(caplog):
    """The evidence of a network that was trained without a prior can take the targets for noise."""
    x = torch.randn(200, 4)
    y = (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]
    model = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 1))
    train(model, lambda: (model(x) - y).square().mean(), 300, 1e-2)
    posterior = lw.fit(model, [(x, y)], lw.Diagonal(), tune=lw.Evidence())
    assert posterior.noise_variance > 5 * (model(x) - y).square().mean()
    (record,) = caplog.records
    assert f"noise variance {posterior.noise_variance:.3g}" in record.getMessage()
    caplog.clear()
    lw.fit(model, [(x, y)], lw.Diagonal())
    lw.fit(model, [(x, y)], lw.Diagonal(), likelihood=lw.Gaussian(noise_variance=1.0), tune=lw.Evidence())
    assert not caplog.records
