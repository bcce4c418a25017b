"""Figure 6 and Table 6: weights that no training input moves, in networks that are trained as in Table 1.

A weight is dead if its gradient is 0 at every training input. The paper's text has standardised inputs; the authors'
program has them for all tables but wine. All tables are trained on both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lapwing.tangent import Tangent
from papers.common import drawing
from papers.common.results import Rows
from papers.common.tables import grid, shown
from papers.optimal_subspace.figure1 import PUBLISHED, TABLES
from papers.optimal_subspace.table1 import network

INPUTS = ("standardised", "raw")


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns the share of dead weights by table and by the scale of the inputs."""
    rows = Rows(__file__, {"published": PUBLISHED["dead parameters"]})
    for seed in seeds:
        for name in TABLES:
            for inputs in INPUTS:
                rows.add(f"{name}, seed {seed}", inputs, dead_weights, name, inputs == "raw", seed)
    return rows.all()


def dead_weights(name: str, raw: bool, seed: int) -> dict[str, Any]:
    """Trains a network, and returns the share of weights with gradient 0 at every training input, and at most of them.

    Args:
        name: one of `TABLES`.
        raw: whether the inputs are as they are in the file, and not standardised.
        seed: of the split and the network.

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
    kinds = {"dead": "dead", "nearly dead": "below 1e-6", "active at most inputs": "active at most inputs"}
    rows = {}
    for name, found in results["table"].items():
        shares = [shown(found[inputs][kind], 1, 100) for kind in kinds for inputs in INPUTS]
        errors = [shown(found[inputs]["relative error of the training rows"], 2) for inputs in INPUTS]
        rows[name] = [f"{100 * results['published'][name]:.0f}", *shares, *errors]
    columns = [f"{label}, %, {inputs}" for label in kinds.values() for inputs in INPUTS]
    return {"dead": grid(["published, %", *columns, *(f"error / std, {inputs}" for inputs in INPUTS)], rows)}


def draw(results: Mapping[str, Any]) -> None:
    """Draws at how many inputs each weight is active, and its sensitivity; one line per seed."""
    figure, axes = drawing.panels(2, 2, (10, 6), sharex=True)
    for column, inputs in enumerate(INPUTS):
        for i, name in enumerate(results["table"]):
            runs = [rows[inputs] for run, rows in results["runs"].items() if run.startswith(f"{name},")]
            for j, row in enumerate(runs):
                for axis, curve in zip(axes[:, column], ("activity", "sensitivities"), strict=True):
                    values = row[f"curve of {curve}"]
                    shares = [k / (len(values) - 1) for k in range(len(values))]
                    axis.plot(shares, values, color=f"C{i}", alpha=0.6, linewidth=1, label=name if j == 0 else None)
        axes[0, column].set(title=f"{inputs} inputs", ylim=(0, 1))
        axes[1, column].set(yscale="log", ylim=(1e-8, 1), xlabel="share of the weights, the most sensitive first")
    axes[0, 0].set_ylabel("share of inputs with a gradient")
    axes[1, 0].set_ylabel("mean size of the gradient, largest = 1")
    axes[0, 1].legend(frameon=False, fontsize=8)
    drawing.save(figure, __file__)
