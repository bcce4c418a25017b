"""Figure 4: the trace on the CIFAR-10 ResNet-20, where the exact posterior cannot be had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import lapwing as lw
from papers.common.data import batched, images
from papers.common.networks import cifar_resnet20
from papers.common.scores import averaged
from papers.optimal_subspace.comparison import Task, compare_subspaces, draw, table

__all__ = ["draw", "run"]


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns the trace of each way by s, of random training images and with random test images as X."""
    ways = ("low rank, KFAC", "low rank, diagonal", "low rank, prior", "subset, magnitude", "subset, diagonal")
    runs, data = [], images("cifar10")
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        picked, chosen = (torch.randperm(len(x), generator=generator) for x in (data.x_train, data.x_test))
        task = Task(cifar_resnet20(), batched(*data.train(picked[:500])), 50_000, lw.Categorical())
        inputs = {"test": data.test(chosen[:50])}
        runs.append(compare_subspaces(task, inputs, (10, 30, 100), 1.0, seed, ways, exact=False)["test"])
        print(seed, runs[-1], flush=True)
    return {"tasks": {"ResNet-20": averaged(runs)}}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the trace."""
    return {"trace": table(results["tasks"], ["ResNet-20"], "trace", (10, 30, 100), 0)}
