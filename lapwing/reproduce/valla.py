"""Data and networks of the VaLLA experiments (Ortega et al. 2024): toy, tables, images; tanh MLPs trained here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import LapwingError
from .data import arrays, images
from .loaders import Batches, batched

Network = TypeVar("Network", bound=nn.Module)
Part = tuple[Tensor, Tensor]

TABLES: dict[str, tuple[str, bool]] = {
    "us_flights_2015jan": ("min", True),
    "nyc_green_taxi_2023q1": ("$", True),
    "kin40k": ("1", False),
    "california_housing": ("100 k$", False),
    "elevators": ("1", False),
}
"""Name -> unit of the target, and whether rows are in time order, which the splits then keep (appendix G.2)."""

FARTHEST_TRIP = 100.0
"""Miles; taxi rows beyond it (131 of 201 749, up to 179 000 miles) are errors of recording and left out."""


@dataclass(frozen=True)
class Table:
    """A regression table, inputs and targets standardised by the training rows.

    Attributes:
        name: of the data set.
        train: x (n, d) and y (n, 1), float32; 80 %.
        val: 10 %, for early stopping and tuning.
        test: 10 %, for reporting.
        scale: standard deviation of the training targets, in the target's unit.
        unit: of the target.
    """

    name: str
    train: Part
    val: Part
    test: Part
    scale: float
    unit: str


def table(name: str, seed: int, folder: str | os.PathLike[str] | None = None) -> Table:
    """Reads a table, split 80/10/10: in the order of time for flights and taxis, at random elsewhere.

    Args:
        name: one of `TABLES`.
        seed: of the random split.
        folder: where; the one that LAPWING_DATA names when None.

    Raises:
        LapwingError: for another name, or if there is no such file.
    """
    if name not in TABLES:
        raise LapwingError(
            f"Asked for table({name!r}); accepted are {', '.join(map(repr, TABLES))}: for other files write "
            f"arrays({name!r})."
        )
    found, (unit, ordered) = arrays(name, folder), TABLES[name]
    x, y = (torch.as_tensor(found[entry]).double() for entry in ("X", "y"))
    if name == "nyc_green_taxi_2023q1":
        near = x[:, list(found["feature_names"]).index("trip_distance")] <= FARTHEST_TRIP
        x, y = x[near], y[near]
    order = torch.arange(len(x))
    if not ordered:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = x[order], y[order]
    return standardised(name, x, y, round(0.8 * len(x)), round(0.9 * len(x)), unit)


def standardised(name: str, x: Tensor, y: Tensor, train: int, val: int, unit: str) -> Table:
    """Standardises x (n, d) and y (n,) by the rows before `train`; a constant column becomes 0.

    Args:
        name: of the data set.
        x: inputs, in the order of the splits.
        y: targets.
        train: where the validation rows begin.
        val: where the test rows begin.
        unit: of the targets.
    """
    spread = x[:train].std(0)
    x = (x - x[:train].mean(0)) / torch.where(spread > 1e-12 * x[:train].abs().amax(0), spread, torch.inf)
    scale = y[:train].std()
    y = (y - y[:train].mean()) / scale
    x, y = x.float(), y.float()[:, None]
    train_part, val_part, test_part = ((x[a:b], y[a:b]) for a, b in pairwise((0, train, val, len(x))))
    return Table(name, train_part, val_part, test_part, float(scale), unit)


def toy(held_out: float = 0.0, seed: int = 0, folder: str | os.PathLike[str] | None = None) -> tuple[Part, Part]:
    """Reads the one-dimensional toy of Izmailov et al. 2020: 400 points in three clusters.

    Args:
        held_out: share of the points kept for validation.
        seed: which.
        folder: where; the one that LAPWING_DATA names when None.

    Returns:
        Training and validation points, x and y (n, 1) float64.
    """
    found = arrays("izmailov_toy1d", folder)
    x, y = torch.as_tensor(found["X"]).double(), torch.as_tensor(found["y"]).double()[:, None]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    cut = round(held_out * len(x))
    return (x[order[cut:]], y[order[cut:]]), (x[order[:cut]], y[order[:cut]])


@dataclass(frozen=True)
class Pictures:
    """MNIST or Fashion-MNIST: training and validation images from the training part, test images, foreign ones.

    Attributes:
        train: x (n, 1, 28, 28) and labels, in batches of 100.
        val: 2 000 of the 5 000 images that training has not seen, likewise.
        test: likewise.
        foreign: test images (n, 1, 28, 28) of the other of the two.
    """

    train: Batches
    val: Batches
    test: Batches
    foreign: Tensor


def pictures(name: str, seed: int, tested: int = 10_000) -> Pictures:
    """Reads MNIST or Fashion-MNIST with the other one's test images.

    Args:
        name: "mnist" or "fashion_mnist".
        seed: of the split into 55 000 training and 5 000 held-out images.
        tested: how many of the test and foreign images.
    """
    data = images(name)
    order = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(seed))
    train, val = order[5000:], order[:2000]
    other = images("fashion_mnist" if name == "mnist" else "mnist")
    return Pictures(
        batched(data.x_train[train], data.y_train[train]),
        batched(data.x_train[val], data.y_train[val]),
        batched(data.x_test[:tested], data.y_test[:tested]),
        other.x_test[:tested],
    )


def tanh_mlp(*widths: int) -> nn.Sequential:
    """Returns a tanh MLP of the given widths, inputs and outputs included; it flattens its inputs."""
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def root_mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the RMSE of a batch, what the paper's regression networks minimise (appendix H.1)."""
    return F.mse_loss(outputs, targets).sqrt()


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: Adam, the learning rate falling to zero over the last half.

    Attributes:
        loss: of outputs and targets.
        steps: batches.
        rate: learning rate.
        decay: weight decay, added to the gradient.
        batch: size; 0 takes all data at once.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    steps: int
    rate: float = 1e-3
    decay: float = 0.0
    batch: int = 100


TOY = Recipe(root_mean_square, 12_000, batch=0)
TABLE = Recipe(F.mse_loss, 6000, decay=1e-4)
IMAGES = Recipe(F.cross_entropy, 6000, decay=1e-3)
"""Appendix H.1 has 20 000 steps, and for tables a rate and decay of 1e-2, under which kin40k's network is constant."""


def train(model: Network, data: Part, recipe: Recipe, seed: int) -> Network:
    """Trains a network in place and returns it, in eval mode."""
    x, y = data
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), recipe.rate, weight_decay=recipe.decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda i: min(1.0, 2 - 2 * i / recipe.steps))
    for _ in range(recipe.steps):
        rows = torch.randint(len(x), (recipe.batch,), generator=generator) if recipe.batch else slice(None)
        optimiser.zero_grad()
        recipe.loss(model(x[rows]), y[rows]).backward()
        optimiser.step()
        schedule.step()
    return model.eval()


def trained(
    widths: Sequence[int], data: Part, recipe: Recipe, seed: int, name: str = "", cache: Path | None = None
) -> nn.Sequential:
    """Returns a trained tanh MLP, from the cache where it is there.

    Args:
        widths: of the layers, inputs and outputs included.
        data: inputs and targets; the network has the inputs' dtype.
        recipe: of the training.
        seed: of weights and batches.
        name: of the data, in the cache.
        cache: folder that keeps networks; None keeps none.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tanh_mlp(*widths).to(data[0].dtype)
    path = None if cache is None else cache / f"{name}_{'_'.join(map(str, widths))}_{recipe.steps}_{seed}.safetensors"
    if path is not None and path.is_file():
        model.load_state_dict(load_file(path))
        return model.eval()
    train(model, data, recipe, seed)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), path)
    return model
