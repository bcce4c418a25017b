"""Subspace methods beyond their dense oracle: choice of rows, the ways to the same span, implicit bases, ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.covariance import ExplicitBasis, ImplicitBasis, LowRank, Subspace
from lapwing.methods import subspace
from lapwing.methods.rows import choose, choose_rows
from lapwing.tangent import Tangent
from tests.conformance import close, psd, setup

FEW = ("mlp", "grouped_strided_conv", "tied", "gpt2", "mlp_scalar")


def problem_of(labels: Tensor, outputs: int, seed: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        tangent=SimpleNamespace(outputs=outputs),
        labels=lambda: labels,
        generator=lambda: torch.Generator().manual_seed(seed),
    )


class TestChoiceOfRows:
    labels = torch.tensor([0] * 50 + [1] * 5 + [2] * 45)

    def test_uniform_pairs_do_not_repeat(self):
        samples, outputs = choose_rows(problem_of(self.labels, 3), 250, "uniform")
        assert len({*zip(samples.tolist(), outputs.tolist(), strict=True)}) == 250
        samples, outputs = choose_rows(problem_of(self.labels, 3), "all", "uniform")
        assert len({*zip(samples.tolist(), outputs.tolist(), strict=True)}) == 300

    def test_balanced_takes_as_many_of_each_class(self):
        samples, outputs = choose_rows(problem_of(self.labels, 3), 12, "balanced")
        assert self.labels[samples].bincount().tolist() == [4, 4, 4]
        assert len(samples.unique()) == 12
        assert outputs.max() < 3
        samples, _ = choose_rows(problem_of(self.labels, 3), 25, "balanced")
        assert self.labels[samples].bincount().tolist()[1] == 5  # all there are

    def test_label_takes_the_output_of_the_class(self):
        samples, outputs = choose_rows(problem_of(self.labels, 3), 30, "label")
        assert torch.equal(outputs, self.labels[samples])
        assert len(samples.unique()) == 30

    def test_needs_labels(self):
        with pytest.raises(lw.LapwingError, match="sampling='uniform'"):
            choose_rows(problem_of(torch.zeros(9, dtype=torch.long), 3), 3, "label")

    def test_large_totals_do_not_repeat_and_follow_the_seed(self):
        found = choose(10**12, 500, torch.Generator().manual_seed(3))
        assert len(found.unique()) == 500
        assert float(found.double().mean()) == pytest.approx(5e11, rel=0.2)
        assert torch.equal(found, choose(10**12, 500, torch.Generator().manual_seed(3)))

    @pytest.mark.parametrize("sampling", ["balanced", "label"])
    def test_fits_on_real_rows(self, sampling):
        problem = setup("cnn_bn_inplace")
        method = lw.ELLA(rank=4, rows=6, sampling=sampling)
        fitted = problem.fit(method)
        assert psd(fitted.covariance.to_dense())
        assert fitted.covariance.rank == 4


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("residual", [None, "prior"])
@pytest.mark.parametrize("ratios", [False, True])
def test_all_ways_to_the_span_agree(name, residual, ratios, monkeypatch):
    """Rows, their Gram matrix with V written out, and V implicit give one covariance, draws and predictions."""
    problem = setup(name)
    precision = {b.name: 2.0 + i for i, b in enumerate(problem.blocks)} if ratios else 2.0
    method, options = lw.ELLA(rank=5, rows=8, residual=residual), {"prior_precision": precision}
    by_rows = problem.fit(method, **options)
    rank = by_rows.covariance.rank

    budgets = {ExplicitBasis: rank * by_rows.tangent.size * 8 + 8, ImplicitBasis: 8}
    for kind, budget in budgets.items():
        monkeypatch.setattr(subspace, "span_of_anchors", with_budget(subspace.span_of_anchors, budget))
        monkeypatch.setattr("lapwing.methods.ella.span_of_anchors", subspace.span_of_anchors)
        other = problem.fit(method, **options)
        monkeypatch.undo()
        assert type(other.covariance.basis) is kind
        assert other.covariance.rank == rank
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
        small = replace(problem.tangent, memory=budget)
        tangent = Forgiving(*(getattr(small, field) for field in small.__dataclass_fields__))
        return function(replace(problem, tangent=tangent), replace(anchors, tangent=tangent), rank, residual)

    return wrapped


class Forgiving(Tangent):
    """A network whose chunks hold three samples, whatever its budget."""

    def chunk_length(self, *arguments: object, **options: object) -> int:
        """Three."""
        return 3


def test_an_implicit_posterior_is_saved_and_loaded(tmp_path, monkeypatch):
    problem = setup("gpt2")
    monkeypatch.setattr("lapwing.methods.ella.span_of_anchors", with_budget(subspace.span_of_anchors, 8))
    posterior = problem.fit(lw.ELLA(rank=4, rows=6))
    assert isinstance(posterior.covariance.basis, ImplicitBasis)
    posterior.save(tmp_path / "ella.safetensors")
    loaded = lw.load(tmp_path / "ella.safetensors", problem.model)
    close(loaded.latent(problem.test).covariance, posterior.latent(problem.test).covariance)


class TestRanks:
    def test_leading_directions_are_those_of_a_smaller_fit(self):
        problem = setup("mlp")
        large, small = (problem.fit(lw.ELLA(rank=k, rows=9)).covariance for k in (6, 3))
        close(large.with_rank(3).to_dense(), small.to_dense())
        assert large.with_rank(3).rank == 3
        assert large.with_rank(99).rank == 6

    def test_bound_grows_with_the_rank_to_fulls_evidence(self):
        problem = setup("mlp")
        posterior = problem.fit(lw.ELLA(rank=10**6, rows="all"))
        full = problem.fit(lw.Full()).log_marginal_likelihood()
        covariance = posterior.covariance
        assert isinstance(covariance, Subspace)
        bounds = [
            replace(posterior, covariance=covariance.with_rank(k)).log_marginal_likelihood(lower_bound=True)
            for k in range(1, covariance.rank + 1)
        ]
        assert all(a <= b + 1e-9 for a, b in pairwise(bounds))
        assert bounds[-1] == pytest.approx(full, rel=1e-9)

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
        with pytest.raises(lw.LapwingError, match="ranks"):
            problem.fit(lw.KFAC(), prior_precision=None, tune=tune)

    def test_a_shorter_posterior_is_saved_and_loaded(self, tmp_path):
        problem = setup("mlp")
        fitted = problem.fit(lw.ELLA(rank=12, rows=20), prior_precision=None, tune=lw.Evidence(rank_gap=0.5))
        fitted.save(tmp_path / "p.safetensors")
        loaded = lw.load(tmp_path / "p.safetensors", problem.model)
        assert isinstance(loaded.covariance, LowRank)
        assert loaded.covariance.rank == fitted.covariance.rank
        close(loaded.covariance.to_dense(), fitted.covariance.to_dense())


def test_bad_options():
    with pytest.raises(lw.LapwingError, match="sampling="):
        lw.ELLA(sampling="random")
    with pytest.raises(lw.LapwingError, match="rank_gap"):
        lw.Evidence(rank_gap=-1.0)
