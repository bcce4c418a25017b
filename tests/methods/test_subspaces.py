"""Subspace methods beyond their dense oracle: choice of rows, the ways to the same span, implicit bases, ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.covariance import ExplicitBasis, ImplicitBasis
from lapwing.methods import subspace
from lapwing.methods.rows import choose, choose_rows
from tests.conformance import close, setup
from tests.tangent.test_anchors import narrow
from tests.zoo_modules import Net

FEW = ("mlp", "grouped_strided_conv", "tied", "gpt2", "mlp_scalar")


def problem_of(outputs: int, seed: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        tangent=SimpleNamespace(outputs=outputs, width=outputs, positions=None),
        generator=lambda: torch.Generator().manual_seed(seed),
    )


class TestChoiceOfRows:
    labels = torch.tensor([0] * 50 + [1] * 5 + [2] * 45)

    def test_uniform_pairs_do_not_repeat(self):
        samples, outputs = choose_rows(problem_of(3), self.labels, 250, "uniform")
        assert len({*zip(samples.tolist(), outputs.tolist(), strict=True)}) == 250
        samples, outputs = choose_rows(problem_of(3), self.labels, "all", "uniform")
        assert len({*zip(samples.tolist(), outputs.tolist(), strict=True)}) == 300

    def test_balanced_takes_as_many_of_each_class(self):
        samples, outputs = choose_rows(problem_of(3), self.labels, 12, "balanced")
        assert self.labels[samples].bincount().tolist() == [4, 4, 4]
        assert len(samples.unique()) == 12
        assert outputs.max() < 3
        samples, _ = choose_rows(problem_of(3), self.labels, 25, "balanced")
        assert self.labels[samples].bincount().tolist()[1] == 5  # all there are

    def test_label_takes_the_output_of_the_class(self):
        samples, outputs = choose_rows(problem_of(3), self.labels, 30, "label")
        assert torch.equal(outputs, self.labels[samples])
        assert len(samples.unique()) == 30

    def test_one_logit_has_two_classes(self):
        labels = torch.tensor([0] * 20 + [1] * 4)
        samples, outputs = choose_rows(problem_of(1), labels, 8, "balanced")
        assert labels[samples].bincount().tolist() == [4, 4]
        assert not outputs.any()

    def test_large_totals_do_not_repeat_and_follow_the_seed(self):
        found = choose(10**12, 500, torch.Generator().manual_seed(3))
        assert len(found.unique()) == 500
        assert float(found.double().mean()) == pytest.approx(5e11, rel=0.2)
        assert torch.equal(found, choose(10**12, 500, torch.Generator().manual_seed(3)))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ("grouped_strided_conv", "gpt2") else n for n in FEW]
)
@pytest.mark.parametrize(("residual", "ratios"), [(None, False), ("prior", True)])
def test_all_ways_to_the_span_agree(name, residual, ratios, monkeypatch):
    """Rows, their Gram matrix with V written out, and V implicit give one covariance, draws and predictions."""
    problem = setup(name)
    precision = {b.name: 2.0 + i for i, b in enumerate(problem.blocks)} if ratios else 2.0
    method, options = lw.ELLA(rank=5, rows=8, residual=residual), {"prior_precision": precision}
    by_rows = problem.fit(method, **options)
    rank = by_rows.covariance.rank

    budgets = {ExplicitBasis: rank * by_rows.tangent.size * 8 + 8, ImplicitBasis: 16 * 8**2}
    for kind, budget in budgets.items():
        monkeypatch.setattr(subspace, "span_of_anchors", with_budget(subspace.span_of_anchors, budget))
        monkeypatch.setattr("lapwing.methods.ella.span_of_anchors", subspace.span_of_anchors)
        other = problem.fit(method, **options)
        monkeypatch.undo()
        assert type(other.covariance.basis) is kind
        assert other.covariance.rank == rank
        for prior in (other.prior.precision, 1.0 + torch.arange(len(problem.blocks)).double()):
            grams = torch.einsum("b,bkl->kl", prior, other.covariance.basis.grams)
            close(other.covariance.basis.prior_gram(prior), grams, 1e-7)
        wanted = by_rows.covariance.to_dense()
        close(other.covariance.to_dense(), wanted, 1e-6)
        close(other.latent(problem.test).covariance, by_rows.latent(problem.test).covariance, 1e-6)
        close(
            other.latent(problem.test, joint=True).covariance, by_rows.latent(problem.test, joint=True).covariance, 1e-6
        )
        moved = [p.with_prior({b.name: 1.0 + 2 * i for i, b in enumerate(problem.blocks)}) for p in (other, by_rows)]
        close(*(p.covariance.to_dense() for p in moved), 1e-6)
        evidence = [p.log_marginal_likelihood(lower_bound=True) for p in (other, by_rows)]
        assert evidence[0] == pytest.approx(evidence[1], rel=1e-6)


def with_budget(function, budget):
    """Runs a function within another memory budget; chunks stay as they are."""

    def wrapped(problem, anchors, rank, residual):
        tangent = narrow(replace(problem.tangent, memory=budget))
        return function(replace(problem, tangent=tangent), replace(anchors, tangent=tangent), rank, residual)

    return wrapped


class TestRanks:
    def test_leading_directions_are_those_of_a_smaller_fit(self):
        problem = setup("mlp")
        large, small = (problem.fit(lw.ELLA(rank=k, rows=9)).covariance for k in (6, 3))
        close(large.with_rank(3).to_dense(), small.to_dense())
        assert large.with_rank(3).rank == 3
        assert large.with_rank(99).rank == 6

    def test_evidence_keeps_the_fewest_within_the_gap(self):
        problem = setup("mlp")
        method = lw.ELLA(rank=12, rows=20)
        whole = problem.fit(method, prior_precision=None)
        for gap in (0.01, 0.5):
            chosen = problem.fit(method, prior_precision=None, tune=lw.Evidence(rank_gap=gap))
            rank = chosen.covariance.rank
            best = whole.log_marginal_likelihood(lower_bound=True)
            assert chosen.log_marginal_likelihood(lower_bound=True) >= best - gap
            assert rank < whole.covariance.rank
            fewer = replace(whole, covariance=whole.covariance.with_rank(rank - 1))
            assert lw.Evidence().tune(fewer).log_marginal_likelihood(lower_bound=True) < best - gap

    def test_validation_chooses_among_ranks(self):
        problem = setup("cnn_bn_inplace")
        held_out = [(problem.case.inputs(7, 5), problem.case.targets(7, 5))]
        tune = lw.Validation(held_out, ranks=(1, 2, 4))
        fitted = problem.fit(lw.ELLA(rank=8, rows=12), prior_precision=None, tune=tune)
        score = fitted.predict(held_out[0][0]).log_prob(held_out[0][1]).mean()
        for rank in (1, 2, 4, 8):
            alone = problem.fit(lw.ELLA(rank=rank, rows=12), prior_precision=None, tune=lw.Validation(held_out))
            assert score >= alone.predict(held_out[0][0]).log_prob(held_out[0][1]).mean() - 1e-3


class TestHardCases:
    """Inputs at the edge of what is accepted, and sums that lose digits."""

    def test_a_shuffling_loader(self):
        """Rows of labels stay with their samples in any order; a choice by class needs one order."""
        problem = setup("cnn_bn_inplace", samples=30)
        shuffled = DataLoader(TensorDataset(problem.x, problem.y), batch_size=7, shuffle=True)
        every = lw.ELLA(rank=30, rows=30, sampling="label")
        found, wanted = (problem.fit(every, loader=loader).covariance for loader in (shuffled, problem.loader))
        close(found.to_dense(), wanted.to_dense(), 1e-7)
        with pytest.raises(lw.LapwingError, match="shuffle=False"):
            problem.fit(lw.ELLA(rank=4, rows=12, sampling="balanced"), loader=shuffled)

    @pytest.mark.parametrize("method", [lw.ELLA(3, 6), lw.ELLA(3, 6, "prior"), lw.OptimalSubspace(3, lw.KFAC(), "all")])
    def test_outputs_without_gradient(self, method):
        """No row spans anything: a posterior without directions, variance 0 or the prior's."""
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).double().eval()
        model[0].bias.data -= 1e3
        x, y = torch.randn(8, 4).double(), torch.arange(8) % 3
        fitted = lw.fit(model, [(x, y)], method, prior_precision=2.0)
        assert fitted.covariance.rank == 0
        assert torch.equal(fitted.latent(x).variance, torch.zeros(8, 3).double())
        total = sum(float(v.sum()) for v in fitted.covariance.diagonal().values())
        assert total == (15 / 2 if method.residual else 0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_few_directions_of_many_rows(self, dtype, monkeypatch):
        """Their Gram matrix gives them. If it cannot resolve the given rank, the QR decides how many there are."""
        monkeypatch.setattr(subspace, "SVD_NUMBERS", 0)
        generator = torch.Generator().manual_seed(0)
        left, right = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((20, 4), (4, 70)))
        rows = (left * torch.tensor([1, 0.5, 0.2, 0.1])) @ right
        best = torch.linalg.svd(rows, full_matrices=False)[2]
        for rank in (2, 4, 9):
            V = subspace.orthonormal_span(rows.to(dtype), 2**30, rank)
            assert V.dtype == dtype
            found = V.double()[: min(rank, 4)]
            close((found @ best[: len(found)].T).abs(), torch.eye(len(found)).double(), 1e-5)
            assert len(V) == min(rank, 4) or dtype == torch.float32  # where rounding adds directions

    def test_more_rows_than_weights(self, monkeypatch):
        monkeypatch.setattr(subspace, "SVD_NUMBERS", 0)
        problem = setup("mlp_scalar", samples=60)
        rows = problem.J.flatten(0, 1)
        tall = torch.cat([rows] * (rows.shape[1] // len(rows) + 2))
        V = subspace.orthonormal_span(tall, 2**30)
        close(V @ V.T, torch.eye(len(V)).double())
        assert len(V) == torch.linalg.matrix_rank(rows)
        close(tall @ V.T @ V, tall, 1e-7)


def one_dimension(width: int, samples: int) -> tuple[torch.nn.Module, list[tuple[Tensor, Tensor]]]:
    """A deep network in one dimension: its rows span directions over many decades, all within the noise's reach."""
    nn = torch.nn
    layers = nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    x = torch.linspace(-3, 3, samples)[:, None]
    return nn.Sequential(*layers).eval(), [(x, torch.sin(x))]


@pytest.mark.parametrize("residual", [None, "prior"])
def test_a_small_budget_loses_no_direction(residual):
    (model, data), method = one_dimension(110, 140), lw.ELLA(140, rows="all", residual=residual)
    options = {"likelihood": lw.Gaussian(noise_variance=1e-4), "prior_precision": 1.0}
    small, large = (lw.fit(model, data, method, memory=memory, **options) for memory in (2**24, 2**30))
    assert small.covariance.rank == large.covariance.rank == 140
    x = data[0][0]
    wanted = lw.fit(model, data, lw.Full(form="dual"), **options).latent(x).variance
    for fitted in (small, large):
        torch.testing.assert_close(fitted.latent(x).variance, wanted, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("width", "samples", "method"),
    [
        (250, 100, lw.OptimalSubspace(20, "prior", rows=100)),
        *(
            pytest.param(width, samples, lw.ELLA(20, rows="all"), marks=pytest.mark.slow)
            for width, samples in ((250, 100), (70, 600))
        ),
    ],
    ids=str,
)
def test_rows_that_do_not_fit_lose_no_direction(method, width, samples):
    """Rows, or what orthonormalises them, exceed the budget: their Gram matrix in float32 shows 7 directions.

    In float64 it shows 16, those down to 3e-6 of the largest; far from the data spreads then differ by some per cent.
    """
    model, data = one_dimension(width, samples)
    options = {"likelihood": lw.Gaussian(noise_variance=1e-4), "prior_precision": 1.0}
    small, large = (lw.fit(model, data, method, memory=memory, **options) for memory in (2**24, 2**30))
    x = torch.linspace(-4, 4, 50)[:, None]
    torch.testing.assert_close(small.latent(x).variance, large.latent(x).variance, rtol=5e-2, atol=0)


def scaled() -> torch.nn.Module:
    together = lambda net, x, shared: net.head(torch.tanh(net.first(x) * shared.sum()))  # noqa: E731
    return Net(together, first=torch.nn.Linear(6, 8), head=torch.nn.Linear(8, 5)).double().eval()


@pytest.mark.quick(4)
@pytest.mark.parametrize("shape", [(), (1, 7), (7,), (3, 2)])
@pytest.mark.parametrize(
    "method", [lw.ELLA(5, 10), lw.ELLA(45, "all", "prior"), lw.OptimalSubspace(5, "prior", rows=20)], ids=str
)
def test_inputs_that_samples_share(shape, method):
    """As where the network holds them; the last batch has one sample, which cannot show what it shares."""
    model, x, y = scaled(), torch.randn(9, 6).double(), torch.arange(9) % 5
    shared = 0.3 * torch.ones(shape).double()
    loader = [{"x": x[i : i + 4], "shared": shared.clone(), "labels": y[i : i + 4]} for i in (0, 4, 8)]
    given = lw.fit(model, loader, method, prior_precision=1.0)
    held = lw.fit(model, [(x, y)], method, prior_precision=1.0, forward=lambda model, x: model(x, shared))
    close(given.latent({"x": x, "shared": shared}).covariance, held.latent(x).covariance)


def test_samples_that_share_other_inputs_stand_in_batches_of_their_own():
    model, x, y = scaled(), torch.randn(8, 6).double(), torch.arange(8) % 5
    other = torch.full((1, 2), 0.1).double(), torch.full((1, 2), 0.5).double()
    loader = [{"x": x[i : i + 4], "shared": other[i // 4], "labels": y[i : i + 4]} for i in (0, 4)]
    anchors = lw.fit(model, loader, lw.ELLA(40, "all", "prior"), prior_precision=1.0)
    exact = lw.fit(model, loader, lw.Full(form="primal"), prior_precision=1.0)
    for batch in loader:
        inputs = {"x": batch["x"], "shared": batch["shared"]}
        close(anchors.latent(inputs).covariance, exact.latent(inputs).covariance, 1e-6)
