"""Table 2, and Figures 2 and 7 by its settings on Fashion-MNIST: the network of `table2`, 40 epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from papers.optimal_subspace import table2
from papers.optimal_subspace.table2 import tables as tables


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns the rows of `table2.run` for Fashion-MNIST."""
    return table2.compared(__file__, "fashion_mnist", seeds)


def draw(results: Mapping[str, Any]) -> None:
    """Draws relative error and NLL over s, and the relative errors of subsets for s up to P."""
    table2.draw(results, __file__)
