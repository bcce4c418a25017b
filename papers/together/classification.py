"""Every method on classifiers of images: NLL, ECE, accuracy, AUROC and cost, with standard errors over networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from papers.common.results import Rows
from papers.together import tasks
from papers.together.comparison import FACTS, add


def run(seeds: Sequence[int] = range(5), names: Sequence[str] = tuple(tasks.IMAGES)) -> dict[str, Any]:
    """Returns a row for each method, way, network and seed; all methods at one seed come first."""
    rows = Rows(__file__, FACTS)
    for seed in seeds:
        for name in names:
            add(rows, name, seed)
    return rows.all()
