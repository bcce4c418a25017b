"""Runs arms on cells, a row each; averages them by family, and judges them by the aims."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from benchmarks.grid import measures
from benchmarks.grid.networks import Cell, Data
from papers.common.measure import timed

Row = dict[str, Any]

TOLERANCE = 2e-3
"""Nats by which the default may be worse than the network, if the standard error is smaller."""


def evaluate(cell: Cell, seed: int, arms: Sequence[str]) -> dict[str, Row]:
    """Returns the row of each arm that is for the network; an arm that raises has a row with its message."""
    data = cell.data(seed)
    model = cell.trained(data, seed)
    x = data.test[0]
    around = {
        name: measures.predicted(make(model, data)[0], x)
        for name, make in (("network", measures.network), ("temperature", measures.temperature))
    }
    passing, training = (measures.forward_seconds(model, inputs) for inputs in (x, data.train[0]))
    rows: dict[str, Row] = {}
    for arm in (arm for arm in arms if measures.applies(arm, model)):
        rows[arm] = {"family": cell.family}
        try:
            rows[arm] |= _measured(arm, model, data, around, passing, training)
        except Exception as error:  # the grid goes on, whatever an arm does
            rows[arm]["error"] = f"{type(error).__name__}: {error}"
        print(f"{cell.name} {seed} {arm}: {rows[arm].get('error') or round(rows[arm]['nll'], 4)}", flush=True)
    return rows


def rows_of(results: Mapping[str, Mapping[str, Row]]) -> list[Row]:
    """Returns the rows of results, "boston-small-well, seed 0" -> arm -> row, with cell, seed and arm."""
    rows = []
    for part, arms in results.items():
        cell, _, seed = part.partition(", seed ")
        rows += [{"cell": cell, "seed": int(seed), "arm": arm, **row} for arm, row in arms.items()]
    return rows


def _measured(arm: str, model: nn.Module, data: Data, around: dict[str, Any], passing: float, training: float) -> Row:
    (predict, facts), fit = timed(lambda: measures.ARMS[arm](model, data))
    x, y = data.test
    found, spent = timed(lambda: measures.predicted(predict, x))
    strange = data.foreign
    foreign = None if strange is None else measures.predicted(predict, strange)
    row: Row = {"train": len(data.train[0]), "weights": sum(weights.numel() for weights in model.parameters())}
    row |= measures.scores(found, y, foreign)
    for name, other in around.items():
        row |= measures.paired(found, other, y, name)
    if strange is not None and foreign is not None:
        alone = measures.predicted(measures.network(model, data)[0], strange)
        ranked = (around["network"].entropy(), alone.entropy())
        row |= measures.paired_auroc((found.entropy(), foreign.entropy()), ranked, "network")
    if "accuracy" in row:
        row["classes_changed"] = int((found.probs.argmax(-1) != around["network"].probs.argmax(-1)).sum())
    costs = {"fit_seconds": fit, "fit_passes": fit / training, "predict_seconds": spent,
             "predict_passes": spent / passing}  # fmt: skip
    return {**row, **costs, **facts}


def with_best(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows, and one more for each cell with candidates: that of the best of them on the test rows."""
    rows = list(rows)
    tried: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row["arm"].removesuffix("-validated") in measures.CANDIDATES and "error" not in row:
            tried.setdefault((row["cell"], row["seed"]), []).append(row)
    best = [min(some, key=lambda row: row["nll"]) for some in tried.values()]
    return [*rows, *({**row, "arm": "best", "of": row["arm"]} for row in best)]


COLUMNS = ("nll", "nll_minus_network", "nll_minus_temperature", "coverage", "width_over_residual", "accuracy", "ece",
           "ece_floor", "auroc_entropy", "fit_passes", "predict_passes")  # fmt: skip
"""What is averaged over a family; costs are medians, in forward passes of the same data."""


def families(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Returns family -> arm -> column -> number, of rows without an error."""
    found: dict[str, dict[str, Row]] = {}
    for family in dict.fromkeys(row["family"] for row in rows):
        for arm in dict.fromkeys(row["arm"] for row in rows):
            some = [row for row in rows if row["family"] == family and row["arm"] == arm and "error" not in row]
            if some:
                averages = {
                    column: (statistics.median if column.endswith("passes") else statistics.fmean)(
                        [row[column] for row in some]
                    )
                    for column in COLUMNS
                    if column in some[0]
                }
                found.setdefault(family, {})[arm] = {"cells": len(some), **averages}
    return found


def aims(rows: Sequence[Row]) -> list[Row]:
    """Returns the aims: what is asked, whether it is met, and by how many, with the cells that miss it worst first."""
    rows = [row for row in rows if "error" not in row]
    plain = {(row["cell"], row["seed"]): row for row in rows if row["arm"] == "network"}
    scaled = {(row["cell"], row["seed"]): row for row in rows if row["arm"] == "temperature"}
    both = plain.keys() & scaled.keys()
    chosen = {
        arm: [row for row in rows if row["arm"] == arm and (row["cell"], row["seed"]) in both]
        for arm in ("default", "validated")
    }
    tables = [row for row in chosen["default"] if "coverage" in row]
    classes = [row for row in chosen["validated"] if "accuracy" in row]

    found = [
        _each(
            "default: NLL at most the network's, plus 0.002 or a standard error", chosen["default"], 1.0,
            lambda row: row["nll_minus_network"] - max(TOLERANCE, row["nll_minus_network_error"]),
        ),
        _mean("default: 90 % intervals cover 86 to 94 % in each family", tables,
              lambda some: abs(statistics.fmean(row["coverage"] for row in some) - 0.9) - 0.04),
        _each("default: 90 % intervals cover 80 to 97 %", tables, 0.9,
              lambda row: max(0.8 - row["coverage"], row["coverage"] - 0.97)),
        _mean("validated: NLL at most as with temperature scaling, in each family", chosen["validated"],
              lambda some: statistics.fmean(row["nll_minus_temperature"] for row in some)),
        _each("validated: NLL at most as with temperature scaling plus a standard error", chosen["validated"], 0.9,
              lambda row: row["nll_minus_temperature"] - row["nll_minus_temperature_error"]),
        _each(
            "validated: ECE at most as with temperature scaling plus a standard error, or at most 0.02 above its floor",
            classes, 1.0,
            lambda row: row["ece"] - max(scaled[row["cell"], row["seed"]]["ece"] + row["ece_deviation"],
                                         row["ece_floor"] + 0.02),
        ),
        _each("validated: classes are the network's", classes, 1.0, lambda row: float(row["classes_changed"])),
        _each("validated: AUROC at least the network's", classes, 0.9, lambda row: -row["auroc_minus_network"]),
        _each("validated: AUROC at least the network's, less a standard error", classes, 0.9,
              lambda row: -row["auroc_minus_network"] - row["auroc_minus_network_error"]),
    ]  # fmt: skip
    return [aim for aim in found if aim["of"]]


def _each(aim: str, rows: Sequence[Row], share: float, excess: Callable[[Row], float]) -> Row:
    """Returns an aim that so large a share of the cells has to meet: where the excess is 0 or less."""
    far = [row for row in rows if not excess(row) <= 0.0]
    misses = {row["cell"] + (f" {row['seed']}" if row["seed"] else ""): excess(row) for row in far}
    return _judged(aim if share == 1.0 else f"{aim}, in {100 * share:.0f} % of the cells", misses, len(rows), share)


def _mean(aim: str, rows: Sequence[Row], excess: Callable[[list[Row]], float]) -> Row:
    """Returns an aim of the mean of each family."""
    some = {family: [row for row in rows if row["family"] == family] for family in {row["family"] for row in rows}}
    misses = {family: excess(part) for family, part in some.items() if not excess(part) <= 0.0}
    return _judged(aim, misses, len(some), 1.0)


def _judged(aim: str, misses: dict[str, float], count: int, share: float) -> Row:
    worst = dict(sorted(misses.items(), key=lambda miss: -miss[1]))
    return {"aim": aim, "met": count - len(misses) >= share * count, "of": count, "misses": worst}
