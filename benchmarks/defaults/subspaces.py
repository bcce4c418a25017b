"""Small tables of the grid: KFAC of all weights beside subspaces, with and without the prior outside their span.

    python -m benchmarks.defaults.subspaces --cache CACHE

Costs are those that `lw.plan` counts, in forward passes of the same data, tuning included: no clock is read. Writes
benchmarks/results/defaults_subspaces.json.
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
from papers.common.data import batched

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
    train, val = (batched(*part, measures.BATCH) for part in (data.train, data.val))
    rows = []
    for name, method in METHODS.items():
        for tuning in TUNINGS:
            predict, facts = getattr(measures, tuning)(model, data, method=method)
            plan = lw.plan(model, train, method, validation=val if tuning == "validated" else None)
            row = {"cell": cell.name, "family": cell.family, "seed": seed, "method": name, "tuning": tuning}
            row |= measures.scores(measures.predicted(predict, data.test[0]), data.test[1]) | facts
            row |= {"fit_passes": plan.passes + plan.tuning_passes, "predict_passes": plan.predict_passes}
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the table of docs/defaults.md: means of a family, and medians of the costs."""
    lines = [
        "| family | method | NLL: default, validated | 90 % intervals cover | passes of the fit | of a prediction |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for family in dict.fromkeys(row["family"] for row in rows):
        for method in METHODS:
            both = [[row for row in rows if (row["family"], row["method"], row["tuning"]) == (family, method, tuning)]
                    for tuning in TUNINGS]  # fmt: skip
            nll = ", ".join(f"{statistics.fmean(row['nll'] for row in some):.3f}" for some in both)
            covered = ", ".join(f"{statistics.fmean(row['coverage'] for row in some):.0%}" for some in both)
            fit = ", ".join(f"{statistics.median(row['fit_passes'] for row in some):.0f}" for some in both)
            predict = statistics.median(row["predict_passes"] for row in both[0])
            lines.append(f"| {family} | {method} | {nll} | {covered.replace('%', ' %')} | {fit} | {predict:.1f} |")
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
