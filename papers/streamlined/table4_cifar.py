"""Tables 4, 10 and 12 on CIFAR-10: a ViT that is trained here on 14 000 images, and the rows to beat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from papers.common.results import Rows
from papers.common.tables import grid
from papers.streamlined.baselines import PARTS, SCORED, add_transformer, class_cells
from papers.streamlined.table4 import add, table

NAME = "cifar10"


def run(seeds: Sequence[int] = range(5), tested: int = 1000, tuned: int = 500) -> dict[str, Any]:
    """Returns the scores of `table4`, and those of the rows to beat."""
    rows = Rows(__file__, {"tested": tested, "foreign": tested // 2, "draws": 50})
    for seed in seeds:
        add_transformer(rows, NAME, seed, tested, tuned)
        add(rows, NAME, seed, PARTS[NAME], 50, 10, tested=tested, tuned=tuned)
    return rows.all()


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns NLPD and ECE of the ViT, and the rows to beat."""
    found = results["table"]
    beat = class_cells(NAME, found[f"{NAME} transformer"])
    return {"scores": table(found, [f"{NAME}, {part}" for part in PARTS[NAME]]), "rows to beat": grid(SCORED, beat)}
