"""Optimal subspaces: Theorem 1, the orders of the design, and every approximation against its dense formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lapwing as lw
from tests.conformance import close, setup
from tests.methods.test_methods import MethodConformance, OnFewNetworks
from tests.methods.test_subspace_theorems import wide_problem

NETWORKS = ("mlp", "mlp_scalar", "cnn_bn_inplace", "tied", "gpt2")
CURVATURES = [lw.KFAC(), lw.EKFAC(), lw.Diagonal(), lw.Full("primal"), lw.Full("dual"), "prior"]


def dense(J: Tensor, approximate: Tensor, precision: Tensor, rank: int) -> Tensor:
    """`P (Pᵀ Ψ⁻¹ P)⁻¹ Pᵀ`, `P = Ψ_approx Jᵀ U_s`."""
    values, vectors = torch.linalg.eigh(J @ approximate @ J.T)
    rank = min(rank, int((values > 1e-11 * values[-1]).sum()))
    P = approximate @ J.T @ vectors[:, -rank:]
    return P @ torch.linalg.inv(P.T @ precision @ P) @ P.T


def full_precision(problem) -> Tensor:
    return problem.G + 2.0 * torch.eye(len(problem.G)).double()


class TestOptimalSubspace(OnFewNetworks, MethodConformance):
    """The oracle's directions are those at the prior of the fit."""

    method = lw.OptimalSubspace(4, lw.Diagonal(), "all")

    def sigma(self, problem, G, delta, fitted):
        approximate = torch.diag(1 / (G.diagonal() + problem.expand(fitted.prior.precision)))
        return dense(problem.J.flatten(0, 1), approximate, G + torch.diag(delta), 4)


@pytest.mark.quick(2)
@pytest.mark.parametrize("curvature", CURVATURES, ids=str)
def test_formula(curvature):
    problem = setup("tied")
    precision = full_precision(problem)
    approximate = torch.eye(len(precision)).double() / 2
    if curvature != "prior":
        approximate = problem.fit(curvature).covariance.to_dense()
    J = problem.J.flatten(0, 1)
    for rank in (1, 3, 6):
        fitted = problem.fit(lw.OptimalSubspace(rank, curvature, "all"))
        close(fitted.covariance.to_dense(), dense(J, approximate, precision, rank), 1e-7)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", NETWORKS)
def test_theorem_1_gives_the_eckart_young_truncation(name):
    problem = setup(name)
    sigma = problem.J_test.flatten(0, 1) @ torch.linalg.inv(full_precision(problem)) @ problem.J_test.flatten(0, 1).T
    values, vectors = torch.linalg.eigh(sigma)
    for rank in (1, 2, 3):
        fitted = problem.fit(lw.OptimalSubspace(rank, lw.Full(), at=problem.test))
        found = fitted.latent(problem.test, joint=True).covariance.flatten(0, 1).flatten(1)
        close(found, (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T, 1e-8)


def test_prior_directions_are_those_of_ella():
    problem = setup("mlp")
    mine = problem.fit(lw.OptimalSubspace(4, "prior", "all")).covariance.to_dense()
    close(mine, problem.fit(lw.ELLA(4, "all")).covariance.to_dense())


def test_residual_adds_the_prior_outside():
    problem = setup("cnn_bn_inplace")
    inside = problem.fit(lw.OptimalSubspace(4, lw.KFAC(), "all")).covariance.to_dense()
    values, vectors = torch.linalg.eigh(inside)
    V = vectors[:, values > 1e-11 * values[-1]].T
    outside = (torch.eye(len(V.T)).double() - V.T @ V) / 2
    found = problem.fit(lw.OptimalSubspace(4, lw.KFAC(), "all", residual="prior")).covariance.to_dense()
    close(found, inside + outside, 1e-7)


def test_rows_in_chunks_equal_rows_together():
    model, loader, test = wide_problem()
    method = lw.OptimalSubspace(4, lw.KFAC(), "all")
    chunks, whole = (lw.fit(model, loader, method, prior_precision=1.0, memory=memory) for memory in (2**24, 2**30))
    close(chunks.latent(test).covariance, whole.latent(test).covariance, 1e-6)
