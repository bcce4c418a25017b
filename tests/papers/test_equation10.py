"""Equation 10 of streamlined prediction, against dense matrices and the exact form."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing import tangent as tn
from lapwing.covariance import Blockwise, KroneckerBlock
from lapwing.prediction.uncertain import prepared
from papers.streamlined.equation10 import shifted
from tests.prediction.streamlined_oracle import F64, mlp_by_loops


def factored(tangent, precision=0.7, scale=2.0):
    """A KFAC posterior over linear layers, with its factors A and Γ of equal mean eigenvalues."""
    structures, factors = {}, {}
    for block in tangent.blocks:
        _, outputs, inputs = block.matrix_shape
        alpha, gamma = torch.rand(1, inputs, dtype=F64), torch.rand(1, outputs, dtype=F64)
        bases = [torch.linalg.qr(torch.randn(1, n, n, dtype=F64))[0] for n in (inputs, outputs)]
        structures[block.name] = KroneckerBlock.of_factors(*bases, alpha, gamma, torch.ones(1, dtype=torch.int64))
        level = (alpha.mean() * gamma.mean() * scale).sqrt()
        diagonals = (alpha[0] / alpha.mean() * level).diag(), (gamma[0] / gamma.mean() * level).diag()
        factors[block.name] = [b[0] @ d @ b[0].T for b, d in zip(bases, diagonals, strict=True)]
    deltas = torch.full((len(tangent.blocks),), precision, dtype=F64)
    return Blockwise(tangent.blocks, structures, deltas, scale), factors


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    x = torch.randn(4, 4, dtype=F64)
    return model, x, tn.Tangent.survey(model, x, tn.matching("*"))


def test_it_equals_dense_matrices():
    model, x, tangent = network()
    covariance, factors = factored(tangent)
    S = {}
    for block in tangent.blocks:
        A, G = factors[block.name]
        inverses = [torch.linalg.inv(M + 0.7**0.5 * torch.eye(len(M), dtype=F64)) for M in (G, A)]
        S[block.name] = torch.kron(*inverses).reshape(*block.matrix_shape[1:], *block.matrix_shape[1:])
    found = lw.Streamlined().latent(tangent, shifted(covariance), prepared(x))
    torch.testing.assert_close(found.covariance, mlp_by_loops(model, S, x, True), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("precision", [1e-4, 1.0, 1e4])
def test_variances_are_never_larger(precision):
    _, _, tangent = network()
    covariance, _ = factored(tangent, precision)
    exact, other = covariance.to_dense(), shifted(covariance).to_dense()
    assert torch.linalg.eigvalsh(exact - other).min() > -1e-9 * exact.diagonal().max()
