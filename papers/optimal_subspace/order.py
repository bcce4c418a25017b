"""Does the trace keep the order of the relative error? All pairs of ways at the same s, from the other results."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from papers.common.results import read
from papers.common.tables import grid
from papers.optimal_subspace import figure1, table1, table2, table2_fashion

SOURCES = {"regressions": table1, "regressions, all rows": figure1, "MNIST": table2, "Fashion-MNIST": table2_fashion}
"""Name -> experiment at λ = 1."""

CLEAR = 0.02
"""Difference of two relative errors that is clear."""

KEYS = "relative_error", "trace"


def run() -> dict[str, Any]:
    """Returns the share of pairs whose larger trace has the smaller error, of all pairs and of the clear ones."""
    return {"shares": {name: shares(read(str(source.__file__))["runs"]) for name, source in SOURCES.items()}}


def shares(runs: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of pairs and of clear pairs at one s of one run, and the shares that agree."""
    gaps = []
    for rows in runs.values():
        by_size: dict[str, list[tuple[float, float]]] = {}
        for of in rows["λ = 1"].values():
            for size, found in of.items() if isinstance(of, Mapping) else ():
                if isinstance(found, Mapping) and all(key in found for key in KEYS):
                    by_size.setdefault(size, []).append((found[KEYS[0]], found[KEYS[1]]))
        for points in by_size.values():
            gaps += [(e - f, t - u) for (e, t), (f, u) in combinations(points, 2)]
    clear = [(error, trace) for error, trace in gaps if abs(error) > CLEAR]
    agree = [sum(error * trace < 0 for error, trace in some) / len(some) for some in (gaps, clear)]
    return {"pairs": len(gaps), "agree": agree[0], "clear pairs": len(clear), "clear pairs that agree": agree[1]}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the shares of pairs."""
    rows = {
        name: [str(of["pairs"]), f"{of['agree']:.3f}", str(of["clear pairs"]), f"{of['clear pairs that agree']:.3f}"]
        for name, of in results["shares"].items()
    }
    return {"shares": grid(("pairs", "agree", "clear pairs", "agree"), rows)}
