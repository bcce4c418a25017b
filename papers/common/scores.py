"""Scores of class probabilities, and averages over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing.evaluation import metrics
from lapwing.likelihoods import ClassPrediction


def class_scores(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Returns accuracy, NLL, ECE and Brier score."""
    return {
        "accuracy": float(metrics.accuracy(probs, labels)),
        "nll": float(metrics.nll(probs.double().gather(1, labels[:, None])[:, 0].log())),
        "ece": float(metrics.expected_calibration_error(probs, labels)),
        "brier": float(metrics.brier(probs, labels)),
    }


def interval_scores(prediction: Any, y: Tensor) -> dict[str, float]:
    """Returns NLL, coverage and mean width of the 90 % intervals of a regression."""
    low, high = (end.reshape(y.shape) for end in prediction.interval(0.9))
    return {
        "nll": -float(prediction.log_prob(y).double().mean()),
        "coverage": float(((low <= y) & (y <= high)).double().mean()),
        "width": float((high - low).double().mean()),
    }


def entropy(probs: Tensor) -> Tensor:
    """Returns the entropy (n,) of class probabilities, in nats."""
    return torch.special.entr(probs.double()).sum(-1)


def probabilities(posterior: lw.Posterior, latent: Any, link: Any = None) -> Tensor:
    """Returns the class probabilities (n, C) of a latent: of draws their average, of Gaussians by the link."""
    prediction = posterior.likelihood.predict(latent, link)
    assert isinstance(prediction, ClassPrediction)
    return prediction.probs


def averaged(runs: Sequence[Any]) -> dict[str, Any]:
    """Averages nested results over runs: mean and standard error at every leaf that all runs have."""
    if isinstance(runs[0], Mapping):
        return {str(key): averaged([run[key] for run in runs]) for key in runs[0] if all(key in run for run in runs)}
    values = [float(run) for run in runs]
    spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "standard_error": spread}


def paired(runs: Mapping[str, Any], of: Callable[[Any], Mapping[str, Any]]) -> dict[str, Any]:
    """Returns by task the averages over its seeds of what `of(rows)` returns, such as differences of two rows.

    Args:
        runs: "task, seed 0" -> rows.
        of: rows of one run -> numbers by name.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for run, rows in runs.items():
        found.setdefault(run.partition(", seed")[0], []).append(of(rows))
    return {task: averaged(seeds) for task, seeds in found.items()}
