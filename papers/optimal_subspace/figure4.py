"""Figure 4: the trace on the CIFAR-10 ResNet-20, where the exact posterior cannot be had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from papers.common.scores import averaged
from papers.optimal_subspace.comparison import compare_subspaces, draw, table, trained_task

__all__ = ["draw", "run"]


def run(seeds: Sequence[int] = (0, 1)) -> dict[str, Any]:
    """Returns the trace of each way by s."""
    ways = ("low rank, KFAC", "low rank, diagonal", "low rank, prior", "subset, magnitude", "subset, diagonal")
    runs = []
    for seed in seeds:
        task, inputs = trained_task("cifar10", seed, shown=500, test=50)
        runs.append(compare_subspaces(task, inputs, (10, 30, 100), 1.0, seed, ways, exact=False)["test"])
        print(seed, runs[-1], flush=True)
    return {"tasks": {"ResNet-20": averaged(runs)}}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the trace."""
    return {"trace": table(results["tasks"], ["ResNet-20"], "trace", (10, 30, 100), 0)}
