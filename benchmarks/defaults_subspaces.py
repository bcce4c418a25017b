"""Small tables of the grid: KFAC of all weights beside subspaces, with and without the prior outside their span."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import lapwing as lw
from benchmarks.grid import measures
from benchmarks.grid.networks import CELLS, Cell
from papers.common.tables import grid

METHODS: dict[str, lw.Method] = {
    "`KFAC()`": lw.KFAC(),
    "`ELLA(20, 500)`": lw.ELLA(rank=20, rows=500),
    '`ELLA(20, 500, residual="prior")`': lw.ELLA(rank=20, rows=500, residual="prior"),
    '`ELLA(100, 500, residual="prior")`': lw.ELLA(rank=100, rows=500, residual="prior"),
}
TUNINGS = ("default", "validated")


def rows_of(cell: Cell, seed: int = 0) -> list[dict[str, Any]]:
    """Returns a row for each method and tuning."""
    data = cell.data(seed)
    model = cell.trained(data, seed)
    rows = []
    for name, method in METHODS.items():
        for tuning in TUNINGS:
            predict, facts = getattr(measures, tuning)(model, data, method=method)
            row = {"cell": cell.name, "family": cell.family, "seed": seed, "method": name, "tuning": tuning}
            row |= measures.scores(measures.predicted(predict, data.test[0]), data.test[1]) | facts
            rows.append(row)
    return rows


def tables(results: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Returns the table of benchmarks/README.md: means of a family."""
    rows = [row for some in results.values() for row in some]
    lines = []
    for family in dict.fromkeys(row["family"] for row in rows):
        for method in METHODS:
            both = [[row for row in rows if (row["family"], row["method"], row["tuning"]) == (family, method, tuning)]
                    for tuning in TUNINGS]  # fmt: skip
            nll = ", ".join(f"{statistics.fmean(row['nll'] for row in some):.3f}" for some in both)
            covered = ", ".join(f"{statistics.fmean(row['coverage'] for row in some):.0%}" for some in both)
            lines.append((family, [method, nll, covered.replace("%", " %")]))
    columns = ["method", "NLL: default, validated", "90 % intervals cover"]
    return {"subspaces": grid(columns, lines, corner="family")}


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the small tables of the grid."""
    some = (cell for cell in CELLS if cell.family.startswith("tables") and cell.family.endswith("small"))
    return {cell.name: partial(rows_of, cell) for cell in some}
