"""Networks of the comparison: a trained network, the data that fits see, held-out data, test data, foreign inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from papers.common.cifar import Cifar, fashion_as_cifar
from papers.common.data import Batches, Part, batched, joined, pictures, random_rows, rows_and_targets, split
from papers.common.device import DEVICE
from papers.common.networks import Logits, mlp
from papers.common.training import ONE_NOISE, Recipe, drawn, half_square, kept, seeded, train
from papers.streamlined import transformers
from papers.streamlined.ivon import IVON

SHOWN, HELD_OUT, TESTED, FOREIGN = 1000, 500, 1000, 500
"""Largest numbers of images that fits see, of samples that tune and that are reported, and of foreign images."""

TRAINED, EPOCHS = 5000, 40
"""Number of training images of the MLPs, and epochs. MLPs of 55 000 images are calibrated as they are."""


@dataclass(frozen=True)
class Training:
    """How networks of a task are trained, for methods that train.

    Attributes:
        data: all training inputs and targets.
        build: makes a network with random weights, from torch's own generator.
        recipe: trains it.
    """

    data: Part
    build: Callable[[], nn.Module]
    recipe: Recipe


@dataclass(frozen=True)
class Task:
    """A trained network and its data.

    Attributes:
        name: of the data.
        seed: of the split and of the network.
        model: the network, in eval mode.
        loader: training samples that fits see, in batches.
        size: N, the number of all training samples.
        val: held-out samples, in batches.
        test: inputs and targets to report.
        foreign: inputs of another data set, or None for tables.
        training: how the network was trained; None if it cannot be trained here.
    """

    name: str
    seed: int
    model: nn.Module
    loader: Batches
    size: int
    val: Batches
    test: Part
    foreign: Tensor | None
    training: Training | None = None

    @property
    def regression(self) -> bool:
        """Whether the targets are real numbers."""
        return self.val[0][1].is_floating_point()

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `lw.fit` that all methods share."""
        options: dict[str, Any] = {"data_size": self.size, "seed": self.seed, "memory": 2**31, "progress": False}
        return {**options, "likelihood": ONE_NOISE} if self.regression else options

    def with_network(self, seed: int) -> Task:
        """Returns the task with another network, trained from other weights on the same data."""
        assert self.training is not None
        return replace(self, model=_trained(self.training, f"{self.name}_{self.seed}", seed))

    @cached_property
    def noise(self) -> float:
        """Mean squared residual of the network on the samples that fits see."""
        with torch.no_grad():
            return float(torch.cat([(self.model(x) - y).square() for x, y in self.loader]).mean())

    def swag(self, rank: int = 20, every: int = 100) -> lw.Posterior:
        """Trains the network on by SGD at a constant rate, and returns SWAG's posterior of `rank` snapshots."""
        assert self.training is not None
        model = copy.deepcopy(self.model)
        collector = lw.SWAG.collector(model, rank=rank)
        x, _ = data = self.training.data
        optimiser = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        rows = list(drawn(len(x), 100, rank * every, self.seed))
        for start in range(0, len(rows), every):
            train(model, data, rows[start : start + every], optimiser, self.training.recipe.loss)
            collector.snapshot()
        return lw.SWAG.from_snapshots(collector, self.loader, likelihood=self.options.get("likelihood"), progress=False)

    def ivon(self) -> lw.Posterior:
        """Trains another network from the same random weights by IVON; returns its posterior.

        A regression has half of the squared error as its loss, and the network's residual as its noise variance.
        """
        assert self.training is not None
        with seeded(self.seed):
            model = self.training.build()
        (x, _), recipe = self.training.data, self.training.recipe
        steps = recipe.steps // 2
        ess, loss = (len(x) / self.noise, half_square) if self.regression else (len(x), F.cross_entropy)
        optimiser = IVON(model.parameters(), ess=ess, rate=0.1, seed=self.seed)
        rows = drawn(len(x), min(100, len(x)), steps, self.seed)
        train(model, self.training.data, rows, optimiser, loss, lambda i: 1 - i / steps)
        likelihood = self.options.get("likelihood")
        return lw.MeanField.from_optimizer(model, optimiser, self.loader, likelihood=likelihood, progress=False)


def _trained(training: Training, name: str, seed: int) -> nn.Module:
    with seeded(seed):
        model = training.build()
    return kept(model, f"together_{name}_{seed}", lambda: training.recipe.train(model, training.data, seed))


TABLES = {"energy": "uci_energy", "concrete": "uci_concrete", "kin40k": "kin40k", "California": "california_housing"}
"""Name -> file. Of the two larger tables 6 250 rows, split 80/10/10 like the others."""

ROWS = 6250


def table(name: str, seed: int) -> Task:
    """Returns a regression table and a tanh MLP with two hidden layers of 50 units, small enough for full LLA."""
    x, y = rows_and_targets(TABLES[name])
    order = random_rows(x, ROWS, 1000 + seed)
    found = split(name, x[order], y[order], "1", seed)
    width = found.train[0].shape[1]
    recipe = Recipe(F.mse_loss, 6000, decay=1e-4)
    training = Training(found.train, lambda: mlp(width, 50, 50, 1), recipe)
    (a, b), (u, v) = found.val, found.test
    val, test = batched(a[:HELD_OUT], b[:HELD_OUT], 250), (u[:TESTED], v[:TESTED])
    loader = batched(*found.train, 250)
    return Task(
        name, seed, _trained(training, f"{name}_{seed}", seed), loader, len(found.train[0]), val, test,
        None, training,
    )  # fmt: skip


IMAGES = {"MNIST": "mnist", "Fashion-MNIST": "fashion_mnist"}


def images(name: str, seed: int) -> Task:
    """Returns MNIST or Fashion-MNIST and a ReLU MLP 784-128-64-10, trained without weight decay on 5 000 images.

    The test images of the other data set are foreign.
    """
    data = pictures(IMAGES[name], seed, TESTED)
    seen = data.train[: TRAINED // 100]
    whole = joined(seen)
    recipe = Recipe(F.cross_entropy, EPOCHS * len(seen), falling=1.0)
    training = Training(whole, lambda: mlp(784, 128, 64, 10, activation=nn.ReLU), recipe)
    return Task(
        name, seed, _trained(training, f"{name}_{seed}", seed), seen[: SHOWN // 100], len(whole[0]),
        data.val[: HELD_OUT // 100], joined(data.test), data.foreign[:FOREIGN], training,
    )  # fmt: skip


TRANSFORMERS = {"ViT": "fashion_mnist", "GPT-2": "agnews"}


def transformer(name: str, seed: int) -> Task:
    """Returns the ViT of 139 000 weights on Fashion-MNIST, or the GPT-2 of 0.74 million on AG News."""
    found = transformers.task(TRANSFORMERS[name], seed)
    model = Logits(transformers.trained(found, seed)).eval().to(DEVICE)
    (x, y), (a, b), (u, v) = (tuple(part.to(DEVICE) for part in pair) for pair in (found.train, found.val, found.test))
    return Task(
        name, seed, model, batched(x[:SHOWN], y[:SHOWN]), len(x), batched(a[:HELD_OUT], b[:HELD_OUT]),
        (u[:TESTED], v[:TESTED]), found.foreign[:FOREIGN].to(DEVICE),
    )  # fmt: skip


def resnet(name: str, seed: int) -> Task:
    """Returns the CIFAR-10 ResNet-20; the first 500 test images are held out, Fashion-MNIST images are foreign."""
    setup = Cifar.load(seed, 1000, 1000)
    foreign = fashion_as_cifar(FOREIGN)
    return Task(name, seed, setup.model, setup.train, 50_000, setup.val[: HELD_OUT // 100], joined(setup.test), foreign)


TASKS: dict[str, Callable[[str, int], Task]] = {
    **dict.fromkeys(TABLES, table), **dict.fromkeys(IMAGES, images), **dict.fromkeys(TRANSFORMERS, transformer),
    "ResNet-20": resnet,
}  # fmt: skip


GIVEN = ("ResNet-20", *TRANSFORMERS)
"""Tasks without methods that train networks."""


def task(name: str, seed: int) -> Task:
    """Returns a task of `TASKS`, with the network of the seed."""
    return TASKS[name](name, seed)
