"""Training of networks: one loop, the batches that it goes through, and a folder that keeps what was trained."""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from papers.common.device import DEVICE

Network = TypeVar("Network", bound=nn.Module)
Part = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]

ONE_NOISE = lw.Gaussian(noise="constant")
"""The likelihood of the papers' regressions: one normal noise variance, which a tuning chooses."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's own generator for the length of a block."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@torch.enable_grad()
def train(
    model: Network,
    data: tuple[Any, Any],
    rows: Iterable[Any],
    optimiser: torch.optim.Optimizer,
    loss: Loss = F.cross_entropy,
    factor: Callable[[int], float] | None = None,
    forward: Callable[[Tensor], Tensor] | None = None,
    clip: float | None = None,
) -> Network:
    """Trains a network in place and returns it, in eval mode.

    Args:
        model: the network.
        data: inputs and targets.
        rows: what each step sees of them: indices, or a slice.
        optimiser: of the network's parameters.
        loss: of outputs and targets.
        factor: step -> what the learning rate is multiplied by; None keeps it.
        forward: inputs -> outputs; None calls the network.
        clip: largest norm of the gradient; None leaves it.
    """
    x, y = data
    forward = forward or model
    schedule = None if factor is None else torch.optim.lr_scheduler.LambdaLR(optimiser, factor)
    model.train()
    for some in rows:

        def closure(some: Any = some) -> Tensor:
            optimiser.zero_grad()
            value = loss(forward(x[some]), y[some])
            value.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            return value

        optimiser.step(closure)  # type: ignore[arg-type]  # torch asks for a float, and takes a tensor
        if schedule is not None:
            schedule.step()
    return model.eval()


def of_best_epoch(model: Network, epoch: Callable[[], Any], loss: Callable[[], Tensor], epochs: int) -> Network:
    """Trains a network by calls of `epoch`; returns it, in eval mode, as it was when the held-out `loss` was least."""
    best, state = math.inf, model.state_dict()
    for _ in range(epochs):
        epoch()
        with torch.no_grad():
            now = float(loss())
        if now < best:
            best, state = now, copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    return model.eval()


def drawn(count: int, size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Yields random rows, with repetition."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randint(count, (size,), generator=generator)


def shuffled(
    count: int, size: int, generator: torch.Generator | None = None, epochs: int | None = None
) -> Iterator[Tensor]:
    """Yields rows for some epochs, or without end: every one once an epoch, whose last batch may be smaller."""
    for _ in itertools.count() if epochs is None else range(epochs):
        yield from torch.randperm(count, generator=generator).split(size)


def adam(
    model: Network,
    data: tuple[Any, Any],
    epochs: int,
    rate: float,
    size: int = 100,
    decay: float = 0.0,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Network:
    """Trains a network by Adam on shuffled rows; returns it in eval mode.

    Args:
        model: the network.
        data: inputs and targets.
        epochs: how often each row is seen.
        rate: learning rate.
        size: of a batch.
        decay: weight decay, added to the gradient.
        generator: of the order of the rows.
        options: of `train`.
    """
    optimiser = torch.optim.Adam(model.parameters(), rate, weight_decay=decay)
    return train(model, data, shuffled(len(data[0]), size, generator, epochs), optimiser, **options)


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns half of the mean squared error, the loss of a Gaussian of variance 1."""
    return F.mse_loss(outputs, targets) / 2


def cosine(steps: int) -> Callable[[int], float]:
    """Returns step -> factor of a learning rate that falls to zero as a half wave."""
    return lambda step: (1 + math.cos(math.pi * step / steps)) / 2


@dataclass(frozen=True)
class Recipe:
    """How most networks are trained: Adam on random batches, the learning rate falling to zero at the end.

    Attributes:
        loss: of outputs and targets.
        steps: batches.
        rate: learning rate.
        decay: weight decay, added to the gradient.
        batch: size; 0 takes all data at once.
        falling: share of the steps over which the rate falls.
    """

    loss: Loss
    steps: int
    rate: float = 1e-3
    decay: float = 0.0
    batch: int = 100
    falling: float = 0.5

    def train(self, model: Network, data: Part, seed: int) -> Network:
        """Trains a network in place and returns it, in eval mode."""
        count = len(data[0])
        rows: Iterable[Any] = repeat(slice(None), self.steps)
        if self.batch:
            rows = drawn(count, min(self.batch, count), self.steps, seed)
        optimiser = torch.optim.Adam(model.parameters(), self.rate, weight_decay=self.decay)
        return train(model, data, rows, optimiser, self.loss, lambda i: min(1.0, (1 - i / self.steps) / self.falling))


def kept(model: Network, name: str, make: Callable[[], Any]) -> Network:
    """Returns a network in eval mode, trained by `make` in place, or with the weights that an earlier call has kept.

    Args:
        model: the network, with random weights.
        name: of its file in the folder that LAPWING_NETWORKS names; without that variable nothing is kept.
        make: trains it.
    """

    def weights() -> dict[str, Tensor]:
        make()
        return model.state_dict()

    model.load_state_dict(kept_tensors(name, weights))
    return model.eval()


def kept_tensors(name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns tensors by name: those that `make` returns, or those that an earlier call has kept, as `kept` does.

    Args:
        name: name of their file in the folder that LAPWING_NETWORKS names; without that variable nothing is kept.
        make: computes them.
    """
    folder = os.environ.get("LAPWING_NETWORKS")
    if not folder:
        return make()
    path = Path(folder) / f"{name}.safetensors"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in make().items()}, path)
    return load_file(path, device=str(DEVICE))
