"""The rows to beat in Tables 1, 2, 4 and 5: one number from validation data, the prior alone, the recommended call.

One number is a temperature of the logits, or a noise variance. The recommended call is `lw.fit` with validation data
and no other choice. Networks, splits and test data are those of the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import lapwing as lw
from papers.common.data import Batches, joined
from papers.common.results import Rows, once, read
from papers.common.scores import paired, probabilities
from papers.common.tables import grid, shown
from papers.common.training import ONE_NOISE
from papers.streamlined import table1, table2
from papers.streamlined.setting import Setting, apart, labels, scores, treated
from papers.streamlined.table1 import NETWORKS, RegressionTask, points_of
from papers.streamlined.table2 import MLPTask, class_row
from papers.valla.published import PRIOR_ALONE

TRANSFORMERS = {"fashion_mnist": (1000, 500), "sst2": (600, 300)}
"""Task -> most test and validation inputs, as in `table4` and `table5`."""


def run(seeds: Sequence[int] = range(5), transformers: Sequence[str] = tuple(TRANSFORMERS)) -> dict[str, Any]:
    """Returns the scores of each network by itself, of the prior alone and of the recommended call."""
    rows = Rows(__file__, {})
    for seed in seeds:
        for name in transformers:
            add_transformer(rows, name, seed, *TRANSFORMERS[name])
        for name in ("mnist", "fashion_mnist"):
            mlp = once(partial(MLPTask.load, name, seed))
            for row in ("as it is", "one temperature", "prior alone", CALL):
                rows.add(f"{name} MLP, seed {seed}", row, lambda task, r: classifier(task(), r), mlp, row)
        for name in NETWORKS:
            task = once(partial(RegressionTask.load, name, seed))
            for row in (*NOISES, "prior alone", CALL):
                rows.add(f"{name}, seed {seed}", row, lambda task, r: regression(task(), r), task, row)
    return rows.all()


def add_transformer(rows: Rows, name: str, seed: int, tested: int, tuned: int) -> None:
    """Adds the rows of one transformer; arguments are those of `Setting.load`."""
    setting = once(lambda: Setting.load(name, seed, tested=tested, tuned=tuned))
    for row in ("as it is", "one temperature", *("prior alone, " + part for part in PARTS[name]), CALL):
        rows.add(f"{name} transformer, seed {seed}", row, lambda s, r: transformer(s(), r), setting, row)


CALL = "recommended call"
NOISES = ("noise of training residuals", "noise of validation residuals")
GAINS = {"GLM": "GLM x factor", "streamlined": "streamlined x factor"}
PARTS = {name: ("attention", "MLPs", "last layer") for name in ("fashion_mnist", "cifar10")} | {"sst2": ("MLPs",)}
"""Transformer -> parts of it whose prior is scored."""


def fitted(
    row: str, model: nn.Module, train: Batches, val: Batches, params: Any = None, **options: Any
) -> lw.Posterior:
    """Fits what a row names; δ, and the temperature or the noise variance, are of the validation data.

    Args:
        row: "one temperature", "recommended call", or else the prior alone.
        model: the network.
        train: training data.
        val: validation data.
        params: of the prior.
        options: of the fit.
    """
    if row == "one temperature":
        return lw.fit(model, val, lw.TemperatureScaling())
    if row == CALL:
        return lw.fit(model, train, validation=val, progress=False, **options)
    return lw.fit(model, train, PRIOR_ALONE, params=params, validation=val, progress=False, **options)


def regression(task: RegressionTask, row: str) -> dict[str, Any]:
    """Returns the NLPD of the test rows, and the noise variance."""
    x, y = task.data.test
    if row not in NOISES:
        posterior = fitted(row, task.model, task.loader, task.val, lw.everything, likelihood=ONE_NOISE)
        nlpd = points_of(posterior, posterior.latent(x), y)[0].mean()
        return {"nlpd": float(nlpd), "noise": posterior.noise_variance, "prior precision": posterior.prior_precision}
    a, b = task.data.train if row == NOISES[0] else joined(task.val)
    with torch.no_grad():
        noise, square = ((task.model(i) - j).double().square().mean() for i, j in ((a, b), (x, y)))
    nlpd = (2 * torch.pi * noise).log() / 2 + square / (2 * noise)
    return {"nlpd": float(nlpd), "noise": float(noise)}


def classifier(task: MLPTask, row: str) -> dict[str, Any]:
    """Returns the scores of an MLP."""
    if row == "as it is":
        return task.network()
    posterior = fitted(
        row, task.model, task.data.train[: table2.SHOWN], task.data.val, lw.everything, data_size=len(task.whole[0])
    )
    inside, outside = (
        probabilities(posterior, task.latent(posterior, x, lw.Linearized()))
        for x in (task.tested[0], task.data.foreign[:2000])
    )
    return {**class_row(inside, task.tested[1], outside), **_chosen(posterior)}


def transformer(setting: Setting, row: str) -> dict[str, Any]:
    """Returns the scores of a transformer."""
    if row == "as it is":
        return setting.network_row()
    params = treated(setting.model).get(row.partition(", ")[2])
    posterior = fitted(row, setting.model, setting.train, setting.val, params, data_size=setting.size)
    inside, outside = (probabilities(posterior, posterior.latent(part)) for part in (setting.test, setting.foreign))
    return {**scores(inside, labels(setting.test)), **apart(inside, outside), **_chosen(posterior)}


def _chosen(posterior: lw.Posterior) -> dict[str, float]:
    found = {"temperature": posterior.logit_temperature, "prior precision": posterior.prior_precision}
    return {name: value for name, value in found.items() if value is not None}


def gains(runs: Mapping[str, Any], posteriors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns table -> row -> how much lower its NLPD is than at one noise variance, in nats.

    Args:
        runs: "table, seed fold" -> rows of this experiment.
        posteriors: the same of `table1`. Networks and test rows are the same, so folds are paired.
    """

    def gained(both: tuple[Mapping[str, Any], Mapping[str, Any]]) -> dict[str, float]:
        rows, ways = both
        nlpds = {way: ways["LA"][way]["scaled"]["nlpd"] for way in ("GLM", "streamlined")}
        nlpds |= {row: rows[row]["nlpd"] for row in ("prior alone", CALL) if row in rows}
        return {row: rows[NOISES[1]]["nlpd"] - nlpd for row, nlpd in nlpds.items()}

    return paired({run: (runs[run], ways) for run, ways in posteriors.items()}, gained)


SCORED = ("NLPD", "ECE", "AUROC", "accuracy, %", "temperature")


def class_cells(name: str, rows: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the cells of a classifier's rows, in the order of `SCORED`."""
    return {
        f"{name}, {row}": [
            *(shown(part[key]) for key in ("nlpd", "ece", "auroc")), shown(part["accuracy"], 1, 100),
            shown(part.get("temperature"), 2),
        ]
        for row, part in rows.items()
    }  # fmt: skip


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the scores of the classifiers, and the NLPD of the regressions with gains over one noise variance."""
    found: dict[str, dict[str, list[str]]] = {"MLPs": {}, "transformers": {}, "regressions": {}}
    gained = gains(results["runs"], read(str(table1.__file__))["runs"])
    for name, rows in results["table"].items():
        if name in gained:
            gain = [shown(part) for part in gained[name].values()]
            found["regressions"][name] = [*(shown(rows[noise]["nlpd"], 2) for noise in NOISES), *gain]
            continue
        kind = "MLPs" if name.endswith("MLP") else "transformers"
        found[kind] |= class_cells(name.rpartition(" ")[0], rows)
    gains_of = [f"gain of {GAINS.get(row, row)}" for row in next(iter(gained.values()))]
    columns = ["noise of the training residuals", "of the validation residuals", *gains_of]
    return {
        "MLPs": grid(SCORED, found["MLPs"]),
        "transformers": grid(SCORED, found["transformers"]),
        "regressions": grid(columns, found["regressions"]),
    }
