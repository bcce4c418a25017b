"""Tables 1 and 4 and Figure 4b, ResNet-20: n and δ chosen by the 512 draws that score, as published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing.covariance import Latent
from papers.common.data import Batches, joined
from papers.common.results import Rows, once, read
from papers.common.scores import averaged
from papers.common.tables import grid, shown
from papers.common.training import kept_tensors
from papers.ella import table1
from papers.ella.shared import balanced_directions, contracted
from papers.ella.table1 import DELTAS, LINK, RANKS, TABLE_4, OneSpan, Whole, best_point

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
    parts = once(lambda: Pieces([(ROWS, seed) for seed in seeds], shown, reported))
    for i, seed in enumerate(seeds):
        span = once(partial(OneSpan.of, parts, i))
        for name, make in choices(span).items():
            rows.add(f"ELLA, seed {seed}", name, make)
    rows.facts["NLL minus the default link's choice"] = differences(rows.runs)
    return rows.all()


class Pieces(Whole):
    """The ResNet-20's images on the directions of some spans: kept piece by piece, since Jacobians take minutes."""

    @cached_property
    def directions(self) -> Tensor:
        """ELLA's directions of all spans (spans K, P)."""
        x, y = joined(self.setup.train)

        def make(size: int, seed: int) -> dict[str, Tensor]:
            return {"found": balanced_directions(self.tangent, x, y, size, self.rank, seed)}

        names = {span: f"ella_directions_{len(x)}_{span[0]}_{span[1]}" for span in self.spans}
        return torch.cat([kept_tensors(name, partial(make, *span))["found"] for span, name in names.items()])

    def pieces(self, part: str, batches: Batches) -> dict[str, Tensor]:
        """Returns outputs and features of a part, five batches a file."""
        seeds, found = "_".join(str(seed) for _, seed in self.spans), []
        for start in range(0, len(batches), 5):
            x, _ = joined(batches[start : start + 5])
            make = lambda x=x: contracted(self.tangent, x, self.directions)  # noqa: E731
            found.append(kept_tensors(f"ella_{part}_{start}_{len(x)}_{seeds}", make))
        return {name: torch.cat([piece[name] for piece in found]) for name in ("outputs", "features")}

    @cached_property
    def train(self) -> dict[str, Tensor]:
        """The first training images."""
        found = self.pieces("train", self.setup.train[: -(-SUMMED // 100)])
        return {name: values[:SUMMED] for name, values in found.items()}

    @cached_property
    def val(self) -> dict[str, Tensor]:
        """The validation images."""
        return self.pieces("val", self.setup.val)

    @cached_property
    def test(self) -> dict[str, Tensor]:
        """The reported images."""
        return self.pieces("test", self.setup.test)


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


DEFAULT = "n and prior by the default link"


def choices(span: Callable[[], OneSpan]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Returns row -> what makes it; K is 20, if the name has no other."""

    def row(rank: int = 20, only: Sequence[int] | None = None) -> dict[str, Any]:
        choose = lambda latent, labels, *_: (*by_draws(latent, labels), 1.0)  # noqa: E731
        return span().row(only or span().counts, rank, choose=choose)

    makes: dict[str, Callable[[], dict[str, Any]]] = {
        "n and prior": row, DEFAULT: lambda: span().row(span().counts), "prior alone": partial(row, only=[0])
    }  # fmt: skip
    return makes | {f"M = {ROWS}, K = {rank}": partial(row, rank) for rank in RANKS}


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
