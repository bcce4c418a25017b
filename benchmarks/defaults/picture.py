"""Draws the results of the grid: how much intervals cover, and NLL beside the network's, a cell a line.

python -m benchmarks.defaults.picture
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.measure import RESULTS
from papers.common import drawing

COLOURS = {"network": "0.7", "temperature": "tab:blue", "default": "tab:red", "validated": "tab:green"}


def draw(rows: list[dict[str, Any]]) -> None:
    """Draws tables on the left, images and texts on the right; the aims are shaded."""
    rows = [row for row in rows if "error" not in row and row["arm"] in COLOURS]
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


if __name__ == "__main__":
    draw(json.loads((RESULTS / "defaults.json").read_text(encoding="utf-8"))["results"]["rows"])
