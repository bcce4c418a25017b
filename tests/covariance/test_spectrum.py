"""Many eigenvalues as few points: log determinants are the same, at any prior precision, and so is what is tuned."""

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.linalg.eigen import MANY, condensed

COUNT = 2 * MANY


def _spectra():
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(COUNT, generator=generator)
    return {
        "spread": (5 * normal).exp(),
        "flat": torch.rand(COUNT, generator=generator),
        "equal": torch.full((COUNT,), 3.0),
        "skewed within a bin": torch.cat([torch.ones(COUNT - COUNT // 20), torch.full((COUNT // 20,), 1.0155)]),
        "subnormal": torch.rand(COUNT, generator=generator) * 1e-44,
        "mostly zero": torch.where(normal > 2, normal, 0.0),
        "products": torch.outer(normal[:500].square(), 1e-6 * normal[500:1000].square()),
    }


@pytest.mark.parametrize("name", _spectra())
def test_log_determinants_are_those_of_all_eigenvalues(name):
    eigenvalues = _spectra()[name]
    points, weights = condensed(eigenvalues)
    assert len(points) < 10_000
    assert float(weights.sum()) == int((eigenvalues > 0).sum())
    for exponent in range(-20, 21):
        exact = torch.log1p(10.0**exponent * eigenvalues.double()).sum()
        torch.testing.assert_close(torch.log1p(10.0**exponent * points) @ weights, exact, rtol=6e-8, atol=0)


STRANGE = [torch.ones(COUNT).index_fill(0, torch.tensor(7), value) for value in (-1e-6, torch.nan, torch.inf)]


@pytest.mark.parametrize("eigenvalues", [*STRANGE, torch.rand(10, 10), torch.zeros(COUNT)])
def test_eigenvalues_without_a_logarithm_few_eigenvalues_and_zeros_stay(eigenvalues):
    points, weights = condensed(eigenvalues)
    assert weights is None
    torch.testing.assert_close(points, eigenvalues.double().flatten(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("method", [lw.Diagonal(), lw.KFAC()])
def test_a_wide_network_is_tuned_as_by_all_eigenvalues(method, monkeypatch):
    net = nn.Sequential(nn.Linear(4, 350), nn.Tanh(), nn.Linear(350, 350), nn.Tanh(), nn.Linear(350, 2)).eval()
    x, y = torch.randn(40, 4), torch.randn(40, 2)
    tune = lw.Evidence(per_layer=True)
    found = lw.fit(net, [(x, y)], method, params=lw.everything, tune=tune)
    assert any(structure.spectrum[1] is not None for structure in found.covariance.structures.values())
    monkeypatch.setattr("lapwing.linalg.eigen.MANY", 10**9)
    exact = lw.fit(net, [(x, y)], method, params=lw.everything, tune=tune)
    assert found.log_marginal_likelihood() == pytest.approx(exact.log_marginal_likelihood(), rel=1e-8)
    torch.testing.assert_close(found.prior.precision, exact.prior.precision, rtol=1e-3, atol=0)
    assert found.noise_variance == pytest.approx(exact.noise_variance, rel=1e-3)
