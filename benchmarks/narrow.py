"""Overfitted regressions without held-out data: how often the default warns, and what `lw.Refit()` mends.

MLPs of one to three hidden layers are trained for a short or a long time, without weight decay, on real and generated
tables. Each is fitted by `lw.fit(model, data)`; one in four, and each that covers less than 80 %, also with
`tune=lw.Refit()`. A row has the coverage of 90 % intervals on other rows, and whether lapwing warned. Tables with an
even number chose the rules, the others are reported on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from torch import nn
from torch.nn import functional as F

import lapwing as lw
from papers.common.data import Part, Table, random_rows, rows_and_targets, standardised
from papers.common.measure import timed
from papers.common.networks import mlp
from papers.common.scores import interval_scores
from papers.common.tables import grid
from papers.common.training import ONE_NOISE, adam

TESTED = 1000
BAD, NARROW, GOOD = 0.75, 0.8, 0.86
"""Coverage of 90 % intervals below which a fit is bad or too narrow, and from which on it is good."""

GENERATED = 5000
"""Number of rows of a generated table."""


def arm(noise: float, seed: int = 0) -> Part:
    """Returns the distance of the hand of an arm of four joints from a point, by angles and lengths, with noise."""
    draw = np.random.default_rng(seed)
    angles, lengths = draw.uniform(-np.pi, np.pi, (GENERATED, 4)), draw.uniform(0.5, 1.0, (GENERATED, 4))
    turns = angles.cumsum(1)
    distance = np.hypot((lengths * np.cos(turns)).sum(1) - 1, (lengths * np.sin(turns)).sum(1))
    return _tensors(np.hstack([angles, lengths]), distance + noise * draw.standard_normal(GENERATED))


def sparse(noise: float, seed: int = 0) -> Part:
    """Returns a function of 3 of 40 features, with noise."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((GENERATED, 40))
    y = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2]
    return _tensors(x, y + noise * draw.standard_normal(GENERATED))


def friedman(make: Callable[..., Any], noise: float) -> Part:
    """Returns a table of Friedman (1991), with noise of this part of the targets' standard deviation."""
    x, y = make(GENERATED, random_state=0)
    return _tensors(x, y + noise * y.std() * np.random.default_rng(0).standard_normal(GENERATED))


def _tensors(x: Any, y: Any) -> Part:
    return torch.as_tensor(x).double(), torch.as_tensor(y).double()


@cache
def real(name: str) -> Part:
    """Returns a table of the data folder, without columns that have missing entries."""
    x, y = rows_and_targets(name)
    x = x[:, ~x.isnan().any(0)]
    return (x, y.log1p()) if name == "uci_forest_fires" else (x, y)


TABLES: dict[str, Callable[[], Part]] = {
    "bike": lambda: real("uci_bike"),
    "arm, noise .1": lambda: arm(0.1),
    "arm, noise .4": lambda: arm(0.4),
    "Friedman 1, noise .3": lambda: friedman(datasets.make_friedman1, 0.3),
    "Friedman 1, noise 1": lambda: friedman(datasets.make_friedman1, 1.0),
    "Friedman 2, noise .3": lambda: friedman(datasets.make_friedman2, 0.3),
    "Friedman 3, noise 1": lambda: friedman(datasets.make_friedman3, 1.0),
    "Friedman 3, noise .3": lambda: friedman(datasets.make_friedman3, 0.3),
    "sparse, noise .3": lambda: sparse(0.3),
    "sparse, noise 1": lambda: sparse(1.0),
    "diabetes": lambda: _tensors(*datasets.load_diabetes(return_X_y=True)),
    "parkinsons": lambda: real("uci_parkinsons"),
    "communities": lambda: real("uci_communities"),
    "thermography": lambda: real("uci_thermography"),
    "concrete": lambda: real("uci_concrete"),
    "airfoil": lambda: real("uci_airfoil"),
    "pol": lambda: real("pol"),
    "elevators": lambda: real("elevators"),
    "kin40k": lambda: real("kin40k"),
    "power": lambda: real("uci_power"),
    "wine, red": lambda: real("uci_wine_red"),
    "California": lambda: real("california_housing"),
    "forest fires": lambda: real("uci_forest_fires"),
    "real estate": lambda: real("uci_real_estate"),
    "energy": lambda: real("uci_energy"),
    "boston": lambda: real("uci_boston"),
}
"""Tables by name."""


@dataclass(frozen=True)
class Network:
    """A network: its table, number of training rows, hidden layers, activation, epochs, rate, and seed."""

    table: str
    rows: int
    hidden: tuple[int, ...]
    activation: str
    epochs: int
    rate: float
    seed: int


def networks(rounds: int) -> list[Network]:
    """Returns networks with random options, one for each table and round."""
    draw = np.random.default_rng(0)
    shapes = [(50,), (50, 50), (100, 50), (50, 50, 50)]
    return [
        Network(
            name, int(draw.choice([200, 400, 600])), shapes[draw.integers(4)],
            str(draw.choice(["ReLU", "Tanh"])), int(draw.choice([100, 300])), float(draw.choice([5e-3, 1e-2])),
            seed,
        )
        for seed in range(rounds) for name in TABLES
    ]  # fmt: skip


def trained(network: Network, data: Part) -> nn.Module:
    """Trains the network by Adam on the mean squared error."""
    steps = torch.Generator().manual_seed(network.seed)
    torch.manual_seed(network.seed)
    model = mlp(data[0].shape[1], *network.hidden, 1, activation=getattr(nn, network.activation))
    return adam(model, data, network.epochs, network.rate, generator=steps, loss=F.mse_loss)


class Warnings(logging.Handler):
    """Keeps the messages of lapwing's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one message."""
        self.messages.append(record.getMessage())


def scores(model: nn.Module, table: Table, tune: lw.Tuning | None) -> dict[str, Any]:
    """Returns coverage and NLL of a fit on the test rows, whether it warned, and its seconds."""
    heard, log = Warnings(), logging.getLogger("lapwing")
    log.addHandler(heard)
    fit = partial(lw.fit, model, table.train, likelihood=ONE_NOISE, tune=tune, progress=False)
    posterior, seconds = timed(fit, time.process_time)
    log.removeHandler(heard)
    found = interval_scores(posterior.predict(table.test[0]), table.test[1])
    return {
        "cover": found["coverage"], "nll": found["nll"],
        "warned": any("overfitted" in message for message in heard.messages), "seconds": seconds,
    }  # fmt: skip


def study(network: Network, number: int) -> dict[str, Any]:
    """Trains one network and fits it; returns its row."""
    x, y = TABLES[network.table]()
    count = min(network.rows, int(0.7 * len(x)))
    order = random_rows(x, len(x), network.seed)[: count + TESTED]
    table = standardised(network.table, x[order], y[order], count, count, "")
    model = trained(network, table.train)

    def error(part: Part) -> float:
        with torch.no_grad():
            return float(F.mse_loss(model(part[0]), part[1]))

    row = {**asdict(network), "train": error(table.train), "test": error(table.test)}
    row["default"] = scores(model, table, lw.BoundedEvidence())
    if number % 4 == 0 or row["default"]["cover"] < NARROW:
        row["refit"] = scores(model, table, lw.Refit())
    return row


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table in Markdown: warnings and coverage of bad, narrow and good fits."""
    groups = {
        "below 75 %": (0.0, BAD),
        "75 to 80 %": (BAD, NARROW),
        "80 to 86 %": (NARROW, GOOD),
        "86 % and more": (GOOD, 2.0),
    }
    columns = "fits", "the default warns", "`lw.Refit()` widens", "below 80 % after it", "mean coverage before, after"
    lines = {}
    for name, (low, high) in groups.items():
        some = [row for row in rows if low <= row["default"]["cover"] < high]
        again = [row for row in some if "refit" in row]
        narrow = sum(row["refit"]["cover"] < NARROW for row in again)
        means = [sum(row[tune]["cover"] for row in again) / max(1, len(again)) for tune in ("default", "refit")]
        warned, widened = (
            sum(row[tune]["warned"] for row in part) for tune, part in (("default", some), ("refit", again))
        )
        lines[name] = [
            f"{len(some)}", f"{warned}", f"{widened} of {len(again)}", f"{narrow} of {len(again)}",
            f"{100 * means[0]:.1f} %, {100 * means[1]:.1f} %",
        ]  # fmt: skip
    return grid(columns, lines, right=True, corner="coverage of the default")


def parts(rounds: int = 20) -> dict[str, Callable[[], Any]]:
    """Returns networks of each table, `rounds` of them."""
    return {
        f"{network.table}, seed {network.seed}": partial(study, network, number // len(TABLES) + number)
        for number, network in enumerate(networks(rounds))
    }


def tables(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Returns warnings and coverage on all tables, on those that chose the rules, and on those that are reported."""
    rows, order = list(results.values()), list(TABLES)
    halves = ([row for row in rows if order.index(row["table"]) % 2 == parity] for parity in (0, 1))
    return {"all": summary(rows), **dict(zip(("chose the rules", "reported"), map(summary, halves), strict=True))}
