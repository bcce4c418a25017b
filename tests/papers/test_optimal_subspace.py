"""Experiments of optimal subspaces: the simulation of appendix F, weights that no input moves, subsets up to P."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from papers.optimal_subspace import baselines, figure6, figure8, table1, table2


@pytest.mark.parametrize("noise", [0.2, 3.0], ids=["below the error", "above the error"])
def test_the_best_constant_spread_is_that_of_a_search(noise):
    """Equation 31: of all constant variances, `MSE - σ²` has the lowest NLL, or 0 if that is negative."""
    squares = torch.randn(200, dtype=torch.float64).square()
    grid = torch.linspace(0, 5, 50_001, dtype=torch.float64)
    total = noise + grid
    nll = squares.mean() / (2 * total) + (2 * math.pi * total).log() / 2
    assert figure8.best_spread(squares, noise) == pytest.approx(float(grid[nll.argmin()]), abs=1e-4)


def test_dead_weights_of_a_network_with_a_dead_unit(monkeypatch):
    """A unit that is negative at every input, and one that feeds it, against gradients by autograd."""
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    with torch.no_grad():
        model[0].bias[1] = -100.0
    x = torch.randn(20, 2)
    monkeypatch.setattr(figure6, "network", lambda *_: (model, (x, torch.randn(20, 1)), None))
    largest = [torch.zeros_like(weight) for weight in model.parameters()]
    for row in x:
        for size, gradient in zip(largest, torch.autograd.grad(model(row).sum(), model.parameters()), strict=True):
            torch.maximum(size, gradient.abs(), out=size)
    share = float((torch.cat([size.flatten() for size in largest]) == 0).double().mean())
    assert figure6.dead_weights("wine", False, 0)["dead"] == pytest.approx(share)
    assert share >= 4 / 13


def test_errors_of_subsets_are_those_of_dense_covariances():
    generator = torch.Generator().manual_seed(0)
    at, rows = (torch.randn(count, 9, generator=generator, dtype=torch.float64) for count in (4, 6))

    def covariance(size):
        some, curvature = at[:, :size], rows[:, :size].T @ rows[:, :size]
        return some @ torch.linalg.inv(curvature + torch.eye(size)) @ some.T

    found = table2.subset_errors(at, rows, (2, 5, 9))
    for size in (2, 5, 9):
        error = (covariance(size) - covariance(9)).norm() / covariance(9).norm()
        assert found[str(size)]["relative_error"] == pytest.approx(float(error), abs=1e-12)


def test_the_network_of_table_2_applies_one_convolution_twice():
    model = table2.PublishedCNN().eval()
    x = torch.randn(2, 1, 28, 28)
    assert sum(weight.numel() for weight in model.parameters()) == 12_458
    h = x
    for convolution in (model.first, model.twice, model.twice):  # ReLU before pooling, as in the authors' program
        h = torch.max_pool2d(convolution(h).relu(), 2)
    assert torch.allclose(model(x), model.last(h.flatten(1)), atol=1e-6)


def test_the_rate_warms_up_and_decays():
    """Table 1 for energy: up to a tenth of 1 500 epochs the rate rises, from a half on it falls to 0."""
    factor = table1.warm_up_and_decay(1500, 0.1, 0.5)
    assert factor(0) == pytest.approx(1 / 150)
    assert factor(149) == factor(749) == 1
    assert factor(1125) == pytest.approx(0.5)
    assert factor(1499) == pytest.approx(1 / 750)


@pytest.mark.parametrize("noise", [0.5, None], ids=["targets", "classes"])
def test_rows_to_beat_of_a_small_network(noise):
    model = nn.Linear(3, 2 if noise is None else 1).double().eval()
    x = torch.randn(40, 3).double()
    out = model(x).detach()
    y = torch.randint(2, (40,)) if noise is None else out + torch.randn(40, 1).double()
    case = baselines.Case(model, [(x[:20], y[:20])], [(x[20:30], y[20:30])], {"nll": (x[30:], y[30:])}, 20, noise)
    found = {row: case.nll(row)["nll"] for row in baselines.ROWS}
    assert all(math.isfinite(value) for value in found.values())
    if noise is None:
        assert found["network"] == pytest.approx(float(nn.functional.cross_entropy(out[30:], y[30:])))
    else:
        squares, variance = (out - y).square(), (out - y)[20:30].square().mean()
        expected = (squares[30:].mean() / variance + (2 * math.pi * variance).log()) / 2
        assert found["one number"] == pytest.approx(float(expected))
