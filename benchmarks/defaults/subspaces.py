"""Small tables of the grid: KFAC of all weights beside subspaces, with and without the prior outside their span.

    python -m benchmarks.defaults.subspaces --cache CACHE

Writes benchmarks/results/defaults_subspaces.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import lapwing as lw
from benchmarks.defaults import measures
from benchmarks.defaults.__main__ import CACHE
from benchmarks.defaults.networks import CELLS, Cell
from benchmarks.measure import write

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


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the table of docs/defaults.md: means of a family."""
    lines = [
        "| family | method | NLL: default, validated | 90 % intervals cover |",
        "| --- | --- | --- | --- |",
    ]
    for family in dict.fromkeys(row["family"] for row in rows):
        for method in METHODS:
            both = [[row for row in rows if (row["family"], row["method"], row["tuning"]) == (family, method, tuning)]
                    for tuning in TUNINGS]  # fmt: skip
            nll = ", ".join(f"{statistics.fmean(row['nll'] for row in some):.3f}" for some in both)
            covered = ", ".join(f"{statistics.fmean(row['coverage'] for row in some):.0%}" for some in both)
            lines.append(f"| {family} | {method} | {nll} | {covered.replace('%', ' %')} |")
    return "\n".join(lines)


def main() -> None:
    """Scores the small tables of the first seed."""
    about = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.defaults.subspaces", description=about)
    parser.add_argument("--cache", type=Path, default=CACHE)
    os.environ["LAPWING_NETWORKS"] = str(parser.parse_args().cache)
    rows = []
    for cell in CELLS:
        if cell.family.startswith("tables") and cell.family.endswith("small"):
            rows += rows_of(cell)
            print(cell.name, *(round(row["nll"], 4) for row in rows[-len(METHODS) * len(TUNINGS) :]), flush=True)
    print(table(rows), write("defaults_subspaces", {"rows": rows}, 0), sep="\n")


if __name__ == "__main__":
    main()
