"""Figures 4 and 8: NLL, CRPS, CQM and its curve on regression tables."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.evaluation import metrics
from lapwing.tuning import Training, Tuning
from papers.common import drawing
from papers.common.data import Batches, Part, Table, arrays, batched, joined, random_rows, rows_and_targets, split
from papers.common.measure import timed
from papers.common.measures import cqm
from papers.common.results import Rows, once
from papers.common.tables import grid, shown
from papers.common.training import ONE_NOISE
from papers.valla.training import TABLE, Untuned, trained

PUBLISHED = {
    "taxi": {"network": 3.763, "KFAC": 3.705, "last layer": 3.718, "ELLA": 3.753, "VaLLA 100": 3.287},
    "airline": {"network": 5.087, "KFAC": 5.097, "last layer": 5.097, "ELLA": 5.086, "VaLLA 100": 4.923},
}
"""NLL in dollars and minutes, on other and more rows."""

TABLES: dict[str, tuple[str, bool]] = {
    "us_flights_2015jan": ("min", True),
    "nyc_green_taxi_2023q1": ("$", True),
    "kin40k": ("1", False),
    "california_housing": ("100 k$", False),
    "elevators": ("1", False),
}
"""Name -> unit of the target, and whether rows are in time order, which the splits then keep (appendix G.2)."""
SHORT = dict(zip(TABLES, ("flights", "taxi", "kin40k", "California", "elevators"), strict=True))
"""Name -> heading."""

FARTHEST_TRIP = 100.0
"""Miles; taxi rows beyond it (131 of 201 749, up to 179 000 miles) are errors of recording and left out."""


def run(seeds: Sequence[int] = range(5), names: Sequence[str] = ()) -> dict[str, Any]:
    """Returns scores of every method on every table."""
    return Rows(__file__, {"levels": LEVELS.tolist(), "units": TABLES}).filled(_add, seeds, names or TABLES)


def _add(rows: Rows, seed: int, name: str) -> None:
    run, task = f"{name}, seed {seed}", once(lambda: TableTask.load(name, seed))
    rows.add(run, "network", lambda: task().network_scores())
    for label, chosen in METHODS.items():
        rows.add(run, label, lambda *chosen: tuned_rows(task(), seed, *chosen), *chosen)
    rows.add(run, "VaLLA 100", lambda: published_row(task(), seed))


def table(name: str, seed: int) -> Table:
    """Reads a table, split 80/10/10: in the order of time for flights and taxis, at random elsewhere."""
    (unit, ordered), (x, y) = TABLES[name], rows_and_targets(name)
    if name == "nyc_green_taxi_2023q1":
        near = x[:, list(arrays(name)["feature_names"]).index("trip_distance")] <= FARTHEST_TRIP
        x, y = x[near], y[near]
    return split(name, x, y, unit, None if ordered else seed)


LEVELS = torch.linspace(0, 1, 21).double()


def regression_scores(mean: Tensor, latent: Tensor, noise: float, y: Tensor, scale: float) -> dict[str, Any]:
    """Returns NLL (of standardised targets, and in the target's unit), CRPS (unit), CQM, coverage and its curve.

    Args:
        mean: of the predictions (n, 1), standardised.
        latent: variance of f (n, 1).
        noise: σ².
        y: targets (n, 1), standardised.
        scale: standard deviation of the targets in their unit.

    Returns:
        numbers by name; `curve` holds P(y in the central interval) at `LEVELS`, `latent share` the share of the latent
        in the predictive variance, `spread` the standard deviation of its logarithm over inputs.
    """
    variance = latent.double() + noise
    std, error = variance.sqrt(), (y - mean).double()
    levels = torch.erf((error / std).abs() / math.sqrt(2))
    nll = float(metrics.nll(torch.distributions.Normal(mean.double(), std).log_prob(y.double())[:, 0]))
    return {
        "nll": nll, "nll, unit": nll + math.log(scale), "crps": scale * float(metrics.crps_gaussian(mean, std, y)),
        "cqm": float(cqm(mean, std, y)), "coverage 0.9": float((levels <= 0.9).double().mean()),
        "latent share": float((latent / variance).mean()), "spread": float(variance.log().std()),
        "noise": noise, "curve": [float((levels <= level).double().mean()) for level in LEVELS],
    }  # fmt: skip


@dataclass(frozen=True)
class TableTask:
    """A trained 3 x 200 tanh MLP and its table.

    Attributes:
        data: the table.
        model: the network.
        train: training rows in batches, in random order.
        val: at most 5 000 validation rows, evenly spread.
        test: at most 10 000 test rows, evenly spread.
    """

    data: Table
    model: nn.Module
    train: Batches
    val: Batches
    test: Part

    @classmethod
    def load(cls, name: str, seed: int) -> TableTask:
        """Reads the table and trains the network, or takes the one that was kept."""
        data = table(name, seed)
        model = trained((data.train[0].shape[1], 200, 200, 200, 1), data.train, TABLE, seed, name)
        val = _thinned(data.val, 5000)
        order = random_rows(data.train[0], len(data.train[0]), seed)
        train = batched(data.train[0][order], data.train[1][order], 500)
        return cls(data, model, train, batched(*val, 500), _thinned(data.test, 10_000))

    def errors(self, part: Part) -> Tensor:
        """Returns squared residuals of the network (n, 1) float64."""
        with torch.no_grad():
            return torch.cat([(y - self.model(x)).double().square() for x, y in batched(*part, 500)])

    def network_scores(self) -> dict[str, Any]:
        """Returns MAP's scores at the σ² of training and of validation residuals, and the best that any σ² could have.

        That best one, which no honest procedure finds, is the mean squared residual of the test rows themselves.
        """
        parts = {"MAP": self.data.train, "MAP, noise tuned": joined(self.val), "MAP, noise of the test rows": self.test}
        rmse = self.data.scale * float(self.errors(self.test).mean().sqrt())
        return {name: self.network_row(part) for name, part in parts.items()} | {"rmse": rmse}

    def network_row(self, rows: Part) -> dict[str, Any]:
        """Returns the scores of the network with the mean squared residual of some rows as noise variance."""
        x, y = self.test
        with torch.no_grad():
            mean = torch.cat([self.model(part) for part in x.split(500)])
        noise = float(self.errors(rows).mean())
        return regression_scores(mean, torch.zeros_like(mean), noise, y, self.data.scale)

    def fit(self, method: lw.Method, params: Any = lw.everything, seed: int = 0, **options: Any) -> lw.Posterior:
        """Fits a method, δ and σ² open, tuned by nothing unless the options say so."""
        options = {"tune": Untuned(), **options}
        return lw.fit(self.model, self.train, method, params=params, likelihood=ONE_NOISE, seed=seed, **options)

    def score(self, posterior: lw.Posterior) -> dict[str, Any]:
        """Returns a posterior's scores on the test rows, δ, and the seconds of a prediction."""
        x, y = self.test
        parts, seconds = timed(lambda: [posterior.latent(part) for part in x.split(500)], time.process_time)
        mean, variance = (torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "variance"))
        noise = posterior.noise_variance
        assert noise is not None
        found = regression_scores(mean, variance, noise, y, self.data.scale)
        return {**found, "prior_precision": posterior.prior_precision, "predict_seconds": seconds}


def _thinned(part: Part, most: int) -> Part:
    x, y = part
    step = -(-len(x) // most)
    return x[::step], y[::step]


METHODS: dict[str, tuple[lw.Method, Any]] = {
    "diagonal": (lw.Diagonal(), lw.everything),
    "KFAC": (lw.KFAC(), lw.everything),
    "last layer": (lw.Full(), lw.last_layer),
    "ELLA": (lw.ELLA(rank=20, rows=100), lw.everything),
    "VaLLA 100, natural gradient": (lw.VaLLA(100, lw.NaturalGradient(steps=20)), lw.everything),
    "prior alone": (lw.VaLLA(1, lw.NaturalGradient(steps=20)), lw.everything),
}
"""Methods whose δ and σ² are tuned afterwards; natural gradients of 20 batches of 500, whatever N is.

One inducing point learns next to nothing, so "prior alone" has the variance `‖J(x)‖²/δ`.
"""


def tuned_rows(task: TableTask, seed: int, method: lw.Method, params: Any = lw.everything) -> dict[str, Any]:
    """Fits a method once and tunes δ and σ² by the evidence and by validation.

    Returns:
        tuning -> scores, and processor seconds of the fit with its tuning.
    """
    posterior, seconds = timed(lambda: task.fit(method, params, seed), time.process_time)
    found: dict[str, Any] = {}
    tunings: dict[str, Tuning] = {"evidence": lw.Evidence(), "validation": lw.Validation(task.val)}
    for kind, tuning in tunings.items():
        tuned, spent = timed(partial(tuning.tune, posterior, Training()), time.process_time)
        found[kind] = {**task.score(tuned), "seconds": seconds + spent}
    return found


LONGEST = 600
"""Most batches of the published fit; the paper does not say how many, and this is what a minute allows."""


def published_row(task: TableTask, seed: int) -> dict[str, Any]:
    """Fits VaLLA as published, by the α-divergence over Z, A, δ and σ² in batches of 100, 100 inducing points.

    The NLL of 1 000 validation rows may stop it.

    Returns:
        scores, processor seconds, steps taken, validation NLL by looks.
    """
    alpha = lw.AlphaDivergence(steps=LONGEST, learning_rate=0.05, validation=task.val[::5], every=50, patience=2)
    train = [part for x, y in task.train[: LONGEST // 5] for part in batched(x, y, 100)]
    size = len(task.data.train[0])
    fit = partial(lw.fit, task.model, train, lw.VaLLA(100, alpha), likelihood=ONE_NOISE, seed=seed, data_size=size)
    posterior, seconds = timed(fit, time.process_time)
    history = posterior.history
    return {
        **task.score(posterior), "seconds": seconds, "steps": len(history["objective"]),
        "looks": history["validation"].tolist(),
    }  # fmt: skip


COLOURS = {
    "network": "#555555", "network, noise tuned": "#aaaaaa", "diagonal": "#1f77b4", "KFAC": "#d62728",
    "last layer": "#2ca02c", "ELLA": "#9467bd", "sampled LLA": "#bcbd22", "VaLLA 100": "#000000",
    "VaLLA 100, natural gradient": "#ff7f0e",
}  # fmt: skip


def draw(results: Mapping[str, Any]) -> None:
    """Draws P(y in the central interval) over its probability."""
    levels, table = results["levels"], results["table"]
    figure, ((*axes,),) = drawing.panels(1, len(table), (3.3 * len(table), 3.8), sharey=True)
    for axis, (name, rows) in zip(axes, table.items(), strict=True):
        lines = {label: row.get("validation", row) for label, row in rows.items()}
        lines |= {"network": rows["network"]["MAP"], "network, noise tuned": rows["network"]["MAP, noise tuned"]}
        for label, values in lines.items():
            if label in COLOURS and "curve" in values:
                curve = [values["curve"][str(i)]["mean"] for i in range(len(levels))]
                axis.plot(levels, curve, color=COLOURS[label], label=label, linewidth=1.2)
        axis.plot([0, 1], [0, 1], ":", color="#222222")
        axis.set(title=SHORT[name], xlabel="probability α of the interval")
    drawing.legend_below(figure, 5)
    axes[0].set_ylabel("share of targets inside, five seeds")
    drawing.save(figure, __file__)


ROWS = {
    "network, noise of the training residuals": ("network", "MAP"),
    "network, noise tuned on validation data": ("network", "MAP, noise tuned"),
    "network, noise of the test rows themselves": ("network", "MAP, noise of the test rows"),
    "diagonal, validated": ("diagonal", "validation"), "KFAC, validated": ("KFAC", "validation"),
    "last layer, validated": ("last layer", "validation"), "ELLA, validated": ("ELLA", "validation"),
    "the prior alone, validated": ("prior alone", "validation"),
    "VaLLA 100, natural gradient, validated": ("VaLLA 100, natural gradient", "validation"),
    "VaLLA 100, α-divergence": ("VaLLA 100",),
    "diagonal, evidence": ("diagonal", "evidence"), "KFAC, evidence": ("KFAC", "evidence"),
    "last layer, evidence": ("last layer", "evidence"), "ELLA, evidence": ("ELLA", "evidence"),
    "VaLLA 100, natural gradient, evidence": ("VaLLA 100, natural gradient", "evidence"),
}  # fmt: skip
"""Row of the tables -> where its scores are."""


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns NLL, CQM and CRPS of each table, and NLL in units beside the paper's on its larger tables."""
    of = results["table"]
    found = {
        row: [reduce(lambda scores, part: scores.get(part, {}), path, of[name]) for name in TABLES]
        for row, path in ROWS.items()
    }
    columns = list(SHORT.values())
    nll = {row: [shown(scores["nll"]) for scores in cells] for row, cells in found.items()}
    quality = {row: [f"{shown(c['cqm'])}; {c['crps']['mean']:.3g}" for c in cells] for row, cells in found.items()}
    methods = {name: f"{name}, validated" for name in ("KFAC", "last layer", "ELLA")}
    methods = {"network": "network, noise of the training residuals", **methods, "VaLLA 100": "VaLLA 100, α-divergence"}
    units = {}
    for name, published, column in (("taxi", "taxi", 1), ("flights", "airline", 0)):
        units[f"{published}, published"] = [f"{PUBLISHED[published][method]:.3f}" for method in methods]
        units[f"{name}, ours"] = [shown(found[row][column]["nll, unit"]) for row in methods.values()]
        evidence = (found.get(f"{method}, evidence") for method in methods)
        units[f"{name}, ours by the evidence"] = [shown(row[column]["nll, unit"]) if row else "" for row in evidence]
    first = found["network, noise of the training residuals"]
    gains = {
        row: [f"{one['nll']['mean'] - c['nll']['mean']:.2f}" for one, c in zip(first, found[row], strict=True)]
        for row in ROWS
        if "evidence" not in row and row not in ("network, noise of the training residuals", "last layer, validated")
    }
    return {
        "nll": grid(columns, nll),
        "cqm and crps": grid(columns, quality),
        "units": grid(list(methods), units),
        "gains": grid(columns, gains),
    }
