"""Pictures: panels without the upper and right edge, saved as small PNGs in the paper's folder `figures`."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """Returns a figure and its axes, an array (rows, columns); needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, squeeze=False, **{"layout": "constrained", **options})


def save(figure: Any, experiment: str, name: str = "") -> None:
    """Writes a figure under the experiment's name, or another.

    Args:
        figure: the picture.
        experiment: its `__file__`.
        name: of the picture, where it is not the experiment's.
    """
    import matplotlib.pyplot as plt

    file = Path(experiment)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    (file.parent / "figures").mkdir(exist_ok=True)
    figure.savefig(file.parent / "figures" / f"{name or file.stem}.png", dpi=80)
    plt.close(figure)


def legend_below(figure: Any, columns: int) -> None:
    """Puts one legend for all panels below them."""
    pairs = [axis.get_legend_handles_labels() for axis in figure.axes]
    named = {label: line for lines, labels in pairs for line, label in zip(lines, labels, strict=True)}
    figure.legend(named.values(), named, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
