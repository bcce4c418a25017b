"""Figure 12: scores of sampling over the number of draws, to 5 000; Table 2's MLP on Fashion-MNIST, KFAC and IVON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lapwing as lw
from papers.common.results import Rows, once
from papers.common.scores import probabilities
from papers.common.tables import grid, shown
from papers.streamlined.figure11 import over_draws
from papers.streamlined.setting import scores
from papers.streamlined.table2 import MLPTask

TESTED, COUNTS = 1000, (10, 50, 100, 200, 500, 1000, 2000, 5000)
"""Test images, and numbers of draws."""


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns scores by the number of draws, and the scores of the other ways."""
    rows = Rows(__file__, {"tested": TESTED})
    for seed in seeds:
        task = once(lambda seed=seed: MLPTask.load("fashion_mnist", seed, TESTED))  # type: ignore[misc]
        fits = {
            "LA": once(lambda task=task: task().laplace(lw.KFAC(), lw.Evidence())),  # type: ignore[misc]
            "MFVI": once(lambda task=task: task().variational),  # type: ignore[misc]
        }
        for method, fitted in fits.items():
            name = f"{method}, seed {seed}"
            rows.add(name, "sampling", lambda t, p: over_draws(p(), t().data.test, COUNTS, COUNTS[-1]), task, fitted)
            for label in ("GLM", "streamlined"):
                rows.add(name, label, by_way, task, fitted, label)
    return rows.all()


def by_way(task: Any, fitted: Any, label: str) -> dict[str, float]:
    """Returns the scores of the test images by one of Table 2's ways."""
    x, y = task().tested
    return scores(probabilities(fitted(), task().latent(fitted(), x, task().ways(label)[label])), y)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the NLPD by the number of draws, and by the other ways."""
    counts, ways = ("10", "100", "1000", "5000"), ("GLM", "streamlined")
    rows = {
        name: [shown(found["sampling"][count]["nlpd"]) for count in counts] + [shown(found[w]["nlpd"]) for w in ways]
        for name, found in results["table"].items()
    }
    return {"draws": grid([*(f"{count} draws" for count in counts), *ways], rows)}
