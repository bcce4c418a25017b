"""Sample weights: a weight of w is a sample shown w times, for every method and the tuning; 0 leaves it out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.covariance import PriorCovariance
from tests import oracle
from tests.conformance import CUTS, close, pack, setup
from tests.trained import train

WEIGHTS = torch.tensor([2.0, 0.0, 1.0, 3.0, 1.0, 1.0, 2.0, 0.0, 1.0], dtype=torch.float64)
METHODS = {
    "full": lw.Full(), "dual": lw.Full(form="dual"), "diagonal": lw.Diagonal(), "kfac": lw.KFAC(),
    "reduce": lw.KFAC(weight_sharing="reduce"), "ekfac": lw.EKFAC(),
    "ella": lw.ELLA(rank=90, rows="all", residual="prior"),
    "optimal": lw.OptimalSubspace(rank=90, rows="all", residual="prior"),
    "subset of weights": lw.SubsetOfWeights(size=10), "subset of data": lw.SubsetOfData(size=1000),
}  # fmt: skip


def weighted(problem, weights=WEIGHTS):
    """Uneven batches (x, y, w)."""
    parts = zip(problem.loader, weights.split(CUTS), strict=True)
    return [{**batch, "sample_weights": w} if isinstance(batch, dict) else (*batch, w) for batch, w in parts]


def repeated(problem, weights=WEIGHTS):
    """The same data with each sample as often as its weight says, in one batch."""
    rows = torch.arange(9).repeat_interleave(weights.long())
    return [pack(oracle.take(problem.x, rows), problem.y[rows])]


def both(name, method, weights=WEIGHTS, **options):
    problem = setup(name)
    given = problem.fit(method, loader=weighted(problem, weights), sample_weights=True, **options)
    return problem, given, problem.fit(method, loader=repeated(problem, weights), **options)


def check_same(given, wanted, x, tolerance=1e-7):
    """Asserts the same prior, noise, latent and evidence."""
    for name in ("prior_precision", "noise_variance"):
        value = getattr(given, name)
        assert value == (None if value is None else pytest.approx(getattr(wanted, name), rel=tolerance))
    close(given.latent(x).covariance, wanted.latent(x).covariance, tolerance)
    if isinstance(given.covariance, PriorCovariance):
        assert given.log_marginal_likelihood() == pytest.approx(wanted.log_marginal_likelihood(), rel=tolerance)


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", ["mlp", "bilinear", "cnn_bn_inplace", "gpt2", "tied", "transposed_conv"])
@pytest.mark.parametrize("method", [pytest.param(value, id=key) for key, value in METHODS.items()])
def test_a_weight_is_a_number_of_copies(name, method):
    weights = WEIGHTS.clamp_min(1) if isinstance(method, lw.OptimalSubspace) else WEIGHTS  # its rows are of all samples
    problem, given, wanted = both(name, method, weights)
    check_same(given, wanted, problem.test)


@pytest.mark.quick(3)
@pytest.mark.parametrize("method", [lw.Full(), lw.KFAC(), lw.Diagonal()], ids=repr)
@pytest.mark.parametrize("name", ["mlp", "deep_linear", "mlp_scalar"])
@pytest.mark.parametrize("tune", [lw.BoundedEvidence(), lw.Evidence()], ids=repr)
def test_tuning_counts_weights(name, method, tune):
    """δ, σ² and the width of regressions by leaving out; what the spread of classifiers costs."""
    problem, given, wanted = both(name, method, prior_precision=None, likelihood=None, tune=tune)
    check_same(given, wanted, problem.test, 1e-4)


def test_points_and_steps_count_weights():
    """VaLLA at the user's points, and every step down its two objectives where one batch is all data."""
    problem = setup("mlp")
    points = lw.InducingPoints(problem.x)
    x, y = problem.x, problem.y
    for fit in (lw.ClosedForm(), lw.NaturalGradient(3), lw.VariationalBound(3), lw.AlphaDivergence(steps=3)):
        options = {"prior_precision": None, "tune": None}
        given = problem.fit(lw.VaLLA(points, fit), loader=[(x, y, WEIGHTS)], sample_weights=True, **options)
        wanted = problem.fit(lw.VaLLA(points, fit), loader=repeated(problem), **options)
        if isinstance(fit, lw.AlphaDivergence):  # whose steps are as long as n says
            close(given.history["objective"][:1], wanted.history["objective"][:1])
            continue
        if "objective" in given.history:
            close(given.history["objective"], wanted.history["objective"], 1e-7)
        close(given.latent(problem.test).covariance, wanted.latent(problem.test).covariance, 1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["mlp", "deep_linear"])
def test_draws_and_fine_tuning_leave_out_a_weight_of_zero(name):
    problem = setup(name)
    x, y, w = problem.x, problem.y, (torch.arange(9) < 6).double()
    few = [(x[:6], y[:6])]
    for options in ({}, {"linearised_mode": True, "em_steps": 2}):
        method = lw.SampledLLA(draws=4, **options)
        given = problem.fit(method, loader=[(x, y, w)], sample_weights=True, prior_precision=None, likelihood=None)
        wanted = problem.fit(method, loader=few, prior_precision=None, likelihood=None)
        close(given.latent(problem.test).covariance, wanted.latent(problem.test).covariance, 1e-5)
    method = lw.MeanField(steps=2, initial_std=1e-9)
    given = problem.fit(method, loader=[(x, y, w)], sample_weights=True)
    wanted = problem.fit(method, loader=few)
    for name in ("mean", "noise_variance"):
        if name in given.history:
            close(given.history[name], wanted.history[name], 1e-6)
    sums = [posterior.history["log_likelihood"] * n for posterior, n in ((given, 9), (wanted, 6))]
    close(sums[0][:1], sums[1][:1], 1e-6)


def test_fractions_against_the_dense_ggn():
    """Any real weights: `G = Σ w JᵀΛJ`, `Σ w log p`, and the gradient of the evidence at the linearised mode."""
    problem = setup("mlp")
    w = torch.rand(9, generator=torch.Generator().manual_seed(0)).double()
    posterior = problem.fit(lw.Full(), loader=weighted(problem, w), sample_weights=True)
    G = oracle.ggn(problem.J, w[:, None, None] * problem.fisher)
    covariance = oracle.laplace_covariance(G, 2.0)
    close(posterior.latent(problem.test).covariance, oracle.output_covariance(problem.J_test, covariance))
    logs = torch.log_softmax(problem.f, -1)[torch.arange(9), problem.y]
    close(posterior.statistics["log_likelihood"], (w * logs).sum())
    residual = torch.eye(3).double()[problem.y] - problem.f.softmax(-1)
    gradient = torch.einsum("n,nc,ncp->p", w, residual, problem.J) - 2.0 * problem.theta
    again = {"linearised_mode": True, "loader": weighted(problem, w), "sample_weights": True}
    gain = posterior.log_marginal_likelihood(**again) - posterior.log_marginal_likelihood()
    assert gain == pytest.approx(float(gradient @ covariance @ gradient) / 2)


@pytest.mark.quick(2)
@pytest.mark.parametrize("method", [lw.Full(), lw.Diagonal(), lw.KFAC(), lw.KFAC(weight_sharing="reduce")], ids=repr)
@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_further_data_with_weights(name, method, reloaded):
    """Weights in the first part, in the second or in both; an update and a former posterior, from a file too."""
    problem = setup(name)
    first, second = slice(0, 4), slice(4, 9)
    for weights in (WEIGHTS, torch.cat([WEIGHTS[first], torch.ones(5)]), torch.cat([torch.ones(4), WEIGHTS[second]])):
        weighs = [bool((weights[part] != 1).any()) for part in (first, second)]
        loaders = [
            [(*pack(oracle.take(problem.x, part), problem.y[part]), *([weights[part]] if some else []))]
            for part, some in zip((first, second), weighs, strict=True)
        ]
        wanted = problem.fit(method, loader=repeated(problem, weights))
        former = problem.fit(method, loader=loaders[0], sample_weights=weighs[0])
        for posterior in (former, reloaded(former, problem.model)):
            check_same(posterior.update(loaders[1], sample_weights=weighs[1]), wanted, problem.test)
        after = lw.fit(problem.model, loaders[1], prior=former, sample_weights=weighs[1])
        close(after.latent(problem.test).covariance, wanted.latent(problem.test).covariance, 1e-7)


def regression(count=300):
    """A network of two outputs, and its data, in float64."""
    x = torch.randn(count, 4, dtype=torch.float64)
    y = torch.stack([x[:, 0].sin(), 5 * x[:, 1]], 1) + torch.tensor([0.3, 2.0]) * torch.randn(count, 2)
    model = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 2)).double()
    train(model, lambda: (model(x) - y).square().mean(), 100)
    return model.eval(), x, y


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "options",
    [{}, {"method": lw.KFAC()}, {"params": lw.last_layer}, {"prior_precision": 1.0}, {"tune": lw.BoundedEvidence()},
     {"validation": True}, {"likelihood": lw.Gaussian(noise="input")}, {"method": lw.ELLA(rank=20)}],
    ids=str,
)  # fmt: skip
def test_only_ratios_of_weights_count_if_the_noise_is_tuned(options):
    model, x, y = regression()
    w = torch.rand(250, dtype=torch.float64) + 0.5
    options = options | ({"validation": (x[250:], y[250:])} if "validation" in options else {})
    wanted = lw.fit(model, [(x[:250], y[:250], w / w.mean())], sample_weights=True, **options)
    assert wanted.temperature == pytest.approx(1, rel=1e-9)
    for factor in (1 / 250, 10.0):
        given = lw.fit(model, [(x[:250], y[:250], factor * w / w.mean())], sample_weights=True, **options)
        assert given.noise_variance == pytest.approx(wanted.noise_variance, rel=1e-4)
        assert given.likelihood.noise_ratios == pytest.approx(wanted.likelihood.noise_ratios, rel=1e-9)
        assert given.temperature == pytest.approx(factor, rel=1e-9)
        close(given.predict(x).variance, wanted.predict(x).variance, 1e-4)
        close(given.predict(x).epistemic_variance, wanted.predict(x).epistemic_variance, 1e-4)


@pytest.mark.quick(1)
@pytest.mark.parametrize("shuffled", [False, True])
def test_copies_of_all_rows_change_no_width_of_a_regression(shuffled):
    model, x, y = regression()
    rows = torch.arange(100).repeat_interleave(10)
    rows = rows[torch.randperm(1000)] if shuffled else rows
    wanted = lw.fit(model, [(x[:100], y[:100])], tune=lw.BoundedEvidence())
    options = {"likelihood": lw.Gaussian(noise_ratios=wanted.likelihood.noise_ratios)}
    wanted = lw.fit(model, [(x[:100], y[:100])], tune=lw.BoundedEvidence(), **options)
    given = lw.fit(model, [(x[rows], y[rows])], tune=lw.BoundedEvidence(), **options)
    weighted = [(x[:100], y[:100], torch.full((100,), 10.0))]
    weighted = lw.fit(model, weighted, tune=lw.BoundedEvidence(), sample_weights=True, **options)
    for one in (given, weighted):
        assert one.temperature == pytest.approx(10)
        close(one.predict(x).variance, wanted.predict(x).variance, 1e-4)
        close(one.predict(x).epistemic_variance, wanted.predict(x).epistemic_variance, 1e-4)


def test_a_temperature_and_a_noise_that_the_user_gave_stay():
    model, x, y = regression()
    data = [(x, y, torch.full((300,), 4.0))]
    assert lw.fit(model, data, sample_weights=True, temperature=2.0).temperature == 2
    given = lw.fit(model, data, sample_weights=True, likelihood=lw.Gaussian(0.5))
    assert (given.temperature, given.noise_variance) == (1, 0.5)
    repeated = [(x.repeat(4, 1), y.repeat(4, 1))]
    close(given.predict(x).variance, lw.fit(model, repeated, likelihood=lw.Gaussian(0.5)).predict(x).variance, 1e-4)


def test_weights_that_sum_to_one_warn_if_more_than_ratios_count(caplog):
    model, x, y = regression(40)
    w = torch.rand(40, dtype=torch.float64) + 0.5
    rates = [(x, y.exp().clamp_max(20).round(), w / w.sum())]
    lw.fit(model, rates, lw.KFAC(), likelihood=lw.Poisson(), sample_weights=True)
    assert "The sample weights sum to 1, so 40 samples count as 1" in caplog.text
    caplog.clear()
    lw.fit(model, [(*rates[0][:2], w)], lw.KFAC(), likelihood=lw.Poisson(), sample_weights=True)
    lw.fit(model, [(x, y, w / w.sum())], sample_weights=True)
    lw.fit(model, [(x, y, w / w.sum())], likelihood=lw.Gaussian(1.0), sample_weights=True)
    assert "sample weights" not in caplog.text
