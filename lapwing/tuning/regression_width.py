"""The width of a regression without held-out data: leave-one-out predictions of the exact linearised model."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from ..covariance import has_prior
from ..data import batches
from ..posterior import Posterior
from .evidence import Training
from .gaussian_process import LeaveOneOut
from .held_out import mean_variances
from .leave_one_out import leave_one_out
from .search import crossing, evenly
from .training_samples import spread_batches

log = logging.getLogger("lapwing")

SAMPLES = 2000
"""Default of the maximum number of training samples that the width is computed from."""

LOWEST_NOISE = 1e-6
"""Minimum of the noise variance, as a part of the width of predictions."""

POINTS = 25
"""Number of noise variances on the grid if the user gave the prior precision."""

WARN_FACTOR, WARN_SAMPLES = 10.0, 100
"""A warning is logged if the width exceeds `WARN_FACTOR` mean squared residuals of at least `WARN_SAMPLES` samples."""


def has_open_width(posterior: Posterior) -> bool:
    """Whether the noise variance is open, for outputs without positions."""
    return not posterior.noise_fixed and not posterior.tangent.positions.several


def with_left_out_width(posterior: Posterior, residual: float, training: Training, samples: int) -> Posterior:
    """Returns the posterior whose predictions of unseen targets have the width s of the leave-one-out predictions.

    `residual` is the mean squared residual of the training data, of which at most `samples` samples are read.
    """
    exact, parts, size = _exact_model(posterior, residual, training, samples)
    explained = (exact.training_variance / exact.noise_variance - 1) * exact.samples / size
    width = max(exact.width, (1 + explained) * residual)  # the network may fit worse than its linearised model
    keeps_prior = posterior.prior.fixed or not has_prior(posterior.covariance)
    precision = torch.full_like(posterior.prior.precision, exact.precision)
    noise = exact.noise_variance
    start = posterior.with_noise(noise) if keeps_prior else posterior.at(precision, noise)
    variance = mean_variances([start], parts)[0]
    factor = width / exact.unseen(noise + variance)
    if exact.drawn:
        noise = (posterior.noise_variance or 0.0) + max(width - exact.drawn, 0.0)
    elif not has_prior(posterior.covariance):
        noise = max(factor * (noise + variance) - variance, residual)
    elif posterior.prior.fixed:
        noise = _noise_of_width(posterior, parts, factor * (noise + variance))
    else:
        noise = max(factor * noise, LOWEST_NOISE * width)
    log.info(
        "Targets that are left out have a variance of %.3g by the exact linearised model of %d weights and %d "
        "samples, and the mean squared residual is %.3g: the noise variance of %s is %.3g",
        exact.width, exact.weights, exact.samples, residual, posterior.method, noise,
    )  # fmt: skip
    if width > WARN_FACTOR * residual and exact.samples >= WARN_SAMPLES:
        log.warning(
            "%s has memorised its training targets: the mean squared residual is %.3g, and predictions of unseen "
            "targets need a variance of %.3g, which they have now. Train for a shorter time or with more weight "
            "decay. If other data trained some of the layers, freeze these before the fit: "
            "parameter.requires_grad_(False).",
            type(posterior.tangent.model).__name__, residual, width,
        )  # fmt: skip
    return posterior.with_noise(noise) if keeps_prior else posterior.at(precision / factor, noise)


def trained_product(posterior: Posterior, training: Training) -> float | None:
    """Returns `λ = δσ²` of a regression by the evidence of the exact linearised model; None without a prior.

    λ determines how the widths of predictions differ between inputs; `(δ/c, c σ²)` has the same λ for every c.
    """
    if not has_prior(posterior.covariance) or posterior.tangent.positions.several:
        return None
    residual = posterior.likelihood.residual_variance(posterior.statistics) or 0.0
    exact, *_ = _exact_model(posterior, residual, training, SAMPLES)
    return exact.precision * exact.noise_variance


def _exact_model(
    posterior: Posterior, residual: float, training: Training, samples: int
) -> tuple[LeaveOneOut, list[batches.Weighted], float]:
    """Returns the leave-one-out predictions, the batches they are computed from, and the number N of all samples."""
    parts = list(spread_batches(training, samples, posterior))
    size = max(training.shown or 0, posterior.samples * posterior.data_factor)
    return leave_one_out(posterior, parts, size, residual), parts, size


def _noise_of_width(posterior: Posterior, parts: Sequence[batches.Weighted], width: float) -> float:
    """Returns the σ² at which predictions of these batches have this mean variance, at the posterior's prior."""
    logs = evenly(math.log(LOWEST_NOISE * width), math.log(width), POINTS)
    candidates = [posterior.with_noise(math.exp(x)) for x in logs]
    widths = [math.exp(x) + v for x, v in zip(logs, mean_variances(candidates, parts), strict=True)]
    return math.exp(-crossing([-x for x in reversed(logs)], widths[::-1], width))  # from the widest to the narrowest
