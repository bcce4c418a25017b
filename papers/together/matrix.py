"""Matrix scaling beside one temperature and the recommended call: more numbers of the same held-out samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import lapwing as lw
from papers.common.data import batched
from papers.common.results import Rows, once
from papers.common.scores import class_scores, paired
from papers.common.tables import grid, shown
from papers.together import tasks
from papers.together.tasks import Task

BASE, MATRIX = "one temperature", "matrix scaling"
CALL, BOTH = "recommended call", "recommended call with matrix scaling"
ROWS = (BASE, MATRIX, CALL, BOTH)
"""The last one is the call with `tune=lw.Validation(held_out, calibration="matrix")`."""

NAMES = (*tasks.IMAGES, *tasks.GIVEN)
"""Each transformer trains for minutes."""


def run(seeds: Sequence[int] = range(5), names: Sequence[str] = NAMES) -> dict[str, Any]:
    """Returns the scores of each row on each classifier; there is one ResNet-20."""
    rows = Rows(__file__, {"held out": tasks.HELD_OUT, "tested": tasks.TESTED})
    for name in names:
        for seed in seeds if name != "ResNet-20" else seeds[:1]:
            task = once(partial(tasks.task, name, seed))
            for label in ROWS:
                rows.add(f"{name}, seed {seed}", label, row, task, label)
    rows.facts["gains"] = gains(rows.runs)
    return rows.all()


def row(task: Callable[[], Task], label: str) -> dict[str, Any]:
    """Returns the scores of a row on the test samples, its temperature, and whether it has a map of the logits."""
    posterior = fitted(task(), label)
    x, y = task().test
    predictions = [posterior.predict(part) for part, _ in batched(x, y, 250)]
    likelihood: Any = posterior.likelihood
    found = class_scores(torch.cat([one.probs for one in predictions]), y)
    return {**found, "temperature": likelihood.logit_temperature, "mapped": bool(likelihood.logit_map)}


def fitted(task: Task, label: str) -> lw.Posterior:
    """Returns the posterior of a row."""
    matrix = lw.Validation(task.val, calibration="matrix")
    if label in (CALL, BOTH):
        chosen: dict[str, Any] = {"validation": task.val} if label == CALL else {"tune": matrix}
        return lw.fit(task.model, task.loader, **task.options, **chosen)
    posterior = lw.fit(task.model, task.val, lw.TemperatureScaling())
    return matrix.tune(posterior) if label == MATRIX else posterior


def gains(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns by network and row how much lower its NLL is than at one temperature, paired by seed."""

    def gained(rows: Mapping[str, Any]) -> dict[str, float]:
        return {label: rows[BASE]["nll"] - of["nll"] for label, of in rows.items() if label != BASE}

    return paired(runs, gained)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the gains over one temperature, with the accuracy and the share of networks whose logits have a map."""
    found = results["table"]
    columns = [f"{name}: {what}" for name in found for what in ("gain", "accuracy, %", "with a map, %")]
    lines = {}
    for label in ROWS:
        cells = []
        for name, rows in found.items():
            mapped = shown(rows[label]["mapped"]["mean"], 0, 100) if label in (MATRIX, BOTH) else ""
            cells += [shown(results["gains"][name].get(label)), shown(rows[label]["accuracy"], 1, 100), mapped]
        lines[label] = cells
    return {"gains": grid(columns, lines)}
