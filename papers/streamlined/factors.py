"""Table 2 by the covariance of equation 10, whose factors are shifted by the root of the prior precision."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import lapwing as lw
from papers.common.results import Rows, once
from papers.streamlined.equation10 import equation_10
from papers.streamlined.table2 import MLPTask

ROW = "LA, equation 10"
WAYS = ("streamlined", "GLM", "sampling")


def run(seeds: Sequence[int] = range(5), names: Sequence[str] = ("mnist", "fashion_mnist")) -> dict[str, Any]:
    """Returns the scores of `table2` for this covariance, at the same prior precision, on the same networks."""
    rows = Rows(__file__, {"tested": 5000})
    for seed in seeds:
        for name in names:
            run, task = f"{name}, seed {seed}", once(partial(MLPTask.load, name, seed))
            rows.add(run, "network", lambda task: task().network(), task)
            rows.add(run, ROW, lambda task: published(task()), task)
    return rows.all()


def published(task: MLPTask) -> dict[str, Any]:
    """Returns the scores of each way through the published covariance."""
    posterior = equation_10(task.laplace(lw.KFAC(), lw.Evidence()))
    return task.scores(posterior, task.ways(*WAYS))
