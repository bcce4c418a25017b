"""Figures 1 and 3: standard deviations and KL divergence to full LLA on a one-dimensional toy, at its δ and σ²."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from papers.common import drawing
from papers.common.data import Part, random_rows, rows_and_targets
from papers.common.measure import timed
from papers.common.measures import gaussian_kl
from papers.common.results import Rows, once
from papers.common.scores import averaged
from papers.common.tables import grid
from papers.common.training import ONE_NOISE
from papers.valla.training import TOY, trained


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns both divergences of each method from full LLA, and the standard deviations of both.

    There is no short run for `python -m papers verify`: thousands of steps that move points amplify rounding, and the
    divergence of one network differs between machines, at M = 20 by 5 % for one seed and by 45 % for another.
    """
    rows = Rows(__file__, {"grid": GRID[:, 0].tolist(), "gaps": GAPS})
    for seed in seeds:
        task = once(partial(Toy, seed))
        rows.add(f"seed {seed}", "LLA", lambda task: task().own_row(), task)
        for name, chosen in methods().items():
            rows.add(f"seed {seed}", name, lambda task, seed, *chosen: task().row(*chosen, seed), task, seed, *chosen)
    rows.facts["KL(LLA || method)"] = {name: from_lla(rows.runs, name) for name in methods()}
    return rows.all()


GRID = torch.linspace(-9, 9, 181).double()[:, None]
STEPS, MANY_STEPS = 500, 5_000
"""Full batches that inducing points are moved for: in other experiments, and here. The paper has 30 000."""

GAPS = ((-4.5, -1.8), (1.7, 4.6))
"""Where there are no data between data."""


def toy(held_out: float = 0.0, seed: int = 0) -> tuple[Part, Part]:
    """Reads the one-dimensional toy of Izmailov et al. 2020: 400 points in three clusters, a share of them held out.

    Returns:
        Training and validation points, x and y (n, 1) float64.
    """
    x, y = rows_and_targets("izmailov_toy1d")
    y, order = y[:, None], random_rows(x, len(x), seed)
    cut = round(held_out * len(x))
    return (x[order[cut:]], y[order[cut:]]), (x[order[:cut]], y[order[:cut]])


def regions(x: Tensor) -> dict[str, Tensor]:
    """Returns which of the grid's points (n, 1) lie in the gaps, among the data, and outside."""
    gap = torch.zeros(len(x), dtype=torch.bool)
    for low, high in GAPS:
        gap |= ((x > low) & (x < high))[:, 0]
    outside = (x.abs() > 7.2)[:, 0]
    return {"gaps": gap, "data": ~gap & ~outside, "outside": outside}


class Toy:
    """A trained 50-50 network, and full LLA of it at the δ and σ² of its evidence.

    Attributes:
        model: the network.
        train: its data.
        val: held-out points, or none.
        exact: full LLA.
        std: its standard deviations (181, 1) of f on `GRID`.
    """

    def __init__(self, seed: int, held_out: float = 0.0) -> None:
        self.train, self.val = toy(held_out, seed)
        self.model = trained((1, 50, 50, 1), self.train, TOY, seed, f"toy{held_out:g}")
        self.exact = lw.fit(self.model, [self.train], lw.Full(), likelihood=ONE_NOISE, tune=lw.Evidence())
        self.latent = self.exact.latent(GRID)
        self.std = self.latent.std

    def fit(self, method: lw.Method, params: Any = lw.everything, seed: int = 0) -> lw.Posterior:
        """Fits another method at full LLA's δ and σ²."""
        noise = self.exact.noise_variance
        return lw.fit(
            self.model, [self.train], method, params=params, prior_precision=self.exact.prior_precision,
            likelihood=lw.Gaussian(noise), seed=seed,
        )  # fmt: skip

    def score(self, posterior: lw.Posterior) -> dict[str, float]:
        """Returns the KL divergence to full LLA, and ratios of standard deviations of f."""
        latent = posterior.latent(GRID)
        return {"kl": self.divergence(latent, self.latent), **self.ratios(latent.std)}

    def divergence(self, one: Any, other: Any) -> float:
        """Returns the KL divergence of the predictions of two latents, averaged over `GRID`."""
        noise = self.exact.noise_variance
        assert noise is not None
        return float(gaussian_kl(one.mean, one.covariance, other.mean, other.covariance, noise).mean())

    def ratios(self, std: Tensor) -> dict[str, float]:
        """Returns geometric means of ratios of standard deviations to full LLA's: over the grid, and by region."""
        ratio = (std / self.std).clamp_min(1e-12).log()[:, 0]
        parts = {f"ratio, {name}": ratio[at] for name, at in regions(GRID).items()}
        return {name: float(part.mean().exp()) for name, part in {"ratio": ratio, **parts}.items()}

    def row(self, method: lw.Method, params: Any = lw.everything, seed: int = 0) -> dict[str, Any]:
        """Returns a method's scores at full LLA's δ and σ², and its standard deviations of f on `GRID`."""
        posterior, seconds = timed(lambda: self.fit(method, params, seed), time.process_time)
        return {**self.score(posterior), "seconds": seconds, "curve of std": curve(posterior)}

    def own_row(self) -> dict[str, Any]:
        """Returns full LLA's δ and σ², and what a picture needs of network and data."""
        return {
            "prior_precision": self.exact.prior_precision, "noise_variance": self.exact.noise_variance,
            "curve of std": curve(self.exact), "curve of mean": self.latent.mean[:, 0].tolist(),
            "curve of x": self.train[0][:, 0].tolist(), "curve of y": self.train[1][:, 0].tolist(),
            "curve of validation x": self.val[0][:, 0].tolist(), "curve of validation y": self.val[1][:, 0].tolist(),
        }  # fmt: skip


def curve(posterior: lw.Posterior) -> list[float]:
    """Returns the standard deviations of f on `GRID`."""
    return [round(value, 5) for value in posterior.latent(GRID).std[:, 0].tolist()]


COUNTS = (5, 10, 20, 50)
"""Numbers of inducing points M, or of rows and directions of ELLA."""


def methods(counts: Sequence[int] = COUNTS) -> dict[str, tuple[lw.Method, Any]]:
    """Returns what Figures 1 and 3 compare: KFAC, diagonal, last layer, ELLA of M rows and directions, VaLLA."""
    found: dict[str, tuple[lw.Method, Any]] = {
        "KFAC": (lw.KFAC(), lw.everything),
        "diagonal": (lw.Diagonal(), lw.everything),
        "last layer": (lw.Full(), lw.last_layer),
    }
    for count in counts:
        found[f"VaLLA, M = {count}, k-means"] = (lw.VaLLA(count, lw.ClosedForm()), lw.everything)
        found[f"VaLLA, M = {count}"] = (lw.VaLLA(count, lw.VariationalBound(MANY_STEPS, 0.02)), lw.everything)
        found[f"ELLA, M = {count}"] = (lw.ELLA(rank=count, rows=count), lw.everything)
        found[f"ELLA with residual, M = {count}"] = (lw.ELLA(rank=count, rows=count, residual="prior"), lw.everything)
    return found


def draw(results: Mapping[str, Any]) -> None:
    """Draws two standard deviations of f, full LLA's dotted, and both divergences over M."""
    run = results["runs"]["seed 0"]
    names = ["diagonal", "KFAC", "last layer"]
    names += [f"{name}, M = {count}" for name in ("VaLLA", "ELLA") for count in COUNTS]
    figure, axes = drawing.panels(3, 4, (14, 9))
    for axis, name in zip([*axes[0][:3], *axes[1], *axes[2]], names, strict=True):
        bands(axis, results["grid"], run["LLA"], run[name]["curve of std"])
        axis.set(ylim=(-4, 4), title=f"{name}, seed 0", xlabel="x", ylabel="y")
    opposite = {name: row.get("kl") for name, row in results["table"][""].items()}
    for found, style, kind in (
        (results["KL(LLA || method)"], "o-", "KL(LLA ‖ method)"), (opposite, "s--", "KL(method ‖ LLA)"),
    ):  # fmt: skip
        for name, colour in (("VaLLA", "#000000"), ("ELLA", "#9467bd"), ("ELLA with residual", "#ff7f0e")):
            rows = [found[f"{name}, M = {count}"] for count in COUNTS]
            means, errors = ([row[key] for row in rows] for key in ("mean", "standard_error"))
            label = f"{name}: {kind}"
            axes[0][3].errorbar(COUNTS, means, errors, fmt=style, label=label, color=colour, markersize=3, capsize=2)
    seeds = len(results["runs"])
    axes[0][3].set(yscale="log", ylim=(1e-6, 1e4), xlabel="M", ylabel="nats", title=f"divergences, {seeds} seeds")
    drawing.legend_below(figure, 3)
    drawing.save(figure, __file__)


def bands(axis: Any, grid: Sequence[float], own: Mapping[str, Any], std: Sequence[float]) -> None:
    """Draws the network, its data, two standard deviations of f about it, and full LLA's own, dotted."""
    mean = own["curve of mean"]
    axis.fill_between(grid, *_edges(mean, std), color="#1f77b4", alpha=0.3, linewidth=0)
    for edge in _edges(mean, own["curve of std"]):
        axis.plot(grid, edge, ":", color="#ff7f0e", linewidth=1)
    axis.plot(own["curve of x"], own["curve of y"], ".", color="#222222", markersize=2)
    axis.plot(grid, mean, color="#1f77b4")


def _edges(mean: Sequence[float], std: Sequence[float]) -> list[list[float]]:
    return [[m + 2 * sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1)]


def from_lla(runs: Mapping[str, Any], row: str) -> dict[str, float]:
    """Returns KL(LLA ‖ method) of predictions, averaged over the grid and the runs, from the curves of std."""
    found = []
    for run in runs.values():
        exact, variance = (
            torch.tensor(run[name]["curve of std"]).square() + run["LLA"]["noise_variance"] for name in ("LLA", row)
        )
        found.append({"kl": float((exact / variance - 1 - (exact / variance).log()).mean() / 2)})
    return averaged(found)["kl"]


def cell(found: Mapping[str, float]) -> str:
    """Returns the mean of a divergence with its standard error; divergences spread over many powers of ten."""
    digits = ".0f" if found["mean"] >= 10 else ".2g"
    return f"{found['mean']:{digits}} ± {found['standard_error']:{digits.replace('2', '1')}}"


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns both divergences between LLA and a method, and the ratio of their standard deviations."""
    rows = {}
    for name, row in results["table"][""].items():
        if name != "LLA":
            divergences = results["KL(LLA || method)"][name], row["kl"]
            rows[name] = [*map(cell, divergences), f"{row['ratio']['mean']:.2f}"]
    return {"divergence": grid(["KL(LLA ‖ method)", "KL(method ‖ LLA)", "ratio of standard deviations"], rows)}
