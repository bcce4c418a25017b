"""VaLLA at fixed inducing points: its dense oracle, the paper's formulas, limits, orders, and the choice of points."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.data.inputs import Inputs, Samples
from lapwing.methods.passes import Batch
from lapwing.methods.valla.inducing import kernel
from lapwing.methods.valla.points import cluster_centres, inducing_points, movable
from lapwing.tangent import Anchors, Tangent
from tests import oracle
from tests.conformance import CUTS, NOISE, Setup, close, cut, jacobian, psd, setup, subspace_covariance
from tests.conformance import subspace as span_of
from tests.methods.test_methods import FEW, MethodConformance, OnFewNetworks


def points_of(problem: Setup, method: lw.VaLLA, loader: list | None = None) -> Anchors:
    """Drives the pass that chooses the points, without a fit."""
    asked = SimpleNamespace(tangent=problem.tangent, generator=lambda: torch.Generator().manual_seed(0))
    choosing = inducing_points(asked, method.inducing_points, method.initial)
    try:
        step = next(choosing)
    except StopIteration as stop:
        return stop.value
    state, start = step.init(), 0
    for batch in loader or problem.loader:
        samples = replace(Samples.of(batch), start=start)
        step.update(state, Batch.of(problem.tangent, samples))
        start += samples.count
    try:
        choosing.send(state)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("one pass is enough")


def rows_at(problem: Setup, anchors: Anchors) -> Tensor:
    """The oracle's rows of J (M, P) at anchors."""
    rows = torch.cat([jacobian(problem.model, group.value, problem.blocks) for group in anchors.inputs])
    return rows[anchors.samples, anchors.outputs]


class VallaConformance(MethodConformance):
    order_matters = True  # points are found among the first samples, in their order

    def sigma(self, problem, G, delta, fitted):
        """The posterior on the span of the rows, whitened by the ratios of the fit's own prior, with the residual."""
        chosen = fitted.prior.precision
        rows = rows_at(problem, points_of(problem, self.method)) * problem.expand(chosen / chosen[0]).rsqrt()
        return subspace_covariance(span_of(rows), G, delta, True)


class TestVallaOfData(VallaConformance):
    method = lw.VaLLA(6, initial="data", fit=lw.ClosedForm())


class TestVallaOfClusters(OnFewNetworks, VallaConformance):
    method = lw.VaLLA(5, initial="kmeans", fit=lw.ClosedForm())


class TestVallaBySteps(OnFewNetworks, VallaConformance):
    """One epoch of natural gradients over uneven batches: the closed form exactly."""

    method = lw.VaLLA(6, initial="data", fit=lw.NaturalGradient(steps=3))
    tolerance = 1e-8


class TestVallaOfEveryPoint(OnFewNetworks, MethodConformance):
    """Z = X with every output: Full exactly (proposition 3)."""

    method = lw.VaLLA(10_000, initial="data", fit=lw.ClosedForm())

    def sigma(self, problem, G, delta, fitted):
        return oracle.laplace_covariance(G, delta)


@pytest.mark.parametrize("name", FEW)
def test_given_points_at_all_inputs_give_full(name):
    problem = setup(name)
    fitted = problem.fit(lw.VaLLA(lw.InducingPoints(problem.x), fit=lw.ClosedForm()))
    close(fitted.covariance.to_dense(), problem.fit(lw.Full()).covariance.to_dense(), 1e-8)


# --- the paper's formulas --------------------------------------------------------------------------------------------

SOME = ("mlp", "mlp_scalar", "conv1d")


def dense_kernels(problem: Setup, method: lw.VaLLA, delta: float) -> tuple[Tensor, Tensor, Tensor]:
    """J̃ (M, P), K_Z (M, M) and Σ_n k_Zn Λ_n k_nZ (M, M)."""
    rows = rows_at(problem, points_of(problem, method))
    return rows, rows @ rows.T / delta, rows @ problem.G @ rows.T / delta**2


@pytest.mark.parametrize("name", SOME)
def test_precision_form_and_kernel_form(name):
    """`Σ = (δI + J_Zᵀ A J_Z)⁻¹` with equation 39's A, and `K* = κ - κ_xZ (A⁻¹ + K)⁻¹ κ_Zx` of equation 6."""
    problem, delta, method = setup(name), 0.7, lw.VaLLA(4, initial="kmeans", fit=lw.ClosedForm())
    rows, K, Q = dense_kernels(problem, method, delta)
    A = torch.linalg.inv(K) @ Q @ torch.linalg.inv(K)
    fitted = problem.fit(method, prior_precision=delta)
    sigma = torch.linalg.inv(delta * torch.eye(rows.shape[1]).double() + rows.T @ A @ rows)
    close(fitted.covariance.to_dense(), sigma, 1e-8)
    root = torch.linalg.cholesky(A)
    middle = root @ torch.linalg.inv(torch.eye(len(K)).double() + root.T @ K @ root) @ root.T
    kxz = problem.J_test @ rows.T / delta
    wanted = problem.J_test @ problem.J_test.mT / delta - kxz @ middle @ kxz.mT
    close(fitted.latent(problem.test).covariance, wanted, 1e-8)


def test_titsias():
    """Equation 37 for Gaussian noise: `κ - k K⁻¹ k + k (σ⁻² K_ZX K_XZ + K)⁻¹ k`, and his bound on the evidence."""
    problem, delta, method = setup("mlp_scalar"), 0.4, lw.VaLLA(4, fit=lw.ClosedForm())
    fitted = problem.fit(method, prior_precision=delta)
    rows, K, _ = dense_kernels(problem, method, delta)
    J = problem.J[:, 0]
    kxz, kzn = problem.J_test[:, 0] @ rows.T / delta, rows @ J.T / delta
    prior = problem.J_test[:, 0].square().sum(1) / delta
    wanted = prior - (kxz @ torch.linalg.inv(K) * kxz).sum(1)
    wanted += (kxz @ torch.linalg.inv(kzn @ kzn.T / NOISE + K) * kxz).sum(1)
    close(fitted.latent(problem.test).variance[:, 0], wanted, 1e-8)
    low = kzn.T @ torch.linalg.inv(K) @ kzn  # (N, N)
    residual, theta = problem.y - problem.f, problem.theta
    bound = -0.5 * residual.square().sum() / NOISE - 0.5 * len(J) * math.log(2 * math.pi * NOISE)
    bound -= 0.5 * torch.logdet(torch.eye(len(J)).double() + low / NOISE) + 0.5 * delta * theta.square().sum()
    bound -= 0.5 * (J.square().sum() / delta - low.trace()) / NOISE
    assert fitted.log_marginal_likelihood(lower_bound=True) == pytest.approx(float(bound), rel=1e-9)


def test_a_kernel_that_fits_the_budget_records_anchors_and_batch_once(monkeypatch):
    problem, calls, record = setup("mlp"), [], Tangent.record
    anchors, weights = points_of(problem, lw.VaLLA(3)), dict.fromkeys(problem.tangent.named_blocks, 0.5)
    rows, J = rows_at(problem, anchors), problem.J
    monkeypatch.setattr(Tangent, "record", lambda *args, **options: calls.append(1) or record(*args, **options))
    found = kernel(anchors, weights, Inputs.of(problem.x))
    assert len(calls) == 2
    close(found.inner, 0.5 * rows @ rows.T)
    close(found.cross, 0.5 * J @ rows.T)
    close(found.within, 0.5 * J @ J.mT)


# --- natural gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "mlp_scalar", "grouped_strided_conv"])
def test_one_epoch_of_steps_is_the_closed_form(name):
    problem = setup(name)
    exact = problem.fit(lw.VaLLA(5, fit=lw.ClosedForm()))
    for steps in (3, 6):
        found = problem.fit(lw.VaLLA(5, fit=lw.NaturalGradient(steps)))
        close(found.covariance.to_dense(), exact.covariance.to_dense(), 1e-8)
        close(found.covariance.traces, exact.covariance.traces, 1e-8)
        bounds = [fit.log_marginal_likelihood(lower_bound=True) for fit in (found, exact)]
        assert bounds[0] == pytest.approx(bounds[1], rel=1e-8)


@pytest.mark.parametrize("data_size", [None, 45])
def test_fewer_steps_than_an_epoch_scale_what_they_saw(data_size):
    """Two batches of three: the closed form on these eight samples, scaled to N."""
    problem = setup("mlp")
    method = lw.VaLLA(lw.InducingPoints(oracle.take(problem.x, slice(0, 3))), fit=lw.NaturalGradient(2))
    found = problem.fit(method, data_size=data_size)
    assert found.samples == 8
    assert found.data_factor == pytest.approx((data_size or 9) / 8)
    part = cut(oracle.take(problem.x, slice(0, 8)), problem.y[:8], (5, 3))
    exact = problem.fit(lw.VaLLA(method.inducing_points, fit=lw.ClosedForm()), loader=part, data_size=data_size or 9)
    close(found.covariance.to_dense(), exact.covariance.to_dense(), 1e-8)
    assert found.log_marginal_likelihood(lower_bound=True) == pytest.approx(
        exact.log_marginal_likelihood(lower_bound=True), rel=1e-8
    )


def test_a_constant_rate_is_the_running_mean_that_it_says():
    problem, rate = setup("mlp_scalar"), 0.3
    given = lw.InducingPoints(problem.x[:4])
    found = problem.fit(lw.VaLLA(given, fit=lw.NaturalGradient(3, rate=rate)))
    G = torch.zeros_like(problem.G)
    for J in problem.J[:, 0].split(CUTS):
        G = (1 - rate) * G + rate * 9 / len(J) * J.T @ J / NOISE
    rows = jacobian(problem.model, given.inputs, problem.blocks)[:, 0]
    wanted = subspace_covariance(span_of(rows), G, torch.full_like(rows[0], 2.0), True)
    close(found.covariance.to_dense(), wanted, 1e-8)


# --- the points ------------------------------------------------------------------------------------------------------


def classes(count: int, sort: bool = False) -> tuple[Tensor, Tensor]:
    y = torch.arange(count) % 3
    y = y.sort().values if sort else y
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(0)).double() + 5 * y[:, None], y


class TestChoiceOfPoints:
    @pytest.mark.parametrize("initial", ["kmeans", "data"])
    def test_classes_and_outputs_are_balanced(self, initial):
        x, y = classes(300)
        anchors = points_of(setup("mlp"), lw.VaLLA(12, initial=initial), [(x[:200], y[:200]), (x[200:], y[200:])])
        means = anchors.inputs[0].value[anchors.samples].mean(1)
        assert (means / 5).round().long().bincount().tolist() == [4, 4, 4]
        assert anchors.outputs.bincount().tolist() == [4, 4, 4]
        assert movable(anchors)
        if initial == "data":
            assert all((x == row).all(1).any() for row in anchors.inputs[0].value[anchors.samples])
        else:
            assert not any((x == row).all(1).any() for row in anchors.inputs[0].value)

    def test_centres_are_those_of_clusters(self):
        x = torch.tensor([[0.0], [0.1], [5.0], [5.2], [9.0]]).double().expand(5, 3).contiguous()
        loader = [(x, torch.zeros(5, 1).double())]
        anchors = points_of(setup("mlp_scalar"), lw.VaLLA(3), loader)
        assert sorted(anchors.inputs[0].value[:, 0].tolist()) == pytest.approx([0.05, 5.1, 9.0])
        assert anchors.outputs.tolist() == [0, 0, 0]

    def test_more_points_than_samples_take_further_outputs(self):
        x, y = classes(6)
        anchors = points_of(setup("mlp"), lw.VaLLA(10), [(x, y)])
        pairs = set(zip(anchors.samples.tolist(), anchors.outputs.tolist(), strict=True))
        assert len(pairs) == len(anchors) == 10
        assert len(points_of(setup("mlp"), lw.VaLLA(100), [(x, y)])) == 18

    def test_only_the_first_samples_are_looked_at(self):
        seen = set()

        class Data(torch.utils.data.Dataset):
            x, y = classes(6000)

            def __len__(self):
                return 6000

            def __getitem__(self, i):
                seen.add(i)
                return self.x[i], self.y[i]

        loader = torch.utils.data.DataLoader(Data(), batch_size=500)
        fitted = setup("mlp").fit(lw.VaLLA(10, fit=lw.NaturalGradient(2)), loader=loader)
        assert max(seen) == 1999  # of 2000 for the points; two batches of steps
        assert fitted.samples == 1000
        assert fitted.data_factor == 6

    @pytest.mark.parametrize("name", ["gpt2", "tied", "embedding_bag_of_tokens"])
    def test_discrete_inputs_are_samples(self, name, caplog):
        problem = setup(name)
        with caplog.at_level(logging.INFO, "lapwing"):
            fitted = problem.fit(lw.VaLLA(5))
        told = [r for r in caplog.records if "discrete" in r.getMessage()]
        assert len(told) == 1
        assert psd(fitted.covariance.to_dense())
        assert not movable(points_of(problem, lw.VaLLA(5)))


class TestClusters:
    """Lloyd's iteration, by what defines its end."""

    def points(self, n: int = 120, width: int = 4) -> Tensor:
        return torch.randn(n, width).double() + 6.0 * torch.randint(4, (n, 1))

    def cost(self, points: Tensor, centres: Tensor) -> float:
        return float((points[:, None] - centres).square().sum(2).amin(1).sum())

    @pytest.mark.parametrize("count", [1, 7, 120])
    def test_every_centre_is_the_mean_of_the_points_nearest_to_it(self, count):
        points = 1e3 + self.points()
        centres = cluster_centres(points, count, torch.Generator().manual_seed(0))
        nearest = (points[:, None] - centres).square().sum(2).argmin(1)
        assert nearest.bincount(minlength=count).min() > 0
        close(centres, torch.stack([points[nearest == k].mean(0) for k in range(count)]), 1e-10)

    def test_as_good_as_scikit_learn(self):
        from sklearn.cluster import KMeans

        points, seeds = self.points(300), range(4)
        own = [self.cost(points, cluster_centres(points, 12, torch.Generator().manual_seed(seed))) for seed in seeds]
        found = [KMeans(12, n_init=1, random_state=seed).fit(points.numpy()).inertia_ for seed in seeds]
        assert sum(own) < 1.03 * sum(found)

    @pytest.mark.parametrize("size", [1e-30, 1.0, 1e25])
    def test_fewer_different_points_than_centres(self, size):
        """Squares of these leave float32 at both ends; centres without points stay on one."""
        points = size * torch.tensor([[0.0, 1.0], [2.0, 3.0], [0.0, 1.0], [0.0, 1.0], [2.0, 3.0]])
        centres = cluster_centres(points, 4, torch.Generator().manual_seed(0))
        assert torch.cdist((centres / size).double(), (points / size).double()).amin(1).max() < 1e-6
        assert torch.cdist((points / size).double(), (centres / size).double()).amin(1).max() < 1e-6
