"""Figures 1 and 7 and Table 6: the 128-128 MLP on four regression tables, trained here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

import lapwing as lw
from lapwing.tangent import Tangent
from papers.common.data import batched, rows_and_targets, standardised
from papers.common.networks import mlp
from papers.common.scores import averaged
from papers.common.training import seeded, shuffled, train
from papers.optimal_subspace.comparison import RANKS, TUNED, WAYS_TUNED, Task, compare_subspaces, draw, swag_from, table

__all__ = ["draw", "run"]

PUBLISHED = {"dead parameters": {"wine": 0.89, "energy": 0.92, "naval": 0.34, "california": 0.60}}
"""Table 6."""


def run(seeds: Sequence[int] = (0, 1)) -> dict[str, Any]:
    """Returns the measures of every way by s, with λ = 1 and λ tuned, and the share of dead parameters."""
    found: dict[str, Any] = {}
    dead, tuned = {}, {}
    for name in TABLES:
        runs, runs_tuned, shares = [], [], []
        for seed in seeds:
            task, inputs = table_task(name, seed)
            tuned[f"{name}, seed {seed}"] = delta = task.tuned_precision()
            runs.append(compare_subspaces(task, inputs, RANKS, 1.0, seed)["test"])
            runs_tuned.append(compare_subspaces(task, inputs, RANKS, delta, seed, WAYS_TUNED)["test"])
            shares.append({"dead": dead_parameters(task)})
            print(name, seed, runs[-1], shares[-1], flush=True)
        found[name], found[f"{name}, prior tuned"] = averaged(runs), averaged(runs_tuned)
        dead[name] = averaged(shares)
    return {"tasks": found, "tuned prior precision": tuned, "dead parameters": dead}


def dead_parameters(task: Task, threshold: float = 1e-6) -> float:
    """Returns the share of weights p that no output feels, `‖J_·p‖ ≤ threshold · max_p' ‖J_·p'‖` (Table 6).

    Args:
        task: network and data; the norm runs over all training inputs and outputs.
        threshold: being relative, it depends neither on the units of the outputs nor on how many inputs there are.
    """
    tangent = Tangent.survey(task.model, task.train[0][0])
    sums = {block.name: torch.zeros(block.size, dtype=torch.float64) for block in tangent.blocks}
    for x, _ in task.train:
        for _, record in tangent.records(x):
            for name in sums:
                sums[name] += record[name].squared_sum()
    sizes = torch.cat(list(sums.values())).sqrt()
    return float((sizes <= threshold * sizes.max()).double().mean())


TABLES: dict[str, dict[str, Any]] = {
    "wine": {"file": "uci_wine_red", "rate": 0.0004, "epochs": 300},
    "energy": {"file": "uci_energy", "rate": 0.004, "epochs": 1500},
    "naval": {"file": "uci_naval", "rate": 0.0004, "epochs": 100},
    "california": {"file": "california_housing", "rate": 0.0004, "epochs": 100},
}
"""The paper's Table 1: learning rate (for a batch of 256) and epochs."""


def table_task(name: str, seed: int, shown: int = 1500, test: int = 200) -> tuple[Task, dict[str, Any]]:
    """Trains the 128-128 MLP on one table; nine tenths train, the posteriors sum over at most `shown` of them.

    Adam with batches of 256 in place of full batches with a scaled rate; inputs and targets standardised.

    Returns:
        The task, and random rows of the other tenth as X.
    """
    options = TABLES[name]
    x, y = rows_and_targets(options["file"])
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    cut = len(x) * 9 // 10
    data = standardised(name, x[order], y[order].flatten(), cut, cut, "1")
    with seeded(seed):
        model = nn.Sequential(*list(mlp(data.train[0].shape[1], 128, 128, 1, activation=nn.ReLU))[1:])
    rows = islice(shuffled(cut, 256, generator), options["epochs"] * -(-cut // 256))
    optimiser = torch.optim.Adam(model.parameters(), options["rate"])
    train(model, data.train, rows, optimiser, nn.functional.mse_loss)
    with torch.no_grad():
        noise = float((model(data.train[0]) - data.train[1]).square().mean())
    loader = batched(*data.train, 256)
    swag = swag_from(model, loader, nn.functional.mse_loss, learning_rate=0.001, snapshots=20)
    seen = batched(data.train[0][:shown], data.train[1][:shown], 250)
    return Task(model, seen, cut, lw.Gaussian(noise), swag), {"test": tuple(part[:test] for part in data.test)}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns relative errors and NLL, at λ = 1 and tuned."""
    tasks, names = results["tasks"], list(TABLES)
    tuned = [f"{name}{TUNED}" for name in names]
    return {
        "relative error": table(tasks, names, "relative_error", (100, 1000)),
        "nll": table(tasks, names, "nll", (100, 1000), 2),
        "relative error, tuned": table(tasks, tuned, "relative_error", (1000,)),
        "nll, tuned": table(tasks, tuned, "nll", (1000,), 2),
    }
