"""Tables 1 and 4 and Figure 4b, ResNet-20: n and δ chosen by the 512 draws that score, as published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing.covariance import Latent
from lapwing.tangent import Tangent
from papers.common.cifar import Cifar
from papers.common.data import joined
from papers.common.results import Rows, once, read
from papers.common.scores import averaged
from papers.common.tables import grid, shown
from papers.common.training import kept_tensors
from papers.ella import table1
from papers.ella.shared import balanced_directions, contracted, curvatures, ella_latent
from papers.ella.table1 import (
    COUNTS,
    DELTAS,
    LINK,
    RANKS,
    TABLE_4,
    Whole,
    best_point,
    scored,
)  # fmt: skip

SUMMED = 512
"""Training images of the largest curvature that is compared; rows of J are of all 14 000."""

ROWS = 2000
"""M. Other M are in `table1`."""


def run(seeds: Sequence[int] = range(5), shown: int = 14_000, reported: int = 4000) -> dict[str, Any]:
    """Returns scores of ELLA whose n and δ are chosen by draws, on the first test images of `table1`.

    The rows of J and the Jacobians of 6 600 images take ten minutes on a core, and are kept. The choices of a seed take
    two.

    Args:
        seeds: of ELLA's rows.
        shown: training images that the rows come from.
        reported: test images.
    """
    rows = Rows(__file__, {"images of the curvature": SUMMED, "reported": reported})
    parts = once(lambda: Parts(seeds, shown, reported).all)
    for i, seed in enumerate(seeds):
        span = once(partial(Span.of, parts, i))
        for name, make in choices(span).items():
            rows.add(f"ELLA, seed {seed}", name, make)
    rows.facts["NLL minus the default link's choice"] = differences(rows.runs)
    return rows.all()


class Parts:
    """The ResNet-20's images on the directions of some spans: kept piece by piece, since Jacobians take minutes.

    Args:
        seeds: of the spans.
        shown: training images that rows of J come from.
        reported: test images.
    """

    def __init__(self, seeds: Sequence[int], shown: int, reported: int) -> None:
        self.seeds, self.shown, self.setup = seeds, shown, Cifar.load(0, shown, reported)
        train = self.setup.train[: -(-SUMMED // 100)]
        self.batches = {"train": train, "val": self.setup.val, "test": self.setup.test}

    @cached_property
    def tangent(self) -> Tangent:
        """The network with all its weights."""
        return Tangent.survey(self.setup.model, self.setup.train[0][0][:4])

    def directions(self, seed: int) -> Tensor:
        """Returns ELLA's directions of a seed (K, P)."""
        x, y = joined(self.setup.train)
        make = lambda: {"found": balanced_directions(self.tangent, x, y, ROWS, Whole.rank, seed)}  # noqa: E731
        return kept_tensors(f"ella_directions_{self.shown}_{ROWS}_{seed}", make)["found"]

    @cached_property
    def every(self) -> Tensor:
        """The directions of all spans (spans K, P)."""
        return torch.cat([self.directions(seed) for seed in self.seeds])

    def piece(self, part: str, start: int, count: int = 5) -> dict[str, Tensor]:
        """Returns outputs and features of `count` batches of a part, from a batch on."""
        x, _ = joined(self.batches[part][start : start + count])
        seeds = "_".join(map(str, self.seeds))
        return kept_tensors(f"ella_{part}_{start}_{len(x)}_{seeds}", lambda: contracted(self.tangent, x, self.every))

    @cached_property
    def all(self) -> dict[str, dict[str, Tensor]]:
        """Part -> outputs, features and labels of all its images."""
        found = {}
        for part, batches in self.batches.items():
            pieces = [self.piece(part, start) for start in range(0, len(batches), 5)]
            found[part] = {name: torch.cat([piece[name] for piece in pieces]) for name in ("outputs", "features")}
            found[part]["labels"] = joined(batches)[1]
        return found


def by_draws(latent: Callable[[float], Latent], labels: Tensor) -> tuple[float, float]:
    """Returns the lowest NLL by draws over the δ of `table1`, with the δ that has it.

    From the best δ of the default link it goes to the better neighbour until none is better. All δ have the same random
    numbers.
    """

    @cache
    def loss(i: int) -> float:
        prediction = lw.Categorical().predict(latent(DELTAS[i]), LINK)
        return -float(prediction.log_prob(labels).double().mean())

    here, last = DELTAS.index(best_point(latent, labels)[1]), -1
    while here != last:
        last = here
        here = min((i for i in (here - 1, here, here + 1) if 0 <= i < len(DELTAS)), key=loss)
    return loss(here), DELTAS[here]


@dataclass(frozen=True)
class Span:
    """ELLA on the span of one M and seed.

    Attributes:
        val: outputs, features and labels of the validation images.
        test: likewise of the reported images.
        curvatures: n -> H_n.
    """

    val: dict[str, Tensor]
    test: dict[str, Tensor]
    curvatures: dict[int, Tensor]

    @classmethod
    def of(cls, parts: Callable[[], dict[str, dict[str, Tensor]]], place: int) -> Span:
        """Returns the span at a place in the order of the spans."""
        mine = slice(place * Whole.rank, (place + 1) * Whole.rank)
        train, val, test = ({**part, "features": part["features"][..., mine]} for part in parts().values())
        found = curvatures(train["outputs"], train["features"], [n for n in COUNTS if n <= SUMMED])
        return cls(val, test, found)

    def row(self, rank: int, choose: Callable[..., Any], only: Any = None) -> dict[str, Any]:
        """Returns test scores at the n and δ of lowest validation NLL.

        Args:
            rank: K.
            choose: `by_draws` or `best_point`.
            only: the numbers n to compare; None compares all.
        """
        found = []
        for n in only or self.curvatures:
            latent = partial(ella_latent, self.val, self.curvatures[n][:rank, :rank])
            found.append((*choose(latent, self.val["labels"])[:2], n))
        loss, delta, n = min(found)
        at = ella_latent(self.test, self.curvatures[n][:rank, :rank], delta)
        return {"n": n, "prior precision": delta, "validation nll": loss, **scored(at, self.test["labels"])}


DEFAULT = "n and prior by the default link"


def choices(span: Callable[[], Span]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Returns row -> what makes it; K is 20, if the name has no other."""
    makes: dict[str, Callable[[], dict[str, Any]]] = {
        "n and prior": lambda: span().row(20, by_draws),
        DEFAULT: lambda: span().row(20, best_point),
        "prior alone": lambda: span().row(20, by_draws, only=(0,)),
    }
    for rank in RANKS:
        makes[f"M = {ROWS}, K = {rank}"] = partial(lambda rank: span().row(rank, by_draws), rank)
    return makes


def differences(runs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns measure -> ELLA's minus the measure of the choice by the default link, paired by seed."""
    found = [
        {measure: rows["n and prior"][measure] - rows[DEFAULT][measure] for measure in ("nll", "ece")}
        for rows in runs.values()
        if DEFAULT in rows
    ]
    return averaged(found) if found else {}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the scores of K = 20, and the NLL over K beside the paper's and beside the choice by the default link."""
    ella, plain = results["table"]["ELLA"], read(table1.__file__)["table"]["ELLA"]
    columns = ["NLL, 512 draws", "NLL, default link", "ECE", "accuracy, %", "n", "δ", "T"]
    names = [f"M = {ROWS}, K = {rank}" for rank in RANKS]
    over = {
        "chosen by draws": [shown(ella[name]["nll"], 4) for name in names],
        "chosen by the default link": [shown(plain[name][f"first {results['reported']}"]["nll"], 4) for name in names],
        "published": [f"{nll:.4f}" for nll in TABLE_4[ROWS][: len(RANKS)]],
    }
    rows = {f"ELLA, {name}": table1.cells(row) for name, row in ella.items() if name not in names}
    return {"scores": grid(columns, rows), "Table 4": grid([f"K = {rank}" for rank in RANKS], over)}
