"""Figure 1 with all training rows of naval and California, and with s to 5 000 on California."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from papers.optimal_subspace import table1
from papers.optimal_subspace.comparison import table

SHOWN = {"naval": 9547, "california": 16_512}
"""All training rows. `table1` has 1 500 of them."""
RANKS = {"naval": table1.RANKS, "california": (*table1.RANKS, 2000, 3000, 4000, 5000)}


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns the measures of every way by s at λ = 1, and the NLL minus that of the network, as `table1` does."""
    return table1.compared(__file__, seeds, SHOWN, RANKS)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the relative errors of each table."""
    chosen = {"naval": (10, 100, 500, 1000), "california": (100, 500, 1000, 2000, 3000, 5000)}
    tasks = table1.tasks_of(results)
    return {f"{name}, relative error": table(tasks, [name], "relative_error", s) for name, s in chosen.items()}


def draw(results: Mapping[str, Any]) -> None:
    """Draws relative error, and NLL minus that of the network, over s."""
    table1.draw(results, __file__)
