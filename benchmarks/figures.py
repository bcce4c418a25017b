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
    kinds = list(next(iter(table.values())))
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
    figure, axes = plt.subplots(1, 5, figsize=(18, 3.4), layout="constrained")
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
    curves: dict[int, list[tuple[int, float, float]]] = {}
    for name, row in read("ella_rows")["table"].items():
        if name != "MAP":
            rows, rank = (int(part.partition("=")[2]) for part in name.split(", "))
            curves.setdefault(rank, []).append((rows, row["nll"]["mean"], row["nll"]["standard_error"]))
    for rank, found in sorted(curves.items()):
        x, y, error = zip(*sorted(found), strict=True)
        axes[4].errorbar(x, y, error, fmt=".-", label=f"K = {rank}")
    axes[4].set(xscale="log", xlabel="M", title="nll, n and prior chosen on validation")
    axes[4].legend(frameon=False, fontsize=8)
    save(figure, "ella_cifar")


def _place(kind: str, run: dict[str, Any]) -> int:
    return list(next(iter(run["n at K=20"].values()))).index(kind)


def ella_last_layer() -> None:
    """ELLA's Figure 7."""
    found = read("ella_last_layer")
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for measure, axis in zip(("nll", "ece", "accuracy"), axes, strict=True):
        for kind in next(iter(found["over n"].values())):
            rows = {int(n): row[kind][measure] for n, row in found["over n"].items()}
            means, errors = ([row[part] for row in rows.values()] for part in ("mean", "standard_error"))
            axis.errorbar(list(rows), means, errors, fmt=".-", label=kind)
        axis.axhline(found["MAP"][measure], color="#555555", linestyle=":", label="MAP")
        axis.set(xscale="log", xlabel="n, images in the curvature (last layer)", title=measure)
    axes[0].set_yscale("log")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, "ella_last_layer")


def ella_corruptions() -> None:
    """ELLA's Figures 3 and 4 (a)."""
    found = read("ella_corruptions")
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for measure, axis in zip(("nll", "ece"), axes, strict=False):
        for name in found["clean"]:
            rows = {0: found["clean"][name][measure]}
            rows |= {int(strength): row[name][measure] for strength, row in found["corrupted"].items()}
            means, errors = ([row[part] for row in rows.values()] for part in ("mean", "standard_error"))
            axis.errorbar(list(rows), means, errors, fmt=".-", label=name)
        axis.set(xlabel="severity (mean over 19 corruptions)", title=measure)
    for name, rows in found["error against confidence"].items():
        points = [(row["confidence"]["mean"], row["error"]["mean"]) for row in rows.values()]
        axes[2].plot(*zip(*points, strict=True), ".-", label=name)
    axes[2].set(xlabel="confidence above", title="error, half of the inputs Fashion-MNIST")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, "ella_corruptions")


TUNED = ", prior tuned"


def subspaces() -> None:
    """The optimal-subspace paper's Figures 1, 2, 4 and 7; above with λ = 1, below with λ tuned."""
    tasks: dict[str, Any] = {}
    for path in sorted(RESULTS.glob("paper_subspace_*.json")):
        tasks |= json.loads(path.read_text())["results"].get("tasks", {})
    plain = [task for task in tasks if not task.endswith(TUNED)]
    for measure in ("relative_error", "trace", "nll"):
        shown = [task for task in plain if any(measure in row for row in tasks[task]["low rank, KFAC"].values())]
        size = (2.9 * len(shown), 6.4)
        figure, axes = plt.subplots(2, len(shown), figsize=size, layout="constrained", squeeze=False)
        for column, task in enumerate(shown):
            for axis, name in zip(axes[:, column], (task, task + TUNED), strict=True):
                if name in tasks:
                    _curves(axis, tasks[name], measure)
                    axis.set_title(name, fontsize=10)
                else:
                    axis.set_axis_off()
        every = [axis.get_legend_handles_labels() for axis in axes.flat]
        named = {label: line for handles in every for line, label in zip(*handles, strict=True)}
        figure.legend(named.values(), named, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
        axes[0][0].set_ylabel(measure)
        save(figure, f"subspaces_{measure}")


def _curves(axis: Any, ways: dict[str, Any], measure: str) -> None:
    """Draws one measure of every way over s."""
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
    axis.set(xscale="log", yscale="log" if measure == "trace" else "linear", xlabel="s")


DRAWN: dict[str, Callable[[], None]] = {
    "paper_ella_errors": ella_errors,
    "paper_ella_cifar": ella_cifar,
    "paper_ella_last_layer": ella_last_layer,
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
