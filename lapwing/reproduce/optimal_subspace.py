"""The optimal-subspace paper's experiments (Faller and Martin 2025) on what is at hand: Figures 1 to 5 and 7, Table 6.

Every function returns plain numbers; `python -m benchmarks.papers` runs them and writes the results. Networks that the
paper trained are trained here; the exact posterior is that of a subset of the training data, scaled to all of them, and
so are all approximations that are compared with it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw

from ..covariance import Latent, Subspace
from ..covariance.output import Dense
from ..evaluation.corruptions import corrupt
from ..evaluation.measures import relative_error
from .data import arrays, images
from .models import cifar_resnet20, mnist_cnn

Batches = list[tuple[Tensor, Tensor]]

WAYS: dict[str, Callable[[int], lw.Method]] = {
    "low rank, GGN": lambda rank: lw.OptimalSubspace(rank, lw.Full()),
    "low rank, KFAC": lambda rank: lw.OptimalSubspace(rank, lw.KFAC()),
    "low rank, EKFAC": lambda rank: lw.OptimalSubspace(rank, lw.EKFAC()),
    "low rank, diagonal": lambda rank: lw.OptimalSubspace(rank, lw.Diagonal()),
    "low rank, prior": lambda rank: lw.OptimalSubspace(rank, "prior"),
    "subset, magnitude": lambda rank: lw.SubsetOfWeights(rank, "magnitude"),
    "subset, diagonal": lambda rank: lw.SubsetOfWeights(rank, "diagonal"),
    "subset, random": lambda rank: lw.SubsetOfWeights(rank, "random"),
}
"""Name -> the method at a rank; "optimal" (Theorem 1 at the test inputs) is added to every comparison."""


@dataclass(frozen=True)
class Task:
    """A trained network and its data.

    Attributes:
        model: the network, in eval mode.
        train: the part of the training data that the posteriors sum over.
        data_size: N.
        likelihood: Categorical, or Gaussian with its noise variance.
        swag: a posterior from the end of training, or None.
    """

    model: nn.Module
    train: Batches
    data_size: int
    likelihood: lw.Likelihood
    swag: lw.Posterior | None = None

    def fit(self, method: lw.Method, precision: float, seed: int) -> lw.Posterior:
        """Fits at a given prior precision."""
        return lw.fit(
            self.model, self.train, method, likelihood=self.likelihood, data_size=self.data_size, tune=None,
            prior_precision=precision, seed=seed, memory=2**33,
        )  # fmt: skip


def compare_subspaces(
    task: Task,
    inputs: Mapping[str, tuple[Tensor, Tensor]],
    ranks: Sequence[int],
    precision: float,
    seed: int,
    ways: Sequence[str] = tuple(WAYS),
    exact: bool = True,
) -> dict[str, Any]:
    """Measures every way to a subspace at several ranks.

    Args:
        task: network and data.
        inputs: name -> inputs and targets: the test set X, and foreign ones.
        ranks: s; each way is fitted once, at the largest.
        precision: λ.
        seed: of subsets and weights.
        ways: which of `WAYS`.
        exact: whether the full posterior can be had; without it there is the trace alone.

    Returns:
        input set -> way -> rank -> relative error (equation 20), trace (equation 25) and NLL (equation 30); way "full"
        has its trace and NLL, and MAP its NLL.
    """
    found: dict[str, Any] = {name: {} for name in inputs}
    reference = {}
    if exact:
        full = task.fit(lw.Full(), precision, seed)
        for name, (x, y) in inputs.items():
            sigma = _joint(full, x)
            reference[name] = sigma
            found[name]["full"] = _measures(full, x, y, sigma, None)
            values, vectors = torch.linalg.eigh(sigma)
            values, vectors = values.flip(0), vectors.flip(1)
            found[name]["optimal"] = {
                rank: {
                    "relative_error": float(values[rank:].norm() / values.norm()),
                    "trace": float(values[:rank].sum()),
                    "nll": _optimal_nll(full, x, y, (vectors[:, :rank] * values[:rank]) @ vectors[:, :rank].T),
                }
                for rank in ranks
            }
    methods = {name: WAYS[name](max(ranks)) for name in ways}
    if task.swag is not None:
        methods["subset, SWAG"] = lw.SubsetOfWeights(max(ranks), task.swag)
    for way, method in methods.items():
        posterior = task.fit(method, precision, seed)
        covariance = posterior.covariance
        assert isinstance(covariance, Subspace)
        for rank in ranks:
            shorter = replace(posterior, covariance=covariance.with_rank(rank))
            for name, (x, y) in inputs.items():
                row = found[name].setdefault(way, {})
                row[rank] = _measures(shorter, x, y, _joint(shorter, x), reference.get(name))
    return found


def _joint(posterior: lw.Posterior, x: Tensor) -> Tensor:
    """Returns the epistemic covariance of all outputs at all inputs (n C, n C), float64."""
    return posterior.latent(x, joint=True).covariance.flatten(0, 1).flatten(1).double()


def _measures(posterior: lw.Posterior, x: Tensor, y: Tensor, sigma: Tensor, exact: Tensor | None) -> dict[str, float]:
    found = {"trace": float(sigma.trace()), "nll": -float(posterior.predict(x).log_prob(y).double().mean())}
    if exact is not None:
        found["relative_error"] = float(relative_error(sigma, exact))
    return found


def _optimal_nll(posterior: lw.Posterior, x: Tensor, y: Tensor, sigma: Tensor) -> float:
    """Returns the NLL under a covariance of all outputs at all inputs."""
    with torch.no_grad():
        mean = posterior.tangent.outputs_of(x)
    count, width = mean.shape
    blocks = sigma.reshape(count, width, count, width).diagonal(dim1=0, dim2=2).movedim(-1, 0)  # (n, C, C)
    latent = Latent(mean, (Dense(blocks.to(mean.dtype)),))
    return -float(posterior.likelihood.predict(latent).log_prob(y).double().mean())


# Networks ------------------------------------------------------------------------------------------------------------


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
    train = list(zip(_scaled(data.x_train[picked]).split(100), data.y_train[picked].split(100), strict=True))
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
    train = list(zip(data.x_train[picked].split(100), data.y_train[picked].split(100), strict=True))
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
    loader = list(zip(x[:cut].split(256), y[:cut].split(256), strict=True))
    swag = swag_from(model, loader, nn.functional.mse_loss, learning_rate=0.001, snapshots=20)
    train = list(zip(x[: min(shown, cut)].split(250), y[: min(shown, cut)].split(250), strict=True))
    task = Task(model, train, cut, lw.Gaussian(noise), swag)
    return task, {"test": (x[cut : cut + test], y[cut : cut + test])}


def _standardised(values: Tensor, cut: int) -> Tensor:
    scale = values[:cut].std(0)
    return (values - values[:cut].mean(0)) / torch.where(scale > 1e-12, scale, torch.ones_like(scale))
