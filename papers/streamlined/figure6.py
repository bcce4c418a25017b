"""Figure 6: how far products of uncertain weights and activations, and their sums, are from Gaussians."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.tuning import Tuning
from papers.common.results import Rows, once
from papers.common.tables import grid, shown
from papers.streamlined.table2 import MLPTask

FAST = {"seeds": (0,)}
"""Arguments of a run for `python -m papers verify`."""


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns distances at every layer of the MNIST network, for two prior precisions."""
    return Rows(__file__, {"network": "784-128-64-10, MNIST", "draws": 2000}).filled(_add, seeds)


def _add(rows: Rows, seed: int) -> None:
    task = once(lambda: MLPTask.load("mnist", seed))

    def make(tune: Tuning) -> dict[str, Any]:
        return products(task().model, task().laplace(lw.KFAC(), tune), task().tested[0][:1])

    rows.add(f"KFAC, seed {seed}", "evidence", make, lw.Evidence())
    rows.add(f"KFAC, seed {seed}", "bounded evidence", make, lw.BoundedEvidence(nats=0.005))


def distance_from_gaussian(values: Tensor) -> Tensor:
    """Computes the Kolmogorov distance `max |F(x) - Φ((x - m)/s)|` of draws (S, ...) from a Gaussian of their moments.

    Returns:
        Distances (...), between 0 and 1; their noise is about 0.6/√S.
    """
    ordered = ((values - values.mean(0)) / values.std(0)).sort(0).values
    steps = torch.arange(len(values), dtype=values.dtype).reshape(-1, *[1] * (values.ndim - 1))
    expected = torch.special.ndtr(ordered)
    above, below = (steps + 1) / len(values) - expected, expected - steps / len(values)
    return torch.maximum(above, below).amax(0)


def products(
    model: nn.Sequential, posterior: lw.Posterior, x: Tensor, draws: int = 2000, seed: int = 0, shown: int = 200
) -> dict[str, dict[str, float]]:
    """Measures products `a_i W_ki` and sums `h_k = Σ_i a_i W_ki + b_k` at every linear layer of an MLP.

    The activations a are those of the networks drawn with the layers before.

    Args:
        model: linear layers and element-wise functions, in turns.
        posterior: over all of its weights.
        x: one input (1, ...).
        draws: S, of all weights.
        seed: of the draws.
        shown: how many products of each layer are looked at, at random among inputs that are not always 0.

    Returns:
        layer -> median and largest distance of products, of products of the weights of largest mean magnitude
        ("heaviest"), and of sums.
    """
    weights = posterior.sample(draws, seed)
    generator = torch.Generator().manual_seed(seed)
    a, found = x.expand(draws, *x.shape[1:]), {}
    for name, layer in model.named_children():
        if not isinstance(layer, nn.Linear):
            a = layer(a)
            continue
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]  # (S, O, I), (S, O)
        alive = (a.std(0) + a.abs().mean(0) > 0).nonzero()[:, 0]
        i = alive[torch.randint(len(alive), (shown,), generator=generator)]
        k = torch.randint(weight.shape[1], (shown,), generator=generator)
        parts = distance_from_gaussian((a[:, i] * weight[:, k, i]).double())
        heaviest = weight.mean(0)[:, alive].abs().flatten().topk(shown).indices  # as in the paper's picture
        k, i = heaviest // len(alive), alive[heaviest % len(alive)]
        heavy = distance_from_gaussian((a[:, i] * weight[:, k, i]).double())
        a = torch.stack([F.linear(row, w, b) for row, w, b in zip(a, weight, bias, strict=True)])  # (S, O)
        sums = distance_from_gaussian(a.double())
        found[name] = {
            "products, median": round(float(parts.median()), 4), "products, largest": round(float(parts.max()), 4),
            "heaviest, median": round(float(heavy.median()), 4), "heaviest, largest": round(float(heavy.max()), 4),
            "sums, median": round(float(sums.median()), 4), "sums, largest": round(float(sums.max()), 4),
        }  # fmt: skip
    return found


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the Kolmogorov distances of products and of sums by layer."""
    rows = {}
    for tuning, layers in results["table"]["KFAC"].items():
        for i, found in enumerate(layers.values()):
            rows[f"{tuning}, layer {i + 1}"] = [shown(value) for value in found.values()]
    columns = [f"{of}, {size}" for of in ("products", "of heaviest weights", "sums") for size in ("median", "largest")]
    return {"distances": grid(columns, rows)}
