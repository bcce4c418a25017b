"""The prior precision chosen for each way of prediction, beside the one chosen for linearised prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import lapwing as lw
from papers.common.results import Rows, once
from papers.common.scores import paired
from papers.common.tables import grid, shown
from papers.together import comparison, methods, tasks
from papers.together.comparison import BASE, FACTS
from papers.together.tasks import Task

METHODS: dict[str, lw.Method] = {"KFAC": lw.KFAC(), "EKFAC": lw.EKFAC(), "diagonal": lw.Diagonal()}
"""Posteriors of all weights."""

OTHER_WAYS = ("sampling", "streamlined")
CHOSEN = {"linearised": "GLM", "own": ""}
"""How the prior precision is chosen -> the way of `lw.Validation(via=)`, or the way that predicts."""

NAMES = (*tasks.TABLES, *tasks.IMAGES)


def run(seeds: Sequence[int] = range(5), names: Sequence[str] = NAMES) -> dict[str, Any]:
    """Returns a row for each method, way, choice, network and seed."""
    return run_all(__file__, seeds, names, METHODS)


def run_all(experiment: str, seeds: Sequence[int], names: Sequence[str], of: Iterable[str]) -> dict[str, Any]:
    """Returns the rows of an experiment, all methods at one seed first."""
    rows = Rows(experiment, FACTS)
    for seed in seeds:
        for name in names:
            task = once(partial(tasks.task, name, seed))
            network = once(lambda task=task: methods.fitted(BASE, task()))  # type: ignore[misc]
            base = once(lambda task=task, fit=network: comparison.losses(task(), fit()))  # type: ignore[misc]
            run = f"{name}, seed {seed}"
            rows.add(run, BASE, comparison.row, task, network, "one pass each", base)
            for method in of:
                for way in OTHER_WAYS:
                    for choice, via in CHOSEN.items():
                        fit = once(partial(fitted, task, method, via or way))
                        rows.add(run, label(method, way, choice), comparison.row, task, fit, way, base)
    for part in ("validated", "fitted"):
        rows.facts[f"gains, {part}"] = comparison.gains(rows.runs, part)
        rows.facts[f"own choice, {part}"] = differences(rows.runs, part)
    return rows.all()


def label(method: str, way: str, choice: str) -> str:
    """Returns the name of a row."""
    return f"{method}, {way}, {choice} choice"


def fitted(task: Callable[[], Task], method: str, via: str) -> methods.Fitted:
    """Fits a posterior whose prior precision, and noise variance or temperature, held-out data choose for a way."""
    found = task()
    tune = lw.Validation(found.val, via=methods.WAYS[via])
    options = {**found.options, "params": lw.everything, "tune": tune}
    return methods.measured(found, lambda of: lw.fit(of.model, of.loader, METHODS[method], **options))


def differences(runs: Mapping[str, Mapping[str, Any]], part: str) -> dict[str, Any]:
    """Returns by task, method and way how much lower the NLL is by the choice for the way, paired by seed."""

    def gained(rows: Mapping[str, Any]) -> dict[str, float]:
        pairs = {
            f"{method}, {way}": [rows.get(label(method, way, choice), {}).get(part) for choice in CHOSEN]
            for method in METHODS
            for way in OTHER_WAYS
        }
        return {name: a["nll"] - b["nll"] for name, (a, b) in pairs.items() if a and b}

    return paired(runs, gained)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns by way the gains over one number by both choices, and their difference."""
    found = {}
    for part, suffix in (("validated", ""), ("fitted", " as fitted")):
        gains, own = results[f"gains, {part}"], results[f"own choice, {part}"]
        for way in OTHER_WAYS:
            lines: dict[str, list[str]] = {}
            for method in METHODS:
                for choice in CHOSEN:
                    cells = [gains[name].get(label(method, way, choice)) for name in gains]
                    lines[f"{method}, {choice} choice"] = [shown(cell) for cell in cells]
                lines[f"{method}, difference"] = [shown(own[name].get(f"{method}, {way}")) for name in gains]
            found[way + suffix] = grid(list(gains), {name: cells for name, cells in lines.items() if any(cells)})
    return found
