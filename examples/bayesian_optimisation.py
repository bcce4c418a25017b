"""Bayesian optimisation with a network in place of a Gaussian process: needs `pip install "lapwing-torch[botorch]"`.

Maximises minus the Branin function on the unit square, a new input at a time by the log expected improvement, and
prints how far the best value is from the maximum, beside random choice.
"""

from __future__ import annotations

import math
import sys
import warnings

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.optim import optimize_acqf
from torch import Tensor, nn

import lapwing as lw
from lapwing.integrations.botorch import LaplaceModel

MAXIMUM = -0.397887


def objective(x: Tensor) -> Tensor:
    """Returns minus the Branin function of x (n, 2) in the unit square, (n, 1)."""
    a, b = 15 * x[:, :1] - 5, 15 * x[:, 1:]
    bent = b - 5.1 / (4 * math.pi**2) * a**2 + 5 / math.pi * a - 6
    return -(bent**2 + 10 * (1 - 1 / (8 * math.pi)) * a.cos() + 10)


def posterior_of(x: Tensor, y: Tensor) -> lw.Posterior:
    """Trains a small network from the beginning, and fits its posterior."""
    network = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)).double()
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=1e-3)
    for _ in range(300):
        optimiser.zero_grad()
        nn.functional.mse_loss(network(x), y).backward()
        optimiser.step()
    return lw.fit(network.eval(), [(x, y)])


def search(steps: int, seed: int) -> tuple[float, float]:
    """Returns how far the best value is from the maximum: by expected improvement, and at random."""
    torch.manual_seed(seed)
    x = torch.rand(8, 2).double()
    y, bounds = objective(x), torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
    random = objective(torch.rand(steps, 2).double())
    first = y.max()
    for _ in range(steps):
        scaled = (y - y.mean()) / y.std()
        improvement = LogExpectedImprovement(LaplaceModel(posterior_of(x, scaled)), best_f=scaled.max())
        chosen, _ = optimize_acqf(improvement, bounds, 1, num_restarts=5, raw_samples=100, options={"maxiter": 50})
        x, y = torch.cat([x, chosen]), torch.cat([y, objective(chosen)])
    return MAXIMUM - float(y.max()), MAXIMUM - float(torch.maximum(random.max(), first))


def main(steps: int = 20, seeds: int = 5) -> None:
    warnings.simplefilter("ignore")
    for seed in range(seeds):
        ours, random = search(steps, seed)
        print(f"seed {seed}: {ours:.3f} below the maximum by expected improvement, {random:.3f} at random")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
