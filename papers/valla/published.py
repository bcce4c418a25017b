"""VaLLA by the published objective, rate and stop on tables, and the rows to beat: one number from held-out data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

import lapwing as lw
from papers.common.data import Batches, batched, joined
from papers.common.results import Rows, once
from papers.common.scores import averaged
from papers.common.tables import grid, shown
from papers.common.training import ONE_NOISE
from papers.valla.figure4 import SHORT, TABLES, TableTask

STEPS = 2000
"""Most batches of 100. The paper does not give a number for tables."""

RATE = 0.02
"""Constant learning rate of lapwing's parameters; the paper's 1e-3 is of other ones."""

EVERY = 100
"""Batches between two looks at the held-out data, as in appendix D."""

HELD_OUT = 1000
"""Most samples that stop a fit, or that choose δ, σ² and temperature."""


def run(seeds: Sequence[int] = range(5), names: Sequence[str] = tuple(TABLES)) -> dict[str, Any]:
    """Returns scores of the published fit and of the rows to beat."""
    return Rows(__file__, {"steps": STEPS, "rate": RATE, "held out": HELD_OUT}).filled(_add_table, seeds, names)


PRIOR_ALONE = lw.VaLLA(1, lw.NaturalGradient(steps=1))
"""One inducing point and one batch: next to no data, so the variance is `‖J(x)‖²/δ`."""


def _add_table(rows: Rows, seed: int, name: str) -> None:
    run, task = f"{name}, seed {seed}", once(lambda: TableRows(TableTask.load(name, seed), seed))
    rows.add(run, "network", lambda: task().network(task().task.data.train))
    rows.add(run, "one noise variance", lambda: task().network(task().held_out))
    rows.add(run, "prior alone, validated", lambda: task().validated(PRIOR_ALONE))
    rows.add(run, "recommended call", lambda: task().validated(None))
    rows.add(run, "VaLLA 100", lambda: task().published(1.0))
    rows.add(run, "VaLLA 100, lapwing's start", lambda: task().published(None))


def published_fit(
    val: Batches, link: Any = None, steps: int = STEPS, points: int = 100, start: float | None = 1.0, rate: float = RATE
) -> lw.VaLLA:
    """Returns VaLLA by the α-divergence at α = 1, which ends at the first rise of the validation NLL.

    Args:
        val: validation data.
        link: of the likelihood.
        steps: maximum number of batches.
        points: M.
        start: δ at the start, in the authors' program 1; None means lapwing's own, `P/‖θ̂‖²`.
        rate: constant learning rate.
    """
    fit = lw.AlphaDivergence(
        steps=steps, learning_rate=rate, validation=val, every=EVERY, link=link, schedule="constant",
        stop="first rise", initial_prior_precision=start,
    )  # fmt: skip
    return lw.VaLLA(points, fit)


def path_of(posterior: lw.Posterior) -> dict[str, Any]:
    """Returns the steps of a published fit, its validation NLL by looks, and whether the rise ended it."""
    looks = posterior.history["validation"].tolist()
    rose = len(looks) > 1 and looks[-1] > looks[-2]
    steps, delta = len(posterior.history["objective"]), posterior.prior_precision
    return {"steps": steps, "looks": looks, "ended by the rise": float(rose), "prior_precision": delta}


class TableRows:
    """Rows of a regression table.

    Attributes:
        task: network and table.
        seed: of the fits.
        held_out: at most `HELD_OUT` validation rows, evenly spread.
    """

    def __init__(self, task: TableTask, seed: int) -> None:
        x, y = joined(task.val)
        step = -(-len(x) // HELD_OUT)
        self.task, self.seed, self.held_out = task, seed, (x[::step], y[::step])

    def network(self, rows: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """Returns the scores of the network with the mean squared residual of some rows as noise variance."""
        return _without_curve(self.task.network_row(rows))

    def validated(self, method: lw.Method | None) -> dict[str, Any]:
        """Returns the scores of a posterior whose δ and σ² are of the held-out rows."""
        options: dict[str, Any] = {} if method is None else {"params": lw.everything}
        posterior = lw.fit(
            self.task.model, self.task.train[:20], method, validation=batched(*self.held_out, 500), seed=self.seed,
            data_size=len(self.task.data.train[0]), likelihood=ONE_NOISE, **options,
        )  # fmt: skip
        return _without_curve(self.task.score(posterior))

    def published(self, start: float | None, rate: float = RATE) -> dict[str, Any]:
        """Returns the scores of the published fit on all training rows, with δ at a start."""
        begin = time.process_time()
        train = [part for x, y in self.task.train for part in batched(x, y, 100)]
        method = published_fit(batched(*self.held_out, 500), start=start, rate=rate)
        posterior = lw.fit(self.task.model, train, method, likelihood=ONE_NOISE, seed=self.seed, tune=None)
        seconds = time.process_time() - begin
        return {**_without_curve(self.task.score(posterior)), **path_of(posterior), "seconds": seconds}


def _without_curve(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "curve"}


FITS = "VaLLA 100", "VaLLA 100, lapwing's start"
LABELS = ("network", "one noise variance", "prior alone, validated", "recommended call", *FITS)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the NLL on tables, and how the published fits ended."""
    table = {SHORT[name]: of for name, of in results["table"].items()}
    rows = {label: [shown(of.get(label, {}).get("nll")) for of in table.values()] for label in LABELS}
    return {"tables": grid(list(table), rows), "ends": ends(results["runs"], SHORT, FITS)}


def ends(runs: Mapping[str, Any], headings: Mapping[str, str], labels: Sequence[str]) -> str:
    """Returns how the published fits ended, means over seeds."""
    rows = {}
    for name, heading in headings.items():
        for label in labels:
            fits = [of[label] for run, of in runs.items() if run.startswith(f"{name}, seed") and label in of]
            if fits:
                found = averaged([{**_ends(fit), "seconds": fit["seconds"]} for fit in fits])
                cells = [shown(found[key], digits) for key, digits in ENDS.items()]
                rows[f"{heading}: {label}" if len(labels) > 1 else heading] = cells
    return grid(tuple(ENDS), rows)


ENDS = {"steps": 0, "share ended by the rise": 1, "seconds": 0, "validation NLL at the start": 3, "lowest": 3}
"""Columns of the table of ends -> digits."""


def _ends(fit: Mapping[str, Any]) -> dict[str, float]:
    looks = fit["looks"]
    return {
        "steps": fit["steps"], "share ended by the rise": fit["ended by the rise"],
        "validation NLL at the start": looks[0], "lowest": min(looks),
    }  # fmt: skip
