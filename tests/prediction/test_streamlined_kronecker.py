"""Kronecker-factored blocks in streamlined prediction, against dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lapwing import tangent as tn
from lapwing.covariance import Blockwise, KroneckerBlock, KroneckerFactors
from lapwing.prediction.streamlined import Streamlined
from tests.prediction.streamlined_oracle import F64, mlp_by_loops


def factored(tangent, precision=0.7, scale=2.0):
    """A KFAC posterior over linear layers, with its factors A and Γ of equal mean eigenvalues."""
    structures, factors = {}, {}
    for block in tangent.blocks:
        _, outputs, inputs = block.matrix_shape
        alpha, gamma = torch.rand(1, inputs, dtype=F64), torch.rand(1, outputs, dtype=F64)
        bases = [torch.linalg.qr(torch.randn(1, n, n, dtype=F64))[0] for n in (inputs, outputs)]
        kronecker = KroneckerFactors(*bases, alpha, gamma, torch.ones(1, dtype=torch.int64))
        structures[block.name] = KroneckerBlock(kronecker.products(), kronecker)
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


@pytest.mark.parametrize("mode", ["diagonal", "full"])
def test_kronecker_factors_equal_dense_matrices(mode):
    model, x, tangent = network()
    covariance, factors = factored(tangent)
    S = {}
    for block in tangent.blocks:
        A, G = factors[block.name]
        dense = torch.linalg.inv(torch.kron(G, A) + 0.7 * torch.eye(len(G) * len(A), dtype=F64))
        S[block.name] = dense.reshape(*block.matrix_shape[1:], *block.matrix_shape[1:])
    found = Streamlined(mode).latent(tangent, covariance, x)
    torch.testing.assert_close(found.covariance, mlp_by_loops(model, S, x, mode == "diagonal"), rtol=1e-9, atol=1e-12)
