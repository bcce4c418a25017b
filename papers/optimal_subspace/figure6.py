"""Figure 6 and Table 6: weights that no training input moves, in networks that are trained as in Table 1.

Full batches, a learning rate in proportion to the number of rows, raw targets. A weight is dead if its gradient is 0 at
every training input. The paper's text has standardised inputs, the authors' program raw ones: both are trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.tangent import Tangent
from papers.common import drawing
from papers.common.data import rows_and_targets
from papers.common.networks import mlp
from papers.common.results import Rows
from papers.common.tables import grid, shown
from papers.common.training import seeded, train
from papers.optimal_subspace.figure1 import PUBLISHED, TABLES

PHASES = {"wine": (0.3, 0.3), "energy": (0.1, 0.5), "naval": (0.3, 0.5), "california": (0.3, 0.5)}
"""The paper's Table 1: shares of the epochs in which the rate rises and falls."""
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
    """Trains a network, and returns the share of weights with gradient 0 at every training input.

    Args:
        name: one of `TABLES`.
        raw: whether the inputs are as they are in the file, and not standardised.
        seed: of the split and the network.
    """
    model, x, y = network(name, raw, seed)
    tangent = Tangent.survey(model, x[:100])
    sums = {block.name: torch.zeros(block.size, dtype=torch.float64) for block in tangent.blocks}
    for part in x.split(250):
        for _, record in tangent.records(part):
            for block in sums:
                sums[block] += record[block].squared_sum()
    sizes = (torch.cat(list(sums.values())) / len(x)).sqrt()
    ordered = sizes.sort(descending=True).values
    with torch.no_grad():
        error = float((model(x) - y).square().mean().sqrt() / y.std())
    thinned = ordered[torch.linspace(0, len(ordered) - 1, 200).long()] / ordered[0].clamp_min(1e-30)
    return {
        "dead": float((sizes == 0).double().mean()),
        "nearly dead": float((sizes <= 1e-6 * sizes.max()).double().mean()),
        "relative error of the training rows": error,
        "curve of sensitivities": [float(f"{size:.3g}") for size in thinned.tolist()],
    }


def network(name: str, raw: bool, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Returns the 128-128 MLP, trained by full batches, and its training inputs and targets."""
    options = TABLES[name]
    x, y = rows_and_targets(options["file"])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: len(x) * 9 // 10]
    x, y = x[order].float(), y[order].reshape(-1, 1).float()
    x = x[:, x.std(0) > 0]  # two columns of naval are constant
    if not raw:
        x = (x - x.mean(0)) / x.std(0)
    with seeded(seed):
        model = nn.Sequential(*list(mlp(x.shape[1], 128, 128, 1, activation=nn.ReLU))[1:])
    epochs, (rising, falling) = options["epochs"], PHASES[name]

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / (rising * epochs), (epochs - step) / (falling * epochs))

    optimiser = torch.optim.Adam(model.parameters(), options["rate"] * len(x) / 256)
    return train(model, (x, y), repeat(slice(None), epochs), optimiser, nn.functional.mse_loss, factor), x, y


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the shares of dead weights beside the paper's."""
    rows = {}
    for name, found in results["table"].items():
        shares = [shown(found[inputs][kind], 1, 100) for kind in ("dead", "nearly dead") for inputs in INPUTS]
        errors = [shown(found[inputs]["relative error of the training rows"], 2) for inputs in INPUTS]
        rows[name] = [f"{100 * results['published'][name]:.0f}", *shares, *errors]
    columns = [f"{kind}, {inputs} inputs" for kind in ("dead, %", "below 1e-6, %", "error / std") for inputs in INPUTS]
    return {"dead": grid(["published, %", *columns], rows)}


def draw(results: Mapping[str, Any]) -> None:
    """Draws the sensitivities of all weights in falling order, a line for each seed."""
    figure, ((*axes,),) = drawing.panels(1, 2, (10, 3.6))
    for axis, inputs in zip(axes, INPUTS, strict=True):
        for i, name in enumerate(results["table"]):
            runs = [rows for run, rows in results["runs"].items() if run.startswith(f"{name},")]
            for j, rows in enumerate(runs):
                sizes = rows[inputs]["curve of sensitivities"]
                shares = [k / (len(sizes) - 1) for k in range(len(sizes))]
                axis.plot(shares, sizes, color=f"C{i}", alpha=0.6, label=name if j == 0 else None)
        axis.set(yscale="log", ylim=(1e-8, 1), xlabel="share of the weights", title=f"{inputs} inputs")
    axes[0].set_ylabel("mean size of the gradient, largest = 1")
    axes[0].legend(frameon=False, fontsize=8)
    drawing.save(figure, __file__)
