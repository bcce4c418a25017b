"""The optimal-subspace paper's tables and figures (Faller and Martin 2025); `benchmarks.papers` runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.averages import averaged
from lapwing.evaluation import DIGITS
from lapwing.evaluation.dead_weights import dead_parameters
from lapwing.reproduce import optimal_subspace as subspace
from lapwing.reproduce import subspace_tasks as tasks
from lapwing.tangent import Tangent

RANKS = (10, 50, 100, 200, 500, 1000)
WAYS_TUNED = tuple(way for way in subspace.WAYS if way not in ("low rank, EKFAC", "subset, random"))


def subspace_images(seeds: Sequence[int] = (0, 1)) -> dict[str, Any]:
    """Figures 2, 3, 5 and 7 of the optimal-subspace paper on MNIST and Fashion-MNIST, with λ = 1 and λ tuned."""
    found: dict[str, Any] = {}
    accuracies, tuned, corrupted = {}, {}, []
    for name in ("mnist", "fashion_mnist"):
        runs, runs_tuned = [], []
        for seed in seeds:
            task, inputs = tasks.image_task(name, seed)
            x, y = inputs["test"]
            accuracies[f"{name}, seed {seed}"] = float((task.model(x).argmax(-1) == y).double().mean())
            tuned[f"{name}, seed {seed}"] = delta = task.tuned_precision()
            runs.append(subspace.compare_subspaces(task, inputs, RANKS, 1.0, seed)["test"])
            runs_tuned.append(subspace.compare_subspaces(task, inputs, RANKS, delta, seed, WAYS_TUNED)["test"])
            if name == "mnist":
                foreign = {kind: tasks.corrupted(x[:30], y[:30], kind, seed) for kind in DIGITS}
                corrupted.append(subspace.compare_subspaces(task, foreign, (100, 500, 1000), 1.0, seed))
            print(name, seed, runs[-1], flush=True)
        found[name], found[f"{name}, prior tuned"] = averaged(runs), averaged(runs_tuned)
    return {
        "tasks": found,
        "accuracy": accuracies,
        "tuned prior precision": tuned,
        "corrupted mnist": averaged(corrupted),
    }


def subspace_given(seeds: Sequence[int] = (0, 1)) -> dict[str, Any]:
    """The same measures on ELLA's MNIST network, with λ = 1."""
    runs = []
    for seed in seeds:
        task, inputs = tasks.trained_task("mnist", seed, shown=400, test=100)
        runs.append(subspace.compare_subspaces(task, inputs, (10, 50, 200, 1000), 1.0, seed)["test"])
        print(seed, runs[-1], flush=True)
    return {"tasks": {"ELLA's MNIST network": averaged(runs)}}


def subspace_tables(seeds: Sequence[int] = (0, 1)) -> dict[str, Any]:
    """Figures 1 and 7 and Table 6: the 128-128 MLP on four tables, with λ = 1 and λ tuned."""
    found: dict[str, Any] = {}
    dead, tuned = {}, {}
    for name in tasks.TABLES:
        runs, runs_tuned, shares = [], [], []
        for seed in seeds:
            task, inputs = tasks.table_task(name, seed)
            tuned[f"{name}, seed {seed}"] = delta = task.tuned_precision()
            runs.append(subspace.compare_subspaces(task, inputs, RANKS, 1.0, seed)["test"])
            runs_tuned.append(subspace.compare_subspaces(task, inputs, RANKS, delta, seed, WAYS_TUNED)["test"])
            tangent = Tangent.survey(task.model, task.train[0][0])
            shares.append({"dead": float(dead_parameters(tangent, task.train))})
            print(name, seed, runs[-1], shares[-1], flush=True)
        found[name], found[f"{name}, prior tuned"] = averaged(runs), averaged(runs_tuned)
        dead[name] = averaged(shares)
    return {"tasks": found, "tuned prior precision": tuned, "dead parameters": dead}


def subspace_resnet(seeds: Sequence[int] = (0, 1)) -> dict[str, Any]:
    """Figure 4: the trace on the ResNet-20, where the exact posterior cannot be had."""
    ways = ("low rank, KFAC", "low rank, diagonal", "low rank, prior", "subset, magnitude", "subset, diagonal")
    runs = []
    for seed in seeds:
        task, inputs = tasks.trained_task("cifar10", seed, shown=500, test=50)
        runs.append(subspace.compare_subspaces(task, inputs, (10, 30, 100), 1.0, seed, ways, exact=False)["test"])
        print(seed, runs[-1], flush=True)
    return {"tasks": {"ResNet-20": averaged(runs)}}
