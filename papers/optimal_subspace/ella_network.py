"""The measures of Figures 2 and 7 on ELLA's MNIST network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from papers.common.scores import averaged
from papers.optimal_subspace.comparison import compare_subspaces, draw, table, trained_task

__all__ = ["draw", "run"]


def run(seeds: Sequence[int] = (0, 1)) -> dict[str, Any]:
    """Returns the measures of every way by s, with λ = 1."""
    runs = []
    for seed in seeds:
        task, inputs = trained_task("mnist", seed, shown=400, test=100)
        runs.append(compare_subspaces(task, inputs, (10, 50, 200, 1000), 1.0, seed)["test"])
        print(seed, runs[-1], flush=True)
    return {"tasks": {"ELLA's MNIST network": averaged(runs)}}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns relative errors and NLL."""
    names, ranks = ["ELLA's MNIST network"], (10, 50, 200, 1000)
    return {
        "relative error": table(results["tasks"], names, "relative_error", ranks),
        "nll": table(results["tasks"], names, "nll", ranks, 2),
    }
