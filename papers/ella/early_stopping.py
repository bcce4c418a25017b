"""Section 5.2: early stopping of the last layer on validation or augmented images, and the time that it saves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import lapwing as lw
from papers.common.cifar import LastLayer
from papers.common.data import Batches, batched, images, random_rows
from papers.common.images import resized_crops
from papers.common.results import Rows, once
from papers.common.scores import class_scores
from papers.common.tables import grid, shown
from papers.ella.table1 import joined

HELD_OUT = 500
"""Validation images, or augmented training images."""

DELTA = 0.5
"""Prior precision, at which full Laplace of the last layer has a V in Figure 7."""


def run(seeds: Sequence[int] = (0, 1, 2)) -> dict[str, Any]:
    """Returns n, NLL and seconds of the fit; the seed gives the order of the training images."""
    rows = Rows(__file__, {"held-out images": HELD_OUT, "prior precision": DELTA})
    for seed in seeds:
        setup = once(lambda s=seed: LastLayer.load(s))
        augmented = once(lambda load=setup, s=seed: crops(load(), s))
        rows.add(f"seed {seed}", "all images", lambda load=setup: row(load(), None))
        for name, held_out in (("validation", lambda load=setup: load().val), ("crops", augmented)):
            for stop in ("best", "first fall"):
                rows.add(
                    f"seed {seed}", f"{name}, {stop}",
                    lambda p, s, load=setup: row(load(), lw.EarlyStopping(p()[: HELD_OUT // 100], stop=s)),
                    held_out, stop,
                )  # fmt: skip
    return rows.all()


def crops(setup: LastLayer, seed: int) -> Batches:
    """Returns the features of resized crops of training images, and their labels."""
    data = images("cifar10")
    picked = random_rows(data.x_train, HELD_OUT, seed + 100)
    return batched(setup.trunk(resized_crops(data.x_train[picked], seed)), data.y_train[picked])


def row(setup: LastLayer, tune: lw.EarlyStopping | None) -> dict[str, float]:
    """Fits KFAC of the last layer and scores it on the reported images, by the default link."""
    x, y = joined(setup.test)
    start = time.process_time()
    posterior = lw.fit(setup.layer, setup.train, lw.KFAC(), prior_precision=DELTA, tune=tune)
    seconds = time.process_time() - start
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
