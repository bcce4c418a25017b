"""What ways to a subspace are compared on (Faller and Martin 2025): networks trained here or before, images and tables.

Networks that the paper trained are trained here, with SWAG from more snapshots of SGD where it is compared.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw

from ..evaluation.corruptions import corrupt
from .data import arrays, images
from .loaders import Batches, batched
from .models import cifar_resnet20, mnist_cnn
from .optimal_subspace import Task


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
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SmallCNN()
    optimiser = torch.optim.Adam(model.parameters(), 0.004)
    steps = epochs * (len(data.x_train) // 256)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda i: min(1.0, 2 * (1 - i / steps)))
    model.train()
    taken = 0
    while taken < steps:
        for rows in torch.randperm(len(data.x_train), generator=generator).split(256):
            if taken < steps:
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(_scaled(data.x_train[rows])), data.y_train[rows]).backward()
                optimiser.step()
                schedule.step()
                taken += 1
    picked = torch.randperm(len(data.x_train), generator=generator)[: 256 * 100]
    loader = [(_scaled(data.x_train[rows]), data.y_train[rows]) for rows in picked.split(256)]
    swag = swag_from(model, loader, nn.functional.cross_entropy, learning_rate=0.01, snapshots=20)
    return model.eval(), swag


def _scaled(x: Tensor) -> Tensor:
    """Maps pixels of [0, 1] to [-1, 1], as the paper does."""
    return 2 * x - 1


def swag_from(
    model: nn.Module, loader: Batches, loss: Callable[[Tensor, Tensor], Tensor], learning_rate: float, snapshots: int
) -> lw.Posterior:
    """Runs SGD on a copy of a trained network and returns SWAG of its snapshots, five batches apart."""
    walker = copy.deepcopy(model)
    optimiser = torch.optim.SGD(walker.parameters(), learning_rate, momentum=0.9)
    collector = lw.SWAG.collector(walker, rank=20)
    batches = itertools.cycle(loader)
    for _ in range(snapshots):
        walker.train()
        for x, y in itertools.islice(batches, 5):
            optimiser.zero_grad()
            loss(walker(x), y).backward()
            optimiser.step()
        collector.snapshot()
    return lw.SWAG.from_snapshots(collector, loader)


def image_task(
    name: str, seed: int, shown: int = 400, test: int = 100
) -> tuple[Task, dict[str, tuple[Tensor, Tensor]]]:
    """Returns the small CNN trained on MNIST or Fashion-MNIST, and random test images as X."""
    model, swag = train_cnn(name, seed)
    data = images(name)
    picked = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(seed))[:shown]
    train = batched(_scaled(data.x_train[picked]), data.y_train[picked])
    chosen = torch.randperm(len(data.x_test), generator=torch.Generator().manual_seed(seed))[:test]
    task = Task(model, train, len(data.x_train), lw.Categorical(), swag)
    return task, {"test": (_scaled(data.x_test[chosen]), data.y_test[chosen])}


def trained_task(name: str, seed: int, shown: int, test: int) -> tuple[Task, dict[str, tuple[Tensor, Tensor]]]:
    """Returns a trained network of the data folder, and random test images as X.

    Args:
        name: "mnist", ELLA's network of 29 034 weights, or "cifar10", the ResNet-20 of 269 722.
        seed: of both subsets.
        shown: training images that the posteriors sum over.
        test: test images.
    """
    model, size = (mnist_cnn(), 60_000) if name == "mnist" else (cifar_resnet20(), 50_000)
    data = images(name)
    generator = torch.Generator().manual_seed(seed)
    picked, chosen = (torch.randperm(len(x), generator=generator) for x in (data.x_train, data.x_test))
    picked, chosen = picked[:shown], chosen[:test]
    train = batched(data.x_train[picked], data.y_train[picked])
    return Task(model, train, size, lw.Categorical()), {"test": (data.x_test[chosen], data.y_test[chosen])}


def corrupted(x: Tensor, y: Tensor, kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """Returns images of [-1, 1] corrupted at the middle strength, and their labels."""
    return _scaled(corrupt(((x + 1) / 2).clamp(0, 1), kind, 3, seed=seed)), y


# Tables --------------------------------------------------------------------------------------------------------------

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
    found = arrays(options["file"])
    x, y = (torch.as_tensor(found[key]).double() for key in ("X", "y"))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order].reshape(len(x), 1)
    cut = len(x) * 9 // 10
    x, y = _standardised(x, cut).float(), _standardised(y, cut).float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(x.shape[1], 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1)
        )  # fmt: skip
    optimiser = torch.optim.Adam(model.parameters(), options["rate"])
    for _ in range(options["epochs"]):
        for rows in torch.randperm(cut, generator=generator).split(256):
            optimiser.zero_grad()
            nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
            optimiser.step()
    model.eval()
    with torch.no_grad():
        noise = float((model(x[:cut]) - y[:cut]).square().mean())
    loader = batched(x[:cut], y[:cut], 256)
    swag = swag_from(model, loader, nn.functional.mse_loss, learning_rate=0.001, snapshots=20)
    train = batched(x[: min(shown, cut)], y[: min(shown, cut)], 250)
    task = Task(model, train, cut, lw.Gaussian(noise), swag)
    return task, {"test": (x[cut : cut + test], y[cut : cut + test])}


def _standardised(values: Tensor, cut: int) -> Tensor:
    scale = values[:cut].std(0)
    return (values - values[:cut].mean(0)) / torch.where(scale > 1e-12, scale, torch.ones_like(scale))
