"""Every method on networks that are not trained again: a ViT, and the CIFAR-10 ResNet-20, which needs a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from papers.together import tasks
from papers.together.comparison import run_all
from papers.together.pages import tables

__all__ = ["run", "tables"]


def run(seeds: Sequence[int] = (0, 1), names: Sequence[str] = tasks.GIVEN) -> dict[str, Any]:
    """Returns a row for each method, way and network; the seed draws the images, and the ViT's initial weights."""
    return run_all(__file__, names, seeds)
