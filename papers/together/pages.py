"""Tables of the comparison for its page, from the results of `regression.py` and `classification.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    lines = {}
    for method in methods.names(trains=True, regression=True):
        names = [method] if method in methods.NETWORKS else [f"{method}, {way}" for way in ways]
        cells = [_gain(results, task, name) for task in results["table"] for name in names]
        if any(cells) and method not in (comparison.BASE, methods.NETWORKS[0]):
            lines[shown_name(method)] = cells
    return grid(columns, lines)


def as_fitted(results: Mapping[str, Any], way: str) -> str:
    """Returns gains through a way without the two held-out numbers, over the network at one number."""
    found = comparison.gains(results["runs"], "fitted")
    lines = {}
    for method in methods.names(trains=True, regression=True):
        name = method if method in methods.NETWORKS else f"{method}, {way}"
        cells = [shown(found.get(task, {}).get(name)) for task in results["table"]]
        if any(cells) and method != comparison.BASE:
            lines[shown_name(method)] = cells
    return grid(list(results["table"]), lines)


def shown_name(method: str) -> str:
    """Returns the name of a method in the tables: held-out data choose two numbers of every row."""
    return method.replace("no held-out data", "fitted without held-out data")


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
    columns: list[str] = []
    lines = {}
    for method in methods.names(trains=True, regression=True):
        part = "fitted" if method == methods.NETWORKS[0] else "validated"
        cells, columns = [], []
        for task, rows in table.items():
            measures = [name for name in MEASURES if name in rows[comparison.BASE]["validated"]]
            found = rows.get(method if method in methods.NETWORKS else f"{method}, GLM", {}).get(part, {})
            own = {"auroc": "auroc by entropy"} if method in methods.NETWORKS[:2] else {}  # without mutual information
            cells += [shown(found.get(own.get(name, name))) for name in measures]
            names = [name.upper() if name in ("ece", "auroc", "rmse") else name for name in measures]
            columns += [f"{task}: {names[0]}", *names[1:]]
        if any(cells):
            lines[shown_name(method)] = cells
    return grid(columns, lines)


def costs(table: Mapping[str, Any]) -> str:
    """Returns what a method costs on each network: the fit and predictions in forward passes, and the bytes kept."""
    columns, lines = [], {}
    for task in table:
        columns += [f"{task}: fit", *(f"{way}" for way in methods.WAYS), "kB"]
    for method in methods.names(trains=True, regression=True):
        cells = []
        for rows in table.values():
            found = [rows.get(f"{method}, {way}", {}) for way in methods.WAYS]
            if method in methods.NETWORKS:
                found = [rows.get(method, {}), {}, {}]
            one = found[0]
            fit = "trains two" if method == methods.NETWORKS[2] and one else _rounded(one, "fit passes")
            cells += [fit, *(_rounded(row, "passes") for row in found), _rounded(one, "bytes")]
        if any(cells):
            lines[shown_name(method)] = cells
    return grid(columns, lines)


def _rounded(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        return ""
    return rounded(row[name]["mean"] / (1000 if name == "bytes" else 1))
