"""Figure 3 and appendix D on the toy: divergences from full LLA in both directions, the α-divergence, δ by folds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import lapwing as lw
from papers.common import drawing
from papers.common.measures import gaussian_kl
from papers.common.results import Rows, once
from papers.common.tables import grid
from papers.valla.figure1 import GRID, Toy, regions, toy
from papers.valla.training import TOY, trained

COUNTS = (5, 10, 20, 50)
MOVES = 300
"""Full batches that the bound moves inducing points for; the paper has 30 000."""

FOLDS, FOLDED = 5, (0,)
"""Number of folds, and the seeds that have them: each fold trains a network."""

PRECISIONS = (10 ** torch.linspace(-2, 3, 16)).tolist()
"""Candidates of δ for the folds."""


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns divergences from full LLA in both directions, distances from the closed form, and δ by folds."""
    rows = Rows(__file__, {"steps of the points": MOVES, "folds": FOLDS})
    for seed in seeds:
        task = once(lambda seed=seed: Distances(seed))  # type: ignore[misc]
        for name, chosen in methods().items():
            rows.add(f"seed {seed}", name, lambda task, *chosen: task().row(*chosen), task, *chosen)
        if seed in FOLDED:
            rows.add(f"seed {seed}", "δ by folds", lambda task: task().folds(), task)
    return rows.all()


def methods() -> dict[str, tuple[lw.Method, Any]]:
    """Returns the methods of Figures 1 and 3, and fits of 20 points by the α-divergence."""
    found: dict[str, tuple[lw.Method, Any]] = {
        "KFAC": (lw.KFAC(), lw.everything),
        "diagonal": (lw.Diagonal(), lw.everything),
        "last layer": (lw.Full(), lw.last_layer),
    }
    for count in COUNTS:
        found[f"ELLA, M = {count}"] = lw.ELLA(rank=count, rows=count), lw.everything
        found[f"ELLA with residual, M = {count}"] = lw.ELLA(rank=count, rows=count, residual="prior"), lw.everything
        found[f"VaLLA, M = {count}, k-means"] = lw.VaLLA(count), lw.everything
        found[f"VaLLA, M = {count}"] = lw.VaLLA(count, lw.VariationalBound(MOVES, 0.02)), lw.everything
    for alpha in (0.0, 0.5, 1.0):
        fit = lw.AlphaDivergence(alpha, steps=MOVES, learning_rate=0.05)
        found[f"VaLLA, M = 20, α = {alpha:g}"] = lw.VaLLA(20, fit), lw.everything
    return found


class Distances:
    """Full LLA of the toy, VaLLA in closed form at 20 moved points, and divergences from both.

    Attributes:
        toy: the network and full LLA.
        seed: of the network.
    """

    def __init__(self, seed: int) -> None:
        self.toy, self.seed = Toy(seed), seed
        self._closed = once(lambda: self.toy.fit(methods()["VaLLA, M = 20"][0], seed=seed).latent(GRID))

    def row(self, method: lw.Method, params: Any) -> dict[str, float]:
        """Returns a method's divergences from full LLA on the grid at LLA's δ and σ², and ratios of deviations of f.

        "closed form" is the divergence of 20 moved points with the optimal A from the method.
        """
        start = time.process_time()
        posterior = self.toy.fit(method, params, self.seed)
        seconds = time.process_time() - start
        ours, lla, closed = posterior.latent(GRID), self.toy.latent, self._closed()
        ratio = (ours.std / lla.std).clamp_min(1e-12).log()[:, 0]
        found = {
            "KL(LLA || method)": self._divergence(lla, ours), "KL(method || LLA)": self._divergence(ours, lla),
            "KL(closed form || method)": self._divergence(closed, ours), "ratio": float(ratio.mean().exp()),
            "seconds": seconds,
        }  # fmt: skip
        return found | {f"ratio, {name}": float(ratio[at].mean().exp()) for name, at in regions(GRID).items()}

    def _divergence(self, one: Any, other: Any) -> float:
        """Returns the mean divergence of predictive Gaussians on the grid."""
        noise = self.toy.exact.noise_variance
        assert noise is not None
        return float(gaussian_kl(one.mean, one.covariance, other.mean, other.covariance, noise).mean())

    def folds(self) -> dict[str, float]:
        """Chooses δ of VaLLA (M = 20, closed form) by folds, the first way of appendix D; σ² stays LLA's.

        Each fold trains a network on the other points, so that no score is of points that the network has seen.

        Returns:
            δ, full LLA's δ, and ratios of standard deviations of f to full LLA's with that δ.
        """
        (x, y), _ = toy()
        noise, scores = self.toy.exact.noise_variance, torch.zeros(len(PRECISIONS), dtype=torch.float64)
        for fold in range(FOLDS):
            out = torch.arange(len(x)) % FOLDS == fold
            part = x[~out], y[~out]
            model = trained((1, 50, 50, 1), part, TOY, self.seed, f"toy_fold{fold}")
            fitted = lw.fit(model, [part], lw.VaLLA(20), likelihood=lw.Gaussian(noise), seed=self.seed, tune=None)
            for i, delta in enumerate(PRECISIONS):
                scores[i] += fitted.with_prior(delta).predict(x[out]).log_prob(y[out]).double().sum()
        delta = PRECISIONS[int(scores.argmax())]
        whole = lw.fit(
            self.toy.model, [self.toy.train], lw.VaLLA(20), likelihood=lw.Gaussian(noise), prior_precision=delta,
            seed=self.seed,
        )  # fmt: skip
        ratio = (whole.latent(GRID).std / self.toy.latent.std).clamp_min(1e-12).log()[:, 0]
        found = {f"ratio, {name}": float(ratio[at].mean().exp()) for name, at in regions(GRID).items()}
        return {"prior precision": delta, "prior precision of LLA": self.toy.exact.prior_precision, **found}


def draw(results: Mapping[str, Any]) -> None:
    """Draws both divergences from full LLA over M, with standard errors over networks."""
    table = results["table"].get("", {})
    figure, ((*axes,),) = drawing.panels(1, 2, (9, 3.6))
    lines = {"VaLLA": "#000000", "VaLLA, k-means": "#7f7f7f", "ELLA": "#9467bd", "ELLA with residual": "#c5b0d5"}
    for axis, direction in zip(axes, ("KL(LLA || method)", "KL(method || LLA)"), strict=True):
        for label, colour in lines.items():
            stem, _, kind = label.partition(", ")
            names = {count: f"{stem}, M = {count}" + (f", {kind}" if kind else "") for count in COUNTS}
            points = [(count, table[name][direction]) for count, name in names.items() if name in table]
            axis.errorbar(
                [count for count, _ in points], [point["mean"] for _, point in points],
                [point["standard_error"] for _, point in points], fmt="o-", markersize=3, capsize=2, label=label,
                color=colour, linewidth=1.2,
            )  # fmt: skip
        for label, style in (("KFAC", ":"), ("diagonal", "--"), ("last layer", "-.")):
            if label in table:
                axis.axhline(
                    table[label][direction]["mean"], color="#1f77b4", linestyle=style, linewidth=1, label=label
                )
        axis.set(yscale="log", xscale="log", xlabel="M", ylabel=f"{direction}, nats", title=direction)
    drawing.legend_below(figure, 4)
    drawing.save(figure, __file__)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns both divergences over M, the α-divergence beside the closed form, and δ by folds."""
    table = results["table"].get("", {})
    directions = ("KL(LLA || method)", "KL(method || LLA)")
    lines = {}
    for label in ("KFAC", "diagonal", "last layer"):
        if label in table:
            lines[label] = [_power(table[label][direction]) for direction in directions]
    for kind, suffix in (("VaLLA", ""), ("VaLLA", ", k-means"), ("ELLA", ""), ("ELLA with residual", "")):
        for count in COUNTS:
            row = table.get(f"{kind}, M = {count}{suffix}")
            if row:
                lines[f"{kind}{suffix}, M = {count}"] = [_power(row[direction]) for direction in directions]
    measures = ("KL(closed form || method)", "KL(LLA || method)", "ratio", "ratio, gaps", "ratio, data")
    near = {}
    for label in ("VaLLA, M = 20, k-means", "VaLLA, M = 20", *(f"VaLLA, M = 20, α = {a}" for a in ("0", "0.5", "1"))):
        if label in table:
            near[label.removeprefix("VaLLA, M = 20")[2:] or "closed form, points moved"] = [
                _power(table[label][name]) for name in measures
            ]
    folds = table.get("δ by folds", {})
    return {
        "directions": grid(directions, lines),
        "closed form": grid(measures, near),
        "folds": grid(list(folds), {"δ by folds": [_power(value) for value in folds.values()]}),
    }


def _power(found: Mapping[str, float]) -> str:
    """Returns a number of any size with its standard error, at two digits."""
    error = f" ± {found['standard_error']:.1g}" * bool(found["standard_error"])
    return f"{found['mean']:.2g}{error}"
