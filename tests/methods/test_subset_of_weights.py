"""Subsets of weights against the dense GGN restricted to identity columns, and the choice of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.covariance.base import join_blocks, split_blocks
from lapwing.covariance.basis import CoordinateBasis
from lapwing.methods.subset_of_weights import SubsetOfWeights
from tests.conformance import EVERY, Setup, close, setup, subspace_covariance
from tests.methods.test_methods import MethodConformance, OnFewNetworks
from tests.zoo import ZOO


def assert_largest(picked: Tensor, values: Tensor) -> None:
    """Asserts that K different weights are those of the K largest values, up to rounding between equals."""
    assert len(picked.unique()) == len(picked)
    rest = torch.ones(len(values), dtype=torch.bool)
    rest[picked] = False
    assert not rest.any() or values[picked].min() >= values[rest].max() * (1 - 1e-12)


class SubsetConformance(MethodConformance):
    """The oracle takes G from loops, and the chosen weights after it has checked that they are the right ones."""

    method: SubsetOfWeights

    def sigma(self, problem: Setup, G: Tensor, delta: Tensor, fitted: lw.Posterior) -> Tensor:
        picked = fitted.covariance.basis.picked
        assert len(picked) == self.method.size
        if self.method.by != "random":
            precision = G.diagonal() + problem.expand(fitted.prior.precision)
            assert_largest(picked, problem.theta.abs() if self.method.by == "magnitude" else 1 / precision)
        V = torch.eye(len(G)).double()[picked]
        return subspace_covariance(V, G, delta, self.method.residual == "prior")


class TestDiagonal(SubsetConformance):
    method = SubsetOfWeights(size=7)


class TestMagnitudeWithResidual(OnFewNetworks, SubsetConformance):
    method = SubsetOfWeights(size=7, by="magnitude", residual="prior")


class TestRandom(OnFewNetworks, SubsetConformance):
    method = SubsetOfWeights(size=7, by="random")


class TestDiagonalWithResidual(OnFewNetworks, SubsetConformance):
    method = SubsetOfWeights(size=7, residual="prior")


# --- the choice ------------------------------------------------------------------------------------------------------


def test_random_follows_the_seed():
    problem = setup("mlp")
    picked = [problem.fit(SubsetOfWeights(9, "random"), seed=seed).covariance.basis.picked for seed in (3, 3, 4)]
    assert torch.equal(picked[0], picked[1])
    assert not torch.equal(picked[0], picked[2])
    assert torch.equal(picked[0][:5], problem.fit(SubsetOfWeights(5, "random"), seed=3).covariance.basis.picked)
    chosen = [problem.fit(SubsetOfWeights(20, "random"), seed=seed).covariance.basis.picked for seed in range(60)]
    counts = torch.cat(chosen).bincount(minlength=len(problem.theta)).double()
    share = 20 / len(problem.theta)
    error = (60 * share * (1 - share)) ** 0.5
    assert ((counts - 60 * share).abs() < 5 * error).all()  # every weight equally often


def test_tiny_curvatures_are_ordered():
    """Next to δ = 1, curvatures of 1e-10 vanish in float32 variances; their order still counts."""
    problem = setup("mlp", samples=40)
    model = problem.case.build().float()
    model[-1].weight.data *= 1e-5  # curvatures of the layers below by 1e-10
    x, y = problem.x.float(), problem.y
    fitted = lw.fit(model, [(x, y)], SubsetOfWeights(10), params=EVERY, prior_precision=1.0)
    exact = Setup(problem.case, EVERY, 40)
    exact.model = model.double()
    picked, diagonal = fitted.covariance.basis.picked, exact.G.diagonal()
    assert diagonal[picked].max() < 1e-8
    assert diagonal[picked].max() <= diagonal.sort().values[9] * 1.001


def test_noise_and_data_size_weigh_curvature_against_the_prior():
    """With one δ a layer the choice depends on the scale of G: σ² open, N/n and τ count."""
    problem = Setup(ZOO["mlp_scalar"], EVERY, 20)
    delta = dict(zip((b.name for b in problem.blocks), (30.0, 0.5), strict=True))
    expanded = problem.expand(torch.tensor(list(delta.values())))
    residual = (problem.y.reshape(problem.f.shape) - problem.f).square().mean()
    chosen = []
    for options, noise, factor in (
        ({"likelihood": lw.Gaussian(), "tune": None}, residual, 1.0),
        ({"data_size": 2000, "temperature": 0.5}, 0.3, 200.0),
        ({}, 0.3, 1.0),
    ):
        fitted = problem.fit(SubsetOfWeights(12), prior_precision=delta, **options)
        G = problem.G * 0.3 / noise * factor
        assert_largest(fitted.covariance.basis.picked, 1 / (G.diagonal() + expanded))
        chosen.append(set(fitted.covariance.basis.picked.tolist()))
    assert chosen[1] != chosen[2]  # a test that could not fail would prove nothing


@pytest.mark.parametrize("name", ["mlp", "grouped_strided_conv", "tied"])
def test_by_a_posterior(name):
    problem = setup(name)
    posterior = problem.fit(lw.KFAC())
    values = join_blocks(problem.blocks, posterior.covariance.diagonal())
    fitted = problem.fit(SubsetOfWeights(7, by=posterior))
    picked = fitted.covariance.basis.picked
    assert_largest(picked, values)
    assert str(fitted.method) == f"SubsetOfWeights(size=7, by=<{posterior.method}>, residual=None)"
    V = torch.eye(len(values)).double()[picked]
    delta = problem.expand(fitted.prior.precision)
    close(fitted.covariance.to_dense(), subspace_covariance(V, problem.G, delta, False))


# --- the basis -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "grouped_strided_conv", "prelu", "tied", "embedding_bag_of_tokens"])
def test_basis_equals_identity_columns(name):
    problem = setup(name)
    picked = torch.randperm(len(problem.theta), generator=torch.Generator().manual_seed(0))[:13]
    basis = CoordinateBasis(problem.blocks, picked, torch.float64)
    W = torch.eye(len(problem.theta)).double()[basis.picked]
    close(join_blocks(problem.blocks, basis.rows()), W)
    close(basis.project(problem.tangent.record(problem.test)), problem.J_test @ W.T)
    u = torch.randn(3, problem.case.outputs, 2).double()
    close(basis.project(problem.tangent.record(problem.test, u)), u.mT @ problem.J_test @ W.T)
    c, v = torch.randn(4, 13).double(), torch.randn(4, len(problem.theta)).double()
    close(join_blocks(problem.blocks, basis.combine(c)), c @ W)
    close(basis.inner(split_blocks(problem.blocks, v)), v @ W.T)
    grams = torch.stack([W[:, where] @ W[:, where].T for where in problem.slices.values()])
    close(basis.grams, grams)
    delta = torch.rand(len(problem.blocks)).double()
    close(basis.prior_gram(delta), torch.einsum("b,bkl->kl", delta, grams))


def test_large_networks_cost_no_rows(monkeypatch):
    """2.6 million weights, 300 of them: neither rows nor Gram matrices by block are made."""
    model = nn.Sequential(nn.Linear(20, 1600), nn.ReLU(), nn.Linear(1600, 1600), nn.ReLU(), nn.Linear(1600, 3))
    x, y = torch.randn(8, 20), torch.randint(3, (8,))
    for asked in ("rows", "grams", "combine"):
        monkeypatch.setattr(CoordinateBasis, asked, property(lambda self: pytest.fail("K x P numbers")))
    fitted = lw.fit(model.eval(), [(x, y)], SubsetOfWeights(300, "magnitude"), prior_precision=1.0, tune=lw.Evidence())
    assert (fitted.latent(x).variance > 0).all()
    fitted.with_prior(3.0).log_marginal_likelihood(lower_bound=True)
