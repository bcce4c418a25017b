"""Figures 2, 3 and 7 on MNIST and Fashion-MNIST: a small CNN, trained here, with SWAG from more snapshots of SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from papers.common.corruptions import DIGITS, corrupt
from papers.common.data import batched, images, random_rows
from papers.common.results import Rows, once
from papers.common.tables import grid, shown
from papers.common.training import kept, seeded, shuffled, train
from papers.optimal_subspace.comparison import (
    MINUS_FULL,
    RANKS,
    TUNED,
    WAYS_TUNED,
    Task,
    compare_subspaces,
    draw,
    swag_from,
    table,
)
from papers.optimal_subspace.table1 import differences

__all__ = ["draw", "run"]


def run(seeds: Sequence[int] = range(5), names: Sequence[str] = ("mnist", "fashion_mnist")) -> dict[str, Any]:
    """Returns the measures of every way by s, with λ = 1 and tuned, and those of corrupted MNIST images."""
    rows = Rows(__file__, {})
    for seed in seeds:
        for name in names:
            run, case = f"{name}, seed {seed}", once(partial(image_task, name, seed))
            rows.add(run, "network", lambda case: network(*case()), case)
            rows.add(run, "λ = 1", lambda case, seed: measures(seed, *case()), case, seed)
            rows.add(run, "λ tuned", lambda case, seed: measures_tuned(seed, *case()), case, seed)
            if name == "mnist":
                rows.add(run, "corrupted", lambda case, seed: measures_corrupted(seed, *case()), case, seed)
    table = rows.all()["table"]
    rows.facts["tasks"] = {name: of["λ = 1"] for name, of in table.items()}
    rows.facts["tasks"] |= {f"{name}{TUNED}": of["λ tuned"] for name, of in table.items()}
    rows.facts["corrupted mnist"] = table["mnist"]["corrupted"]
    gains = differences(rows.runs, "λ tuned", "full")
    rows.facts[MINUS_FULL] = {f"{name}{TUNED}": of for name, of in gains.items()}
    return rows.all()


Inputs = Mapping[str, tuple[Tensor, Tensor]]
NOT_SHOWN = ("full", "optimal", "low rank, EKFAC")
"""Ways that the table of corrupted images leaves out: two have no error there, and EKFAC has KFAC's."""


def network(task: Task, inputs: Inputs) -> dict[str, float]:
    """Returns the accuracy at X, and the prior precision of the best evidence."""
    x, y = inputs["test"]
    accuracy = float((task.model(x).argmax(-1) == y).double().mean())
    return {"accuracy": accuracy, "tuned prior precision": task.tuned_precision()}


def measures(seed: int, task: Task, inputs: Inputs) -> dict[str, Any]:
    """Returns the measures of every way by s at λ = 1."""
    return compare_subspaces(task, inputs, RANKS, 1.0, seed)["test"]


def measures_tuned(seed: int, task: Task, inputs: Inputs) -> dict[str, Any]:
    """Returns the measures of most ways by s at the prior precision of the best evidence."""
    return compare_subspaces(task, inputs, RANKS, task.tuned_precision(), seed, WAYS_TUNED)["test"]


def measures_corrupted(seed: int, task: Task, inputs: Inputs) -> dict[str, Any]:
    """Returns the measures at 30 images with each kind of corruption."""
    x, y = inputs["test"]
    kinds = {kind: corrupted(x[:30], y[:30], kind, seed) for kind in DIGITS}
    return compare_subspaces(task, kinds, (100, 500, 1000), 1.0, seed)


class SmallCNN(nn.Sequential):
    """A convolutional network of the paper's size: three convolutions with batch norm and pooling, 12 526 weights."""

    def __init__(self) -> None:
        parts: list[nn.Module] = []
        for inputs, outputs in ((1, 8), (8, 20), (20, 40)):
            parts += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(*parts, nn.Flatten(), nn.Linear(40 * 9, 10))


def train_cnn(name: str, seed: int, epochs: int = 3) -> tuple[nn.Module, lw.Posterior]:
    """Trains the small CNN on MNIST or Fashion-MNIST; returns it with SWAG from 20 more snapshots of SGD.

    Adam with learning rate 0.004 and batches of 256, falling linearly to 0 in the last half of the training.
    """
    data = images(name)
    with seeded(seed):
        model = SmallCNN()
    steps = epochs * (len(data.x_train) // 256)

    def make() -> nn.Module:
        rows = islice(shuffled(len(data.x_train), 256, torch.Generator().manual_seed(seed)), steps)
        optimiser = torch.optim.Adam(model.parameters(), 0.004)
        factor, forward = lambda i: min(1.0, 2 * (1 - i / steps)), lambda x: model(_scaled(x))
        return train(model, (data.x_train, data.y_train), rows, optimiser, factor=factor, forward=forward)

    model = kept(model, f"small_cnn_{name}_{epochs}_{seed}", make)
    picked = random_rows(data.x_train, 256 * 100, seed)
    loader = [(_scaled(data.x_train[rows]), data.y_train[rows]) for rows in picked.split(256)]
    swag = swag_from(model, loader, nn.functional.cross_entropy, learning_rate=0.01, snapshots=20)
    return model, swag


def _scaled(x: Tensor) -> Tensor:
    """Maps pixels of [0, 1] to [-1, 1], as the paper does."""
    return 2 * x - 1


def image_task(name: str, seed: int) -> tuple[Task, dict[str, tuple[Tensor, Tensor]]]:
    """Returns the small CNN trained on MNIST or Fashion-MNIST, and random test images as X."""
    model, swag = train_cnn(name, seed)
    data = images(name)
    picked, chosen = random_rows(data.x_train, 400, seed), random_rows(data.x_test, 100, seed)
    train = batched(_scaled(data.x_train[picked]), data.y_train[picked])
    task = Task(model, train, len(data.x_train), lw.Categorical(), swag)
    return task, {"test": (_scaled(data.x_test[chosen]), data.y_test[chosen])}


def corrupted(x: Tensor, y: Tensor, kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """Returns images of [-1, 1] corrupted at the middle strength, and their labels."""
    return _scaled(corrupt(((x + 1) / 2).clamp(0, 1), kind, 3, seed=seed)), y


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns relative errors and NLL, at λ = 1 and tuned, and relative errors on corrupted MNIST images."""
    tasks, names = results["tasks"], ["mnist", "fashion_mnist"]
    tuned = [f"{name}{TUNED}" for name in names]
    corrupted = results["corrupted mnist"]
    rows = {
        way: [shown(corrupted[kind][way]["500"]["relative_error"]) for kind in corrupted]
        for way in next(iter(corrupted.values()))
        if way not in NOT_SHOWN
    }
    return {
        "relative error": table(tasks, names, "relative_error", (10, 200, 1000)),
        "nll": table(tasks, names, "nll", (10, 200, 1000), 2),
        "relative error, tuned": table(tasks, tuned, "relative_error", (10, 200, 1000), 2),
        "corrupted": grid(list(corrupted), rows),
    }
