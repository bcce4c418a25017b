"""Regression without held-out data: what the evidence and leaving out make of noise and prior precision.

Networks of two hidden layers on six UCI tables, and some that are trained for long, wider, or without weight decay:
70 % of the rows (2 100 at most) to train with, half of the others for `Validation`, which is there to compare, half to
report on: NLL in standardised units and how much a 90 % interval covers, a structure and tuning. MAP is the network
with its mean squared residual as noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from papers.common.data import batched, some_rows
from papers.common.networks import mlp
from papers.common.scores import interval_scores
from papers.common.tables import grid
from papers.common.training import ONE_NOISE, adam

SEED, THREADS = 0, 2
ROWS = 3000


@dataclass(frozen=True)
class Run:
    """One network: a table, how it is trained, and its two hidden layers."""

    table: str
    epochs: int
    width: int = 50
    activation: type[nn.Module] = nn.Tanh
    weight_decay: float = 1e-4


LONG = "wine_red, 600 epochs, 100 ReLU, no decay"
RUNS = {
    **{name: Run(name, epochs) for name, epochs in
       {"concrete": 300, "boston": 300, "wine_red": 100, "airfoil": 200, "energy": 300, "power": 50}.items()},
    "concrete, 1500 epochs": Run("concrete", 1500),
    "airfoil, 600 epochs, ReLU, no decay": Run("airfoil", 600, 50, nn.ReLU, 0.0),
    "concrete, 600 epochs, 100 ReLU, no decay": Run("concrete", 600, 100, nn.ReLU, 0.0),
    LONG: Run("wine_red", 600, 100, nn.ReLU, 0.0),
}  # fmt: skip

METHODS: dict[str, lw.Method] = {
    "last layer": lw.KFAC(), "full": lw.Full(), "KFAC": lw.KFAC(), "diagonal": lw.Diagonal(), "ELLA": lw.ELLA(rank=50)
}  # fmt: skip

TUNINGS: dict[str, lw.Tuning] = {"evidence": lw.Evidence(), "bounded evidence": lw.BoundedEvidence()}


def trained(run: Run, x: Tensor, y: Tensor) -> nn.Module:
    """Trains D-W-W-1."""
    torch.manual_seed(SEED)
    model = mlp(x.shape[1], run.width, run.width, 1, activation=run.activation)
    return adam(model, (x, y), run.epochs, 1e-2, 128, run.weight_decay, loss=nn.functional.mse_loss)


def study(label: str, run: Run) -> dict[str, Any]:
    """Fits and scores every structure and tuning on one table."""
    data = some_rows(f"uci_{run.table}", ROWS, SEED)
    model, train, (x, y) = trained(run, *data.train), batched(*data.train, 500), data.test
    with torch.no_grad():
        residual = float(torch.cat([(model(a) - b).square() for a, b in train]).mean())
        errors = (model(x) - y).square() / residual
    own = {"nll": float((math.log(2 * math.pi * residual) + errors).mean() / 2)}
    results: dict[str, Any] = {"MAP": {**own, "coverage": float((errors < 1.6449**2).float().mean())}}
    for name, method in METHODS.items():
        for tuning, tune in {**TUNINGS, "validation": lw.Validation([data.val])}.items():
            params = lw.last_layer if name == "last layer" else None
            posterior = lw.fit(model, train, method, likelihood=ONE_NOISE, params=params, tune=tune, progress=False)
            results.setdefault(name, {})[tuning] = interval_scores(posterior.predict(x), y)
        print(label, name, {k: round(v["nll"], 3) for k, v in results[name].items()}, flush=True)
    return results


TABLES = tuple(dict.fromkeys(run.table for run in RUNS.values()))


def parts() -> dict[str, Callable[[], Any]]:
    """Returns a study of each network."""
    return {label: partial(study, label, run) for label, run in RUNS.items()}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Returns the mean NLL of nine networks; the tenth was trained for long on noisy targets."""
    some = [rows for label, rows in results.items() if label != LONG]
    names = {"last layer": "last layer", "full": "Full", "KFAC": "KFAC", "diagonal": "diagonal", "ELLA": "ELLA"}
    tunings = {"evidence": "evidence", "bounded evidence": "default", "validation": "validation"}
    rows = {text: [f"{sum(r[name][tuning]['nll'] for r in some) / len(some):.2f}" for tuning in tunings]
            for name, text in names.items()}  # fmt: skip
    return {"nll": grid(list(tunings.values()), rows, right=True)}
