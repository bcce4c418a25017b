"""Figures 5 and 10 by the numbers of appendix B.3 in full mode, where the hidden covariances count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lapwing as lw
from papers.common.results import Rows, once
from papers.streamlined import figure10
from papers.streamlined.figure5 import DigitTask

IMAGES = 6
"""As in the full mode of `figure5`."""

WAYS = lw.Linearized(), lw.Streamlined("full")
"""Through the network alone, whose weights are certain, full mode is linearised prediction, which is faster."""

tables = figure10.tables


def run(seeds: Sequence[int] = range(3)) -> dict[str, Any]:
    """Returns what the maps say in numbers, of three networks: five minutes of a core each."""
    rows = Rows(__file__, {"rise": figure10.RISE, "most steps": figure10.STEPS})
    for seed in seeds:
        task = once(lambda seed=seed: DigitTask.load(seed))  # type: ignore[misc]
        rows.add(f"seed {seed}", "log variance", figure10.both, task, False, IMAGES, WAYS)
    return rows.all()
