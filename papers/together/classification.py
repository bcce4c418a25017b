"""Every method on classifiers of images: NLL, ECE, accuracy, AUROC and cost, with standard errors over networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from papers.together import tasks
from papers.together.comparison import run_all
from papers.together.pages import tables

__all__ = ["run", "tables"]


def run(seeds: Sequence[int] = range(5), names: Sequence[str] = tuple(tasks.IMAGES)) -> dict[str, Any]:
    """Returns a row for each method, way, network and seed."""
    return run_all(__file__, names, seeds)
