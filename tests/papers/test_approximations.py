"""Which approximation of streamlined prediction costs what, against Jacobians restricted to one layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing import tangent as tn
from lapwing.prediction.linearized import Linearized
from papers.streamlined.approximations import approximation_errors, restricted
from tests.prediction.streamlined_oracle import F64, build


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3)).double().eval()
    x, y = torch.rand(24, 2, 6, 6, dtype=F64), torch.randint(3, (24,))
    return model, x, lw.fit(model, [(x, y)], lw.Diagonal(), prior_precision=1e5)


@pytest.mark.parametrize("kind", ["kronecker", "diagonal", "dense block"])
def test_restricted_covariance_is_a_block_of_the_dense_one(kind):
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double().eval()
    x = torch.randn(5, 4, dtype=F64)
    tangent = tn.Tangent.survey(model, x, tn.matching("*"))
    covariance = build(tangent, kind)
    dense, rows, start = covariance.to_dense(), tangent.record(x).rows(), 0
    for block in tangent.blocks:
        part, start = slice(start, start + block.size), start + block.size
        alone = restricted(covariance, block)
        found = Linearized().latent(tangent, alone, x, joint=False).covariance
        J = rows[..., part]
        torch.testing.assert_close(found, J @ dense[part, part] @ J.mT, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(alone.to_dense(), dense[part, part])


def test_tables():
    _, x, posterior = network()
    way = lw.Streamlined(positions="independent")
    found = approximation_errors(posterior, x[:8], way)
    exact, own = posterior.latent(x[:8]).variance, posterior.latent(x[:8], via=way)
    rows = found["options"]
    assert rows["as given"]["ratio"] == pytest.approx(float((own.variance / exact).log().mean().exp()))
    assert rows["as given"]["ratio"] < 1
    assert rows["positions correlated"]["error"] < rows["as given"]["error"]
    layers = found["layers"]
    assert list(layers) == [block.name for block in posterior.covariance.blocks]
    assert sum(row["share"] for row in layers.values()) == pytest.approx(1)
    assert layers["6"]["ratio"] == pytest.approx(1)
    assert layers["6"]["missing"] == pytest.approx(0, abs=1e-9)
    block = posterior.covariance.blocks[0]
    J = posterior.tangent.record(x[:8])[block.name].rows()
    alone = (J.square() @ posterior.covariance.diagonal()[block.name]).sum() / exact.sum()
    assert layers["0"]["share"] == pytest.approx(float(alone))
