"""Tables of the comparison for its page, from the results of `regression.py` and `classification.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from papers.common.tables import grid, rounded, shown
from papers.together import comparison, methods


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns gains through all ways, each way and as fitted, other scores through linearised prediction, and costs."""
    found = {"gains": gains(results, tuple(methods.WAYS))}
    found |= {f"gains, {way}": gains(results, (way,)) for way in methods.WAYS}
    found |= {f"gains as fitted, {way}": as_fitted(results, way) for way in methods.WAYS}
    return {**found, "scores": scores(results["table"]), "costs": costs(results["table"])}


FEW = 3
"""Fewest networks of which an error over networks is shown."""


def gains(results: Mapping[str, Any], ways: Sequence[str]) -> str:
    """Returns how much lower a method's NLL is than that of the network at one number.

    ± is over networks, or over test samples if there are fewer than `FEW` networks. A dagger marks a factor of the
    covariance at the lower edge of its range, which leaves hardly any spread.
    """
    columns = [task + f", {way}" * (len(ways) > 1) for task in results["table"] for way in ways]

    def cells(method: str) -> list[str]:
        names = [method] if method in methods.NETWORKS else [f"{method}, {way}" for way in ways]
        return [_gain(results, task, name) for task in results["table"] for name in names]

    return grid(columns, lines(cells, (comparison.BASE, methods.NETWORKS[0])))


def lines(cells_of: Callable[[str], list[str]], without: Sequence[str] = ()) -> dict[str, list[str]]:
    """Returns the cells of each method that has some, by its name in the tables.

    Held-out data choose two numbers of every row, so a method "without held-out data" was only fitted without them.
    """
    found = {name: cells_of(name) for name in methods.names(trains=True, regression=True) if name not in without}
    words = "no held-out data", "fitted without held-out data"
    return {name.replace(*words): cells for name, cells in found.items() if any(cells)}


def as_fitted(results: Mapping[str, Any], way: str) -> str:
    """Returns gains through a way without the two held-out numbers, over the network at one number."""
    found = comparison.gains(results["runs"], "fitted")

    def cells(method: str) -> list[str]:
        name = method if method in methods.NETWORKS else f"{method}, {way}"
        return [shown(found.get(task, {}).get(name)) for task in results["table"]]

    return grid(list(results["table"]), lines(cells, (comparison.BASE,)))


def _gain(results: Mapping[str, Any], task: str, name: str) -> str:
    found = results["gains"].get(task, {}).get(name)
    row = results["table"][task].get(name, {})
    if found is None:
        return "refused" if name in results["table"][task] else ""
    factors = [
        rows[name].get("factor", 1) for run, rows in results["runs"].items() if run.startswith(task) and name in rows
    ]
    error = found["standard_error"] if len(factors) >= FEW else row["gain error"]["mean"]
    return shown({"mean": found["mean"], "standard_error": error}) + " †" * (min(factors) < 1.01 * methods.FACTORS[0])


MEASURES = ("ece", "accuracy", "auroc", "rmse", "coverage 0.9")
"""Scores beside the NLL, which the gains show."""


def scores(table: Mapping[str, Any]) -> str:
    """Returns the scores of all methods through linearised prediction, with the held-out numbers.

    AUROC is by mutual information; a network alone has none, and its AUROC is by entropy.
    """
    measures = {
        task: [name for name in MEASURES if name in rows[comparison.BASE]["validated"]] for task, rows in table.items()
    }

    def cells(method: str) -> list[str]:
        part = "fitted" if method == methods.NETWORKS[0] else "validated"
        own = {"auroc": "auroc by entropy"} if method in methods.NETWORKS[:2] else {}  # without mutual information
        name = method if method in methods.NETWORKS else f"{method}, GLM"
        return [
            shown(rows.get(name, {}).get(part, {}).get(own.get(measure, measure)))
            for task, rows in table.items()
            for measure in measures[task]
        ]

    columns = []
    for task, some in measures.items():
        names = [name.upper() if name in ("ece", "auroc", "rmse") else name for name in some]
        columns += [f"{task}: {names[0]}", *names[1:]]
    return grid(columns, lines(cells))


def costs(table: Mapping[str, Any]) -> str:
    """Returns what a method costs on each network: the fit and predictions in forward passes, and the bytes kept."""
    columns = []
    for task in table:
        columns += [f"{task}: fit", *methods.WAYS, "kB"]

    def cells(method: str) -> list[str]:
        found = []
        for rows in table.values():
            ways = [rows.get(f"{method}, {way}", {}) for way in methods.WAYS]
            if method in methods.NETWORKS:
                ways = [rows.get(method, {}), {}, {}]
            fit = "trains two" if method == methods.NETWORKS[2] and ways[0] else _rounded(ways[0], "fit passes")
            found += [fit, *(_rounded(row, "passes") for row in ways), _rounded(ways[0], "bytes")]
        return found

    return grid(columns, lines(cells))


def _rounded(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        return ""
    return rounded(row[name]["mean"] / (1000 if name == "bytes" else 1))
