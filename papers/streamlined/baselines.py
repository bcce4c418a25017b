"""One number from validation data, and no posterior: the rows to beat in Tables 1, 2, 4 and 5.

Classifiers have a temperature of their logits. Regressions have a noise variance, and without validation data that of
the training residuals. Networks, splits and test data are those of the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from papers.common.results import Rows, once, read
from papers.common.scores import averaged
from papers.common.tables import grid, shown
from papers.streamlined import table1
from papers.streamlined.setting import Setting, apart, labels, outputs, scores
from papers.streamlined.table1 import NETWORKS, RegressionTask
from papers.streamlined.table2 import MLPTask, class_row

TRANSFORMERS = {"fashion_mnist": (1000, 500), "sst2": (600, 300), "mrpc": (600, 300)}
"""Task -> most test and validation inputs, as in `table4` and `table5`."""


def run(
    seeds: Sequence[int] = (0, 1), folds: Sequence[int] = range(5), transformers: Sequence[str] = tuple(TRANSFORMERS)
) -> dict[str, Any]:
    """Returns scores of each network as it is, and at its temperature or noise variance."""
    rows = Rows(__file__, {})
    for name in NETWORKS:
        for fold in folds:
            rows.add(f"{name}, seed {fold}", "network", lambda *at: regression(RegressionTask.load(*at)), name, fold)
    for seed in seeds:
        for name in ("mnist", "fashion_mnist"):
            mlp = once(lambda name=name, seed=seed: MLPTask.load(name, seed))  # type: ignore[misc]
            rows.add(f"{name} MLP, seed {seed}", "network", lambda task: classifier(task()), mlp)
    for seed in seeds:
        for name in transformers:
            rows.add(f"{name} transformer, seed {seed}", "network", _transformer, name, seed, *TRANSFORMERS[name])
    return rows.all()


def regression(task: RegressionTask) -> dict[str, Any]:
    """Returns the NLPD of the test rows under the noise variance of training residuals, and of validation residuals."""
    found = {}
    val = tuple(torch.cat(parts) for parts in zip(*task.val, strict=True))
    x, y = task.data.test
    with torch.no_grad():
        squares = {
            name: (task.model(part[0]) - part[1]).double().square()
            for name, part in (("training", task.data.train), ("validation", val), ("test", (x, y)))
        }
    for name in ("training", "validation"):
        noise = squares[name].mean()
        nlpd = (2 * torch.pi * noise).log() / 2 + squares["test"].mean() / (2 * noise)
        found[f"noise of {name} residuals"] = {"nlpd": float(nlpd), "noise": float(noise)}
    return found


def classifier(task: MLPTask) -> dict[str, Any]:
    """Returns the scores of an MLP as it is, and at one temperature."""
    with torch.no_grad():
        inside, outside = (task.model(x) for x in (task.tested[0], task.data.foreign[:2000]))
    temperature = lw.fit(task.model, task.data.val, lw.TemperatureScaling()).logit_temperature
    return {
        name: class_row((inside / t).softmax(-1), task.tested[1], (outside / t).softmax(-1))
        for name, t in (("as it is", 1.0), ("one temperature", temperature))
    } | {"temperature": temperature}


def _transformer(name: str, seed: int, tested: int, tuned: int) -> dict[str, Any]:
    setting = Setting.load(name, seed, tested=tested, tuned=tuned)
    temperature = lw.fit(setting.model, setting.val, lw.TemperatureScaling()).logit_temperature

    def logits(part: Any) -> Tensor:
        with torch.no_grad():
            return torch.cat([outputs(setting.model, x) for x, _ in part])

    inside, outside = logits(setting.test), logits(setting.foreign)
    found: dict[str, Any] = {"temperature": temperature}
    for name, t in (("as it is", 1.0), ("one temperature", temperature)):
        probs, foreign = ((part / t).softmax(-1) for part in (inside, outside))
        found[name] = {**scores(probs, labels(setting.test)), **apart(probs, foreign)}
    return found


def gains(runs: Mapping[str, Any], posteriors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns table -> way -> how much lower the NLPD of LA with a factor is than at one noise variance, in nats.

    Args:
        runs: "table, seed fold" -> rows of this experiment.
        posteriors: the same of `table1`. Networks and test rows are the same, so folds are paired.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for run, ways in posteriors.items():
        base = runs[run]["network"]["noise of validation residuals"]["nlpd"]
        for way in ("GLM", "streamlined"):
            table = found.setdefault(run.partition(",")[0], {})
            table.setdefault(way, []).append(base - ways["LA"][way]["scaled"]["nlpd"])
    return {name: averaged([dict(zip(ways, fold, strict=True)) for fold in zip(*ways.values(), strict=True)])
            for name, ways in found.items()}  # fmt: skip


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the scores of the classifiers, and the NLPD of the regressions with the gains of Table 1 over it."""
    classes, regressions = {}, {}
    gained = gains(results["runs"], read(str(table1.__file__))["runs"])
    for name, found in results["table"].items():
        row = found["network"]
        if "temperature" in row:
            parts = (row["as it is"], row["one temperature"])
            cells = [shown(part[key]) for key in ("nlpd", "ece", "auroc") for part in parts]
            classes[name] = [shown(row["temperature"], 2), *cells]
        else:
            gain = [shown(gained[name][way]) for way in ("GLM", "streamlined")]
            regressions[name] = [*(shown(part["nlpd"], 2) for part in row.values()), *gain]
    columns = [f"{name}, {kind}" for name in ("NLPD", "ECE", "AUROC") for kind in ("as it is", "one temperature")]
    noises = ["noise of the training residuals", "noise of the validation residuals"]
    fields = [*noises, "gain of GLM x factor", "gain of streamlined x factor"]
    return {
        "classifiers": grid(["temperature", *columns], classes),
        "regressions": grid(fields, regressions),
    }
