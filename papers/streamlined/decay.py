"""Tables 1 and 8: FF and ITT, whose networks overfit, with a weight decay that the validation rows choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from papers.common.results import Rows, once
from papers.common.tables import grid, shown
from papers.streamlined.baselines import NOISES, regression
from papers.streamlined.table1 import PUBLISHED, RECIPE, RegressionTask

DECAYS = (0.0, 1e-3, 1e-2, 1e-1)
"""Weight decays, added to the gradient of the mean squared error."""


def run(names: Sequence[str] = ("FF", "ITT"), folds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns scores of Laplace and mean-field posteriors, and of the network at one noise variance."""
    rows = Rows(__file__, {})
    for name in names:
        for fold in folds:
            found = once(partial(decayed, name, fold))
            run = f"{name}, seed {fold}"
            rows.add(run, "one noise variance", lambda found: found()[1] | regression(found()[0], NOISES[1]), found)
            rows.add(run, "LA", lambda found: found()[0].laplace(), found)
            rows.add(run, "MFVI", lambda found: found()[0].mean_field(), found)
    return rows.all()


def decayed(name: str, fold: int) -> tuple[RegressionTask, dict[str, float]]:
    """Returns the network whose validation error is lowest, and its weight decay."""
    tasks = {decay: RegressionTask.load(name, fold, replace(RECIPE, decay=decay)) for decay in DECAYS}
    decay = min(tasks, key=lambda decay: _error(tasks[decay]))
    return tasks[decay], {"decay": decay}


def _error(task: RegressionTask) -> float:
    with torch.no_grad():
        return sum(float((task.model(x) - y).double().square().sum()) for x, y in task.val)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns NLPD and RMSE beside the paper's."""
    rows = {}
    for name, found in results["table"].items():
        la, mf = found["LA"], found["MFVI"]
        nlpds = [(la, way, kind) for way in ("sampling", "GLM") for kind in ("plain", "scaled")]
        nlpds += [(la, "streamlined", "scaled"), (la, "no spread", "plain")]
        nlpds += [(mf, "sampling", "plain"), (mf, "streamlined", "scaled")]
        cells = [shown(of[way][kind]["nlpd"], 2) for of, way, kind in nlpds]
        cells += [shown(found["one noise variance"]["nlpd"], 2), shown(la["streamlined"]["plain"]["rmse"], 2)]
        paper = PUBLISHED["nlpd"][name]
        rows[f"{name}, paper"] = [
            f"{paper[2][0]:.2f}", "", f"{paper[3][0]:.2f}", "", f"{paper[4][0]:.2f}", "", f"{paper[0][0]:.2f}",
            f"{paper[1][0]:.2f}", "", f"{PUBLISHED['rmse'][name][4][0]:.2f}",
        ]  # fmt: skip
        rows[f"{name}, ours"] = cells
    columns = [
        "LA sampling",
        "LA sampling x factor",
        "GLM",
        "GLM x factor",
        "streamlined x factor",
        "no spread",
        "MFVI sampling",
        "MFVI streamlined x factor",
    ]
    return {"scores": grid([*columns, "one noise variance", "RMSE"], rows)}
