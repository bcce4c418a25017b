"""Figure 1 with all training rows of naval and California, and with s to 5 000 on California."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from papers.optimal_subspace import table1

SHOWN = {"naval": 9547, "california": 16_512}
"""All training rows. `table1` has 1 500 of them, and more seeds."""
RANKS = {"naval": table1.RANKS, "california": (*table1.RANKS, 2000, 3000, 4000, 5000)}


def run(seeds: Sequence[int] = range(2)) -> dict[str, Any]:
    """Returns what `table1.run` returns."""
    return table1.compared(__file__, seeds, SHOWN, RANKS)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns relative errors, and NLL minus that of the network with the same seed, table by table."""
    chosen = {"naval": (10, 100, 500, 1000), "california": (100, 500, 1000, 2000, 3000, 5000)}
    return {
        f"{name}, {measure}": text
        for name, ranks in chosen.items()
        for measure, text in table1.by_rank(results, [name], ranks).items()
    }


def draw(results: Mapping[str, Any]) -> None:
    """Draws what `table1.draw` draws."""
    table1.draw(results, __file__)
