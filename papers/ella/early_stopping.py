"""Section 5.2: early stopping of the last layer on validation or augmented images, and the time that it saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lapwing as lw
from papers.common.cifar import LastLayer
from papers.common.data import Batches, batched, images, joined, random_rows
from papers.common.images import resized_crops
from papers.common.measure import timed
from papers.common.results import Rows, once
from papers.common.scores import class_scores
from papers.common.tables import grid, shown

HELD_OUT = 500
"""Validation images, or augmented training images."""

DELTA = 0.5
"""Prior precision, at which full Laplace of the last layer has a V in Figure 7."""


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns n, NLL and seconds of the fit; the seed gives the order of the training images."""
    rows = Rows(__file__, {"held-out images": HELD_OUT, "prior precision": DELTA})
    for seed in seeds:
        setup = once(partial(LastLayer.load, seed))
        rows.add(f"seed {seed}", "all images", partial(_row, setup, None, ""))
        crops = once(partial(_crops, setup, seed))
        for name, held_out in (("validation", partial(_validation, setup)), ("crops", crops)):
            for stop in ("best", "first fall"):
                rows.add(f"seed {seed}", f"{name}, {stop}", partial(_row, setup, held_out, stop))
    return rows.all()


Held = Callable[[], Batches]


def _validation(setup: Callable[[], LastLayer]) -> Batches:
    return setup().val[: HELD_OUT // 100]


def _crops(setup: Callable[[], LastLayer], seed: int) -> Batches:
    """Returns the features of resized crops of training images, and their labels."""
    data = images("cifar10")
    picked = random_rows(data.x_train, HELD_OUT, seed + 100)
    return batched(setup().trunk(resized_crops(data.x_train[picked], seed)), data.y_train[picked])


def _row(setup: Callable[[], LastLayer], held_out: Held | None, stop: Any) -> dict[str, float]:
    """Fits KFAC of the last layer and scores it on the reported images, by the default link."""
    tune = None if held_out is None else lw.EarlyStopping(held_out(), stop=stop)
    x, y = joined(setup().test)
    fit = partial(lw.fit, setup().layer, setup().train, lw.KFAC(), prior_precision=DELTA, tune=tune)
    posterior, seconds = timed(fit, time.process_time)
    scores = class_scores(posterior.predict(x).probs, y)
    return {"n": posterior.samples, "seconds": seconds, "nll": scores["nll"], "ece": scores["ece"]}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the rows, averaged over seeds."""
    table = results["table"][""]
    cells = {
        name: [shown(row["n"], 0), shown(row["nll"]), shown(row["ece"]), shown(row["seconds"], 1)]
        for name, row in table.items()
    }
    return {"stops": grid(["n", "NLL", "ECE", "seconds of the fit"], cells)}
