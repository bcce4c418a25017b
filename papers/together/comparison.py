"""Rows of the comparison: a method, a way of prediction, a network and a seed give one row, which can be run alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lapwing import LapwingError
from lapwing.evaluation import metrics
from lapwing.likelihoods import Likelihood
from papers.common.data import joined
from papers.common.device import clock
from papers.common.measure import timed
from papers.common.results import Rows, once
from papers.common.scores import averaged
from papers.together import methods, tasks
from papers.together.methods import Fitted
from papers.together.tasks import Task

FACTS = {"shown": tasks.SHOWN, "held out": tasks.HELD_OUT, "tested": tasks.TESTED, "foreign": tasks.FOREIGN}


BASE = "temperature or noise"
"""The row to beat: one number from the held-out data."""


def add(rows: Rows, name: str, seed: int) -> None:
    """Adds the rows of one network that the file lacks."""
    task = once(lambda: tasks.task(name, seed))
    base = once(lambda: losses(task(), methods.fitted(BASE, task())))
    for method in methods.names(name not in tasks.GIVEN, name in tasks.TABLES):
        fit = once(lambda method=method: methods.fitted(method, task()))  # type: ignore[misc]
        ways = ("one pass each",) if method in methods.NETWORKS else tuple(methods.WAYS)
        for way in ways:
            label = method if method in methods.NETWORKS else f"{method}, {way}"
            rows.add(f"{name}, seed {seed}", label, row, task, fit, way, base)


def run_all(experiment: str, names: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Returns the results of an experiment: all methods at one seed come first, so that whole tables are early."""
    rows = Rows(experiment, FACTS)
    for seed in seeds:
        for name in names:
            add(rows, name, seed)
    rows.facts["gains"] = gains(rows.runs)
    return rows.all()


def gains(runs: Mapping[str, Mapping[str, Any]], part: str = "validated") -> dict[str, Any]:
    """Returns by task and row how much lower the NLL is than that of the network at one temperature or noise variance.

    The differences are of networks of the same seed; mean and standard error are over seeds.

    Args:
        runs: "task, seed 0" -> row -> values.
        part: "validated" for rows with two numbers from the held-out data, "fitted" for rows without them.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for run, rows in runs.items():
        base = rows.get(BASE, {}).get("validated", {}).get("nll")
        for name, values in rows.items():
            if base is not None and name != BASE and part in values:
                task = found.setdefault(run.partition(",")[0], {})
                task.setdefault(name, []).append(base - values[part]["nll"])
    return {task: {name: averaged(values) for name, values in rows.items()} for task, rows in found.items()}


def row(task: Any, fit: Any, way: str, base: Any) -> dict[str, Any]:
    """Returns the scores of a method through a way, as fitted and with two numbers from the held-out data.

    The two numbers are a factor of the covariance, and the temperature of the logits or the noise variance.
    """
    try:
        return scored(task(), fit(), way, base())
    except LapwingError as error:
        return {"refused": str(error).partition("\n")[0][:300]}


def losses(task: Task, fit: Fitted) -> Tensor:
    """Returns the negative log likelihood of each test sample (n,) under the network at one number."""
    x, y = task.test
    return -fit.likelihood.predict(fit.latent(x, next(iter(fit.ways.values())))).log_prob(y).double()


def scored(task: Task, fit: Fitted, way: str, base: Tensor) -> dict[str, Any]:
    """Returns the scores of `row`; "gain" is the mean of `base` minus the losses, with its error over test samples."""
    x, y = task.test
    forward = forward_seconds(task, x)
    latent, spent = timed(lambda: fit.latent(x, fit.ways[way]), clock)
    outside = None if task.foreign is None else fit.latent(task.foreign, fit.ways[way])
    a, b = joined(task.val)
    likelihood, factor = methods.best(fit.likelihood, fit.latent(a, fit.ways[way]), b)
    found: dict[str, Any] = {}
    for name, chosen, scale in (("fitted", fit.likelihood, 1.0), ("validated", likelihood, factor)):
        found[name] = scores(chosen, latent.scaled(scale), y, None if outside is None else outside.scaled(scale))
    gain = base + likelihood.predict(latent.scaled(factor)).log_prob(y).double()
    shown = sum(len(part) for part, _ in task.loader)
    found |= {
        "gain": float(gain.mean()), "gain error": float(gain.std() / len(gain) ** 0.5),
        "factor": factor, "fit seconds": fit.seconds, "fit passes": fit.seconds / forward * len(x) / shown,
        "passes": spent / forward, "bytes": fit.bytes,
    }  # fmt: skip
    ratio = likelihood.noise_variance if task.regression else likelihood.logit_temperature
    found["noise variance" if task.regression else "temperature"] = ratio
    return found if fit.prior_precision is None else {**found, "prior precision": fit.prior_precision}


def forward_seconds(task: Task, x: Tensor) -> float:
    """Returns seconds (see `clock`) of a plain forward pass of all inputs, the fastest of five."""
    with torch.no_grad():
        spent = [timed(lambda: [task.model(part) for part in x.split(250)], clock)[1] for _ in range(5)]
    return max(min(spent), 1e-6)


def scores(likelihood: Likelihood, latent: Any, y: Tensor, outside: Any = None) -> dict[str, float]:
    """Returns the scores of a latent: of classes NLL, ECE, accuracy, AUROC; of real targets NLL, RMSE, coverage."""
    found: Any = likelihood.predict(latent)
    numbers = {"nll": -float(found.log_prob(y).double().mean())}
    if likelihood.noise_variance is not None:
        numbers["rmse"] = float(metrics.rmse(found.mean, y))
        low, high = found.interval(0.9)
        numbers["coverage 0.9"] = float(metrics.interval_coverage(low, high, y))
        return numbers
    numbers |= {
        "ece": float(metrics.expected_calibration_error(found.probs, y)),
        "accuracy": float(metrics.accuracy(found.probs, y)),
    }
    if outside is not None:
        other: Any = likelihood.predict(outside)
        pairs = {"auroc": (found.mutual_information(), other.mutual_information()),
                 "auroc by entropy": (found.entropy(), other.entropy())}  # fmt: skip
        numbers |= {name: float(metrics.auroc(*pair)) for name, pair in pairs.items()}
    return numbers
