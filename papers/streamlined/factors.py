"""Table 2 by the covariance of equation 10, whose factors are shifted by the root of the prior precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import lapwing as lw
from papers.common.results import Rows, once
from papers.common.tables import grid, shown
from papers.streamlined import table2
from papers.streamlined.equation10 import equation_10
from papers.streamlined.table2 import MLPTask

EXACT, SHIFTED = "exact", "equation 10"
WAYS = ("sampling", "GLM", "streamlined")


def run(seeds: Sequence[int] = range(5), names: Sequence[str] = ("mnist", "fashion_mnist")) -> dict[str, Any]:
    """Returns the scores of `table2` by both covariances of a fit, at the prior precision of its evidence."""
    rows = Rows(__file__, {"tested": 5000})
    for seed in seeds:
        for name in names:
            run, task = f"{name}, seed {seed}", once(partial(MLPTask.load, name, seed))
            fit = once(lambda task=task: task().laplace(lw.KFAC(), lw.Evidence()))  # type: ignore[misc]
            for label in (EXACT, SHIFTED):
                rows.add(run, label, row, task, fit, label)
    return rows.all()


def row(task: Any, fit: Any, label: str) -> dict[str, Any]:
    """Returns the scores of each way through a covariance."""
    posterior = equation_10(fit()) if label == SHIFTED else fit()
    return task().scores(posterior, task().ways(*WAYS))


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the scores by both covariances, beside the paper's."""
    lines = {}
    for name, rows in results["table"].items():
        for way in WAYS:
            paper = table2.PUBLISHED["table 2"][name][f"LA {way}"][1]
            for label in (SHIFTED, EXACT):
                cells = [f"{paper:.3f}", shown(rows[label][way]["plain"]["accuracy"], 1, 100)]
                for score in ("nlpd", "ece", "auroc"):
                    cells += [shown(rows[label][way][kind][score]) for kind in ("plain", "scaled")]
                lines[f"{name}, {way}, {label}"] = cells
    return {"scores": grid(table2.COLUMNS, lines)}
