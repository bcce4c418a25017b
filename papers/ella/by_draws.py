"""Tables 1 and 4 and Figure 4b, ResNet-20: n and δ chosen by the 512 draws that score, as published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

from torch import Tensor

import lapwing as lw
from lapwing.covariance import Latent
from papers.common import drawing
from papers.common.cifar import LastLayer
from papers.common.data import joined
from papers.common.results import Rows, once, read
from papers.common.scores import averaged
from papers.common.tables import grid, shown
from papers.common.training import kept_tensors
from papers.ella import table1
from papers.ella.shared import curvatures, ella_latent
from papers.ella.table1 import (
    COUNTS,
    DELTAS,
    LABELS,
    LINK,
    RANKS,
    ROWS,
    TABLE_4,
    TEMPERATURES,
    Whole,
    best_point,
    fitted,
    prior_latent,
    scored,
)  # fmt: skip

SUMMED = 4096
"""Training images of ELLA's largest curvature. By draws no choice comes near them. Its rows of J are of all 14 000."""


def run(seeds: Sequence[int] = range(5), shown: int = 14_000, reported: int = 8000) -> dict[str, Any]:
    """Returns scores of ELLA and of the last layer whose choices are by draws, on the test images of `table1`.

    The Jacobians of 14 100 images take half an hour on a core, and are kept. The choices of a seed take ten minutes.

    Args:
        seeds: of ELLA's rows.
        shown: training images that ELLA's rows come from, and of the last layer's curvature.
        reported: test images.
    """
    rows = Rows(__file__, {"images of the curvature": SUMMED, "reported": reported})
    setup = once(lambda: LastLayer.load(0, shown, reported))
    for name, make in last_layers(setup).items():
        rows.add("last layer", name, make)
    spans = [(size, seed) for seed in seeds for size in ROWS]
    parts = once(lambda: contracted_parts(spans, shown, reported))
    for i, seed in enumerate(seeds):
        ellas = [once(partial(Span.of, parts, i * len(ROWS) + j)) for j in range(len(ROWS))]
        for name, make in of_seed(ellas).items():
            rows.add(f"ELLA, seed {seed}", name, make)
    rows.facts["NLL minus the default link's choice"] = differences(rows.runs)
    return rows.all()


def last_layers(setup: Callable[[], LastLayer]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Returns row -> what makes it, for the prior alone, the full matrix and KFAC of the last layer."""

    def row(method: lw.Method, tune: Callable[[], Any]) -> dict[str, Any]:
        posterior = fitted(setup(), method, tune=tune())
        x, y = joined(setup().test)
        temperature = posterior.logit_temperature or 1.0
        return {
            "prior precision": posterior.prior_precision, "T": temperature, "n": posterior.samples,
            **scored(posterior.latent(x), y, temperature),
        }  # fmt: skip

    def prior() -> dict[str, Any]:
        x, y = joined(setup().val)
        loss, delta, _ = by_draws(partial(prior_latent, setup(), x), y)
        x, y = joined(setup().test)
        return {"prior precision": delta, "validation nll": loss, **scored(prior_latent(setup(), x, delta), y)}

    makes: dict[str, Callable[[], dict[str, Any]]] = {"last layer, prior alone": prior}
    for name, method in (("last layer", lw.Full()), ("last layer, KFAC", lw.KFAC())):
        for how, tune in (
            ("validation", lambda: lw.Validation(setup().val, tempered=False, tolerance=0.0, link=LINK)),
            ("validation with T", lambda: lw.Validation(setup().val, link=LINK)),
            ("early stopping", lambda: lw.EarlyStopping(setup().val, link=LINK)),
        ):
            makes[f"{name}, {how}"] = partial(row, method, tune)
    return makes


def contracted_parts(spans: Sequence[tuple[int, int]], shown: int, reported: int) -> dict[str, Tensor]:
    """Returns outputs, features of all spans, prior covariances and labels of each part, "part, name" -> tensor."""
    seeds = sorted({seed for _, seed in spans})

    def make() -> dict[str, Tensor]:
        whole, found = Whole(spans, shown, reported), {}
        setup = whole.setup
        for part, batches in (("train", setup.train[: -(-SUMMED // 100)]), ("val", setup.val), ("test", setup.test)):
            x, y = joined(batches)
            for name, tensor in {**whole.of(x, [], whole._prior), "labels": y}.items():
                found[f"{part}, {name}"] = tensor
        return found

    return kept_tensors(f"ella_{shown}_{reported}_{SUMMED}_{'_'.join(map(str, seeds))}", make)


def by_draws(
    latent: Callable[[float], Latent], labels: Tensor, temperatures: Sequence[float] = (1.0,)
) -> tuple[float, float, float]:
    """Returns the lowest NLL by draws over the δ and T of `table1`, with the δ and T that have it.

    From the best pair of the default link it goes to the best neighbour until none is better. All pairs have the same
    random numbers.
    """
    at = cache(latent)

    @cache
    def loss(i: int, j: int) -> float:
        prediction = lw.Categorical(logit_temperature=temperatures[j]).predict(at(DELTAS[i]), LINK)
        return -float(prediction.log_prob(labels).double().mean())

    _, delta, temperature = best_point(at, labels, temperatures)
    here, last = (DELTAS.index(delta), list(temperatures).index(temperature)), None
    while here != last:
        last = here
        steps = product((-1, 0, 1), (-1, 0, 1))
        near = ((here[0] + i, here[1] + j) for i, j in steps)
        here = min(
            ((i, j) for i, j in near if 0 <= i < len(DELTAS) and 0 <= j < len(temperatures)), key=lambda ij: loss(*ij)
        )
    return loss(*here), DELTAS[here[0]], temperatures[here[1]]


@dataclass(frozen=True)
class Span:
    """ELLA on the span of one M and seed.

    Attributes:
        val: outputs, features and prior covariance of the validation images.
        test: likewise of the reported images.
        curvatures: n -> H_n.
        labels: of both.
    """

    val: dict[str, Tensor]
    test: dict[str, Tensor]
    curvatures: dict[int, Tensor]
    labels: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, parts: Callable[[], Mapping[str, Tensor]], place: int) -> Span:
        """Returns the span at a place in the order of the spans."""
        mine = slice(place * Whole.rank, (place + 1) * Whole.rank)
        train, val, test = (
            {name: parts()[f"{part}, {name}"] for name in ("outputs", "features", "prior")}
            for part in ("train", "val", "test")
        )
        for part in (train, val, test):
            part["features"] = part["features"][..., mine]
        counts = [n for n in COUNTS if n <= SUMMED]
        found = curvatures(train["outputs"], train["features"], counts)
        return cls(val, test, found, (parts()["val, labels"], parts()["test, labels"]))

    def row(self, rank: int, choose: Callable[..., Any], residual: bool = False, only: Any = None) -> dict[str, Any]:
        """Returns test scores at the n, δ and T of lowest validation NLL.

        Args:
            rank: K.
            choose: `by_draws` or `best_point`, with the temperatures.
            residual: whether to add the residual.
            only: the numbers n to compare; None compares all.
        """
        found = []
        for n in only or self.curvatures:
            latent = partial(ella_latent, self.val, self.curvatures[n][:rank, :rank], residual=residual)
            found.append((*choose(latent, self.labels[0]), n))
        loss, delta, temperature, n = min(found)
        at = ella_latent(self.test, self.curvatures[n][:rank, :rank], delta, residual=residual)
        return {
            "n": n, "prior precision": delta, "T": temperature, "validation nll": loss,
            **scored(at, self.labels[1], temperature),
        }  # fmt: skip


DEFAULT = "n and prior by the default link"


def of_seed(spans: Sequence[Callable[[], Span]]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Returns row -> what makes it, for the spans of one seed, the first with M of Table 1."""
    ella = spans[0]
    makes: dict[str, Callable[[], dict[str, Any]]] = {
        "n and prior": lambda: ella().row(20, by_draws),
        DEFAULT: lambda: ella().row(20, best_point),
        "prior alone": lambda: ella().row(20, by_draws, only=(0,)),
        "with residual": lambda: ella().row(20, by_draws, residual=True),
        "n, prior and T": lambda: ella().row(20, partial(by_draws, temperatures=TEMPERATURES)),
    }
    for size, span in zip(ROWS, spans, strict=True):
        for rank in RANKS:
            makes[f"M = {size}, K = {rank}"] = partial(lambda span, rank: span().row(rank, by_draws), span, rank)
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
    """Returns the scores of all rows, and Table 4 beside the paper's numbers."""
    table = results["table"]
    ella = {name: row for name, row in table["ELLA"].items() if not name.startswith("M = ")}
    rows = {**table["last layer"], **{f"ELLA, {name}": row for name, row in ella.items()}}
    columns = ["NLL, 512 draws", "NLL, default link", "ECE", "accuracy, %", "n", "δ", "T"]
    over = {}
    for size in ROWS:
        found = [table["ELLA"][f"M = {size}, K = {rank}"]["nll"] for rank in RANKS]
        over[f"M = {size}"] = [
            f"{shown(ours, 4)} ({published:.4f})" for ours, published in zip(found, TABLE_4[size], strict=True)
        ]
    return {
        "scores": grid(columns, {name: table1.cells(row) for name, row in rows.items()}),
        "Table 4": grid([f"K = {rank}" for rank in RANKS], over),
    }


def draw(results: Mapping[str, Any]) -> None:
    """Draws the NLL over K for each M, and for the largest M by the choice of the default link."""
    ella, plain = results["table"]["ELLA"], read(table1.__file__)["table"]
    figure, ((axis,),) = drawing.panels(1, 1, (5.5, 4))
    for size in ROWS:
        ranks = {rank: ella[f"M = {size}, K = {rank}"]["nll"] for rank in RANKS}
        if size == ROWS[0]:
            ranks[20] = ella["n and prior"]["nll"]
        drawing.curve(axis, dict(sorted(ranks.items())), label=f"M = {size}")
    ranks = {rank: plain["ELLA"][f"M = {ROWS[0]}, K = {rank}"]["nll"] for rank in RANKS}
    drawing.curve(axis, ranks, label=f"M = {ROWS[0]}, chosen by the default link", color="#aaaaaa")
    level = plain["network and last layer"]["network, one temperature"]["nll"]["mean"]
    axis.axhline(level, color="#555555", linestyle="--", label="network, one temperature")
    axis.set(xlabel="K", ylabel=LABELS["nll"])
    drawing.legend_below(figure, 2)
    drawing.save(figure, __file__)
