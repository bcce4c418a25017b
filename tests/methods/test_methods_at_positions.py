"""Other methods than the curvature methods on outputs with positions: dense oracles, and fits to single positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.inputs import Inputs
from lapwing.jacobian.blocks import split
from lapwing.methods import Batch, DataSummary, Problem, Seen
from lapwing.methods.sampled_lla.linearised_mode import _Along, _Score
from lapwing.methods.sampled_lla.system import CurvatureProducts, PositionedRoot
from lapwing.methods.subset_of_data import chosen_places
from lapwing.methods.valla import alpha_divergence, inducing, moving_points
from lapwing.methods.valla.alpha_divergence import inner_factor
from lapwing.methods.valla.moving_points import divergence
from lapwing.tangent import Anchors, Tangent
from tests import conformance, oracle
from tests.conformance import close
from tests.fitting.test_positions import CLASSES, F64, case, dense, jacobian, rows

TREATED = (lw.last_layer, lw.everything)


# --- Kronecker factors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [lw.KFAC(), lw.EKFAC(), lw.KFAC(weight_sharing="reduce")], ids=str)
@pytest.mark.parametrize("layers", ["tokens", "pixels"])
def test_padding_whose_labels_do_not_count_changes_nothing(method, layers):
    """The factors of the layers' inputs hold only positions that count, by their weights."""
    w = torch.rand(6, dtype=F64) + 0.5
    if layers == "tokens":
        x, y, padding = torch.randint(9, (6, 3)), torch.randint(3, (6, 3)), torch.full((6, 4), 9)
        model = nn.Sequential(nn.Embedding(10, 5), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    else:
        x, y, padding = (
            torch.randn(6, 2, 3, 2, dtype=F64),
            torch.randint(3, (6, 3, 2)),
            torch.ones(6, 2, 4, 2, dtype=F64),
        )
        model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Tanh(), nn.Conv2d(4, 3, 1))
    model = model.double().eval()
    longer = torch.cat([x, padding], 1 if x.ndim == 2 else 2), torch.cat([y, y.new_full((6, 4, *y.shape[2:]), -100)], 1)
    options = {"params": lw.everything, "prior_precision": 1.0, "sample_weights": True}
    alone, padded = (lw.fit(model, [(*data, w)], method, **options) for data in ((x, y), longer))
    close(padded.latent(x).rows.variance, alone.latent(x).rows.variance, 1e-9)


# --- VaLLA -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", TREATED)
def test_valla_at_given_positions_is_the_sparse_gaussian_process(params):
    """`κ - κ_xZ (A⁻¹ + K)⁻¹ κ_Zx`: in weight space the posterior on the rows, and the prior outside."""
    model, loader, x = case("3x3")
    points = lw.InducingPoints(loader[0][0][[0, 0, 1, 2]], torch.tensor([1, 16, 35, 20]))
    fitted = lw.fit(model, loader, lw.VaLLA(points), params=params, prior_precision=2.0)
    names = list(fitted.tangent.parameters)
    every = jacobian(model, points.inputs, names).unflatten(0, (4, -1)).flatten(1, 2)  # (4, T C, P)
    J = every[torch.arange(4), points.outputs]
    span = torch.linalg.pinv(J) @ J
    precision = 2.0 * torch.eye(J.shape[1], dtype=F64) + span @ dense(model, loader, names) @ span
    close(
        fitted.latent(x).covariance.flatten(0, -3),
        oracle.output_covariance(jacobian(model, x, names), precision.inverse()),
        1e-7,
    )


def problem_of(model: torch.nn.Module, batch: tuple[Tensor, Tensor], params: Any, **options: Any) -> Problem:
    tangent = Tangent.survey(model, batch[0], params, targets=batch[1])
    return conformance.problem_of(tangent, lw.Categorical(), batch[1], prior_mean=0.3, **options)


def posed(name: str, params: Any, places: tuple[int, int], **options: Any) -> tuple[Any, ...]:
    """Returns a network, a batch of it, its problem, and as points one of the places in each of two samples."""
    model, loader, _ = case(name)
    (x, y), points = loader[0], torch.arange(2)
    problem = problem_of(model, (x, y), params, **options)
    return model, x, y, problem, Anchors(problem.tangent, (Inputs(x[:2].clone()),), points, torch.tensor(places))


@pytest.mark.parametrize(("name", "params"), [("transformer", lw.everything), ("3x3", TREATED[1]), ("3x3", TREATED[0])])
def test_the_bound_is_a_sum_over_positions_that_count(name, params):
    """In weight space, `-[Σ log p - 1/2 tr(G Σ)] + KL`, with sample weights, temperature and data size."""
    size = len(case(name)[1][0][0])
    model, x, y, problem, anchors = posed(name, params, (4, 5), temperature=2.0, data_size=10 * size)
    tangent, factor, w = problem.tangent, 5.0, torch.rand(size, dtype=F64) + 0.5
    names = list(tangent.parameters)
    steps = moving_points.BoundSteps(problem, anchors, 3, 0.1, None)
    state, batch = steps.init(), Batch(tangent, Inputs(x), y, 0, y != -100, w, lw.Categorical())
    value = steps.objective(state, state.values, batch, torch.Generator())
    J, f, labels = jacobian(model, x, names), rows(model(x).detach()), y.flatten()
    each = w.repeat_interleave(y[0].numel()) * (labels != -100)
    G = oracle.ggn(J, oracle.softmax_fisher(f) * each[:, None, None])
    A = J.unflatten(0, (len(x), -1)).flatten(1, 2)[torch.arange(2), anchors.outputs]
    theta = oracle.flat_parameters(model, names)
    span = torch.linalg.pinv(A) @ A
    precision = 2 * torch.eye(len(theta), dtype=F64) + factor * span @ G @ span
    q = torch.distributions.MultivariateNormal(theta, precision_matrix=precision)
    p = torch.distributions.MultivariateNormal(torch.full_like(theta, 0.3), torch.eye(len(theta), dtype=F64) / 2)
    logs = f.log_softmax(-1).gather(1, labels.clamp_min(0)[:, None])[:, 0]
    expected = factor * ((logs * each).sum() - (G @ torch.linalg.inv(precision)).trace() / 2)
    close(value.detach(), torch.distributions.kl_divergence(q, p) - expected, 1e-6)


@pytest.mark.parametrize("params", TREATED)
def test_the_divergence_is_a_sum_over_positions_that_count(params):
    model, x, y, problem, anchors = posed("transformer", params, (4, 5), data_size=12)
    tangent, names = problem.tangent, list(problem.tangent.parameters)
    steps = alpha_divergence.AlphaSteps(lw.AlphaDivergence(), problem, anchors, None)
    state = steps.init()
    batch = Batch(tangent, Inputs(x), y, 0, y != -100, None, lw.Categorical())
    value = steps.objective(state, state.values, batch, torch.Generator())
    J = jacobian(model, x, names)
    A = J.unflatten(0, (len(x), -1)).flatten(1, 2)[torch.arange(2), anchors.outputs]
    sigma = torch.linalg.inv(2 * torch.eye(A.shape[1], dtype=F64) + A.T @ A)  # L = I
    latent = lw.fit(model, [(x, y)], lw.Full(), params=params, prior_precision=2.0).latent(x).rows
    term = type(latent.terms[0])(oracle.output_covariance(J, sigma))
    logs = lw.Categorical().predict(type(latent)(rows(model(x).detach()), (term,))).log_prob(y.flatten())
    kl = divergence(inner_factor(A @ A.T / 2, torch.eye(2, dtype=F64)))
    close(value.detach(), kl - 3 * logs[y.flatten() != -100].sum(), 1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("params", TREATED)
def test_gradients_in_moving_points_at_positions(params):
    _, x, y, problem, anchors = posed("3x3", params, (4, 17))
    batch, step = Batch(problem.tangent, Inputs(x), y, 0, y != -100, None, lw.Categorical()), torch.randn_like(x[:2])
    for steps in (
        moving_points.BoundSteps(problem, anchors, 3, 0.1, None),
        alpha_divergence.AlphaSteps(lw.AlphaDivergence(), problem, anchors, None),
    ):
        state = steps.init()
        moved = [(x[:2] + h * step).requires_grad_() for h in (0.0, 1e-5, -1e-5)]
        value, above, below = (
            steps.objective(replace(state, kept={}), {**state.values, "input/0/0": at}, batch, torch.Generator())
            for at in moved
        )
        (slope,) = torch.autograd.grad(value, moved[0])
        difference = float((above - below).detach()) / 2e-5
        assert float((slope * step).sum()) == pytest.approx(difference, rel=1e-4)


def test_picked_positions_are_unbiased():
    generator = torch.Generator().manual_seed(0)
    counted = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]).bool()
    picked, repeats = inducing.picked_positions(counted, 20, generator)  # all
    assert torch.equal(torch.zeros(4, 5, dtype=F64).scatter_(1, picked, repeats), counted.double())
    total = torch.zeros(4, 5, dtype=F64)
    for _ in range(1000):
        picked, repeats = inducing.picked_positions(counted, 50, generator)  # two
        assert picked.shape == (4, 2)
        assert torch.equal(repeats.sum(1), counted.sum(1).double())
        total.scatter_add_(1, picked, repeats)
    assert (total / 1000 - counted.double()).abs().max() < 0.15


@pytest.mark.quick(1)
@pytest.mark.parametrize("some", [100, 3])
@pytest.mark.parametrize("fit", [lw.VariationalBound(steps=3), "alpha"])
def test_moving_points_at_positions(fit, some, monkeypatch):
    monkeypatch.setattr(inducing, "SOME_OUTPUTS", some)
    model, loader, x = case("3x3")
    if fit == "alpha":
        fit = lw.AlphaDivergence(steps=3, validation=loader[1:], every=1)
    for params in TREATED:
        posterior = lw.fit(model, [loader[0], loader[0]], lw.VaLLA(4, fit=fit), params=params)
        assert posterior.predict(x).probs.isfinite().all()
        assert posterior.history["objective"].isfinite().all()


# --- sampled draws ---------------------------------------------------------------------------------------------------

EXACT = lw.ConjugateGradients(tolerance=1e-10)


@pytest.mark.quick(2)
@pytest.mark.parametrize("params", TREATED)
@pytest.mark.parametrize("name", ["transformer", "3x3"])
def test_products_with_the_curvature_are_the_dense_ones(name, params):
    """One vector, by forward mode if that is cheaper, and many."""
    model, loader, _ = case(name)
    problem = problem_of(model, loader[0], params)
    problem = replace(problem, read=Seen(sum(len(x) for x, _ in loader), DataSummary()))
    names = list(problem.tangent.parameters)
    G, root, generator = dense(model, loader, names), PositionedRoot(problem), torch.Generator().manual_seed(0)
    for count in (1, 40):
        V = {b.name: torch.randn(count, b.size, generator=generator).to(F64) for b in problem.tangent.blocks}
        step = CurvatureProducts(problem, root, V)
        state, start = step.init(), 0
        for x, y in loader:
            step.update(state, Batch(problem.tangent, Inputs(x), y, start, y != -100, likelihood=lw.Categorical()))
            start += len(x)
        parts = split(problem.tangent.blocks, V), split(problem.tangent.blocks, state.blocks)
        vectors, products = (torch.cat([part[name].flatten(1) for name in names], -1) for part in parts)
        close(products, vectors @ G, 1e-8)


@pytest.mark.quick(1)
@pytest.mark.parametrize("params", TREATED)
def test_draws_have_fulls_covariance_whatever_the_batches(params):
    model, loader, x = case("transformer")
    method, options = lw.SampledLLA(400, EXACT), {"params": params, "prior_precision": 2.0}
    fitted = lw.fit(model, loader, method, **options)
    full = lw.fit(model, loader, lw.Full(), **options).latent(x).covariance
    assert (fitted.latent(x).covariance - full).norm() < 0.2 * full.norm()
    some = [(x[:1], y[:1]) for x, y in loader] + [(x[1:], y[1:]) for x, y in loader]
    some[1], some[2] = some[2], some[1]  # the same order
    again = lw.fit(model, some, lw.SampledLLA(3, EXACT), **options)
    close(again.latent(x).variance, lw.fit(model, loader, lw.SampledLLA(3, EXACT), **options).latent(x).variance, 1e-6)


@pytest.mark.parametrize("params", TREATED)
def test_the_gradient_of_the_linearised_model_is_the_dense_one(params):
    model, loader, _ = case("transformer")
    x, y = loader[0]
    problem, w = problem_of(model, (x, y), params), torch.rand(len(x), dtype=F64)
    blocks, names = problem.tangent.blocks, list(problem.tangent.parameters)
    offset = {b.name: 0.1 * torch.randn(1, b.size, dtype=F64) for b in blocks}
    J, labels = jacobian(model, x, names), y.flatten()
    m = torch.cat([part.flatten() for part in split(blocks, offset).values()]).requires_grad_()
    f, each = rows(model(x).detach()) + J @ m, w.repeat_interleave(y.shape[1]) * (labels != -100)
    wanted = (f.log_softmax(-1).gather(1, labels.clamp_min(0)[:, None])[:, 0] * each).sum()
    batch = Batch(problem.tangent, Inputs(x), y, 0, y != -100, w, lw.Categorical())
    score = _Score(problem, lw.Categorical(), offset)
    score.update(state := score.init(), batch)
    gradient = torch.cat([part.flatten() for part in split(blocks, state.blocks).values()])
    close(gradient, torch.autograd.grad(wanted, m)[0])
    along = _Along(problem, lw.Categorical(), offset, offset)
    along.update(state := along.init(), batch)
    close(state.total[0], wanted.detach())


def test_em_over_positions():
    model, loader, x = case("1x1")
    data = [(x, model(x).detach() + 0.1 * torch.randn_like(model(x))) for x, _ in loader]
    method = lw.SampledLLA(100, linearised_mode=True)
    fitted = lw.fit(model, data, method, params=lw.last_layer, tune=lw.Evidence())  # the noise variance is that of EM
    full = lw.fit(model, data, lw.Full(), params=lw.last_layer, tune=lw.Evidence())
    assert fitted.noise_variance == pytest.approx(full.noise_variance, rel=0.1)
    assert fitted.predict(x).std.shape == model(x).shape


# --- others ----------------------------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["transformer", "3x3"])
def test_temperature_scaling_is_that_of_single_positions(name):
    model, loader, x = case(name)
    loader = [(x, torch.where(y == -100, y, rows(model(x)).argmax(-1).reshape(y.shape))) for x, y in loader]
    for _, y in loader:
        y[0] = y[0].clamp_min(0) * 0  # some are wrong
    weights = [torch.rand(len(x), dtype=F64) for x, _ in loader]
    data = [(x, y, w) for (x, y), w in zip(loader, weights, strict=True)]
    flat = []
    for x, y, w in data:
        keep = (y != -100).flatten()
        every = w.repeat_interleave(y[0].numel())
        flat.append((rows(model(x).detach())[keep], y.flatten()[keep], every[keep]))
    head = torch.nn.Linear(CLASSES, CLASSES).to(F64).eval()
    head.load_state_dict({"weight": torch.eye(CLASSES, dtype=F64), "bias": torch.zeros(CLASSES, dtype=F64)})
    scaled, single = (
        lw.fit(network, batches, lw.TemperatureScaling(), sample_weights=True)
        for network, batches in ((model, data), (head, flat))
    )
    assert scaled.logit_temperature == pytest.approx(single.logit_temperature, rel=1e-9)
    x = data[0][0]
    close(rows(scaled.predict(x).probs), (rows(model(x).detach()) / scaled.logit_temperature).softmax(-1))


@pytest.mark.quick(1)
@pytest.mark.parametrize("params", TREATED)
def test_a_subset_of_data_is_full_on_these_inputs(params):
    model, loader, x = case("transformer")
    loader.reverse()  # the second batch has more positions
    fitted = lw.fit(model, loader, lw.SubsetOfData(4), params=params, prior_precision=2.0)
    places = chosen_places(7, 4, torch.Generator().manual_seed(0), None)
    inputs = [(x[n : n + 1], y[n : n + 1]) for x, y in loader for n in range(len(x))]
    wanted = lw.fit(model, [inputs[n] for n in places], lw.Full(), params=params, prior_precision=2.0)
    close(fitted.latent(x).covariance, wanted.latent(x).covariance, 1e-6)
    assert fitted.samples == 4
    assert fitted.log_marginal_likelihood() == pytest.approx(wanted.log_marginal_likelihood(), rel=1e-9)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["transformer", "3x3"])
def test_mean_field_sums_over_positions_that_count(name):
    """At tiny spread, the log likelihood of the objective, and the first step, which has the sign of the gradient."""
    model, loader, x = case(name)
    weights = [torch.rand(len(x), dtype=F64) for x, _ in loader]
    data = [(x, y, w) for (x, y), w in zip(loader, weights, strict=True)]
    method = lw.MeanField(steps=2, learning_rate=1e-6, initial_std=1e-12)
    fitted = lw.fit(model, data[:1], method, sample_weights=True, prior_precision=1e-9)
    x, y, w = data[0]
    logs = rows(model(x)).log_softmax(-1).gather(1, y.flatten().clamp_min(0)[:, None])[:, 0]
    total = (logs * w.repeat_interleave(y[0].numel()) * (y != -100).flatten()).sum()
    assert float(fitted.history["log_likelihood"][0]) == pytest.approx(float(total.detach()) / len(x), rel=1e-6)
    parameters = dict(model.named_parameters())
    gradient = dict(zip(parameters, torch.autograd.grad(total, parameters.values()), strict=True))
    for parameter, slope in gradient.items():
        step = dict(fitted.model.named_parameters())[parameter] - parameters[parameter]
        clear = slope.abs() > 1e-6 * slope.abs().max()
        assert torch.equal(step.sign()[clear], slope.sign()[clear])
    both = lw.fit(model, data, lw.MeanField(steps=4), sample_weights=True)
    assert both.predict(x).probs.shape == model(x).shape


def test_constructed_posteriors_accept_positions():
    model, loader, x = case("3x3")
    data = [(x, model(x).detach() + torch.tensor([1.0, 2.0, 3.0]).to(F64)[:, None, None]) for x, _ in loader]
    variances = {"head.bias": torch.full((CLASSES,), 0.25, dtype=F64)}
    given = lw.MeanField.from_variances(model, variances, data)
    assert given.noise_variance == pytest.approx(14 / 3)
    close(given.latent(x).variance, torch.full_like(model(x), 0.25))
    assert given.samples == 5
    collector = lw.SWAG.collector(model, rank=2)
    for _ in range(3):
        collector.snapshot()
        with torch.no_grad():
            model.head.bias += 0.1
    for posterior in (lw.SWAG.from_snapshots(collector, loader), lw.SWAG.from_snapshots(collector, loader[:1])):
        assert posterior.predict(x).probs.shape == posterior.predict(x, via=lw.MonteCarlo(4)).probs.shape
        close(posterior.latent(x).variance[:, 0], torch.full_like(model(x)[:, 0], 0.5 * (0.02 / 3 + 0.0125)))


# --- streamlined -----------------------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["tagger", "transformer", "1x1", "3x3", "transposed"])
def test_streamlined_moments_of_a_last_layer_are_the_linearised_ones(name):
    model, loader, x = case(name)
    posterior = lw.fit(model, loader, lw.KFAC(), params=lw.last_layer, prior_precision=2.0)
    wanted = posterior.latent(x)
    full, fast = (posterior.latent(x, via=lw.Streamlined(mode)) for mode in ("full", "diagonal"))
    close(full.covariance, wanted.covariance, 1e-8)
    if name != "transposed":  # whose factors the diagonal mode takes as a diagonal
        close(fast.variance, wanted.variance, 1e-8)
    close(fast.mean, model(x).detach())
    assert posterior.predict(x, via=lw.Streamlined()).probs.shape == model(x).shape


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["tagger", "3x3"])
def test_streamlined_moments_of_all_weights_near_certainty(name):
    model, loader, x = case(name)
    posterior = lw.fit(model, loader, lw.Diagonal(), prior_precision=1e6)
    wanted = posterior.latent(x).covariance
    close(posterior.latent(x, via=lw.Streamlined("full")).covariance, wanted, 1e-4)
    in_chunks = lw.fit(model, loader, lw.Diagonal(), prior_precision=1e6, memory=2**24)
    many = x.repeat(60, *[1] * (x.ndim - 1))
    first = in_chunks.latent(many, via=lw.Streamlined()).variance[:2]
    close(first, posterior.latent(x, via=lw.Streamlined()).variance)
