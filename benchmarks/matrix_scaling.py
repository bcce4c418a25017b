"""Calibration by an affine map of the logits, on the classifiers of the grid, with structured matrix scaling beside it.

The rows are the network, temperature scaling, `validation=`, `lw.Validation(..., calibration="matrix")`, and, if
probmetrics is installed, its structured matrix scaling (for two classes quadratic scaling) of the probabilities of
`validation=`. All are fitted to the same validation rows. *gain* is the mean gain in log probability of the test rows
over `validation=`, with the standard error of the paired difference.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from benchmarks.grid.measures import network, predicted, temperature
from benchmarks.grid.networks import CELLS, Cell
from papers.common.data import batched
from papers.common.tables import grid

SEED = 0
CLASSIFIERS = tuple(cell for cell in CELLS if not cell.family.startswith("tables"))
FOREIGN = "structured matrix scaling of validation="
PACKAGES = ("probmetrics",) if importlib.util.find_spec("probmetrics") else ()


def structured(held_out: Tensor, y: Tensor, test: Tensor) -> Tensor:
    """Returns the log probabilities of probmetrics' default calibrator, fitted to log probabilities."""
    from probmetrics.calibrators import get_calibrator

    calibrator = get_calibrator("logistic")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's, of an option
        calibrator.fit(held_out.exp().numpy(), y.numpy())
        return torch.as_tensor(calibrator.predict_proba(test.exp().numpy())).clamp_min(1e-12).log()


def report(cell: Cell) -> dict[str, Any]:
    """Returns the measures of a cell by row."""
    data = cell.data(SEED)
    model, (x, y) = cell.trained(data, SEED), data.test
    logs = {name: predicted(arm(model, data)[0], x).logits for name, arm in
            {"network": network, "temperature scaling": temperature}.items()}  # fmt: skip
    tunings = {"validation=": lw.Validation(batched(*data.val)),
               'calibration="matrix"': lw.Validation(batched(*data.val), calibration="matrix")}  # fmt: skip
    facts: dict[str, Any] = {}
    for name, tune in tunings.items():
        posterior = lw.fit(model, batched(*data.train), data_size=data.size, tune=tune, progress=False)
        held_out, logs[name] = (predicted(lambda part, one=posterior: one.predict(part).distribution(), part).logits
                                for part in (data.val[0], x))  # fmt: skip
        facts["map"] = bool(posterior.likelihood.logit_map)  # type: ignore[attr-defined]
        if name == "validation=" and PACKAGES:
            foreign = structured(held_out, data.val[1], logs[name])
    if PACKAGES:
        logs[FOREIGN] = foreign
    nll = {name: -values.gather(1, y[:, None])[:, 0].double() for name, values in logs.items()}
    rows = {}
    for name, values in nll.items():
        gain = nll["validation="] - values
        rows[name] = {
            "nll": float(values.mean()), "accuracy": float((logs[name].argmax(1) == y).double().mean()),
            "gain": float(gain.mean()), "error": float(gain.std() / math.sqrt(len(y))),
        }  # fmt: skip
    return {"held_out": len(data.val[0]), **facts, "rows": rows}


def means(cells: dict[str, Any]) -> dict[str, Any]:
    """Returns the means over the cells that have a row."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for cell in cells.values() for name in cell["rows"]):
        rows = [cell["rows"][name] for cell in cells.values() if name in cell["rows"]]
        found[name] = {key: sum(row[key] for row in rows) / len(rows) for key in ("nll", "accuracy", "gain")}
        found[name] |= {"cells": len(rows), "worse": sum(row["gain"] < -row["error"] for row in rows)}
    return found


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the classifiers of the grid."""
    return {cell.name: partial(report, cell) for cell in CLASSIFIERS}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Returns the means over all classifiers."""
    columns = {"network": "network", "temperature scaling": "temperature", "validation=": "`validation=`",
               'calibration="matrix"': '`calibration="matrix"`', FOREIGN: "SMS on `validation=`"}  # fmt: skip
    found = means(results)
    worse = [f"{row['worse']}" if name != "validation=" else "" for name, row in found.items()]
    return {"means": grid(list(columns.values()), {
        "mean NLL": [f"{found[name]['nll']:.4f}" for name in columns],
        "mean accuracy": [f"{found[name]['accuracy']:.4f}" for name in columns],
        f"worse, of {len(results)}": worse,
    })}  # fmt: skip
