"""Figure 6 and Table 6: weights that no training input moves, in networks that are trained as in Table 1.

A weight is dead if its gradient is 0 at every training input. The paper's text has standardised inputs; the authors'
program has them for all tables but wine, which is trained on both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lapwing.tangent import Tangent
from papers.common import drawing
from papers.common.results import Rows
from papers.common.tables import grid, shown
from papers.optimal_subspace.table1 import TABLES, network

PUBLISHED = {"wine": 0.89, "energy": 0.92, "naval": 0.34, "california": 0.60}
"""Table 6."""
FAST = {"seeds": (0,)}
"""Arguments of a run for `python -m papers verify`."""


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns the share of dead weights by table and by the scale of the inputs."""
    rows = Rows(__file__, {"published": PUBLISHED})
    for seed in seeds:
        for name in TABLES:
            for inputs in ("standardised", "raw") if name == "wine" else ("standardised",):
                rows.add(f"{name}, seed {seed}", inputs, dead_weights, name, inputs == "raw", seed)
    return rows.all()


def dead_weights(name: str, raw: bool, seed: int) -> dict[str, Any]:
    """Trains a network, and returns the share of weights with gradient 0 at every training input, and at most of them.

    Returns:
        "dead": share of the weights with gradient 0 at every training input; "nearly dead": share whose mean size of
        the gradient is at most 1e-6 of the largest; "active at most inputs": share whose gradient is not 0 at more than
        half of the inputs; curves over the weights from the most to the least sensitive.
    """
    model, (x, y), _ = network(name, raw, seed)
    tangent = Tangent.survey(model, x[:100])
    active, sizes = torch.zeros(2, tangent.size, dtype=torch.float64)
    for part in x.split(250):
        for _, record in tangent.records(part):
            gradients = record.rows()[:, 0].abs()  # (B, P)
            active += (gradients > 0).sum(0) / len(x)
            sizes += gradients.sum(0) / len(x)
    with torch.no_grad():
        error = float((model(x) - y).square().mean().sqrt() / y.std())
    some = sizes.argsort(descending=True)[torch.linspace(0, len(sizes) - 1, 200).long()]
    return {
        "dead": float((sizes == 0).double().mean()),
        "nearly dead": float((sizes <= 1e-6 * sizes.max()).double().mean()),
        "active at most inputs": float((active > 0.5).double().mean()),
        "relative error of the training rows": error,
        "curve of sensitivities": [float(f"{size:.3g}") for size in (sizes[some] / sizes.max()).tolist()],
        "curve of activity": [round(share, 3) for share in active[some].tolist()],
    }


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the shares of dead weights beside the paper's."""
    rows = {}
    for name, found in results["table"].items():
        for inputs, row in found.items():
            shares = [shown(row[kind], 1, 100) for kind in ("dead", "nearly dead", "active at most inputs")]
            error = shown(row["relative error of the training rows"], 2)
            rows[f"{name}, {inputs} inputs"] = [f"{100 * results['published'][name]:.0f}", *shares, error]
    columns = ("published, dead, %", "dead, %", "at most 1e-6, %", "active at most inputs, %", "error / std")
    return {"dead": grid(columns, rows)}


def draw(results: Mapping[str, Any]) -> None:
    """Draws at how many inputs each weight is active, and its sensitivity; one line per seed."""
    figure, ((*axes,),) = drawing.panels(1, 2, (10, 3.8))
    groups = [(name, inputs) for name, found in results["table"].items() for inputs in found]
    for i, (name, inputs) in enumerate(groups):
        runs = [rows[inputs] for run, rows in results["runs"].items() if run.startswith(f"{name},") and inputs in rows]
        for j, row in enumerate(runs):
            for axis, curve in zip(axes, ("activity", "sensitivities"), strict=True):
                values = sorted(row[f"curve of {curve}"], reverse=True)
                shares = [k / (len(values) - 1) for k in range(len(values))]
                label = f"{name}, {inputs} inputs" if j == 0 else None
                axis.plot(shares, values, color=f"C{i}", alpha=0.6, linewidth=1, label=label)
    seeds = len({run.rpartition(" ")[2] for run in results["runs"]})
    figure.suptitle(f"{seeds} seed{'s' * (seeds > 1)}", fontsize=10)
    axes[0].set(ylim=(0, 1.02), xlabel="share of the weights, most active first")
    axes[0].set_ylabel("share of inputs with a gradient")
    axes[1].set(yscale="log", ylim=(1e-8, 2), xlabel="share of the weights, most sensitive first")
    axes[1].set_ylabel("mean |gradient|, largest = 1")
    drawing.legend_below(figure, 3)
    drawing.save(figure, __file__)
