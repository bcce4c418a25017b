"""ELLA and optimal subspaces on the tables with the rows of J that their papers have: 1 000 instead of 100."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import lapwing as lw
from papers.common.results import Rows, once
from papers.common.scores import paired
from papers.common.tables import grid, shown
from papers.together import comparison, methods, tasks
from papers.together.comparison import BASE, FACTS


class Budget(NamedTuple):
    """Directions of a subspace, and the rows of J that they are made of."""

    directions: int
    rows: int

    def __str__(self) -> str:
        return f"{self.directions} directions of {self.rows:,} rows"


FIRST = Budget(20, 100)
"""The budget of the comparison."""
MORE = Budget(20, 1000), Budget(200, 1000)

METHODS: dict[str, Callable[[Budget], lw.Method]] = {
    "ELLA": lambda budget: lw.ELLA(*budget),
    "ELLA with residual": lambda budget: lw.ELLA(*budget, residual="prior"),
    "optimal subspace": lambda budget: lw.OptimalSubspace(budget.directions, rows=budget.rows),
    "optimal subspace with residual": lambda budget: lw.OptimalSubspace(
        budget.directions, rows=budget.rows, residual="prior"
    ),
}
WAYS = ("GLM", "sampling")


def run(seeds: Sequence[int] = range(5), names: Sequence[str] = tuple(tasks.TABLES)) -> dict[str, Any]:
    """Returns a row for each method, budget, way, table and seed."""
    rows = Rows(__file__, FACTS)
    for seed in seeds:
        for name in names:
            task, run = once(partial(tasks.task, name, seed)), f"{name}, seed {seed}"
            network = once(lambda task=task: methods.fitted(BASE, task()))  # type: ignore[misc]
            base = once(lambda task=task, fit=network: comparison.losses(task(), fit()))  # type: ignore[misc]
            rows.add(run, BASE, comparison.row, task, network, "one pass each", base)
            for method, make in METHODS.items():
                for budget in (FIRST, *MORE):
                    fit = once(partial(fitted, task, make(budget)))
                    for way in WAYS:
                        rows.add(run, label(method, way, budget), comparison.row, task, fit, way, base)
    rows.facts["gains"] = comparison.gains(rows.runs)
    rows.facts["more"] = differences(rows.runs)
    return rows.all()


def label(method: str, way: str, budget: Budget) -> str:
    """Returns the name of a row."""
    return f"{method}, {way}, {budget}"


def fitted(task: Callable[[], tasks.Task], method: lw.Method) -> methods.Fitted:
    """Fits a posterior of all weights, tuned by held-out data."""
    return methods.measured(task(), methods.everything(method))


def differences(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns by table and row how much lower its NLL is than with the first budget, paired by seed."""

    def gained(rows: Mapping[str, Any]) -> dict[str, float]:
        found = {}
        for method, way, budget in itertools.product(METHODS, WAYS, MORE):
            few, more = (rows.get(label(method, way, b), {}).get("validated") for b in (FIRST, budget))
            if few and more:
                found[label(method, way, budget)] = few["nll"] - more["nll"]
        return found

    return paired(runs, gained)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns by way the gains over one noise variance with the first budget, and what the others add to them."""
    gains, more = results["gains"], results["more"]
    found = {}
    for way in WAYS:
        lines = {}
        for method in METHODS:
            for budget in (FIRST, *MORE):
                key, values = label(method, way, budget), gains if budget == FIRST else more
                title = f"{method}, {budget}" if budget == FIRST else f"{method}, added by {budget}"
                lines[title] = [shown(values[name].get(key)) for name in gains]
        found[way] = grid(list(gains), lines)
    return found
