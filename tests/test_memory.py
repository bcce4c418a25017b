"""The peak memory of fits and predictions: at most twice the budget plus the result, tuning included.

The decomposition of a wide factor needs more: up to 24 bytes for each of its numbers (docs/costs.md).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from benchmarks.cost import cnn, mlp
from lapwing.covariance import Latent
from lapwing.covariance.terms import DenseTerm, EigenTerm, FactoredTerm
from lapwing.linalg import condensed
from lapwing.methods.prior import Prior
from lapwing.prediction.way import Way
from papers.common.measure import LiveBytes
from tests.peaks import storages

BUDGET = 2**24
METHODS = (
    lw.Diagonal(), lw.KFAC(), lw.EKFAC(), lw.ELLA(20, 50), lw.ELLA(20, 15, residual="prior"), lw.ELLA(100, 150),
    lw.SubsetOfWeights(300), lw.OptimalSubspace(10, rows=60), lw.VaLLA(10), lw.Full(), lw.SubsetOfData(50),
    lw.SampledLLA(3), lw.MeanField(20),
)  # fmt: skip
WAYS = (
    lw.MonteCarlo(20), lw.Streamlined(), lw.Linearized(draws=64), lw.Linearized(outputs=3),
    lw.Scaled(lw.Linearized(), 0.5), lw.Scaled(lw.MonteCarlo(20), 0.5),
)  # fmt: skip
WIDEST = {"mlp": 785, "cnn": 1569}  # factors
CASES = [(method, lw.Linearized()) for method in METHODS] + [(method, way) for method in METHODS[:2] for way in WAYS]
NETWORKS = {"mlp": (mlp, (784,)), "cnn": (cnn, (1, 28, 28))}


def beside(live: LiveBytes, returned: Any) -> float:
    """The peak beside what is returned, in budgets."""
    return (live.peak - sum(storages(returned).values())) / BUDGET


@pytest.mark.parametrize(
    ("name", "method", "way"),
    [
        pytest.param(name, method, way, marks=[] if name == "mlp" and (method, way) == CASES[0] else pytest.mark.slow)
        for name in NETWORKS
        for method, way in CASES
        if name == "mlp" or not isinstance(method, lw.Full)  # P² numbers for the 15 690 weights of the last layer
    ],
    ids=str,
)
def test_fits_and_predictions_stay_within_twice_the_budget(name: str, method: lw.Method, way: Way) -> None:
    make, shape = NETWORKS[name]
    model, samples = make(), 1000 if name == "mlp" else 200
    data = [(torch.randn(samples, *shape), torch.randint(10, (samples,)))]
    params = lw.last_layer if isinstance(method, lw.Full) else lw.everything
    with LiveBytes() as live:
        fitted = lw.fit(model, data, method, params=params, memory=BUDGET)
    assert beside(live, fitted) < max(2, 24 * WIDEST[name] ** 2 / BUDGET)
    x = torch.randn(8000 if name == "mlp" else 400, *shape)
    with LiveBytes() as live:
        latent = fitted.latent(x, via=way)
    assert beside(live, latent) < 2
    with LiveBytes() as live:
        prediction = fitted.predict(x, via=way)
        assert prediction.probs.isfinite().all()
    assert beside(live, latent) < 2  # which predictions are made of


@pytest.mark.parametrize("method", [lw.Diagonal(), pytest.param(lw.KFAC(), marks=pytest.mark.slow)], ids=str)
def test_tuning_keeps_no_copy_of_the_weights_for_every_candidate(method: lw.Method) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(5)), nn.Linear(512, 10)).eval()
    data = [(torch.randn(100, 512), torch.randint(10, (100,)))]
    size = 4 * sum(p.numel() for p in model.parameters())
    with LiveBytes() as live:
        lw.fit(model, data, method, params=lw.everything, memory=2 * BUDGET, tune=None)
    with LiveBytes() as tuned:
        lw.fit(model, data, method, params=lw.everything, memory=2 * BUDGET)  # 17 candidates
    assert tuned.peak < live.peak + 5 * size


def test_the_measure_counts_what_is_made() -> None:
    old = torch.ones(1000)
    with LiveBytes() as live:
        assert old[:10].sum() == 10
        assert live.peak < 100  # a view of what was there is nothing new
        new = old * 2
        assert new[:10].sum() == 20
        assert 4000 <= live.peak < 4100
        del new
        assert live.now < 100


@pytest.mark.parametrize("lengths", [(2, 2, 1), (3, 2), (5,), (1, 4)])
@pytest.mark.parametrize("width", [4, 25])
@pytest.mark.parametrize("gradient", [False, True])
def test_chunks_are_gathered(lengths: tuple[int, ...], gradient: bool, width: int) -> None:
    basis = torch.randn(3, 3)
    whole = Latent(
        torch.randn(5, 3),
        (FactoredTerm(torch.randn(5, 3, width), torch.rand(5, width)), EigenTerm(basis, torch.rand(5, 3))),
    )
    if gradient:
        whole.mean.requires_grad_()
    chunks = (whole.taken(rows) for rows in torch.arange(5).split(lengths))
    found = Latent.gather(chunks, 5)
    torch.testing.assert_close(found.mean, whole.mean)
    torch.testing.assert_close(found.covariance, whole.covariance)
    of_chunks = [EigenTerm, DenseTerm] if width > 8 * 3 and len(lengths) > 1 else [FactoredTerm, EigenTerm]
    assert [type(term) for term in found.terms] == of_chunks
    assert found.mean.requires_grad == gradient


def test_eigenvalues_are_condensed_and_a_prior_mean_kept_without_copies() -> None:
    eigenvalues = torch.rand(2**21, generator=torch.Generator().manual_seed(0))
    with LiveBytes() as live:
        points, weights = condensed(eigenvalues)
    assert live.peak < 5 * eigenvalues.nbytes  # twice in float64: the logarithms, joined from parts
    assert weights is not None
    torch.testing.assert_close(
        torch.log1p(points) @ weights, torch.log1p(eigenvalues.double()).sum(), rtol=1e-6, atol=0.0
    )
    tangent = lw.fit(nn.Linear(500, 2).eval(), [(torch.randn(4, 500), torch.tensor([0, 1, 0, 1]))]).tangent
    with LiveBytes() as live:
        prior = Prior.read(tangent, 1.0, 0.5)
    assert live.peak < 200
    assert all((mean == 0.5).all() for mean in prior.mean.values())
