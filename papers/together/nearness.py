"""How near each posterior is to full LLA at LLA's own δ and σ², what it costs, and what the residual gains."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import lapwing as lw
from papers.common import drawing
from papers.common.measure import timed
from papers.common.measures import gaussian_kl
from papers.common.results import Rows, once
from papers.common.tables import grid, rounded
from papers.together import tasks
from papers.together.comparison import forward_seconds
from papers.together.tasks import Task

SIZES = (10, 20, 50, 100, 200)
"""Numbers of directions: ELLA's rows and rank, inducing points, weights or data of a subset."""


def run(seeds: Sequence[int] = range(5), names: Sequence[str] = tuple(tasks.TABLES)) -> dict[str, Any]:
    """Returns divergences from full LLA and costs of every method on every table."""
    rows = Rows(__file__, {"sizes": SIZES})
    for seed in seeds:
        for name in names:
            reference = once(lambda name=name, seed=seed: Reference(tasks.task(name, seed)))  # type: ignore[misc]
            rows.add(f"{name}, seed {seed}", "full LLA", lambda reference: reference().own_row(), reference)
            for label, chosen in methods().items():
                rows.add(f"{name}, seed {seed}", label, lambda reference, *chosen: reference().row(*chosen),
                         reference, *chosen)  # fmt: skip
    return rows.all()


def methods() -> dict[str, tuple[lw.Method, Any]]:
    """Returns each method and the weights that it treats; subspaces without and with residual, by size."""
    found: dict[str, tuple[lw.Method, Any]] = {
        "diagonal": (lw.Diagonal(), lw.everything),
        "KFAC": (lw.KFAC(), lw.everything),
        "EKFAC": (lw.EKFAC(), lw.everything),
        "last layer": (lw.Full(), lw.last_layer),
    }
    for size in SIZES:
        found[f"VaLLA, {size}"] = lw.VaLLA(size), lw.everything
        found[f"subset of data, {size}"] = lw.SubsetOfData(size), lw.everything
        for residual, label in ((None, ""), ("prior", " with residual")):
            options: Any = {"residual": residual}
            found[f"ELLA{label}, {size}"] = lw.ELLA(size, size, **options), lw.everything
            found[f"optimal subspace{label}, {size}"] = lw.OptimalSubspace(size, rows=1000, **options), lw.everything
            found[f"subset of weights{label}, {size}"] = lw.SubsetOfWeights(size, **options), lw.everything
    return found


class Reference:
    """Full LLA of a table at the δ and σ² of its evidence.

    Attributes:
        task: the network and its data.
        exact: full LLA.
        latent: its latent of the test inputs.
        forward: processor seconds of a forward pass of the test inputs.
        seconds: processor seconds of the fit of `exact`.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        fit = partial(lw.fit, task.model, task.loader, lw.Full(), tune=lw.Evidence(), **task.options)
        self.exact, self.seconds = timed(fit, time.process_time)
        x, _ = task.test
        self.latent = self.exact.latent(x)
        self.forward = forward_seconds(task, x)

    def own_row(self) -> dict[str, float]:
        """Returns full LLA's δ, σ² and costs."""
        noise = self.exact.noise_variance
        assert noise is not None
        delta = float(self.exact.prior.precision[0])
        return {"prior precision": delta, "noise variance": noise, **self._costs(self.exact, self.seconds)}

    def row(self, method: lw.Method, params: Any) -> dict[str, float]:
        """Returns a method's divergences from full LLA at its δ and σ², and its costs.

        Divergences are of the predictive Gaussians, averaged over test inputs.
        """
        task, noise = self.task, self.exact.noise_variance
        assert noise is not None
        delta = float(self.exact.prior.precision[0])
        options = {**task.options, "likelihood": lw.Gaussian(noise), "prior_precision": delta, "tune": None}
        fit = partial(lw.fit, task.model, task.loader, method, params=params, **options)
        posterior, seconds = timed(fit, time.process_time)
        x, _ = task.test
        latent = posterior.latent(x)
        ours, theirs = (latent.mean, latent.covariance), (self.latent.mean, self.latent.covariance)
        return {
            "KL(LLA || method)": float(gaussian_kl(*theirs, *ours, noise).mean()),
            "KL(method || LLA)": float(gaussian_kl(*ours, *theirs, noise).mean()),
            **self._costs(posterior, seconds),
        }

    def _costs(self, posterior: lw.Posterior, seconds: float) -> dict[str, float]:
        x, _ = self.task.test
        _, spent = timed(lambda: posterior.latent(x), time.process_time)
        shown = sum(len(part) for part, _ in self.task.loader)
        return {"fit passes": seconds / self.forward * len(x) / shown, "passes": spent / self.forward}


COLOURS = {
    "diagonal": "#1f77b4", "KFAC": "#d62728", "EKFAC": "#ff9896", "last layer": "#2ca02c", "ELLA": "#9467bd",
    "VaLLA": "#000000",
    "optimal subspace": "#ff7f0e", "subset of weights": "#8c564b",
    "subset of data": "#7f7f7f",
}  # fmt: skip


def draw(results: Mapping[str, Any]) -> None:
    """Draws the divergence from full LLA over the cost of a prediction, and over the size with and without residual."""
    table = results["table"]
    _draw_lines(table, "", "prediction, in forward passes", SINGLE)
    _draw_lines(table, "residual", "directions, points or weights", ())


SINGLE = ("diagonal", "KFAC", "EKFAC", "last layer")
LINES = ("ELLA", "optimal subspace", "subset of weights", "VaLLA", "subset of data")


def _draw_lines(table: Mapping[str, Any], name: str, xlabel: str, single: Sequence[str]) -> None:
    """Draws a panel for each task: the divergence over the cost if the name is empty, else over the size."""
    figure, ((*axes,),) = drawing.panels(1, len(table), (4.6 * len(table), 4.2), sharey=True)
    for axis, (task, rows) in zip(axes, table.items(), strict=True):
        for label in (*single, *LINES):
            for suffix, style in (("", "o--"), (" with residual", "o-")):
                keys = {0: label} if label in single else {size: f"{label}{suffix}, {size}" for size in SIZES}
                points = [(size, rows[key]) for size, key in keys.items() if key in rows]
                if points:
                    line = "o-" if label in ("VaLLA", "subset of data") else style
                    axis.errorbar(
                        [size if name else row["passes"]["mean"] for size, row in points],
                        [row["KL(LLA || method)"]["mean"] for _, row in points],
                        [row["KL(LLA || method)"]["standard_error"] for _, row in points], color=COLOURS[label],
                        fmt="s" if label in single else line, label=f"{label}{suffix}", markersize=4, linewidth=1.1,
                        capsize=2,
                    )  # fmt: skip
                if label in single:
                    break
        axis.set(xscale="log", yscale="log", title=f"{task}, mean of five seeds", xlabel=xlabel)
        axis.set_xticks(SIZES if name else (10, 20, 50, 100, 200), minor=False)
        axis.minorticks_off()
        axis.xaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("KL(full LLA || method), nats")
    drawing.legend_below(figure, 4)
    drawing.save(figure, __file__, name)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the divergence from full LLA by method, at sizes 20 and 100, and the cost of a prediction."""
    table = results["table"]
    labels = dict.fromkeys(name for rows in table.values() for name in rows)
    lines = {}
    for label in labels:
        if label == "full LLA" or label.endswith((", 10", ", 50", ", 200")):
            continue
        found = [rows.get(label, {}) for rows in table.values()]
        lines[label] = [_short(row.get(name)) for row in found for name in ("KL(LLA || method)", "passes")]
    columns = [f"{name}{part}" for name in table for part in ("", ", passes")]
    return {"divergence": grid(columns, lines)}


def _short(found: Mapping[str, float] | None) -> str:
    """Returns a number of any size at two digits, and its standard error at one."""
    if found is None:
        return ""
    error = f" ± {rounded(found['standard_error'], 1)}" * bool(found["standard_error"])
    return rounded(found["mean"]) + error
