"""How near streamlined variances are to linearised ones, with independent and with correlated positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import lapwing as lw
from papers.common.data import Batches, batched, images, random_rows
from papers.common.networks import cifar_resnet20, mnist_cnn
from papers.common.results import Rows
from papers.common.tables import grid, shown
from papers.streamlined.setting import CORRELATED, PAPER, Setting, relu_mlp

PRECISIONS = (1e3,)
"""Prior precisions δ."""
SHOWN, TESTED = 500, 20
"""Training inputs of the curvature, and test inputs."""
NETWORKS = ("MLP, MNIST", "CNN, MNIST", "ResNet-20, CIFAR-10", "ViT, Fashion-MNIST")


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns the ratio of the mean output variances and the correlation of their logarithms."""
    rows = Rows(__file__, {"training inputs": SHOWN, "test inputs": TESTED})
    for seed in seeds:
        for name in NETWORKS:
            for delta in PRECISIONS:
                rows.add(f"{name}, δ = {delta:g}, seed {seed}", "variances", nearness, name, delta, seed)
    return rows.all()


def network(name: str, seed: int) -> tuple[nn.Module, Batches, int, torch.Tensor]:
    """Returns a trained network, batches of training inputs, N, and test inputs; seeds draw the inputs."""
    if name.startswith("ViT"):
        setting = Setting.load("fashion_mnist", seed, shown=SHOWN, tested=TESTED, tuned=100)
        return setting.model, setting.train, setting.size, torch.cat([x for x, _ in setting.test])
    data = images("cifar10" if name.startswith("ResNet") else "mnist")
    picked, tested = random_rows(data.x_train, SHOWN, seed), random_rows(data.x_test, TESTED, seed)
    if name.startswith("MLP"):
        model: nn.Module = relu_mlp(data.x_train, data.y_train, "mnist", seed)
    else:
        model = cifar_resnet20() if name.startswith("ResNet") else mnist_cnn()
    size = 50_000 if name.startswith("ResNet") else len(data.x_train)
    return model, batched(*data.train(picked)), size, data.x_test[tested]


def nearness(name: str, delta: float, seed: int) -> dict[str, Any]:
    """Returns ratio and correlation of one network's variances under a diagonal posterior, by the positions."""
    model, train, size, x = network(name, seed)
    posterior = lw.fit(
        model, train, lw.Diagonal(), params=lw.everything, prior_precision=delta, tune=None, data_size=size, seed=seed,
        progress=False,
    )  # fmt: skip
    exact = posterior.latent(x, via=lw.Linearized()).variance.double()
    found = {}
    for label, way in (("independent", PAPER), ("correlated", CORRELATED)):
        variance = posterior.latent(x, via=way).variance.double()
        logs = torch.stack([variance.flatten().log(), exact.flatten().log()])
        found[label] = {
            "ratio": float(variance.mean() / exact.mean()),
            "correlation": float(torch.corrcoef(logs)[0, 1]),
        }
    return found


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns ratio and correlation by network and positions."""
    rows = {}
    for name, found in results["table"].items():
        parts = found["variances"]
        rows[name] = [shown(parts[label][key]) for label in parts for key in ("ratio", "correlation")]
    columns = [f"{label}, {key}" for label in ("independent", "correlated") for key in ("ratio", "correlation")]
    return {"nearness": grid(columns, rows)}
