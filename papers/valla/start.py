"""Where δ starts in the published fit, 1 or lapwing's P/‖θ̂‖², the rate, and 200 points: tables and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from papers.common.results import Rows, once
from papers.common.tables import grid, shown
from papers.valla.figure4 import SHORT, TABLES, TableTask
from papers.valla.figure5 import ImageTask
from papers.valla.published import HELD_OUT, RATE, TableRows
from papers.valla.published_images import ImageRows

RATES, IMAGE_RATES = (0.001, 0.005, 0.02, 0.05), (0.02, 0.05)
"""Constant rates of tables and of images at seed 0; other seeds have `RATE`. A slow image fit takes an hour."""

STARTS = {"1": 1.0, "P/‖θ̂‖²": None}
"""δ at the start; the authors' program has 1."""

MANY = 200
"""Points of a further image fit from δ = 1; the others have 100."""
LARGER = f"δ from 1, rate {RATE:g}, {MANY} points"

TESTED = 1500
"""Test images, as in `published_images`."""


def run(
    seeds: Sequence[int] = range(5), tables: Sequence[str] = tuple(TABLES), images: Sequence[str] = ("fashion_mnist",)
) -> dict[str, Any]:
    """Returns scores of the published fit by start and rate, and of images by points; tables have the first seed."""
    rows = Rows(__file__, {"held out": HELD_OUT, "tested": TESTED})
    for name in tables:
        task: Any = once(lambda name=name: TableRows(TableTask.load(name, seeds[0]), seeds[0]))  # type: ignore[misc]
        _add(rows, f"{name}, seed {seeds[0]}", task, RATES, lambda task, *fit: task().published(*fit))
    for name in images:
        for seed in seeds:
            task = once(lambda name=name, seed=seed: ImageRows(ImageTask.load(name, seed, TESTED), seed))  # type: ignore[misc]
            run, rates = f"{name}, seed {seed}", IMAGE_RATES if seed == seeds[0] else (RATE,)
            rows.add(run, "network", lambda task: task().network(1.0), task)
            _add(rows, run, task, rates, lambda task, *fit: task().published(100, *fit))
            rows.add(run, LARGER, lambda task: task().published(MANY, 1.0), task)
    return rows.all()


def _add(rows: Rows, run: str, task: Any, rates: Sequence[float], make: Any) -> None:
    for label, start in STARTS.items():
        for rate in rates:
            rows.add(run, f"δ from {label}, rate {rate:g}", make, task, start, rate)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the NLL of tables with the steps in brackets, and the scores of images, by start and rate."""
    found, labels = results["table"], [f"δ from {start}, rate {rate:g}" for start in STARTS for rate in RATES]
    of_tables = {
        label: [shown(found[name][label]["nll"]) + f" ({_mean(found[name][label], 'steps')})" for name in TABLES]
        for label in labels
    }
    of_images, columns = {}, (("nll", 3, 1), ("accuracy", 1, 100), ("ece", 3, 1), ("auroc", 3, 1))
    for of in (of for name, of in found.items() if name not in TABLES):
        for label in ("network", *(label for label in (*labels, LARGER) if label in of)):
            scores = of[label].get("textbook probit", of[label])
            more = [_mean(of[label], key) for key in ("prior_precision", "steps") if key in of[label]]
            of_images[label] = [*(shown(scores[key], digits, scale) for key, digits, scale in columns), *more]
    headings = ["NLL", "accuracy, %", "ECE", "AUROC", "δ", "steps"]
    return {"tables": grid(list(SHORT.values()), of_tables), "images": grid(headings, of_images)}


def _mean(row: Mapping[str, Any], key: str) -> str:
    return f"{row[key]['mean']:.0f}"
