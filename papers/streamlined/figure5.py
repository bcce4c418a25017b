"""Figures 5 and 10: sensitivities of predictions to the pixels of digits 0, 6 and 8, and to columns of tables."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.evaluation import plots
from lapwing.evaluation.sensitivity import Sensitivities, sensitivity
from papers.common import drawing
from papers.common.data import Table, arrays, batched, images, rows_and_targets, split
from papers.common.networks import mlp
from papers.common.scores import averaged
from papers.common.tables import grid
from papers.common.training import ONE_NOISE, Recipe, kept, seeded, shuffled, train


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns what the maps say in numbers, and the maps and bars of the first seed."""
    return rounded({**digits(seeds), "tables": bars(seeds[0])})


DIGITS = (0, 6, 8)
WIDTHS = (784, 128, 64, 32, 3)
"""Four layers; appendix B.3 does not give their widths."""

CENTRE, SCALE = 0.1307, 0.3081
"""Of the pixels: appendix B.5 has inputs with a range of 3.246, which is 1 / 0.3081."""

TABLE = Recipe(F.mse_loss, 4000, decay=1e-4, batch=64)

OBJECTIVES: dict[str, dict[str, Any]] = {"equation 11": {"weight": 1.0, "rate": 0.1}, "λ follows": {"rate": 0.2}}


@dataclass(frozen=True)
class DigitTask:
    """A ReLU MLP trained on three digits, with its last-layer posteriors.

    Attributes:
        model: the network.
        candidates: name -> the network, or a posterior around it.
        x: test images (n, 784), as many of each digit, in turn.
        y: their classes.
        empty: which pixels no training image has ink in (784,).
        accuracy: on all test images of these digits.
    """

    model: nn.Module
    candidates: Mapping[str, nn.Module | lw.Posterior]
    x: Tensor
    y: Tensor
    empty: Tensor
    accuracy: float

    @classmethod
    def load(cls, seed: int, each: int = 10) -> DigitTask:
        """Reads MNIST, trains the network or takes the one that was kept, and fits the posteriors."""
        data = images("mnist")
        x, y = _three(data.x_train, data.y_train)
        model = trained(x, y, seed)
        whole, labels = _three(data.x_test, data.y_test)
        with torch.no_grad():
            accuracy = float((model(whole).argmax(1) == labels).float().mean())
        rows = torch.stack([(labels == c).nonzero()[:each, 0] for c in range(len(DIGITS))], 1).flatten()
        loader = batched(x, y, 500)
        candidates: dict[str, nn.Module | lw.Posterior] = {
            "MAP": model,
            "last layer": lw.fit(model, loader, lw.KFAC(), params=lw.last_layer, tune=lw.BoundedEvidence(nats=0.005)),
        }
        return cls(model, candidates, whole[rows], labels[rows], x.std(0) < 1e-6, accuracy)

    def find(self, name: str, full: bool, shown: int, **options: Any) -> Sensitivities:
        """Returns the sensitivities of a candidate at the first test images; in full mode hidden covariances count.

        With certain weights full mode is `Linearized()`, which is faster.
        """
        candidate = self.candidates[name]
        alone = isinstance(candidate, nn.Module)
        via: lw.Linearized | lw.Streamlined = lw.Streamlined("full" if full else "diagonal")
        if full and alone:
            via = lw.Linearized()
        likelihood = "categorical" if alone else None
        return sensitivity(candidate, self.x[:shown], self.y[:shown], via=via, likelihood=likelihood, **options)


def _three(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the images of the three digits, flat and normalised, and their classes."""
    digits = torch.tensor(DIGITS)
    kept = torch.isin(y, digits)
    return (x[kept].flatten(1) - CENTRE) / SCALE, torch.searchsorted(digits, y[kept])


def trained(x: Tensor, y: Tensor, seed: int, epochs: int = 50) -> nn.Sequential:
    """Trains by appendix B.3: Adam, batches of 64, rate 1e-3, weight decay 1e-5, 50 epochs; or takes what was kept."""
    with seeded(seed):
        model = nn.Sequential(*list(mlp(*WIDTHS, activation=nn.ReLU))[1:])
        optimiser = torch.optim.Adam(model.parameters(), 1e-3, weight_decay=1e-5)
        rows = islice(shuffled(len(x), 64), epochs * -(-len(x) // 64))
        return kept(model, f"digits_068_{epochs}_{seed}", lambda: train(model, (x, y), rows, optimiser))


def stretched(values: Tensor) -> Tensor:
    """Returns sensitivities (B, n) stretched to [0, 1] image by image, as maps of nearly equal ones must be."""
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    return (values - low) / (high - low).clamp_min(torch.finfo(values.dtype).tiny)


def summary(task: DigitTask, found: Sensitivities, draws: int = 200) -> dict[str, float]:
    """Returns what the maps say of pixels that are always empty, and whether the network bears the noise in fact.

    Returns:
        `smallest`, `median`: of the sensitivities, 1 the largest of each image; `empty share`: of the sum of stretched
        sensitivities at always empty pixels, beside their share of the image; `strong`, `strong, empty`: share of the
        pixels, and of the empty ones, above one half of the stretched range, which the paper's figures show; `strong,
        far`: share of the pixels more than three from any ink that are; `far pixels`: how many there are; `std`:
        median noise, in units of normalised pixels; `rise`, `rise, drawn`: of the NLPD of the network alone under the
        noise, by the last step, and by draws of the pixels.
    """
    shown, empty, y = stretched(found.values), task.empty, task.y[: len(found.values)]
    noisy = lw.propagate(task.model, lw.Uncertain(found.inputs, found.variance), via=lw.MonteCarlo(draws))
    with torch.no_grad():
        before = F.cross_entropy(task.model(found.inputs), y)
        after = -lw.Categorical().predict(noisy).log_prob(y).mean()
    nlpd = found.history["nlpd"]
    ink = (found.inputs > CENTRE).float().reshape(-1, 1, 28, 28)
    far = F.max_pool2d(ink, 7, 1, 3).flatten(1) == 0
    return {
        "smallest": float(found.values.amin(1).mean()),
        "median": float(found.values.median(1).values.mean()),
        "empty share": float((shown[:, empty].sum(1) / shown.sum(1)).mean()),
        "empty pixels": float(empty.float().mean()),
        "strong": float((shown > 0.5).float().mean()),
        "strong, empty": float((shown[:, empty] > 0.5).float().mean()),
        "strong, far": float((shown[far] > 0.5).float().mean()),
        "far pixels": float(far.float().mean()),
        "std": float(found.std.median()),
        "steps": float(found.steps.float().mean()),
        "stopped": float(found.stopped.float().mean()),
        "rise": float((nlpd[-1] - nlpd[0]).mean()),
        "rise, drawn": float(after - before),
    }


def agreement(a: Tensor, b: Tensor) -> float:
    """Returns the mean correlation over images of two networks' log sensitivities (B, n): what is spurious differs."""
    pairs = [torch.corrcoef(torch.stack([p, q]))[0, 1] for p, q in zip(a.double().log(), b.double().log(), strict=True)]
    return float(torch.stack(pairs).mean())


def digits(seeds: Sequence[int], full_shown: int = 6) -> dict[str, Any]:
    """Learns maps of MAP and last-layer Laplace, for the printed objective and one that follows (Figure 5).

    Returns:
        seed -> "candidate, mode, objective" -> summary, with the agreement of its maps with MAP's; means over seeds.
    """
    runs: dict[str, Any] = {}
    kept: dict[str, Sensitivities] = {}
    for seed in seeds:
        task = DigitTask.load(seed)
        rows = runs[f"seed {seed}"] = {"accuracy": task.accuracy}
        for full, (objective, options) in itertools.product((False, True), OBJECTIVES.items()):
            shown = full_shown if full else len(task.x)
            found = {name: task.find(name, full, shown, **options) for name in task.candidates}
            for name, one in found.items():
                row = f"{name}, {'full' if full else 'diagonal'}, {objective}"
                rows[row] = {**summary(task, one), "agreement with MAP": agreement(found["MAP"].values, one.values)}
                print(seed, row, rounded(rows[row]), flush=True)
                if full and seed == seeds[0]:
                    kept[f"{name}, {objective}"] = one
    curves: dict[str, Any] = {"maps": {row: found.values.tolist() for row, found in kept.items()}}
    curves["images"] = next(iter(kept.values())).inputs.tolist()
    return {
        "digits": DIGITS, "widths": WIDTHS, "rise": 0.1, "runs": runs, "table": averaged(list(runs.values())),
        "curves": curves,
    }  # fmt: skip


TABLES = {"concrete": ("uci_concrete", "MPa"), "california_housing": ("california_housing", "100 k$")}
"""Name -> file, unit of the target."""


def table(name: str, seed: int) -> tuple[Table, list[str]]:
    """Reads a table of eight features, split 80/10/10 at random, and the features' names."""
    file, unit = TABLES[name]
    return split(name, *rows_and_targets(file), unit, seed), [str(name) for name in arrays(file)["feature_names"]]


def table_sensitivities(name: str, seed: int) -> tuple[dict[str, Sensitivities], list[str]]:
    """Trains an MLP d-100-1 on a table, and learns how much noise the features of 50 test rows bear.

    Returns:
        "MAP", "last layer", "all layers" (KFAC), all in full mode -> sensitivities; the features' names.
    """
    data, names = table(name, seed)
    with seeded(seed):
        model = nn.Sequential(nn.Linear(len(names), 100), nn.ReLU(), nn.Linear(100, 1))
    TABLE.train(model, data.train, seed)
    loader = batched(*data.train, 500)
    options: Any = {"likelihood": ONE_NOISE, "tune": lw.BoundedEvidence()}
    last = lw.fit(model, loader, lw.Full(), params=lw.last_layer, **options)
    posterior = lw.fit(model, loader, lw.KFAC(), **options)
    noise = posterior.noise_variance
    assert noise is not None
    x = data.test[0][:50]
    found = {
        "MAP": sensitivity(model, x, likelihood=lw.Gaussian(noise), via=lw.Linearized()),
        "last layer": sensitivity(last, x, via=lw.Streamlined("full")),
        "all layers": sensitivity(posterior, x, via=lw.Streamlined("full")),
    }
    return found, names


def bars(seed: int) -> dict[str, Any]:
    """Returns the features of each table, and the sensitivities of its test rows by candidate (Figure 10)."""
    found = {}
    for name in TABLES:
        of_table, features = table_sensitivities(name, seed)
        curves = {candidate: one.values.tolist() for candidate, one in of_table.items()}
        found[f"{name}, seed {seed}"] = {"features": features, "curves": curves}
    return found


def rounded(value: Any, digits: int = 4) -> Any:
    """Returns nested numbers with four digits, three in curves."""
    if isinstance(value, Mapping):
        return {key: rounded(part, 3 if key == "curves" else digits) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(part, digits) for part in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def draw(results: Mapping[str, Any]) -> None:
    """Draws the maps of the digits and the bars of the tables."""
    curves = results["curves"]
    draw_maps(
        {row: torch.tensor(values) for row, values in curves["maps"].items()}, torch.tensor(curves["images"]), __file__
    )
    draw_tables(results["tables"])


def draw_maps(maps: Mapping[str, Tensor], images: Tensor, experiment: str) -> None:
    """Draws maps; those of equation 11 are stretched, and shown from one half on, as in the paper.

    Args:
        maps: "candidate, objective" -> sensitivities (n, 784).
        images: pixels (n, 784).
        experiment: whose picture this is, a `__file__`.
    """
    rows = sorted(maps, key=lambda row: list(OBJECTIVES).index(row.rpartition(", ")[2]))
    figure, axes = drawing.panels(len(rows), len(images), (1.2 * len(images) + 1.6, 1.25 * len(rows)), layout=None)
    for line, row in zip(axes, rows, strict=True):
        name, _, objective = row.rpartition(", ")
        printed = objective == "equation 11"
        values = stretched(maps[row]) if printed else maps[row]
        for value, image, axis in zip(values, images, line, strict=True):
            low = 0.5 if printed else 0.1
            above = ((value - low) / (1 - low)).clamp_min(0)
            plots.uncertainty_map(above.reshape(28, 28), 1 - image.reshape(28, 28), axis, label="")
        text = f"{name}\n{objective}\n({'stretched, 0.5 to 1' if printed else '0.1 to 1'})"
        line[0].text(-0.1, 0.5, text, transform=line[0].transAxes, ha="right", va="center", fontsize=8)
    figure.subplots_adjust(left=0.2, right=0.995, top=0.99, bottom=0.01, wspace=0.04, hspace=0.04)
    drawing.save(figure, experiment)


def draw_tables(runs: Mapping[str, Any]) -> None:
    """Draws bars of the first seed, a row a table, a column a candidate."""
    first = {run: found for run, found in runs.items() if run.endswith("seed 0")}
    figure, axes = drawing.panels(len(first), 3, (12, 2.7 * len(first)))
    for line, (run, found) in zip(axes, first.items(), strict=True):
        for axis, (candidate, values) in zip(line, found["curves"].items(), strict=True):
            plots.sensitivity_bars(torch.tensor(values), found["features"], axis)
            axis.set_title(f"{run.partition(',')[0]}, {candidate}", fontsize=9)
    figure.suptitle("seed 0; means of the test rows, lines: quartiles", fontsize=10)
    drawing.save(figure, __file__, "figure5_tables")


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns what the maps of full mode say, means of the networks."""
    kinds = {
        "smallest / largest": "smallest", "strong pixels, always empty": "strong, empty",
        "strong pixels, far from ink": "strong, far", "rise under draws": "rise, drawn",
        "agreement with MAP": "agreement with MAP",
    }  # fmt: skip
    rows = {
        f"{name}, {objective}": [
            f"{results['table'][f'{name}, full, {objective}'][key]['mean']:.3g}" for key in kinds.values()
        ]
        for objective in OBJECTIVES
        for name in ("MAP", "last layer")
    }
    return {"maps": grid(list(kinds), rows)}
