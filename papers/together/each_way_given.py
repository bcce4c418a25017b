"""The prior precision of KFAC chosen for each way of prediction on a ViT and a GPT-2, where a choice takes minutes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from papers.together import tasks
from papers.together.each_way import run_all, tables

__all__ = ["run", "tables"]


def run(seeds: Sequence[int] = range(5), names: Sequence[str] = tuple(tasks.TRANSFORMERS)) -> dict[str, Any]:
    """Returns a row for each way, choice, network and seed.

    The page has five seeds of the ViT (3 minutes of a core each), and of the GPT-2 (25 minutes).
    """
    return run_all(__file__, seeds, names, ("KFAC",))
