"""Figure 14: how far networks are from linear along their inputs; the ReLU MLP on MNIST, and the ViT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from papers.common.data import images
from papers.common.results import Rows
from papers.common.tables import grid
from papers.streamlined.setting import Setting, relu_mlp

EPSILONS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns the error over the range of the outputs, by ε."""
    rows = Rows(__file__, {"inputs": 124})
    for seed in seeds:
        rows.add(f"seed {seed}", "MLP, MNIST", _mlp, seed)
        rows.add(f"seed {seed}", "ViT, Fashion-MNIST", _vit, seed)
    return rows.all()


def _mlp(seed: int) -> dict[str, float]:
    data = images("mnist")
    return nonlinearity(relu_mlp(data.x_train, data.y_train, "mnist", seed), data.x_test[:124], EPSILONS)


def _vit(seed: int) -> dict[str, float]:
    setting = Setting.load("fashion_mnist", seed, shown=100, tested=200, tuned=100)
    inputs = torch.cat([x for x, _ in setting.test])[:124]
    return nonlinearity(lambda z: setting.model(z).logits, inputs, EPSILONS)


def nonlinearity(network: Any, z: Tensor, epsilons: Sequence[float]) -> dict[str, float]:
    """Returns `E|f(z (1 ± ε)) - f(z) (1 ± ε)|` over inputs and outputs, each output by its range (equation 89)."""
    with torch.no_grad():
        middle = network(z)
        span = middle.amax(0) - middle.amin(0)  # (C,)
        return {
            f"{epsilon:g}": sum(
                float(((network(z * (1 + e)) - middle * (1 + e)).abs().mean(0) / span).mean()) / 2
                for e in (epsilon, -epsilon)
            )
            for epsilon in epsilons
        }


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the relative error of the linearisation by the size of the change."""
    sizes = ("0.01", "0.1", "1")
    rows = {name: [f"{found[size]['mean']:.2g}" for size in sizes] for name, found in results["table"][""].items()}
    return {"errors": grid([f"ε = {size}" for size in sizes], rows)}
