"""Totals by `posterior.of`, and labels chosen by `posterior.value`.

`totals`: how often 90 % intervals hold the total of 60 targets. A network of one hidden layer is trained on 800 rows of
a table (700 of concrete), and fitted by `lw.fit(model, data)`. A total is the sum over 60 test rows: a random one and
those nearest to it, or 60 random ones. Totals of concrete, which has 330 test rows, overlap. "Independent" adds up the
variances of single predictions.

`labels`: the test RMSE after each of five rounds in which ten of 250 rows get a label, from 30 at first. The ten are
random, or have the largest variance (BALD for a regression), or are chosen one at a time by their value for 100 other
rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from papers.common import results as stored
from papers.common.data import random_rows, rows_and_targets, standardised
from papers.common.networks import mlp
from papers.common.tables import grid
from papers.common.training import adam

TABLES = {"concrete": "uci_concrete", "power plant": "uci_power", "kin40k": "kin40k", "elevators": "elevators"}
TRAINED, TESTED, ROWS, TOTALS, SEEDS = 800, 2000, 60, 100, 3


def data(name: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns x and y to train with, and x and y to test with, standardised by the former."""
    x, y = rows_and_targets(name)
    count = min(TRAINED, int(0.68 * len(x)))
    order = random_rows(x, count + TESTED, seed)
    found = standardised(name, x[order], y[order], count, count, "")
    return *found.train, *found.test


def trained(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """Returns a network D-50-1."""
    torch.manual_seed(seed)
    return adam(mlp(x.shape[1], 50, 1), (x, y), 300, 1e-2, 128, 1e-4, loss=nn.functional.mse_loss)


def groups(x: Tensor, similar: bool) -> Tensor:
    """Returns the numbers of the rows of each total, (TOTALS, ROWS)."""
    if not similar:
        return torch.stack([torch.randperm(len(x))[:ROWS] for _ in range(TOTALS)])
    centres = x[torch.randperm(len(x))[:TOTALS]]
    return torch.cdist(centres, x).topk(ROWS, largest=False).indices


def coverage(table: str) -> dict[str, dict[str, float]]:
    """Returns the coverage of 90 % intervals of totals, and of their single rows, and the mean ratio of the widths."""
    held: dict[str, list[dict[str, Tensor]]] = {"similar": [], "random": []}
    for seed in range(SEEDS):
        x, y, x_test, y_test = data(TABLES[table], seed)
        posterior = lw.fit(trained(x, y, seed), (x, y))
        prediction = posterior.predict(x_test)
        for kind, parts in held.items():
            rows = groups(x_test, kind == "similar")
            totals = posterior.of(lambda f, x=x_test, rows=rows: f(x)[rows].sum((1, 2)), observed=True)
            independent = prediction.variance[rows].sum(1)[:, 0].sqrt()
            error = (y_test[rows].sum(1)[:, 0] - totals.mean).abs()
            single = (y_test - prediction.mean).abs() < 1.645 * prediction.std
            parts.append({
                "joint": error < 1.645 * totals.std, "independent": error < 1.645 * independent,
                "ratio of widths": totals.std / independent, "single rows": single[rows].flatten(),
            })  # fmt: skip
    return {
        kind: {name: float(torch.cat([part[name] for part in parts]).double().mean()) for name in parts[0]}
        for kind, parts in held.items()
    }


POOL, STARTED, ASKED, ROUNDS, RUNS = 250, 30, 10, 5, 3
RULES = ("random", "variance", "value")
COLUMNS = ("random choice", "largest variance", "`value`", "BoTorch chooses", "BoTorch predicts")


def chosen(rule: str, posterior: lw.Posterior, pool: Tensor, targets: Tensor, seed: int) -> Tensor:
    """Returns the numbers of the rows of the pool that get a label."""
    if rule == "random":
        return random_rows(pool, ASKED, seed)
    if rule == "variance":
        return posterior.latent(pool).variance[:, 0].topk(ASKED).indices
    rows: list[int] = []
    for _ in range(ASKED):
        value = posterior.value(pool, targets, pool[rows] if rows else None)
        value[rows] = 0
        rows.append(int(value.argmax()))
    return torch.tensor(rows)


def learned(table: str, rule: str, seed: int, fit: Callable[..., Any] = lw.fit) -> tuple[list[float], list[Any]]:
    """Returns the test RMSE of the network before the first round and after each, and what `fit(model, data)` made."""
    x, y, x_test, y_test = data(TABLES[table], seed)
    x, y, targets = x[:POOL], y[:POOL], x[POOL : POOL + 100]
    known, errors, fits = torch.arange(STARTED), [], []
    for step in range(ROUNDS + 1):
        model = trained(x[known], y[known], seed)
        with torch.no_grad():
            errors.append(rmse(model(x_test), y_test))
        fits.append(fit(model, (x[known], y[known])))
        pool = torch.arange(len(x))[~torch.isin(torch.arange(len(x)), known)]
        known = torch.cat([known, pool[chosen(rule, fits[-1], x[pool], targets, 100 * seed + step)]])
    return errors, fits


def rmse(mean: Tensor, y: Tensor) -> float:
    """Returns the root of the mean squared error."""
    return float((mean - y).square().mean().sqrt())


def labels(table: str) -> dict[str, Any]:
    """Returns the RMSE of each rule."""
    return {rule: summary(torch.tensor([learned(table, rule, seed)[0] for seed in range(RUNS)])) for rule in RULES}


def summary(runs: Tensor) -> dict[str, Any]:
    """Returns the mean RMSE (RUNS, ROUNDS + 1) by round, its mean over the rounds, and the standard error of this."""
    after = runs[:, 1:].mean(1)
    return {
        "RMSE": [round(value, 4) for value in runs.mean(0).tolist()], "mean": float(after.mean()),
        "standard error": float(after.std() / RUNS**0.5),
    }  # fmt: skip


def rows_of_totals(results: dict[str, Any]) -> list[str]:
    """Returns the rows of the table of totals in `examples/tasks/plot_quantities.py`."""
    names = ("single rows", "joint", "independent")
    of_totals = {name.partition(", ")[2]: of for name, of in results.items() if name.startswith("totals")}
    return [
        f"# {table:11}  " + "  ".join(f"{of['similar'][name]:<11.2f}" for name in names).rstrip()
        for table, of in of_totals.items()
    ]


def parts() -> dict[str, Callable[[], Any]]:
    """Returns both experiments on each table."""

    def quietly(run: Callable[[str], Any], table: str) -> Any:
        logging.getLogger("lapwing").setLevel(logging.ERROR)
        return run(table)

    experiments = {"totals": coverage, "labels": labels}
    return {f"{name}, {table}": partial(quietly, run, table) for name, run in experiments.items() for table in TABLES}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Returns the table of labels in docs/training.md, the columns of `labels_botorch` last."""
    rows = {}
    for table, rival in stored.read(str(Path(__file__).with_name("labels_botorch.py"))).items():
        of = results[f"labels, {table}"]
        cells = *(of[rule] for rule in RULES), rival["network"], rival["process"]
        rows[table] = [f"{cell['mean']:.3f} ± {cell['standard error']:.3f}" for cell in cells]
    return {"labels": grid(COLUMNS, rows, right=True, corner="table")}
