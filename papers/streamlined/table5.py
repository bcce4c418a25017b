"""Table 5: a GPT-2 on SST-2, foreign texts from AG News."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from papers.common.results import Rows
from papers.streamlined.table4 import add, table

PUBLISHED = {
    "columns": ("LA sampling", "LA GLM", "LA streamlined"),
    "MRPC": (1.219, 0.660, 0.629), "WiC": (0.858, 0.730, 0.719), "BoolQ": (0.814, 0.650, 0.684),
}  # fmt: skip
"""NLPD of a pre-trained GPT-2."""


def run(seeds: Sequence[int] = range(5), tested: int = 600) -> dict[str, Any]:
    """Returns scores of every way through Laplace and mean-field posteriors of the last MLPs."""
    rows = Rows(__file__, {"tested": tested, "foreign": tested // 2, "draws": 20})
    for seed in seeds:
        add(rows, "sst2", seed, ("MLPs",), 20, 5, tested=tested, tuned=300)
    return rows.all()


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns NLPD and ECE of the GPT-2."""
    return {"scores": table(results["table"], ["sst2, MLPs"])}
