"""A regression whose predictions have the noise and the tails that its residuals show."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..covariance import has_positions, has_prior
from ..data.samples import Samples
from ..likelihoods import Gaussian, StudentT
from ..linalg import doubled
from ..posterior import Posterior
from ..posterior.latents import latent_of_batch
from ..prediction.aim import DEFAULT_AIM, Aim
from ..prediction.linearized import DEFAULT_WAY
from ..tangent.features import features_at, last_layer_of
from .noise_shape import SHAPE_ROWS, ResidualRows, chosen, loss
from .training_kernel import targets_of

log = logging.getLogger("lapwing")

CHEAP_WEIGHTS, FEW_ROWS = 40_000, 2_000
"""Maximum number of treated weights for which many training rows get variances, and of rows that get some otherwise."""


def rows_wanted(posterior: Posterior) -> int:
    """Returns the number of training rows that the noise of a posterior may read; 0 if it is not open."""
    if _tails(posterior) is None:
        return 0
    return SHAPE_ROWS if posterior.tangent.size <= CHEAP_WEIGHTS else FEW_ROWS


def with_noise_of_residuals(
    posterior: Posterior, training: Iterable[Samples], held_out: Iterable[Samples] | None = None, aim: Aim = DEFAULT_AIM
) -> Posterior:
    """Returns the posterior with the noise and the tails that predict left-out residuals best, or unchanged.

    `training` yields training rows, and `held_out` held-out rows, if there are any. With these the covariance of the
    outputs may get another factor s: δ/s and s σ², if both are open. A noise variance that the user gave is kept.

    Cost: two forward passes of the training rows, and predictions of them without held-out data.
    """
    likelihood: Any = posterior.likelihood
    tails = _tails(posterior)
    if tails is None:
        return posterior
    floor = (likelihood.noise_variance or 0.0) * likelihood.ratios(torch.ones(posterior.tangent.outputs).double())
    layer, noise = last_layer_of(posterior.tangent), likelihood.noise
    if posterior.noise_fixed:  # the level is given, and any rows show the tails
        training, held_out, noise = training if held_out is None else held_out, None, "constant"
    train = _rows(posterior, training, layer, aim if held_out is None else None)
    latent = None if train is None else train.latent
    if train is None:
        return posterior
    if latent is not None:  # h = v/(v + σ²)
        train = train._replace(leverages=latent / (latent + floor), latent=None)
    rows = None if held_out is None else _rows(posterior, held_out, layer, aim)
    scaled = not posterior.prior.fixed and has_prior(posterior.covariance) and aim.other_way is None
    if rows is not None:
        losses = loss(rows.residuals.square(), floor, math.inf, rows.latent)
        rows = rows._replace(losses=losses.nan_to_num().sum(1))
    found = chosen(train, floor, rows, noise, *tails, scaled)
    if found is None:
        return posterior
    spread = float(found.spread)
    if spread != 1:
        posterior = posterior.at(posterior.prior.precision / spread, spread * (likelihood.noise_variance or 0.0))
    found, likelihood = replace(found, layer=layer), posterior.likelihood
    log.info("The residuals show %s", found)
    return replace(posterior, likelihood=replace(likelihood, input_noise=found))


def _tails(posterior: Posterior) -> tuple[float | None, bool] | None:
    """Returns ν (inf: normal; None: tuned) and whether today's law is an answer; None if noise and tails are given."""
    likelihood: Any = posterior.likelihood
    if not isinstance(likelihood, Gaussian):
        return None
    if likelihood.noise_ratios is not None and len(likelihood.noise_ratios) != posterior.tangent.outputs:
        return None  # of each position
    given = likelihood.df if isinstance(likelihood, StudentT) else None
    df = math.inf if likelihood.tails == "normal" else given
    constant = likelihood.noise == "constant" or posterior.noise_fixed
    return None if constant and df is not None else (df, likelihood.tails != "student")


@torch.no_grad()
def _rows(posterior: Posterior, data: Iterable[Samples], layer: str, aim: Aim | None) -> ResidualRows | None:
    """Returns the rows of batches, with variances of f by a way if there is an aim; None if there are no rows."""
    tangent, parts = posterior.tangent, []
    for samples in data:
        samples = samples.to(tangent.device)
        inputs = tangent.check(samples.inputs)
        _, residuals, known = targets_of(posterior, samples)
        residuals = torch.where(known == 0, torch.nan, residuals)
        count = len(residuals) // max(1, samples.count)
        weights = None if samples.weights is None else doubled(samples.weights).repeat_interleave(count)
        variance: Tensor | None = None
        if aim is not None:
            latent: Any = latent_of_batch(tangent, posterior.covariance, inputs, aim.via or DEFAULT_WAY, False)
            variance = doubled((latent.rows if has_positions(latent) else latent).variance)
        features = doubled(features_at(tangent, layer, inputs))
        parts.append([part if part is None else part.cpu() for part in (features, residuals, weights, variance)])
    if not parts:
        return None
    columns: Any = zip(*parts, strict=True)
    every: Any = [None if column[0] is None else torch.cat(column) for column in columns]
    return ResidualRows(every[0], every[1], every[2], None, every[3])
