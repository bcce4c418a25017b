"""VaLLA on regression tables (Ortega et al. 2024): the table of Figure 4, and the curves of Figures 4 and 8."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw

from ..evaluation import metrics
from ..tuning import Training, Tuning
from .loaders import Batches, batched
from .valla import TABLE, Part, Table, table, trained

LEVELS = torch.linspace(0, 1, 21).double()


class Untuned(Tuning):
    """Tunes nothing, and has the evidence's bound made ready: tunings are compared on one fit."""

    def tune(self, posterior: lw.Posterior, training: Training = Training()) -> lw.Posterior:  # noqa: B008 (frozen)
        """Returns the posterior as it is."""
        return posterior


def regression_scores(mean: Tensor, latent: Tensor, noise: float, y: Tensor, scale: float) -> dict[str, Any]:
    """Returns NLL (of standardised targets, and in the target's unit), CRPS (unit), CQM, coverage and its curve.

    Args:
        mean: of the predictions (n, 1), standardised.
        latent: variance of f (n, 1).
        noise: σ².
        y: targets (n, 1), standardised.
        scale: standard deviation of the targets in their unit.

    Returns:
        numbers by name; `curve` holds P(y in the central interval) at `LEVELS`, `latent share` the share of the latent
        in the predictive variance, `spread` the standard deviation of its logarithm over inputs.
    """
    variance = latent.double() + noise
    std, error = variance.sqrt(), (y - mean).double()
    levels = torch.erf((error / std).abs() / math.sqrt(2))
    nll = float(metrics.gaussian_nll(mean, variance, y))
    return {
        "nll": nll, "nll, unit": nll + math.log(scale), "crps": scale * float(metrics.crps_gaussian(mean, std, y)),
        "cqm": float(metrics.cqm(mean, std, y)), "coverage 0.9": float((levels <= 0.9).double().mean()),
        "latent share": float((latent / variance).mean()), "spread": float(variance.log().std()),
        "noise": noise, "curve": [float((levels <= level).double().mean()) for level in LEVELS],
    }  # fmt: skip


@dataclass(frozen=True)
class TableTask:
    """A trained 3 x 200 tanh MLP and its table.

    Attributes:
        data: the table.
        model: the network.
        train: training rows in batches, in random order.
        val: at most 5 000 validation rows, evenly spread.
        test: at most 10 000 test rows, evenly spread.
    """

    data: Table
    model: nn.Module
    train: Batches
    val: Batches
    test: Part

    @classmethod
    def load(cls, name: str, seed: int, cache: Path | None = None) -> TableTask:
        """Reads the table and trains the network, or reads it from the cache."""
        data = table(name, seed)
        model = trained((data.train[0].shape[1], 200, 200, 200, 1), data.train, TABLE, seed, name, cache)
        val = _thinned(data.val, 5000)
        order = torch.randperm(len(data.train[0]), generator=torch.Generator().manual_seed(seed))
        train = batched(data.train[0][order], data.train[1][order], 500)
        return cls(data, model, train, batched(*val, 500), _thinned(data.test, 10_000))

    def errors(self, part: Part) -> Tensor:
        """Returns squared residuals of the network (n, 1) float64."""
        with torch.no_grad():
            return torch.cat([(y - self.model(x)).double().square() for x, y in batched(*part, 500)])

    def network_scores(self) -> dict[str, Any]:
        """Returns MAP's scores at the σ² of training and of validation residuals, and the best that any σ² could have.

        That best one, which no honest procedure finds, is the mean squared residual of the test rows themselves.
        """
        x, y = self.test
        with torch.no_grad():
            mean = torch.cat([self.model(part) for part in x.split(500)])
        zero = torch.zeros_like(mean)
        val = torch.cat([x for x, _ in self.val]), torch.cat([y for _, y in self.val])
        parts = {"MAP": self.data.train, "MAP, noise tuned": val, "MAP, noise of the test rows": self.test}
        return {
            name: regression_scores(mean, zero, float(self.errors(part).mean()), y, self.data.scale)
            for name, part in parts.items()
        } | {"rmse": self.data.scale * float(metrics.rmse(mean, y))}

    def fit(self, method: lw.Method, params: Any = lw.everything, seed: int = 0, **options: Any) -> lw.Posterior:
        """Fits a method, δ and σ² open, tuned by nothing unless the options say so."""
        options = {"tune": Untuned(), **options}
        return lw.fit(self.model, self.train, method, params=params, likelihood="gaussian", seed=seed, **options)

    def score(self, posterior: lw.Posterior) -> dict[str, Any]:
        """Returns a posterior's scores on the test rows, δ, and the seconds of a prediction."""
        x, y = self.test
        start = time.process_time()
        parts = [posterior.latent(part) for part in x.split(500)]
        seconds = time.process_time() - start
        mean, variance = (torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "variance"))
        noise = posterior.noise_variance
        assert noise is not None
        found = regression_scores(mean, variance, noise, y, self.data.scale)
        return {**found, "prior_precision": posterior.prior_precision, "predict_seconds": seconds}


def _thinned(part: Part, most: int) -> Part:
    x, y = part
    step = -(-len(x) // most)
    return x[::step], y[::step]


METHODS: dict[str, tuple[lw.Method, Any]] = {
    "diagonal": (lw.Diagonal(), lw.everything),
    "KFAC": (lw.KFAC(), lw.everything),
    "last layer": (lw.Full(), lw.last_layer),
    "ELLA": (lw.ELLA(rank=20, rows=100), lw.everything),
    "VaLLA 100, natural gradient": (lw.VaLLA(100, lw.NaturalGradient(steps=20)), lw.everything),
    "prior alone": (lw.VaLLA(1, lw.NaturalGradient(steps=20)), lw.everything),
}
"""Methods whose δ and σ² are tuned afterwards; natural gradients of 20 batches of 500, whatever N is.

One inducing point learns next to nothing, so "prior alone" has the variance `‖J(x)‖²/δ`.
"""


def tuned_rows(task: TableTask, seed: int, method: lw.Method, params: Any = lw.everything) -> dict[str, Any]:
    """Fits a method once and tunes δ and σ² by the evidence and by validation.

    Returns:
        tuning -> scores, and processor seconds of the fit with its tuning.
    """
    start = time.process_time()
    posterior = task.fit(method, params, seed)
    seconds = time.process_time() - start
    found: dict[str, Any] = {}
    tunings: dict[str, Tuning] = {"evidence": lw.Evidence(), "validation": lw.Validation(task.val)}
    for kind, tuning in tunings.items():
        start = time.process_time()
        tuned = tuning.tune(posterior, Training())
        spent = seconds + time.process_time() - start
        found[kind] = {**task.score(tuned), "seconds": spent}
    return found


def published_row(task: TableTask, seed: int, steps: int = 600, stopped: bool = True) -> dict[str, Any]:
    """Fits VaLLA as published, by the α-divergence over Z, A, δ and σ² in batches of 100, 100 inducing points.

    Args:
        task: network and table.
        seed: of the fit.
        steps: batches at most; the paper does not say how many, and this is what a minute allows.
        stopped: by the NLL of 1 000 validation rows.

    Returns:
        scores, processor seconds, steps taken, validation NLL by looks.
    """
    start = time.process_time()
    fit = lw.AlphaDivergence(
        steps=steps, learning_rate=0.05, validation=task.val[::5] if stopped else None, every=50, patience=2
    )
    train = [part for x, y in task.train[: steps // 5] for part in batched(x, y, 100)]
    posterior = lw.fit(
        task.model, train, lw.VaLLA(100, fit), likelihood="gaussian", seed=seed, data_size=len(task.data.train[0])
    )
    seconds = time.process_time() - start
    history = posterior.history
    return {
        **task.score(posterior), "seconds": seconds, "steps": len(history["objective"]),
        "looks": history["validation"].tolist() if stopped else [],
    }  # fmt: skip
