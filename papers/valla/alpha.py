"""Proposition 3 and appendix D on the toy: the α-divergence beside the closed form, and δ by folds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import lapwing as lw
from papers.common.results import Rows, once
from papers.common.tables import grid
from papers.valla.figure1 import GRID, STEPS, Toy, cell, toy
from papers.valla.training import TOY, trained

ALPHAS = (0.0, 0.5, 1.0)
FOLDS = 5
PRECISIONS = (10 ** torch.linspace(-2, 3, 16)).tolist()
"""Candidates of δ for the folds."""


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns divergences of fits of 20 points from the closed form and from full LLA, and δ by folds."""
    rows = Rows(__file__, {"steps": STEPS, "folds": FOLDS})
    for seed in seeds:
        task = once(lambda seed=seed: Distances(seed))  # type: ignore[misc]
        for name, method in methods().items():
            rows.add(f"seed {seed}", name, lambda task, method: task().row(method), task, method)
        rows.add(f"seed {seed}", "δ by folds", lambda task: task().folds(), task)
    return rows.all()


def methods() -> dict[str, lw.VaLLA]:
    """Returns fits of 20 points: the optimal A at two choices of the points, and the α-divergence."""
    found = {
        "closed form, k-means": lw.VaLLA(20),
        "closed form, points moved": lw.VaLLA(20, lw.VariationalBound(STEPS, 0.02)),
    }
    for alpha in ALPHAS:
        found[f"α = {alpha:g}"] = lw.VaLLA(20, lw.AlphaDivergence(alpha, steps=STEPS, learning_rate=0.05))
    return found


class Distances:
    """Full LLA of the toy, the closed form at 20 moved points, and divergences from both."""

    def __init__(self, seed: int) -> None:
        self.toy, self.seed = Toy(seed), seed
        self.closed = self.toy.fit(methods()["closed form, points moved"], seed=seed).latent(GRID)

    def row(self, method: lw.VaLLA) -> dict[str, float]:
        """Returns divergences on the grid at full LLA's δ and σ², and ratios of standard deviations of f to LLA's."""
        latent, lla = self.toy.fit(method, seed=self.seed).latent(GRID), self.toy.latent
        return {
            "KL(closed form || method)": self.toy.divergence(self.closed, latent),
            "KL(LLA || method)": self.toy.divergence(lla, latent),
            "KL(method || LLA)": self.toy.divergence(latent, lla), **self.toy.ratios(latent.std),
        }  # fmt: skip

    def folds(self) -> dict[str, float]:
        """Chooses δ of VaLLA (M = 20, closed form) by folds, the first way of appendix D; σ² stays LLA's.

        Each fold trains a network on the other points, so that no score is of points that the network has seen.

        Returns:
            δ, full LLA's δ, and ratios of standard deviations of f at the chosen δ to full LLA's.
        """
        (x, y), _ = toy()
        noise, scores = lw.Gaussian(self.toy.exact.noise_variance), torch.zeros(len(PRECISIONS), dtype=torch.float64)
        for fold in range(FOLDS):
            out = torch.arange(len(x)) % FOLDS == fold
            part = x[~out], y[~out]
            model = trained((1, 50, 50, 1), part, TOY, self.seed, f"toy_fold{fold}")
            fitted = lw.fit(model, [part], lw.VaLLA(20), likelihood=noise, seed=self.seed, tune=None)
            for i, delta in enumerate(PRECISIONS):
                scores[i] += fitted.with_prior(delta).predict(x[out]).log_prob(y[out]).double().sum()
        delta = PRECISIONS[int(scores.argmax())]
        whole = lw.fit(
            self.toy.model, [self.toy.train], lw.VaLLA(20), likelihood=noise, prior_precision=delta, seed=self.seed
        )
        exact = self.toy.exact.prior_precision
        assert isinstance(exact, float)
        return {"δ": delta, "δ of LLA": exact, **self.toy.ratios(whole.latent(GRID).std)}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the distances of each fit, and δ by folds for each seed."""
    columns = ("KL(closed form || method)", "KL(LLA || method)", "KL(method || LLA)")
    ratios = ("ratio, data", "ratio, gaps", "ratio, outside")
    rows = {
        name: [cell(row[column]) for column in columns] + [f"{row[column]['mean']:.2f}" for column in ratios]
        for name, row in results["table"][""].items()
        if name != "δ by folds"
    }
    folds = {
        run: [f"{row['δ by folds'][column]:.3g}" for column in ("δ", "δ of LLA", *ratios)]
        for run, row in results["runs"].items()
    }
    return {
        "distances": grid([column.replace("||", "‖") for column in columns] + list(ratios), rows),
        "folds": grid(["δ", "δ of LLA", *ratios], folds),
    }
