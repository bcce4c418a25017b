"""Pictures of the papers' results: reads `benchmarks/results/paper_*.json`, writes `docs/papers/figures/*.png`.

`python -m benchmarks.figures` draws what there are results for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display needed
import matplotlib.pyplot as plt

from benchmarks.measure import RESULTS

FIGURES = Path(__file__).parent.parent / "docs" / "papers" / "figures"
COLOURS = {
    "full": "#222222", "optimal": "#000000", "low rank, GGN": "#8c564b", "low rank, KFAC": "#d62728",
    "low rank, EKFAC": "#ff9896", "low rank, diagonal": "#1f77b4", "low rank, prior": "#2ca02c",
    "subset, magnitude": "#9467bd", "subset, diagonal": "#17becf", "subset, SWAG": "#bcbd22",
    "subset, random": "#7f7f7f",
}  # fmt: skip


def read(name: str) -> dict[str, Any]:
    """Returns the results of one experiment."""
    return json.loads((RESULTS / f"paper_{name}.json").read_text())["results"]


def save(figure: Any, name: str) -> None:
    """Writes a figure as a small PNG."""
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / f"{name}.png", dpi=80)
    plt.close(figure)


def ella_errors() -> None:
    """ELLA's Figure 2 (a, b)."""
    table = read("ella_errors")["table"]
    kinds = [key for key in next(iter(table.values())) if key != "runs"]
    figure, axes = plt.subplots(1, len(kinds), figsize=(4 * len(kinds), 3.4), layout="constrained")
    for axis, kind in zip(axes, kinds, strict=True):
        curves: dict[int, list[tuple[int, float]]] = {}
        for name, row in table.items():
            rows, rank = (int(part.partition("=")[2]) for part in name.split(", "))
            curves.setdefault(rank, []).append((rows, row[kind]["mean"]))
        for rank, points in sorted(curves.items()):
            axis.plot(*zip(*sorted(points), strict=True), ".-", label=f"K = {rank}")
        axis.set(xscale="log", yscale="log", xlabel="M", title=kind)
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, "ella_errors")


def ella_cifar() -> None:
    """ELLA's Figures 2 (c), 4 (b) and 6."""
    runs = read("ella_cifar")["runs"]
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.4), layout="constrained")
    for measure, axis in zip(("nll", "ece", "accuracy"), axes, strict=False):
        for kind in next(iter(runs[0]["n at K=20"].values())):
            for i, run in enumerate(runs):
                points = [(int(n), row[kind][measure]) for n, row in run["n at K=20"].items()]
                label = kind if i == 0 else None
                axis.plot(
                    *zip(*points, strict=True), ".-", label=label, color=f"C{_place(kind, run)}", alpha=1 / (i + 1)
                )
        axis.axhline(runs[0]["MAP"][measure], color="#555555", linestyle=":", label="MAP")
        axis.set(xscale="log", xlabel="n, images in the curvature (K = 20)", title=measure)
    axes[0].legend(frameon=False, fontsize=8)
    for run in runs:
        points = [(int(k), row["nll"]) for k, row in run["K, best n and prior"].items()]
        axes[3].plot(*zip(*points, strict=True), ".-")
    axes[3].set(xlabel="K (M = 2000)", title="nll, n and prior chosen on validation")
    save(figure, "ella_cifar")


def _place(kind: str, run: dict[str, Any]) -> int:
    return list(next(iter(run["n at K=20"].values()))).index(kind)


def ella_corruptions() -> None:
    """ELLA's Figures 3 and 4 (a)."""
    found = read("ella_corruptions")
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for measure, axis in zip(("nll", "ece"), axes, strict=False):
        for name in found["clean"]:
            points = [(0, found["clean"][name][measure])]
            points += [(int(s), row[name][measure]["mean"]) for s, row in found["corrupted"].items()]
            axis.plot(*zip(*points, strict=True), ".-", label=name)
        axis.set(xlabel="severity (mean over 19 corruptions)", title=measure)
    for name, row in found["clean"].items():
        points = [(r["confidence"], r["error"]) for r in row["error against confidence"]]
        axes[2].plot(*zip(*points, strict=True), ".-", label=name)
    axes[2].set(xlabel="confidence above", title="error, half of the inputs Fashion-MNIST")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, "ella_corruptions")


def subspaces() -> None:
    """The optimal-subspace paper's Figures 1, 2, 4 and 7."""
    tasks = {}
    for path in sorted(RESULTS.glob("paper_subspace_*.json")):
        tasks |= json.loads(path.read_text())["results"].get("tasks", {})
    for measure in ("relative_error", "trace", "nll"):
        figure, axes = plt.subplots(1, len(tasks), figsize=(3.2 * len(tasks), 3.6), layout="constrained", squeeze=False)
        for axis, (task, ways) in zip(axes[0], tasks.items(), strict=True):
            for way, ranks in ways.items():
                if way == "full":
                    if measure in ranks:
                        axis.axhline(ranks[measure]["mean"], color="#222222", linestyle=":", label="full")
                    continue
                points = [(int(rank), row[measure]["mean"]) for rank, row in ranks.items() if measure in row]
                points = [point for point in points if measure != "trace" or point[1] > 0]
                if points:
                    style = "--" if way.startswith("subset") else "-"
                    axis.plot(*zip(*points, strict=True), style, color=COLOURS[way], label=way, marker=".")
            axis.set(xscale="log", yscale="log" if measure == "trace" else "linear", xlabel="s", title=task)
        named = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(named.values(), named, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
        axes[0][0].set_ylabel(measure)
        save(figure, f"subspaces_{measure}")


DRAWN: dict[str, Callable[[], None]] = {
    "paper_ella_errors": ella_errors,
    "paper_ella_cifar": ella_cifar,
    "paper_ella_corruptions": ella_corruptions,
    "paper_subspace_images": subspaces,
}


def main() -> None:
    """Draws every figure that has results."""
    for name, draw in DRAWN.items():
        if (RESULTS / f"{name}.json").exists():
            draw()


if __name__ == "__main__":
    main()
