"""How good lapwing's defaults are: arms on a grid of trained networks, the averages of each family, and the aims.

    python -m benchmarks defaults --seeds 2
    python -m benchmarks defaults 'boston*' --arms all --into boston

The arms are names, separated by commas, or all. Parts with results are run again unless `--missing` is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.grid import measures, summary
from benchmarks.grid.networks import CELLS
from papers.common import drawing
from papers.common.tables import grid

COLOURS = {"network": "0.7", "temperature": "tab:blue", "default": "tab:red", "validated": "tab:green"}


def parts(arms: str = "network,temperature,default,validated", seeds: int = 1) -> dict[str, Callable[[], Any]]:
    """Returns cells and seeds, each with its arms."""
    names = list(measures.ARMS) if arms == "all" else arms.split(",")
    if unknown := set(names) - set(measures.ARMS):
        raise SystemExit(f"There is no arm {', '.join(unknown)}. Name some of {', '.join(measures.ARMS)}.")
    runs = itertools.product(range(seeds), CELLS)
    return {f"{cell.name}, seed {seed}": partial(summary.evaluate, cell, seed, names) for seed, cell in runs}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Returns NLL and coverage of each family, ECE and AUROC of classifiers, and the aims."""
    rows = summary.rows_of(results)
    families = dict(sorted(summary.families(rows).items()))
    ranked = ("network", "temperature", "default", "validated")
    aims = {
        aim["aim"]: ["yes" if aim["met"] else "no", f"{aim['of'] - len(aim['misses'])} of {aim['of']}"]
        for aim in summary.aims(rows)
    }
    nll, ood = {}, {}
    for family, of in families.items():
        nll[family] = [f"{of['default']['cells']}", *(_cell(row) for row in of.values())]
        if "ece" in of["network"]:
            eces = (f"{of[arm]['ece']:.3f}" for arm in ("temperature", "validated"))
            ood[family] = [*eces, *(f"{of[arm]['auroc_entropy']:.3f}" for arm in ranked)]
    columns = ["ECE: temperature", "validated", "AUROC: network", *ranked[1:]]
    return {
        "nll": grid(["networks", *ranked], nll, corner="family"),
        "ood": grid(columns, ood, corner="family"),
        "aims": grid(["met", "cells or families"], aims, corner="aim"),
    }


def _cell(row: summary.Row) -> str:
    """Returns the NLL of a family, and the coverage of its intervals."""
    nll = f"{row['nll']:.3f}" if row["nll"] < 1e4 else f"{row['nll']:.0e}".replace("+", "")
    return nll + (f" ({100 * row['coverage']:.0f} %)" if "coverage" in row else "")


def draw(results: dict[str, Any]) -> None:
    """Draws how much intervals cover on the left, and NLL beside the network's, a cell a line; aims are shaded."""
    rows = [row for row in summary.rows_of(results) if "error" not in row and row["arm"] in COLOURS]
    figure, axes = drawing.panels(1, 2, (11, 7))
    for axis, column in zip(axes[0], ("coverage", "accuracy"), strict=True):
        some = [row for row in rows if column in row]
        cells = list(dict.fromkeys(row["cell"] for row in some))[::-1]
        for arm, colour in COLOURS.items():
            shown = [row for row in some if row["arm"] == arm]
            values = [row["coverage" if column == "coverage" else "nll_minus_network"] for row in shown]
            axis.plot(values, [cells.index(row["cell"]) for row in shown], "o", ms=5, color=colour, label=arm)
        axis.set_yticks(range(len(cells)), cells, fontsize=7)
        axis.grid(axis="y", lw=0.3)
    axes[0, 0].axvspan(0.8, 0.97, color="0.93", zorder=0)
    axes[0, 0].axvline(0.9, color="0.5", lw=0.8)
    axes[0, 0].set_xlabel("share of test targets in 90 % intervals")
    axes[0, 1].axvline(0, color="0.5", lw=0.8)
    axes[0, 1].set_xscale("symlog", linthresh=0.01)
    axes[0, 1].set_xlabel("test NLL minus the network's, nats")
    drawing.legend_below(figure, len(COLOURS))
    drawing.save(figure, __file__, "defaults")
