"""How near streamlined variances of convolution networks are to the exact ones, plain and after `lw.scale_factor(to=)`.

A diagonal posterior over all weights; 300 test images, with the exact variances of the linearised network as the truth.
64 training images give `lw.scale_factor(posterior, x, lw.Streamlined(), to=lw.Linearized())`, without labels. *Level*
is the ratio of the mean variances, *rank* Spearman's rank correlation with the exact ones over images: the mean over
classes of those of one class, and that of the means over classes. On a CPU, *passes* is the cost of a batch of 100 in
forward passes in eager mode: one thread, CPU time, the fastest of many. One seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from papers.common.data import batched, images
from papers.common.measure import fastest
from papers.common.networks import cifar_resnet20
from papers.common.training import adam

SEED = 0
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHOWN, FITTED, TESTED, BATCH = 1000, 64, 300, 100
SECONDS = 45.0  # of timing


def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """A 3 x 3 convolution, a batch norm and a ReLU."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class Pooled(nn.Module):
    """Five convolutions with batch norm, and a linear layer on the means over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            block(1, 24, 1), block(24, 24, 1), block(24, 48, 2), block(48, 48, 1), block(48, 48, 2)
        )
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits."""
        return self.head(self.body(x).mean((2, 3)))


def hidden() -> nn.Module:
    """Three convolutions with max pooling, and two linear layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers[:-1], nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10))


KINDS: dict[str, Callable[[], nn.Module]] = {"Pooled": Pooled, "Hidden": hidden}


def trained(model: nn.Module, x: Tensor, y: Tensor, epochs: int = 5) -> nn.Module:
    """Returns the network, trained."""
    return adam(model.to(DEVICE), (x.to(DEVICE), y.to(DEVICE)), epochs, 2e-3, 64, 1e-4)


def spearman(a: Tensor, b: Tensor) -> float:
    """Returns the rank correlation of two vectors."""
    return float(torch.corrcoef(torch.stack([x.argsort().argsort().double() for x in (a, b)]))[0, 1])


def nearness(model: nn.Module, name: str, size: int, precision: float) -> dict[str, dict[str, float]]:
    """Returns level, ranks and cost of streamlined variances, plain and fitted to 64 images."""
    data = images(name)
    shown = batched(data.x_train[:SHOWN].to(DEVICE), data.y_train[:SHOWN].to(DEVICE))
    model = model.to(DEVICE).eval()
    posterior = lw.fit(
        model, shown, lw.Diagonal(), params=lw.everything, prior_precision=precision, tune=None, data_size=size
    )
    x, few = data.x_test[:TESTED].to(DEVICE), data.x_train[SHOWN : SHOWN + FITTED].to(DEVICE)
    exact = posterior.latent(x).variance.double().cpu()
    ways = {"plain": lw.Streamlined(), "fitted": lw.scale_factor(posterior, few, lw.Streamlined(), to=lw.Linearized())}
    rows = {}
    for label, way in ways.items():
        found = posterior.latent(x, via=way).variance.double().cpu()
        by_class = [spearman(a, b) for a, b in zip(found.T, exact.T, strict=True)]
        rows[label] = {
            "level": float(found.mean() / exact.mean()),
            "rank by class": sum(by_class) / len(by_class),
            "rank of means": spearman(found.mean(1), exact.mean(1)),
        }
    if DEVICE.type == "cpu":
        few = x[:BATCH]
        with torch.no_grad():
            calls = [lambda way=way: posterior.latent(few, via=way) for way in ways.values()]
            forward, *times = fastest([lambda: model(few), *calls], SECONDS)
        for label, milliseconds in zip(ways, times, strict=True):
            rows[label]["passes"] = milliseconds / forward
    return rows


@cache
def network(kind: str) -> nn.Module:
    """Returns a network trained on 6 000 images of Fashion-MNIST."""
    data = images("fashion_mnist")
    return trained(KINDS[kind](), data.x_train[:6000], data.y_train[:6000])


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the networks at prior precisions δ."""

    def small(kind: str, precision: float) -> dict[str, dict[str, float]]:
        return nearness(network(kind), "fashion_mnist", 6000, precision)

    def resnet(precision: float) -> dict[str, dict[str, float]]:
        return nearness(cifar_resnet20(), "cifar10", 50_000, precision)

    found = {f"ResNet-20, δ = {precision:g}": partial(resnet, precision) for precision in (1e3, 1e4)}
    pairs = itertools.product(KINDS, (1e2, 1e3))
    return found | {f"{kind}, δ = {precision:g}": partial(small, kind, precision) for kind, precision in pairs}
