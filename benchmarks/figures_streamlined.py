"""Pictures of the streamlined paper's results: `benchmarks/results/paper_streamlined_*.json` to `docs/papers/figures/`.

`python -m benchmarks.figures_streamlined` draws what there are results for; the sensitivity maps are drawn by their
experiment.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display needed
import matplotlib.pyplot as plt

from benchmarks.figures import FIGURES
from benchmarks.measure import RESULTS

STYLES = {"streamlined": "-", "GLM": "--", "sampling": ":"}
COLOURS = {"network": "#555555", "LA": "#1f77b4", "MFVI": "#d62728"}


def read(name: str) -> dict[str, Any]:
    """Returns the results of one experiment."""
    return json.loads((RESULTS / f"paper_streamlined_{name}.json").read_text())["results"]


def save(figure: Any, name: str) -> None:
    """Writes a figure as a small PNG."""
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / f"streamlined_{name}.png", dpi=80)
    plt.close(figure)


def rotations() -> None:
    """Figure 8: NLPD and accuracy over the angle of MNIST digits, means of the seeds."""
    found = read("rotations")
    runs = list(found["runs"].values())
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axis, measure in zip(axes, ("nlpd", "accuracy"), strict=True):
        for name in runs[0]:
            posterior, _, way = name.partition(" ")
            curves = [run[name][measure] for run in runs if name in run]
            mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
            axis.plot(found["angles"], mean, STYLES.get(way, "-"), color=COLOURS[posterior], label=name)
        axis.set_xlabel("rotation in degrees")
        axis.set_ylabel({"nlpd": "NLPD"}.get(measure, measure))
    axes[0].legend(fontsize=7, frameon=False)
    save(figure, "rotations")


def entropies() -> None:
    """Figures 4 and 9: densities of the predictive entropy inside and outside the training distribution."""
    mlp = read("mlp")["runs"]["fashion_mnist, seed 0"]
    vit = read("vit")["runs"]
    panels: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for posterior, label in (("LA, KFAC", "LA"), ("MFVI", "MFVI")):
        for way in ("streamlined", "GLM", "sampling"):
            panels[f"MLP, {label} {way}"] = _both(mlp[posterior][way]["plain"])
    for label in ("LA", "MFVI"):
        for way in ("streamlined", "GLM", "sampling"):
            panels[f"ViT, {label} {way}"] = _both(vit["fashion_mnist, attention, seed 0"][f"{label} {way}"]["plain"])
    figure, axes = plt.subplots(2, 6, figsize=(13, 4.4), layout="constrained", sharex=True)
    for axis, (name, (inside, outside)) in zip(axes.flat, panels.items(), strict=True):
        for share, colour in ((inside, "#1f77b4"), (outside, "#d62728")):
            width = math.log(10) / len(share)
            axis.bar([(i + 0.5) * width for i in range(len(share))], share, width, color=colour, alpha=0.5)
        axis.set_title(name, fontsize=8)
        axis.set_yticks([])
    for axis in axes[-1]:
        axis.set_xlabel("entropy", fontsize=8)
    save(figure, "entropies")


def _both(row: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Returns shares of inputs by entropy, inside and outside."""
    inside, outside = row.get("curve of entropy") or [row[f"curve of entropies {at}"] for at in ("inside", "outside")]
    return [value / sum(inside) for value in inside], [value / sum(outside) for value in outside]


def main() -> None:
    """Draws everything."""
    rotations()
    entropies()


if __name__ == "__main__":
    main()
