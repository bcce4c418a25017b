"""Figure 1 and Table 5: KL divergence to full LLA on a toy regression, with one noise variance and the paper's two."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from papers.common.measures import gaussian_kl
from papers.common.networks import mlp
from papers.common.scores import averaged
from papers.common.training import seeded, train

PUBLISHED = {"ELLA": 0.83, "KFAC": 0.35, "diagonal": 1.71, "last layer": 2.44}
"""ELLA at noise variance 0.01, the others at 0.0001."""


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns the divergences at both noise variances."""
    runs = {noise: [illustrative_regression(seed, noise) for seed in seeds] for noise in (0.01, 0.0001)}
    return {f"noise variance {noise}": averaged(found) for noise, found in runs.items()}


def illustrative_regression(seed: int, noise_variance: float = 0.01) -> dict[str, Any]:
    """Fits `y = sin 2x + ε` at 16 points with a tanh MLP; returns each method's KL divergence to full LLA.

    One noise variance and one prior precision (1) for all methods, unlike the paper's program, which gave ELLA the
    noise variance 0.01 and the others 0.0001.

    Args:
        seed: of data, network and rows.
        noise_variance: σ².

    Returns:
        method -> `KL(method || Full)` of the predictive Gaussians, averaged over 200 points of [-5, 5]; and the
        training error of the network.
    """
    generator = torch.Generator().manual_seed(seed)
    x = 8 * torch.rand(16, 1, generator=generator) - 4
    y = (2 * x).sin() + 0.2 * torch.randn(16, 1, generator=generator)
    with seeded(seed):
        model = nn.Sequential(*list(mlp(1, 50, 50, 50, 1))[1:]).double()
    x, y = x.double(), y.double()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-4)
    train(model, (x, y), repeat(slice(None), 1000), optimiser, nn.functional.mse_loss)
    methods: dict[str, tuple[lw.Method, Any]] = {
        "ELLA": (lw.ELLA(rank=5, rows=16), lw.everything),
        "ELLA, 16 directions": (lw.ELLA(rank=16, rows=16), lw.everything),
        "ELLA with residual": (lw.ELLA(rank=5, rows=16, residual="prior"), lw.everything),
        "KFAC": (lw.KFAC(), lw.everything),
        "EKFAC": (lw.EKFAC(), lw.everything),
        "diagonal": (lw.Diagonal(), lw.everything),
        "last layer": (lw.Full(), lw.last_layer),
    }
    grid = torch.linspace(-5, 5, 200).double()[:, None]

    def predictive(method: lw.Method, params: Any) -> tuple[Tensor, Tensor]:
        posterior = lw.fit(
            model, [(x, y)], method, params=params, prior_precision=1.0, likelihood=lw.Gaussian(noise_variance),
            seed=seed,
        )  # fmt: skip
        latent = posterior.latent(grid)
        return latent.mean, latent.covariance

    exact = predictive(lw.Full(), lw.everything)
    with torch.no_grad():
        found: dict[str, Any] = {"training error": float(nn.functional.mse_loss(model(x), y))}
    for name, chosen in methods.items():
        found[name] = float(gaussian_kl(*predictive(*chosen), *exact, noise_variance=noise_variance).mean())
    return found
