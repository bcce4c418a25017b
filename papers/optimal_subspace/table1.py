"""Table 1, and Figures 1 and 7 by its settings: full batches, raw targets, a rate that warms up and decays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import nn

import lapwing as lw
from papers.common import drawing
from papers.common.data import Part, batched, rows_and_targets
from papers.common.networks import mlp
from papers.common.results import Rows
from papers.common.scores import paired
from papers.common.training import kept, seeded, train
from papers.optimal_subspace.comparison import LABELS, Task, compare_subspaces, curves, swag_from, table
from papers.optimal_subspace.figure8 import gaussian_nll

TABLES: dict[str, dict[str, Any]] = {
    "wine": {"file": "uci_wine_red", "rate": 0.0004, "epochs": 300},
    "energy": {"file": "uci_energy", "rate": 0.004, "epochs": 1500},
    "naval": {"file": "uci_naval", "rate": 0.0004, "epochs": 100},
    "california": {"file": "california_housing", "rate": 0.0004, "epochs": 100},
}
"""The paper's Table 1: learning rate (for a batch of 256) and epochs."""
PHASES = {"wine": (0.3, 0.3), "energy": (0.1, 0.5), "naval": (0.3, 0.5), "california": (0.3, 0.5)}
"""The paper's Table 1: shares of the epochs at which the rate stops to rise, and at which it starts to fall."""
RANKS = (10, 50, 100, 200, 500, 1000)
SHOWN = {"wine": 1279, "energy": 614, "naval": 1500, "california": 1500}
"""Most training rows that posteriors sum over: all rows of the two small tables."""
WAYS = ("low rank, KFAC", "low rank, diagonal", "low rank, prior", "subset, magnitude", "subset, diagonal")


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns the measures of every way by s at λ = 1, the NLL of the network at two noise variances, differences."""
    return compared(__file__, seeds, SHOWN, dict.fromkeys(SHOWN, RANKS))


def compared(
    experiment: str, seeds: Sequence[int], shown: Mapping[str, int], ranks: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Returns the rows and differences of `run` for tables with a number of rows, and with s of their own."""
    rows = Rows(experiment, {"rows of the curvature": dict(shown)})
    for seed in seeds:
        for name in shown:
            rows.add(f"{name}, seed {seed}", "λ = 1", measures, name, seed, shown[name], ranks[name])
    rows.facts["NLL minus the network's"] = differences(rows.runs)
    return rows.all()


def network(name: str, raw: bool, seed: int) -> tuple[nn.Module, Part, Part]:
    """Returns the 128-128 MLP, trained by full batches, and the rows that trained it and the others, a fifth.

    Raw inputs are as they are in the file, and not standardised.
    """
    options = TABLES[name]
    x, y = rows_and_targets(options["file"])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y, cut = x[order].float(), y[order].reshape(-1, 1).float(), len(x) * 8 // 10
    x = x[:, x[:cut].std(0) > 0]  # two columns of naval are constant
    if not raw:
        x = (x - x[:cut].mean(0)) / x[:cut].std(0)
    fitted = x[:cut], y[:cut]
    with seeded(seed):
        model = nn.Sequential(*list(mlp(x.shape[1], 128, 128, 1, activation=nn.ReLU))[1:])

    def make() -> nn.Module:
        optimiser = torch.optim.Adam(model.parameters(), options["rate"] * cut / 256)
        batches, factor = repeat(slice(None), options["epochs"]), warm_up_and_decay(options["epochs"], *PHASES[name])
        return train(model, fitted, batches, optimiser, nn.functional.mse_loss, factor)

    named = f"full_batches_{name}{'_raw' * raw}_{options['epochs']}_{seed}"
    return kept(model, named, make), fitted, (x[cut:], y[cut:])


def warm_up_and_decay(steps: int, warm: float, decay: float) -> Callable[[int], float]:
    """Returns step -> factor of the learning rate. It rises up to a share of the steps, and falls from another on."""
    return lambda step: min(1.0, (step + 1) / (warm * steps), (steps - step) / ((1 - decay) * steps))


def measures(name: str, seed: int, shown: int, ranks: Sequence[int]) -> dict[str, Any]:
    """Returns the measures of every way for one network, at half of the other rows, at most 200.

    "one noise variance" is the network with the mean squared error of the other half as noise variance.
    """
    model, (x, y), (x_other, y_other) = network(name, False, seed)
    count = min(200, len(x_other) // 2)
    with torch.no_grad():
        noise = float((model(x) - y).square().mean())
        squares = (model(x_other) - y_other).double().square()
    swag = swag_from(model, batched(x, y, 256), nn.functional.mse_loss, learning_rate=0.001, snapshots=20)
    task = Task(model, batched(x[:shown], y[:shown], 250), len(x), lw.Gaussian(noise), swag)
    inputs = {"test": (x_other[:count], y_other[:count])}
    found = compare_subspaces(task, inputs, ranks, 1.0, seed, WAYS)["test"]
    found["network"] = {"nll": gaussian_nll(squares[:count], noise)}
    found["one noise variance"] = {"nll": gaussian_nll(squares[:count], float(squares[count:].mean()))}
    return {**found, "noise variance": noise, "test error": float(squares[:count].mean())}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns relative errors, and NLL minus that of the network with the same seed."""
    tasks = tasks_of(results)
    return {
        "relative error": table(tasks, list(tasks), "relative_error", (100, 500, 1000)),
        "nll": table(results["NLL minus the network's"], list(tasks), "nll", (100, 500, 1000)),
    }


def draw(results: Mapping[str, Any], experiment: str = __file__) -> None:
    """Draws relative error, and NLL minus that of the network, over s: means and standard errors of the seeds."""
    tasks = tasks_of(results)
    figure, axes = drawing.panels(len(tasks), 2, (9, 3.4 * len(tasks) + 0.8))
    for line, name in zip(axes, tasks, strict=True):
        count = sum(run.startswith(f"{name},") for run in results["runs"])
        curves(line[0], tasks[name], "relative_error")
        curves(line[1], results["NLL minus the network's"][name], "nll")
        for axis in line:
            axis.set_title(f"{name}, {count} seed{'s' * (count > 1)}", fontsize=10)
        line[0].set_ylabel(LABELS["relative_error"])
        line[1].set_ylabel("NLL minus the network's (nats)")
    drawing.legend_below(figure, 5)
    drawing.save(figure, experiment)


def tasks_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns table -> way -> s -> measures; numbers of the network alone are left out."""
    return {
        name: {way: of for way, of in rows["λ = 1"].items() if "mean" not in of}
        for name, rows in results["table"].items()
    }


def differences(runs: Mapping[str, Any], part: str = "λ = 1", base: str = "network") -> dict[str, Any]:
    """Returns the NLL of each way minus the NLL of `base` with the same seed, table -> way -> s -> mean and error."""

    def gained(rows: Mapping[str, Any]) -> dict[str, Any]:
        ways = {way: of for way, of in rows[part].items() if isinstance(of, Mapping)}
        return {way: _minus(of, ways[base]["nll"]) for way, of in ways.items()}

    return paired(runs, gained)


def _minus(found: Mapping[str, Any], start: float) -> dict[str, Any]:
    if "nll" in found:
        return {"nll": found["nll"] - start}
    return {rank: {"nll": row["nll"] - start} for rank, row in found.items()}
