"""What posteriors cost, as ratios to a plain forward pass of the same batch in the same run.

Exact C x C output covariances of an MLP and a CNN, a last layer with many classes, and one pass of a fit. Random
weights and inputs: cost does not depend on them, but KFAC rotates only the input directions that its fit saw, so the
MLP's covariances come after a fit of the batch itself, and after one of 2 000 samples. There the same products also run
by hand, without what makes a library: what is above them is lapwing's own cost. `tests/test_memory.py` has the memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.covariance import Blockwise, KroneckerBlock
from papers.common.measure import ratio

SEED, THREADS = 0, 2


def mlp() -> nn.Module:
    """784-128-64-10."""
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)).eval()


def cnn() -> nn.Module:
    """Two 3x3 convolutions to 16 and 32 channels, 2x2 max pooling, 28x28 inputs, linear 1568-10."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1568, 10),
    ).eval()  # fmt: skip


def _forward(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def by_hand(model: nn.Module, x: Tensor, posterior: lw.Posterior) -> Callable[[], Tensor]:
    """Returns a function that computes an MLP's covariances by the bare products: no recording, no checks, one network.

    Raises:
        AssertionError: if they are not lapwing's.
    """
    linear, fitted = [layer for layer in model.modules() if isinstance(layer, nn.Linear)], posterior.covariance
    assert isinstance(fitted, Blockwise)
    weights, bases = [], []
    for layer, structure, delta in zip(linear, fitted.structures.values(), fitted.precision.tolist(), strict=True):
        weight = 1 / (fitted.scale * structure.eigenvalues + delta)
        if isinstance(structure, KroneckerBlock):
            inputs = structure.inputs[0]
            weights.append((weight[0],))
            bases.append((inputs[-1].contiguous(), inputs[:-1], structure.outputs[0]))
        else:
            weight = weight.reshape(layer.out_features, -1)
            weights.append((weight[:, :-1], weight[:, -1].contiguous()))
            bases.append(None)

    @torch.no_grad()
    def covariance() -> Tensor:
        a, parts, g = [x], [], None  # g (B, C, O), the identity at the last layer
        for layer in linear[:-1]:
            a.append(layer(a[-1]).relu_())
        linear[-1](a[-1])
        for i in reversed(range(len(linear))):
            if bases[i] is None:
                scale, rows = F.linear(a[i].square(), *weights[i]), g
                last = torch.diag_embed(scale) if g is None else None
            else:
                bias, basis, turn = bases[i]
                scale = F.linear(torch.addmm(bias, a[i], basis).square_(), *weights[i])
                rows = None if g is None else g @ turn
                last = (turn * scale.unsqueeze(1)) @ turn.T if g is None else None
            parts.append(torch.bmm(rows * scale.unsqueeze(1), rows.mT) if last is None else last)
            if i:
                weight = linear[i].weight
                g = (weight if g is None else g @ weight) * (a[i] > 0).to(x.dtype).unsqueeze(1)
        return reduce(torch.add, parts)

    torch.testing.assert_close(covariance(), posterior.latent(x).covariance, rtol=1e-3, atol=1e-5)
    return covariance


def predictions(model: nn.Module, x: Tensor, rounds: int, batches: int = 1) -> dict[str, Any]:
    """Returns the cost of exact latent variances and covariances for Diagonal and KFAC, fitted on some batches.

    An MLP's covariances also come by hand.
    """
    loader = [(x if i == 0 else torch.randn_like(x), torch.randint(10, (len(x),))) for i in range(batches)]
    results = {}
    for name, method in (("diagonal", lw.Diagonal()), ("KFAC", lw.KFAC())):
        posterior = lw.fit(model, loader, method, params=lw.everything, prior_precision=1.0)
        results[name] = {
            "variance": ratio(lambda p=posterior: p.latent(x).variance, lambda: _forward(model, x), rounds),
            "covariance": ratio(lambda p=posterior: p.latent(x).covariance, lambda: _forward(model, x), rounds),
        }
        if x.ndim == 2:
            results[name]["covariance by hand"] = ratio(
                by_hand(model, x, posterior), lambda: _forward(model, x), rounds
            )
    return results


class Clock:
    """A loader of one batch many times that notes when each was asked for.

    Attributes:
        asked: the times, of the longest way through.
    """

    def __init__(self, batch: tuple[Tensor, Tensor], count: int) -> None:
        self._batch, self._count = batch, count
        self.asked: list[float] = []

    def __len__(self) -> int:
        """How many batches."""
        return self._count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the batch."""
        asked: list[float] = []
        for _ in range(self._count):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            asked.append(time.perf_counter())
            if len(asked) > len(self.asked):
                self.asked = asked
            yield self._batch


def fits(model: nn.Module, x: Tensor, classes: int = 10, params: Any = lw.everything) -> dict[str, Any]:
    """Returns the cost of one batch of a pass, from one to the next, the fastest of many; set-up is no part of it."""
    y, results = torch.randint(classes, (len(x),)), {}
    for name, method in (("diagonal", lw.Diagonal()), ("KFAC", lw.KFAC())):
        clocks = [Clock((x, y), 320) for _ in range(4)]
        for clock in clocks:
            lw.fit(model, clock, method, params=params, prior_precision=1.0)
        best = min(later - asked for clock in clocks for asked, later in pairwise(clock.asked))
        forward = ratio(lambda: _forward(model, x), lambda: _forward(model, x), 100)["reference_milliseconds"]
        results[name] = {"milliseconds": 1e3 * best, "reference_milliseconds": forward, "ratio": 1e3 * best / forward}
    return results


def fastest(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Returns the faster time of two runs for every entry, of the method and of its reference."""
    if "ratio" not in first:
        return {key: fastest(value, second[key]) for key, value in first.items()}
    times = {key: min(first[key], second[key]) for key in ("milliseconds", "reference_milliseconds")}
    return {**times, "ratio": times["milliseconds"] / times["reference_milliseconds"]}


def last_layer(classes: int, fit: bool) -> dict[str, Any]:
    """Returns the cost of a last layer of many classes: of its fit, or of its predictions."""
    net, x = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, classes)).eval(), torch.randn(100, 512)
    if fit:
        return fits(net, x, classes, lw.last_layer)
    posterior = lw.fit(net, [(x, torch.randint(classes, (100,)))], prior_precision=1.0)
    row = {"variance": ratio(lambda: posterior.latent(x).variance, lambda: _forward(net, x), 100)}
    if classes == 100:
        row["covariance"] = ratio(lambda: posterior.latent(x).covariance, lambda: _forward(net, x), 20)
    return row


def parts(rounds: int = 3) -> dict[str, Callable[[], Any]]:
    """Returns the costs of predictions and fits, each the fastest of some rounds."""
    costs: dict[str, Callable[[], Any]] = {
        "MLP 784-128-64-10, batch 100": lambda: predictions(mlp(), torch.randn(100, 784), 1000),
        "MLP 784-128-64-10, batch 100, fitted on 2 000": lambda: predictions(mlp(), torch.randn(100, 784), 1000, 20),
        "CNN 28x28, batch 50": lambda: predictions(cnn(), torch.randn(50, 1, 28, 28), 50),
        "fit of the MLP, a batch of 100": lambda: fits(mlp(), torch.randn(100, 784)),
    }
    for classes in (100, 1000):
        name = f"last layer 512-512-{classes}"
        costs[f"{name}, batch 100"] = partial(last_layer, classes, False)
        costs[f"fit of the {name}, a batch of 100"] = partial(last_layer, classes, True)
    return {name: lambda call=call: reduce(fastest, (call() for _ in range(rounds))) for name, call in costs.items()}
