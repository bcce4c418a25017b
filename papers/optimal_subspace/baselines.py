"""The rows to beat in Figures 1, 2 and 7: one number from held-out data, the prior alone, the recommended call.

One number is a noise variance, or a temperature of the logits. The networks are those of `table1`, `table2` and
`figure2`, trained again or kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import lapwing as lw
from papers.common.data import Batches, Part, batched, images, joined, random_rows
from papers.common.results import Rows, once
from papers.common.scores import paired
from papers.common.tables import grid, shown
from papers.common.training import ONE_NOISE
from papers.optimal_subspace import figure2, table1, table2
from papers.optimal_subspace.comparison import Task
from papers.optimal_subspace.figure8 import gaussian_nll
from papers.streamlined.baselines import CALL, fitted

ROWS = ("network", "one number", "prior alone", CALL)
NETWORKS = {
    "mnist": "MNIST, 20 epochs", "mnist, 3 epochs": "MNIST, 3 epochs", "fashion_mnist, 3 epochs": "Fashion-MNIST",
}  # fmt: skip
"""Image networks, and their headings. The other rows of the first are in `table2`, with more images."""
OTHERS = 2000
"""Test images beside X and those that choose."""


def run(seeds: Sequence[int] = range(5), image_seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns the NLL of each row on four tables and of three networks for images."""
    rows = Rows(__file__, {})
    for seed in seeds:
        for name in table1.TABLES:
            _add(rows, f"{name}, seed {seed}", partial(regression, name, seed))
    for seed in image_seeds:
        _add(rows, f"mnist, seed {seed}", partial(published_cnn, seed))
        for name in ("mnist", "fashion_mnist"):
            _add(rows, f"{name}, 3 epochs, seed {seed}", partial(small_cnn, name, seed))
    rows.facts["NLL minus the network's"] = differences(rows.runs)
    return rows.all()


def _add(rows: Rows, run: str, make: Callable[[], Case]) -> None:
    case = once(make)
    for row in ROWS:
        rows.add(run, row, lambda row: case().nll(row), row)


@dataclass(frozen=True)
class Case:
    """A network and its data.

    Attributes:
        model: the network.
        train: what posteriors sum over.
        val: what chooses δ, and the noise variance or the temperature.
        tests: name -> inputs and targets.
        size: N.
        noise: variance of the training residuals; None for classes.
    """

    model: nn.Module
    train: Batches
    val: Batches
    tests: Mapping[str, Part]
    size: int
    noise: float | None = None

    def nll(self, row: str) -> dict[str, float]:
        """Returns the NLL of a row on each test set."""
        if row in ("prior alone", CALL):
            likelihood = {} if self.noise is None else {"likelihood": ONE_NOISE}
            posterior = fitted(
                row, self.model, self.train, self.val, lw.everything, data_size=self.size, memory=2**30, **likelihood
            )
            parts = {name: batched(x, y, 500) for name, (x, y) in self.tests.items()}
            return {
                name: -float(torch.cat([posterior.predict(x).log_prob(y).double() for x, y in part]).mean())
                for name, part in parts.items()
            }
        if self.noise is None:
            temperature = lw.fit(self.model, self.val, lw.TemperatureScaling()).logit_temperature
            scale = 1.0 if row == "network" else 1 / float(temperature or 1.0)
            return {
                name: float(nn.functional.cross_entropy(scale * self.outputs(part), part[1]))
                for name, part in self.tests.items()
            }
        noise = self.noise if row == "network" else float(self.squares(joined(self.val)).mean())
        return {name: gaussian_nll(self.squares(part), noise) for name, part in self.tests.items()}

    def outputs(self, part: Part) -> torch.Tensor:
        """Returns the network's outputs."""
        with torch.no_grad():
            return torch.cat([self.model(x) for x in part[0].split(500)])

    def squares(self, part: Part) -> torch.Tensor:
        """Returns the squared residuals, float64."""
        return (self.outputs(part) - part[1]).double().square()


def regression(name: str, seed: int) -> Case:
    """Returns a network of `table1` with its rows: at most 200 to test, as there, and the others to choose."""
    model, (x, y), (x_other, y_other) = table1.network(name, False, seed)
    count, size = min(200, len(x_other) // 2), table1.SHOWN[name]
    with torch.no_grad():
        noise = float((model(x) - y).square().mean())
    train, val = batched(x[:size], y[:size], 250), batched(x_other[count:], y_other[count:], 250)
    return Case(model, train, val, {"nll": (x_other[:count], y_other[:count])}, len(x), noise)


def published_cnn(seed: int) -> Case:
    """Returns the network of `table2` with its images."""
    return image_case("mnist", table2.ImageRows("mnist", seed).task, seed)


def small_cnn(name: str, seed: int) -> Case:
    """Returns a network of `figure2` with its images."""
    return image_case(name, figure2.image_task(name, seed)[0], seed)


def image_case(name: str, task: Task, seed: int) -> Case:
    """Returns a network with X, 1 000 test images that choose, and 2 000 more to test, in the order of `table2`."""
    data = images(name)
    x, y = 2 * data.x_test - 1, data.y_test
    chosen, others = table2.TESTED, table2.TESTED + table2.VALIDATING
    order = random_rows(x, others + OTHERS, seed)
    at, val, rest = order[:chosen], order[chosen:others], order[others:]
    tests = {"nll": (x[at], y[at]), f"nll, {OTHERS} images": (x[rest], y[rest])}
    return Case(task.model, task.train, batched(x[val], y[val]), tests, task.data_size)


def differences(runs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the NLL minus that of the network with the same seed, task -> row -> mean and standard error."""
    return paired(runs, lambda rows: {row: of["nll"] - rows["network"]["nll"] for row, of in rows.items()})


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the NLL minus the network's on tables, and the NLL of the networks for images."""
    gained, found = results["NLL minus the network's"], results["table"]
    images = {}
    for name, heading in NETWORKS.items():
        for row in ("prior alone",) if name == "mnist" else ROWS:
            of = found[name][row]
            label = "one temperature" if row == "one number" else row
            images[f"{heading}, {label}"] = [shown(of[measure], 4) for measure in ("nll", f"nll, {OTHERS} images")]
    tables = {
        "one noise variance" if row == "one number" else row: [shown(gained[name][row]) for name in table1.TABLES]
        for row in ROWS[1:]
    }
    return {
        "tables": grid(list(table1.TABLES), tables),
        "images": grid([f"NLL, the {table2.TESTED} images of X", f"NLL, {OTHERS} test images"], images),
    }
