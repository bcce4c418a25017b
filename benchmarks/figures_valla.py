"""Pictures of the VaLLA results: `benchmarks/results/paper_valla_*.json` to `docs/papers/figures/valla_*.png`.

`python -m benchmarks.figures_valla` draws what there are results for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display needed
import matplotlib.pyplot as plt

from benchmarks.measure import RESULTS

FIGURES = Path(__file__).parent.parent / "docs" / "papers" / "figures"
COLOURS = {
    "network": "#555555", "MAP": "#555555", "MAP, noise tuned": "#aaaaaa", "diagonal": "#1f77b4", "KFAC": "#d62728",
    "last layer": "#2ca02c", "last layer, KFAC": "#98df8a", "ELLA": "#9467bd", "sampled LLA": "#bcbd22",
    "VaLLA 100": "#000000", "VaLLA 100, natural gradient": "#ff7f0e",
}  # fmt: skip


def read(name: str) -> dict[str, Any]:
    """Returns the results of one experiment."""
    return json.loads((RESULTS / f"paper_valla_{name}.json").read_text())["results"]


def save(figure: Any, name: str) -> None:
    """Writes a figure as a small PNG."""
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / f"valla_{name}.png", dpi=80)
    plt.close(figure)


def _band(axis: Any, grid: Sequence[float], mean: Sequence[float], std: Sequence[float], colour: str) -> None:
    low, high = ([m + 2 * sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
    axis.fill_between(grid, low, high, color=colour, alpha=0.3, linewidth=0)


def toy() -> None:
    """Figures 1 and 3: two standard deviations of f, full LLA's dotted; KL divergence over M."""
    found = read("toy")
    run, grid = found["runs"]["seed 0"], found["grid"]
    own = run["LLA"]
    shown = ["diagonal", "KFAC", "last layer"]
    shown += [f"{name}, M = {count}" for name in ("VaLLA", "ELLA") for count in (5, 10, 20, 50)]
    figure, axes = plt.subplots(3, 4, figsize=(14, 8), layout="constrained")
    order = [axes[0][0], axes[0][1], axes[0][2], *axes[1], *axes[2]]
    for axis, name in zip(order, shown, strict=True):
        if name not in run:
            continue
        _band(axis, grid, own["curve of mean"], run[name]["curve of std"], "#1f77b4")
        for sign in (-2, 2):
            edge = [m + sign * s for m, s in zip(own["curve of mean"], own["curve of std"], strict=True)]
            axis.plot(grid, edge, ":", color="#ff7f0e", linewidth=1)
        axis.plot(own["curve of x"], own["curve of y"], ".", color="#222222", markersize=2)
        axis.plot(grid, own["curve of mean"], color="#1f77b4")
        axis.set(ylim=(-4, 4), title=name)
    over = axes[0][3]
    for name, style in (("VaLLA", "-"), ("VaLLA, k-means", "--"), ("ELLA", "-"), ("ELLA with residual", "--")):
        stem, _, kind = name.partition(", ")
        points = []
        for count in (5, 10, 20, 50):
            row = found["table"][""].get(f"{stem}, M = {count}" + (f", {kind}" if kind else ""))
            if row:
                points.append((count, max(row["kl"]["mean"], 1e-8)))
        if points:
            over.plot(*zip(*points, strict=True), f".{style}", label=name, color="#9467bd" if "ELLA" in name else "k")
    over.set(yscale="log", xlabel="M", title="KL divergence to full LLA")
    over.legend(frameon=False, fontsize=8)
    save(figure, "toy")


def toy_stopping() -> None:
    """Figure 2: what stopping does in the gaps."""
    found = read("toy_stopping")
    fits, grid = found["runs"]["seed 0"]["fits"], found["grid"]
    own = fits["LLA"]
    names = [name for name in fits if name != "LLA"]
    figure, axes = plt.subplots(1, len(names), figsize=(3.5 * len(names), 3), layout="constrained", sharey=True)
    for axis, name in zip(axes, names, strict=True):
        _band(axis, grid, own["curve of mean"], fits[name]["curve of std"], "#1f77b4")
        for sign in (-2, 2):
            edge = [m + sign * s for m, s in zip(own["curve of mean"], own["curve of std"], strict=True)]
            axis.plot(grid, edge, ":", color="#ff7f0e", linewidth=1)
        axis.plot(own["curve of x"], own["curve of y"], ".", color="#222222", markersize=2)
        axis.plot(own["curve of validation x"], own["curve of validation y"], ".", color="#ff7f0e", markersize=3)
        axis.set(ylim=(-3, 3), title=f"{name}\nδ = {fits[name]['prior_precision']:.3g}")
    save(figure, "toy_stopping")


def tables() -> None:
    """Figures 4 and 8: P(y in the central interval) over its probability."""
    found = read("tables")
    levels, table = found["levels"], found["table"]
    figure, axes = plt.subplots(1, len(table), figsize=(3.3 * len(table), 3.6), layout="constrained", sharey=True)
    for axis, (name, rows) in zip(axes, table.items(), strict=True):
        for label, row in rows.items():
            parts = row if label == "network" else {label: row.get("validation", row)}
            for part, values in parts.items():
                if part in COLOURS and "curve" in values:
                    curve = [values["curve"][str(i)]["mean"] for i in range(len(levels))]
                    axis.plot(levels, curve, color=COLOURS[part], label=part, linewidth=1.2)
        axis.plot([0, 1], [0, 1], ":", color="#222222")
        axis.set(title=name, xlabel="α")
    named = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    axes[0].set_ylabel("share of targets inside")
    save(figure, "tables")


def images() -> None:
    """Figures 5 and 6: seconds, and NLL and ECE of rotated images."""
    table = read("images")["table"]
    figure, axes = plt.subplots(len(table), 3, figsize=(13, 3.4 * len(table)), layout="constrained", squeeze=False)
    for (name, rows), line in zip(table.items(), axes, strict=True):
        spent = {}
        for label, row in rows.items():
            values = row.get("evidence", row)
            link = next((link for link in ("probit", "Monte Carlo", "softmax") if link in values), None)
            if label not in COLOURS or link is None:
                continue
            for axis, measure in zip(line, ("nll", "ece"), strict=False):
                points = [(int(angle), at[measure]["mean"]) for angle, at in values[link]["rotated"].items()]
                axis.plot(*zip(*sorted(points), strict=True), ".-", color=COLOURS[label], label=label, linewidth=1.2)
            if "seconds" in values:
                spent[label] = values["seconds"]["mean"]
        line[2].barh(list(spent), list(spent.values()), color=[COLOURS[label] for label in spent])
        line[2].set(xscale="log", title=f"{name}: seconds")
        line[0].set(title=f"{name}: NLL", xlabel="angle")
        line[1].set(title=f"{name}: ECE", xlabel="angle")
        line[0].legend(frameon=False, fontsize=7)
    save(figure, "images")


def cifar() -> None:
    """Figure 7: NLL of corrupted images by severity, a box over 19 kinds each."""
    run = next(iter(read("cifar")["runs"].values()))
    figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    names = list(run)
    for i, name in enumerate(names):
        corrupted = run[name]["corrupted"]
        places = [j * (len(names) + 1) + i for j in range(len(corrupted))]
        boxes = axis.boxplot(
            [row["nll by kind"] for row in corrupted.values()], positions=places, widths=0.8, patch_artist=True,
            showfliers=False,
        )  # fmt: skip
        for box in boxes["boxes"]:
            box.set_facecolor(f"C{i}")
        axis.plot([], [], "s", color=f"C{i}", label=name)
    severities = list(next(iter(run.values()))["corrupted"])
    axis.set_xticks([j * (len(names) + 1) + (len(names) - 1) / 2 for j in range(len(severities))], severities)
    axis.set(xlabel="severity", ylabel="NLL")
    axis.legend(frameon=False, fontsize=8)
    save(figure, "cifar")


def cost() -> None:
    """Seconds of one fit over the number of training points."""
    rows = read("cost")["runs"]["fit over N"]
    figure, axis = plt.subplots(figsize=(5, 3.4), layout="constrained")
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, row in rows.items():
        method, _, count = name.rpartition(", N = ")
        curves.setdefault(method, []).append((int(count), row["seconds"]))
    for method, points in curves.items():
        axis.plot(*zip(*sorted(points), strict=True), ".-", label=method)
    axis.set(xscale="log", yscale="log", xlabel="N", ylabel="processor seconds of a fit")
    axis.legend(frameon=False, fontsize=8)
    save(figure, "cost")


DRAWN: dict[str, Callable[[], None]] = {
    "toy": toy, "toy_stopping": toy_stopping, "tables": tables, "images": images, "cifar": cifar, "cost": cost,
}  # fmt: skip


def main() -> None:
    """Draws every figure that has results."""
    for name, draw in DRAWN.items():
        if (RESULTS / f"paper_valla_{name}.json").exists():
            draw()


if __name__ == "__main__":
    main()
