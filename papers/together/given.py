"""Every method on larger networks, which no method trains again: a CIFAR-10 ResNet-20, a ViT and a GPT-2 on texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from papers.together import tasks
from papers.together.comparison import run_all
from papers.together.pages import tables

__all__ = ["run", "tables"]


def run(seeds: Sequence[int] = range(5), names: Sequence[str] = tasks.GIVEN) -> dict[str, Any]:
    """Returns a row for each method, way and network; the seed draws data, and weights before training.

    The page has five seeds of the ViT (40 minutes of a core each) and of the GPT-2 (two hours), and one ResNet-20.
    """
    return run_all(__file__, names, seeds)
