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
from ..likelihoods.input_noise import InputNoise
from ..linalg import double_device, doubled
from ..posterior import Posterior
from ..posterior.latents import latent_of_batch
from ..prediction.aim import DEFAULT_AIM, Aim
from ..prediction.linearized import DEFAULT_WAY
from ..tangent.features import features_at, last_layer_of
from .noise_shape import LEAST_HELD_OUT, SHAPE_ROWS, ResidualRows, chosen, level, loss
from .training_kernel import targets_of

log = logging.getLogger("lapwing")

CHEAP_WEIGHTS, FEW_ROWS = 40_000, 2_000
"""Maximum number of treated weights for which `SHAPE_ROWS` training rows are read, and of rows read otherwise."""


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

    Cost: two forward passes of the training rows, and predictions of the held-out rows.
    """
    likelihood: Any = posterior.likelihood
    tails = _tails(posterior)
    if tails is None:
        return posterior
    floor = (likelihood.noise_variance or 0.0) * likelihood.ratios(torch.ones(posterior.tangent.outputs).double())
    layer, noise = last_layer_of(posterior.tangent), likelihood.noise
    if posterior.noise_fixed:  # the level is given, and any rows show the tails
        training, held_out, noise = training if held_out is None else held_out, None, "constant"
    train = _rows(posterior, training, layer)
    if train is None:
        return posterior
    rows = None if held_out is None else _rows(posterior, held_out, layer, aim)
    if rows is not None:
        losses = loss(rows.residuals.square(), floor, math.inf, rows.latent)
        rows = rows._replace(losses=losses.nan_to_num().sum(1))
    found = chosen(train, floor, rows, noise, *tails, _is_scaled(posterior, aim))
    if found is None:
        return posterior
    if posterior.noise_fixed:  # also far from the data
        found = replace(found, whitening=torch.zeros_like(found.whitening[:, :1]))
    return _with(posterior, replace(found, layer=layer))


def with_level_of_residuals(posterior: Posterior, former: Any, held_out: Iterable[Samples], aim: Aim) -> Posterior:
    """Returns the posterior with the shape of the noise of a former likelihood, at the level of held-out rows.

    The weights w stay, and b, s and ν follow from the rows, as in `with_noise_of_residuals`. With fewer than
    `LEAST_HELD_OUT` of them σ²(x) is the former one times the ratio of the noise variances. Without such a noise
    nothing changes.

    Cost: a forward pass and predictions of the held-out rows.
    """
    likelihood: Any = posterior.likelihood
    tails, noise = _tails(posterior), getattr(former, "input_noise", None)
    if noise is None or tails is None:
        return posterior
    noise, rows = noise.to(torch.device("cpu")), _rows(posterior, held_out, noise.layer, aim)
    factor = likelihood.noise_variance / former.noise_variance
    if rows is None or posterior.noise_fixed or int((rows.known()[1] > 0).any(1).sum()) < LEAST_HELD_OUT:
        return _with(posterior, replace(noise.times(factor), spread=torch.ones_like(noise.spread)))
    floor = likelihood.noise_variance * likelihood.ratios(torch.ones(posterior.tangent.outputs).double())
    noise, tail = replace(noise, floor=floor), math.inf if noise.tails is None else tails[0]
    slopes, far, ones = noise.slope(rows.features)[None], noise.is_far(rows.features), torch.ones_like(rows.counts())
    offset, spread, df, _ = level(slopes, rows, ones[None], tail, floor, far, _is_scaled(posterior, aim))
    return _with(posterior, replace(noise, offset=offset[0], spread=spread[0], df=df[0]))


def _is_scaled(posterior: Posterior, aim: Aim) -> bool:
    """Whether the latent covariance may get another factor s."""
    return not posterior.prior.fixed and has_prior(posterior.covariance) and aim.other_way is None


def _with(posterior: Posterior, noise: InputNoise) -> Posterior:
    """Returns the posterior with this noise, and with δ/s and s σ²."""
    spread = float(noise.spread)
    if spread != 1:
        posterior = posterior.at(posterior.prior.precision / spread, spread * (posterior.noise_variance or 0.0))
    likelihood: Any = posterior.likelihood
    log.info("The residuals show %s", noise)
    noise = noise.to(double_device(posterior.tangent.device))
    return replace(posterior, likelihood=replace(likelihood, input_noise=noise))


def _tails(posterior: Posterior) -> tuple[float | None, bool] | None:
    """Returns ν (inf: normal; None: tuned), and whether the plain law may stay; None if noise and tails are given."""
    likelihood: Any = posterior.likelihood
    tails = likelihood.tails_to_fit
    if tails is None:
        return None
    if likelihood.noise_ratios is not None and len(likelihood.noise_ratios) != posterior.tangent.outputs:
        return None  # of each position
    constant = likelihood.noise == "constant" or posterior.noise_fixed
    return tails if tails[0] is None or not constant else None


@torch.no_grad()
def _rows(posterior: Posterior, data: Iterable[Samples], layer: str, aim: Aim | None = None) -> ResidualRows | None:
    """Returns the rows with known targets, with variances of f by a way if there is an aim; None without batches."""
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
        seen = ~residuals.isnan().all(1)
        parts.append([part if part is None else part[seen].cpu() for part in (features, residuals, weights, variance)])
    if not parts:
        return None
    columns: Any = zip(*parts, strict=True)
    every: Any = [None if column[0] is None else torch.cat(column) for column in columns]
    return ResidualRows(*every)
