"""Equation 10 of streamlined prediction, against dense matrices and the exact form."""

from __future__ import annotations

import pytest
import torch
from tests.prediction.test_streamlined_kronecker import factored
from torch import nn

import lapwing as lw
from lapwing import tangent as tn
from papers.streamlined.equation10 import equation_10, shifted
from tests.prediction.streamlined_oracle import F64, mlp_by_loops


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
    found = lw.Streamlined().latent(tangent, shifted(covariance), x)
    torch.testing.assert_close(found.covariance, mlp_by_loops(model, S, x, True), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("precision", [1e-4, 1.0, 1e4])
def test_variances_are_never_larger(precision):
    _, _, tangent = network()
    covariance, _ = factored(tangent, precision)
    exact, other = covariance.to_dense(), shifted(covariance).to_dense()
    assert torch.linalg.eigvalsh(exact - other).min() > -1e-9 * exact.diagonal().max()


def test_fitted_posteriors_of_convolutions():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)).eval()
    x, y = torch.randn(20, 1, 6, 6), torch.randint(2, (20,))
    posterior = lw.fit(model, [(x, y)], lw.KFAC(), prior_precision=1.0)
    for way in (lw.Streamlined(), lw.Linearized()):
        exact, found = (p.latent(x, via=way).variance for p in (posterior, equation_10(posterior)))
        assert (found < exact).all()


def test_other_posteriors_are_named():
    model, x = nn.Linear(4, 3).eval(), torch.randn(20, 4)
    for method, words in ((lw.Diagonal(), "no Kronecker factors"), (lw.EKFAC(), "no products")):
        posterior = lw.fit(model, [(x, torch.arange(20) % 3)], method, prior_precision=1.0)
        with pytest.raises(lw.LapwingError, match=words):
            equation_10(posterior)
