"""Kronecker factors shifted as in the paper's equation 10, against dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing import tangent as tn
from lapwing.covariance import Blockwise, KroneckerBlock
from lapwing.errors import LapwingError
from lapwing.prediction.streamlined import Streamlined
from lapwing.prediction.streamlined.kronecker import shifted
from tests.prediction.streamlined_oracle import F64, build, mlp_by_loops, weight_covariances


def factored(tangent, precision=0.7, scale=2.0):
    """A KFAC posterior over linear layers, with its factors A and Γ of equal mean eigenvalues."""
    structures, factors = {}, {}
    for block in tangent.blocks:
        _, outputs, inputs = block.matrix_shape
        alpha, gamma = torch.rand(1, inputs, dtype=F64), torch.rand(1, outputs, dtype=F64)
        bases = [torch.linalg.qr(torch.randn(1, n, n, dtype=F64))[0] for n in (inputs, outputs)]
        structures[block.name] = KroneckerBlock(gamma[..., :, None] * alpha[..., None, :], *bases)
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
@pytest.mark.parametrize("kronecker", ["exact", "shifted"])
def test_both_forms_equal_dense_matrices(kronecker, mode):
    model, x, tangent = network()
    covariance, factors = factored(tangent)
    S = {}
    for block in tangent.blocks:
        A, G = factors[block.name]
        root = 0.7**0.5
        if kronecker == "exact":
            dense = torch.linalg.inv(torch.kron(G, A) + 0.7 * torch.eye(len(G) * len(A), dtype=F64))
        else:
            inverses = [torch.linalg.inv(M + root * torch.eye(len(M), dtype=F64)) for M in (G, A)]
            dense = torch.kron(*inverses)
        S[block.name] = dense.reshape(*block.matrix_shape[1:], *block.matrix_shape[1:])
    found = Streamlined(mode, kronecker=kronecker).latent(tangent, covariance, x)
    torch.testing.assert_close(found.covariance, mlp_by_loops(model, S, x, mode == "diagonal"), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("precision", [1e-4, 1.0, 1e4])
def test_shifted_variances_are_never_larger(precision):
    _, x, tangent = network()
    covariance, _ = factored(tangent, precision)
    exact, other = covariance.to_dense(), shifted(covariance).to_dense()
    assert torch.linalg.eigvalsh(exact - other).min() > -1e-9 * exact.diagonal().max()
    found = [Streamlined(kronecker=k).latent(tangent, covariance, x).variance for k in ("exact", "shifted")]
    assert (found[1] < found[0]).all()


def test_fitted_posteriors_of_convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)).eval()
    x, y = torch.randn(20, 1, 6, 6), torch.randint(2, (20,))
    posterior = lw.fit(model, [(x, y)], lw.KFAC(), prior_precision=1.0)
    found = [posterior.latent(x, via=lw.Streamlined(kronecker=k)).variance for k in ("exact", "shifted")]
    assert (found[1] < found[0]).all()
    S = weight_covariances(posterior.tangent, shifted(posterior.covariance))
    assert all(torch.isfinite(part).all() for part in S.values())


def test_other_posteriors_are_named():
    _, x, tangent = network()
    with pytest.raises(LapwingError, match="without Kronecker factors"):
        Streamlined(kronecker="shifted").latent(tangent, build(tangent, "diagonal"), x)
    with pytest.raises(LapwingError, match="EKFAC"):
        Streamlined(kronecker="shifted").latent(tangent, build(tangent, "kronecker"), x)
