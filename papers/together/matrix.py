"""Matrix scaling beside one temperature and the recommended call: more numbers of the same held-out samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import lapwing as lw
from lapwing.tuning import Training
from papers.common.data import batched
from papers.common.results import Rows, once
from papers.common.scores import averaged, class_scores
from papers.common.tables import grid, shown
from papers.together import tasks
from papers.together.tasks import Task

BASE, MATRIX, CALL = "one temperature", "matrix scaling", "recommended call"
ROWS = (BASE, MATRIX, CALL, f"{CALL}, {MATRIX}")
"""The last one is the call with `tune=lw.Validation(held_out, calibration="matrix")`."""

NAMES = (*tasks.IMAGES, *tasks.GIVEN)


def run(seeds: Sequence[int] = range(5), names: Sequence[str] = NAMES) -> dict[str, Any]:
    """Returns the scores of each row on each classifier; there is one ResNet-20."""
    rows = Rows(__file__, {"held out": tasks.HELD_OUT, "tested": tasks.TESTED})
    for name in names:
        for seed in seeds if name != "ResNet-20" else seeds[:1]:
            task = once(lambda name=name, seed=seed: tasks.task(name, seed))  # type: ignore[misc]
            for label in ROWS:
                rows.add(f"{name}, seed {seed}", label, lambda task, label: row(task(), label), task, label)
    rows.facts["gains"] = gains(rows.runs)
    return rows.all()


def row(task: Task, label: str) -> dict[str, Any]:
    """Returns the scores of a row on the test samples, and the number of entries of its map of the logits."""
    tune: Callable[[], Any] = lambda: lw.Validation(task.val, calibration="matrix")  # noqa: E731
    if label in (BASE, MATRIX):
        posterior = lw.fit(task.model, task.val, lw.TemperatureScaling())
        posterior = tune().tune(posterior, Training()) if label == MATRIX else posterior
    else:
        chosen = {"validation": task.val} if label == CALL else {"tune": tune()}
        posterior = lw.fit(task.model, task.loader, **task.options, **chosen)
    x, y = task.test
    predictions = [posterior.predict(part) for part, _ in batched(x, y, 250)]
    logs = torch.cat([one.log_prob(b) for one, (_, b) in zip(predictions, batched(x, y, 250), strict=True)])
    scores = class_scores(torch.cat([one.probs for one in predictions]), y)
    likelihood: Any = posterior.likelihood
    return {**scores, "nll": -float(logs.double().mean()), "entries of the map": len(likelihood.logit_map or ())}


def gains(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns by network and row how much lower its NLL is than at one temperature, paired by seed."""
    found: dict[str, list[dict[str, float]]] = {}
    for run, rows in runs.items():
        base = rows[BASE]["nll"]
        gained = {label: base - of["nll"] for label, of in rows.items() if label != BASE}
        found.setdefault(run.partition(",")[0], []).append(gained)
    return {name: averaged(seeds) for name, seeds in found.items()}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the gains over one temperature, with the accuracy."""
    gained, table = results["gains"], results["table"]
    columns = [f"{name}: {what}" for name in table for what in ("gain", "accuracy, %")]
    lines = {}
    for label in ROWS:
        cells = []
        for name, rows in table.items():
            cells += [shown(gained[name].get(label)), shown(rows[label]["accuracy"], 1, 100)]
        lines[label.replace(f"{CALL}, ", f"{CALL} with ")] = cells
    return {"gains": grid(columns, lines)}
