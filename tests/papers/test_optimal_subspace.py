"""Experiments of optimal subspaces: the simulation of appendix F, and weights that no input moves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from papers.optimal_subspace import figure6, figure8


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
    monkeypatch.setattr(figure6, "network", lambda *_: (model, x, torch.randn(20, 1)))
    largest = [torch.zeros_like(weight) for weight in model.parameters()]
    for row in x:
        for size, gradient in zip(largest, torch.autograd.grad(model(row).sum(), model.parameters()), strict=True):
            torch.maximum(size, gradient.abs(), out=size)
    share = float((torch.cat([size.flatten() for size in largest]) == 0).double().mean())
    assert figure6.dead_weights("wine", False, 0)["dead"] == pytest.approx(share)
    assert share >= 4 / 13
