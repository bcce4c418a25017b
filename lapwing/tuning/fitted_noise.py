"""A regression whose predictions have the noise and the tails that its residuals show."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..covariance import has_positions, has_prior
from ..data.inputs import Samples
from ..likelihoods.input_noise import InputNoise
from ..linalg import double_device, doubled
from ..methods.passes import Batch
from ..posterior import Posterior
from ..posterior.latents import latent_of_batch
from ..posterior.tuned import Training, evenly_spaced_batches
from ..prediction.aim import DEFAULT_AIM, Aim
from ..prediction.linearized import default_way
from ..tangent.features import last_layer_of, outputs_and_features
from .noise_shape import SHAPE_ROWS, ResidualRows, at_level, chosen, constant

log = logging.getLogger("lapwing")

CHEAP_WEIGHTS, FEW_ROWS = 40_000, 2_000
"""Maximum number of treated weights for which `SHAPE_ROWS` training rows are read, and of rows read otherwise."""


class _Part(NamedTuple):
    """A regression whose noise or tails are open: the likelihood itself, with the key None, or a head of `lw.Joint`."""

    key: str | None
    likelihood: Any
    columns: Any  # its outputs
    floor: Tensor  # σ² of each of them (C,)
    fixed: bool  # whether the user gave σ²
    scaled: bool  # whether the latent covariance may get another factor s


def rows_wanted(posterior: Posterior) -> int:
    """Returns the number of training rows that the noise of a posterior may read; 0 if it is not open."""
    if not _open_parts(posterior):
        return 0
    return SHAPE_ROWS if posterior.tangent.size <= CHEAP_WEIGHTS else FEW_ROWS


def with_noise_of_residuals(
    posterior: Posterior, training: Training, held_out: Iterable[Samples] | None = None, aim: Aim = DEFAULT_AIM,
    former: Any = None, noises: Tensor | None = None,
) -> Posterior:  # fmt: skip
    """Returns the posterior with the noise and the tails that predict left-out residuals best, or unchanged.

    With held-out rows the covariance of the outputs may get another factor s: δ/s and s σ², if both are open. A noise
    variance that the user gave is kept. Heads of `lw.Joint` share the covariance, which stays. Without the training
    data (for `Posterior.update`) the likelihood before the tuning, `former`, has the shape of the noise. `noises` are
    one σ² for each of several outputs (C,), in units of their noise ratios, for new rows.

    Cost: a forward pass of `rows_wanted` training rows, and predictions of the held-out rows.
    """
    if held_out is not None and training.count is None:
        return _with_level(posterior, former, held_out, aim)
    parts = _open_parts(posterior, aim)
    if not parts:
        return posterior
    layer, limit = last_layer_of(posterior.tangent), rows_wanted(posterior)
    every: Any = _rows(posterior, evenly_spaced_batches(training, limit, posterior), layer)
    known = None if held_out is None else _rows(posterior, held_out, layer, aim)
    for part in parts:
        train, noise = every.of(part.columns), part.likelihood.noise
        several = noises is not None and part.key is None and not part.fixed and noise != "constant"
        if noises is not None and several:
            part = part._replace(floor=part.likelihood.ratios(noises.to(part.floor)) * noises.to(part.floor))
        rows = None if known is None else known.of(part.columns)
        if part.fixed:  # any rows show the tails
            train, rows, noise = rows or train, None, "constant"
        df, may_stay = part.likelihood.tails_to_fit
        enough = len(train.features) > 1  # a row is predicted by others
        found = chosen(train, part.floor, rows, noise, df, may_stay, part.scaled) if enough else None
        if found is None and several and enough:
            found = constant(train, part.floor)
        if found is not None and part.fixed:  # also far from the data
            found = replace(found, offset=part.floor.log(), whitening=found.whitening[:, :1] * 0)
        if found is not None:
            posterior = _with(posterior, part.key, replace(found, layer=layer))
    return posterior


def _with_level(posterior: Posterior, former: Any, held_out: Iterable[Samples], aim: Aim) -> Posterior:
    """Returns the posterior with the shape of the noise of a former likelihood, at the level of held-out rows.

    The weights w stay, and b, s and ν follow from the rows. Without such a noise, or if σ² is given, nothing changes.
    """
    laws = former.regressions
    parts = [one for one in _open_parts(posterior, aim) if laws[one.key].input_noise is not None and not one.fixed]
    known: Any = _rows(posterior, held_out, former.features_read, aim) if parts else None
    for part in parts:
        noise = replace(laws[part.key].input_noise.to(torch.device("cpu")), floor=part.floor)
        df = noise.df if math.isinf(noise.df) else part.likelihood.tails_to_fit[0]
        posterior = _with(posterior, part.key, at_level(noise, known.of(part.columns), df, part.scaled))
    return posterior


def _open_parts(posterior: Posterior, aim: Aim = DEFAULT_AIM) -> list[_Part]:
    """Returns the regressions whose noise or tails are open; those with a noise of each position have none."""
    found, likelihood = [], posterior.likelihood
    for key, part in likelihood.regressions.items():
        outputs = torch.arange(posterior.tangent.outputs)
        columns = likelihood.columns(key, len(outputs))
        size, (df, _) = len(outputs[columns]), part.tails_to_fit
        fixed = posterior.noise_fixed if key is None else likelihood.head_numbers[key][2] is None
        settled = fixed or (part.noise == "constant" and df == math.inf)  # else tails or level are open
        if (df is None or not settled) and len(part.noise_ratios or outputs[columns]) == size:
            floor = (part.noise_variance or 0.0) * part.ratios(torch.ones(size).double())
            scaled = key is None and not fixed and not posterior.prior.fixed and has_prior(posterior.covariance)
            found.append(_Part(key, part, columns, floor, fixed, scaled and aim.other_way is None))
    return found


def _with(posterior: Posterior, key: str | None, noise: InputNoise) -> Posterior:
    """Returns the posterior with this noise of a part, and with δ/s and s σ²."""
    if noise.spread != 1:
        posterior = posterior.at(posterior.prior.precision / noise.spread, noise.spread * posterior.noise_variance)
    log.info("The residuals%s show %s", "" if key is None else f" of {key}", noise)
    part = posterior.likelihood.regressions[key]
    part = replace(part, input_noise=noise.to(double_device(posterior.tangent.device)))
    likelihood: Any = posterior.likelihood
    return replace(posterior, likelihood=likelihood.with_regressions({key: part}))


@torch.no_grad()
def _rows(posterior: Posterior, data: Iterable[Samples], layer: str, aim: Aim | None = None) -> ResidualRows | None:
    """Returns the rows of all outputs, with variances of f by a way if there is an aim; None without batches."""
    tangent, parts = posterior.tangent, []
    for samples in data:
        samples = samples.to(tangent.device)
        inputs = tangent.check(samples.inputs)
        outputs, features = outputs_and_features(tangent, layer, inputs)
        rows = Batch.of(tangent, samples).rows(outputs)
        residuals = posterior.likelihood.residuals(rows["outputs"], rows["targets"])  # type: ignore[attr-defined]
        weights = torch.ones_like(residuals[:, 0]) if rows["weights"] is None else rows["weights"]
        variance = torch.zeros_like(residuals)
        if aim is not None:
            via = aim.via or default_way(tangent)
            latent: Any = latent_of_batch(tangent, posterior.covariance, inputs, via, False)
            variance = (latent.rows if has_positions(latent) else latent).variance
        parts.append([doubled(one).cpu() for one in (features, residuals, weights, variance)])
    return ResidualRows(*map(torch.cat, zip(*parts, strict=True))).distinct() if parts else None
