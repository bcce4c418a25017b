"""The arms of the grid and what is measured of them. An arm turns a network and its data into a predictor.

A predictor takes inputs and returns a distribution of torch: a Normal for each row, or a Categorical.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

import lapwing as lw
from benchmarks.grid.networks import Data
from lapwing.evaluation import metrics
from papers.common.data import Batches, Part, batched
from papers.common.measure import timed

Predictor = Callable[[Tensor], Distribution]
Arm = Callable[[nn.Module, Data], tuple[Predictor, dict[str, Any]]]

BATCH = 100
RESAMPLED = 200
HALF = NormalDist().inv_cdf(0.95)
"""Half of a 90 % interval, in standard deviations."""


@torch.no_grad()
def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Returns the outputs of the network, batch by batch."""
    return torch.cat([model(some) for some in x.split(BATCH)])


def network(model: nn.Module, data: Data) -> tuple[Predictor, dict[str, Any]]:
    """Returns the network alone: a softmax, or the mean squared training residual as noise."""
    return _scaled(model, data.train) if data.train[1].is_floating_point() else (partial(_classes, model, 1.0), {})


def temperature(model: nn.Module, data: Data) -> tuple[Predictor, dict[str, Any]]:
    """Returns the network with one number that is fitted on the validation rows: temperature or noise."""
    if data.val[1].is_floating_point():
        return _scaled(model, data.val)
    logits, y = outputs(model, data.val[0]).double(), data.val[1]
    chosen = min(torch.logspace(-1, 2, 1001).tolist(), key=lambda t: float(nn.functional.cross_entropy(logits / t, y)))
    return partial(_classes, model, chosen), {"temperature": chosen}


@torch.no_grad()
def _classes(model: nn.Module, divisor: float, x: Tensor) -> Distribution:
    return Categorical(logits=model(x) / divisor)


def _scaled(model: nn.Module, part: Part) -> tuple[Predictor, dict[str, Any]]:
    noise = float((outputs(model, part[0]) - part[1]).double().square().mean())

    @torch.no_grad()
    def predict(x: Tensor) -> Distribution:
        mean = model(x)
        return Independent(Normal(mean, torch.full_like(mean, math.sqrt(noise))), 1)

    return predict, {"noise_variance": noise}


def default(model: nn.Module, data: Data, **options: Any) -> tuple[Predictor, dict[str, Any]]:
    """Returns lapwing's posterior of the training rows, by default that of `lw.fit(model, loader)`."""
    posterior = lw.fit(model, _batches(data.train), data_size=data.size, progress=False, **options)
    facts = {"noise_variance": posterior.noise_variance, "prior_precision": posterior.prior_precision}
    return lambda x: posterior.predict(x).distribution(), facts


def validated(model: nn.Module, data: Data, **options: Any) -> tuple[Predictor, dict[str, Any]]:
    """Returns lapwing's posterior of the training rows, tuned on the validation rows."""
    return default(model, data, validation=_batches(data.val), **options)


def _batches(part: Part) -> Batches:
    return batched(*part, BATCH)


CANDIDATES: dict[str, dict[str, Any]] = {
    "diagonal": {"method": lw.Diagonal()},
    "kfac": {"method": lw.KFAC()},
    "last-layer": {"method": lw.KFAC(), "params": lw.last_layer},
    "full": {"method": lw.Full()},
    "ella": {"method": lw.ELLA(rank=20, rows=500)},
}
"""What the best of all methods is sought among, each with the default tuning and validated; Full for small networks."""

ARMS: dict[str, Arm] = {"network": network, "temperature": temperature, "default": default, "validated": validated}
ARMS |= {name: partial(default, **options) for name, options in CANDIDATES.items()}
ARMS |= {f"{name}-validated": partial(validated, **options) for name, options in CANDIDATES.items()}


def applies(arm: str, model: nn.Module) -> bool:
    """Tells whether an arm is for a network of this size."""
    return not arm.startswith("full") or sum(weights.numel() for weights in model.parameters()) <= 3000


def predicted(predict: Predictor, x: Tensor) -> Distribution:
    """Returns the distribution of all rows, batch by batch."""
    parts = [predict(some) for some in x.split(BATCH)]
    if isinstance(parts[0], Categorical):
        return Categorical(logits=torch.cat([part.logits for part in parts]).detach().double())
    mean, std = (torch.cat([getattr(part, name) for part in parts]).detach().double() for name in ("mean", "stddev"))
    return Independent(Normal(mean, std), 1)


def scores(prediction: Distribution, y: Tensor, foreign: Distribution | None = None) -> dict[str, float]:
    """Returns what is measured of test predictions, and of those of foreign inputs."""
    nll = -prediction.log_prob(y)
    if not isinstance(prediction, Categorical):
        residual = y.double() - prediction.mean
        half = HALF * prediction.stddev
        return {
            "nll": float(nll.mean()),
            "coverage": float(metrics.interval_coverage(prediction.mean - half, prediction.mean + half, y.double())),
            "squared_error": float(residual.square().mean()),
            "width_over_residual": float(prediction.stddev.mean() / residual.square().mean().sqrt()),
        }
    confidence, classes = prediction.probs.max(-1)
    chance = torch.rand(RESAMPLED, len(y), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    by_chance = calibration_error(confidence, (chance < confidence).double())
    row = {
        "nll": float(nll.mean()),
        "accuracy": float((classes == y).double().mean()),
        "ece": float(calibration_error(confidence, (classes == y).double()[None])[0]),
        "ece_floor": float(by_chance.mean()),
        "ece_deviation": float(by_chance.std()),
    }
    if foreign is not None:
        row["auroc_entropy"] = float(metrics.auroc(prediction.entropy(), foreign.entropy()))
        row["auroc_confidence"] = float(metrics.auroc(-confidence, -foreign.probs.amax(-1)))
    return row


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = 15) -> Tensor:
    """Returns the expected calibration error (R,) of confidences (n,) for R vectors of what was correct (R, n).

    Drawn from the confidences themselves, these say how large it is for a calibrated network: its noise floor.
    """
    places = (confidence * bins).long().clamp_max(bins - 1)
    return ((correct - confidence) @ nn.functional.one_hot(places, bins).double()).abs().sum(-1) / len(confidence)


def paired(prediction: Distribution, other: Distribution, y: Tensor, name: str) -> dict[str, float]:
    """Returns the mean difference in NLL of the test rows, and its standard error."""
    difference = other.log_prob(y) - prediction.log_prob(y)
    return {
        f"nll_minus_{name}": float(difference.mean()),
        f"nll_minus_{name}_error": float(difference.std() / math.sqrt(len(y))),
    }


def paired_auroc(scores: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor], name: str) -> dict[str, float]:
    """Returns the difference in AUROC of two scores of the same test and foreign inputs, and its standard error.

    The AUROC is a mean over the test inputs of the share of foreign inputs that score higher, and over the foreign
    inputs likewise. The error is that of these two means (DeLong et al. 1988).
    """
    differences = [mine - its for mine, its in zip(_shares(*scores), _shares(*others), strict=True)]
    return {
        f"auroc_minus_{name}": float(differences[0].mean()),
        f"auroc_minus_{name}_error": math.sqrt(sum(float(each.var()) / len(each) for each in differences)),
    }


def _shares(test: Tensor, foreign: Tensor) -> tuple[Tensor, Tensor]:
    """Returns for each test input how much of the foreign ones score higher, and for each foreign one the like."""
    higher = (foreign > test[:, None]).double() + 0.5 * (foreign == test[:, None]).double()
    return higher.mean(1), higher.mean(0)


def forward_seconds(model: nn.Module, x: Tensor) -> float:
    """Returns the seconds of the network's own outputs: the fastest of some runs where they are short."""
    first = timed(lambda: outputs(model, x))[1]
    return min(first, *(timed(lambda: outputs(model, x))[1] for _ in range(5))) if first < 0.2 else first
