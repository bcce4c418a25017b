"""Pictures: panels without the upper and right edge, saved as small PNGs in the paper's folder `figures`.

A picture carries a digest of the results that it shows, so that a test can tell if it is older than they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from papers.common import results


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """Returns a figure and its axes, an array (rows, columns); needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, squeeze=False, **{"layout": "constrained", **options})


def save(figure: Any, experiment: str, name: str = "", sources: Sequence[str] = ()) -> None:
    """Writes a figure under the experiment's name, or another.

    Args:
        figure: the picture.
        experiment: its `__file__`.
        name: of the picture, if it is not the experiment's.
        sources: `__file__` of the experiments whose results it shows; empty means the experiment's own.
    """
    import matplotlib.pyplot as plt

    file = Path(experiment)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    (file.parent / "figures").mkdir(exist_ok=True)
    path = file.parent / "figures" / f"{name or file.stem}.png"
    digests = (f"{Path(source).stem}.json {digest(source)}" for source in sources or (experiment,))
    figure.savefig(path, dpi=80, metadata={"Source": ", ".join(digests)})
    plt.close(figure)


def digest(experiment: str) -> str:
    """Returns a digest of the results of an experiment.

    Args:
        experiment: its `__file__`.
    """
    return hashlib.sha256(json.dumps(results.read(experiment)).encode()).hexdigest()[:16]


def sources(picture: Path) -> dict[str, str]:
    """Returns which results a picture was drawn from: name of the file -> digest; empty if it does not say."""
    contents = picture.read_bytes()
    at = contents.find(b"tEXtSource\0")
    length = int.from_bytes(contents[at - 4 : at], "big")
    text = contents[at + 11 : at + 4 + length].decode() if at > 0 else ""
    return dict(pair.split(" ") for pair in text.split(", ") if pair)


def curve(axis: Any, points: Mapping[Any, Mapping[str, float]], **style: Any) -> None:
    """Draws means with their standard errors over numbers."""
    means, errors = ([found[part] for found in points.values()] for part in ("mean", "standard_error"))
    axis.errorbar([float(x) for x in points], means, errors, **{"fmt": ".-", **style})


def boxes(axis: Any, groups: Mapping[str, Sequence[Sequence[float]]], names: Sequence[str]) -> None:
    """Draws groups of boxes, a colour each: label -> the numbers of a box at each of the names."""
    for i, (label, values) in enumerate(groups.items()):
        places = [j * (len(groups) + 1) + i for j in range(len(names))]
        drawn = axis.boxplot(values, positions=places, widths=0.8, patch_artist=True, showfliers=False)
        for box, median in zip(drawn["boxes"], drawn["medians"], strict=True):
            box.set_facecolor(f"C{i}")
            median.set_color("black")
        axis.plot([], [], "s", color=f"C{i}", label=label)
    axis.set_xticks([j * (len(groups) + 1) + (len(groups) - 1) / 2 for j in range(len(names))], names)


def legend_below(figure: Any, columns: int) -> None:
    """Puts one legend for all panels below them."""
    pairs = [axis.get_legend_handles_labels() for axis in figure.axes]
    named = {label: line for lines, labels in pairs for line, label in zip(lines, labels, strict=True)}
    figure.legend(named.values(), named, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
