"""How Gaussian products are: the distance, and an MLP through the measure."""

from __future__ import annotations

import torch

import lapwing as lw
from papers.streamlined.figure6 import distance_from_gaussian, products


def test_distance_is_noise_for_gaussians_and_large_for_others():
    draws = torch.randn(20_000, 3, dtype=torch.float64)
    assert distance_from_gaussian(3 * draws + 1).max() < 0.02
    # a product of two centred normals has density K_0(|x|)/π: its distribution function at 0.5 is 0.795, Φ's is 0.691
    product = draws * torch.randn(20_000, 3, dtype=torch.float64)
    found = distance_from_gaussian(product)
    assert found.min() > 0.09
    assert found.max() < 0.13
    # ±1 with equal odds: a jump of 1/2 at -1, where Φ(-1) = 0.1587
    signs = torch.sign(torch.randn(20_000, 1, dtype=torch.float64))
    assert abs(float(distance_from_gaussian(signs)) - (0.5 - 0.1587)) < 0.02


def test_sums_are_nearer_than_products():
    model = torch.nn.Sequential(torch.nn.Linear(5, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3)).eval()
    x, y = torch.randn(60, 5), torch.arange(60) % 3
    posterior = lw.fit(model, [(x, y)], lw.Diagonal(), prior_precision=4.0)
    found = products(model, posterior, x[:1], draws=3000, shown=60)
    assert list(found) == ["0", "2"]
    assert found["0"]["products, largest"] < 0.05  # a certain input times a Gaussian weight
    assert found["2"]["products, median"] > 3 * found["2"]["sums, median"]
