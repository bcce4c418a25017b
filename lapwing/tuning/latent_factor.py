"""Numbers for likelihoods without noise variance and logit temperature: a factor by held-out data, and other noise."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..covariance import has_prior, without_spread
from ..data.data import Data
from ..data.inputs import checked
from ..likelihoods import apply_weights
from ..linalg import doubled
from ..methods.passes import Batch
from ..methods.temperature_scaling import refined
from ..posterior import Posterior
from ..posterior.tuned import Training, evenly_spaced_batches
from ..prediction.aim import Aim
from .held_out import sample_scores
from .held_out_choice import surely_better
from .leave_one_out import left_out_outputs
from .search import evenly, pull

log = logging.getLogger("lapwing")

LATENT_FACTORS = evenly(-2.0, 4.0, 13)
"""Candidates for log10 of the factor."""

SURELY_MORE, FEW_TARGETS = 4.5, 2
"""Minimum gain of log likelihood, in nats, for another noise: three standard errors of one number. The targets that
gain most do not count, `FEW_TARGETS` of them."""


def with_latent_factor(posterior: Posterior, held_out: Data, aim: Aim) -> Posterior:
    """Returns the posterior at `(δ/c, c τ)`, whose covariance is c Σ, or unchanged.

    c maximises the log likelihood of held-out samples, with the pull of one sample towards 1. It must gain more than
    one paired standard error. `c τ` is the temperature of the curvature: targets that vary more than their
    likelihood says make Σ far too narrow, which no δ mends. A prior precision and a temperature of the user stay.

    Cost: one pass over the held-out data, with 13 candidates.
    """
    likelihood = posterior.likelihood
    has_number = likelihood.logit_temperature is not None or likelihood.noise_variance is not None
    if has_number or likelihood.head_numbers or posterior.temperature != 1 or not has_prior(posterior.covariance):
        return posterior
    candidates = [_times(posterior, 10**exponent) for exponent in LATENT_FACTORS]
    scores = sample_scores([posterior], lambda _: candidates, held_out, aim=aim)[0, :, 0].double()
    pulls = torch.tensor([pull(exponent, posterior.tangent.outputs) for exponent in LATENT_FACTORS]) / scores.shape[1]
    means = (scores.mean(1) + pulls).nan_to_num(-torch.inf)
    best = int(means.argmax())
    if not surely_better(scores[best], scores[LATENT_FACTORS.index(0.0)], 1.0):
        return posterior
    factor = 10 ** refined(LATENT_FACTORS, means.tolist(), best)
    log.info("Held-out data multiply the temperature of the curvature by %.3g", factor)
    return _times(posterior, factor)


def with_other_noise(posteriors: Sequence[Posterior], held_out: Data) -> list[Posterior]:
    """Returns the posteriors, and also with the noise of highest likelihood at held-out outputs f without spread.

    Without such noise, the spread of the weights would take its place, and be far too wide where data are few.
    """
    tangent, candidates = posteriors[0].tangent, posteriors[0].likelihood.noise_candidates()
    if not candidates:
        return list(posteriors)
    every = (Batch.of(tangent, samples).rows() for samples in checked(held_out, tangent.device))
    scores = _log_likelihoods(candidates, ((rows["outputs"], rows["targets"], None) for rows in every))
    found = candidates[int(scores.sum(1).argmax())]
    return [*posteriors, *(_with_noise(one, found) for one in posteriors)]


def with_left_out_noise(posterior: Posterior, training: Training, samples: int) -> Posterior:
    """Returns the posterior with the noise of highest likelihood for left-out training targets, or unchanged.

    A network is near its own training targets, so its residuals show too little noise. The log likelihood must rise by
    `SURELY_MORE`, without the `FEW_TARGETS` that gain most. Cost: a kernel of `samples` training samples, see
    `leave_one_out`.
    """
    candidates = [posterior.likelihood, *posterior.likelihood.noise_candidates()]
    if len(candidates) == 1:
        return posterior
    parts = list(evenly_spaced_batches(training, samples, posterior))
    scores = _log_likelihoods(candidates, [left_out_outputs(posterior, parts)])
    gains = torch.where(scores.isfinite().all(0), scores - scores[0], 0.0)  # rates beyond the range show nothing
    gains = gains.sum(1) - gains.topk(min(FEW_TARGETS, gains.shape[1])).values.clamp_min(0.0).sum(1)
    found = candidates[int(gains.argmax())]
    if gains.max() < SURELY_MORE:
        return posterior
    log.info("Training targets that are left out have the noise of %r, and residuals %r", found, posterior.likelihood)
    return _with_noise(posterior, found)


def _log_likelihoods(candidates: Sequence[Any], rows: Iterable[tuple[Tensor, Tensor, Tensor | None]]) -> Tensor:
    """Returns log densities of targets times weights, under K likelihoods at outputs without spread, (K, N) float64."""
    scores = []
    for outputs, targets, weights in rows:
        latent = without_spread(doubled(outputs))
        each = [apply_weights(one.predict(latent).log_prob(targets), weights) for one in candidates]
        scores.append(torch.stack(each).double().cpu())
    return torch.cat(scores, 1)


def _with_noise(posterior: Posterior, likelihood: Any) -> Posterior:
    """Returns the posterior with other noise, and with the temperature that belongs to it, unless the user gave one."""
    former: Any = posterior.likelihood
    before, after = (one.dispersion_temperature(posterior.statistics) for one in (former, likelihood))
    moved = replace(posterior, likelihood=likelihood)
    if posterior.temperature != before or not has_prior(posterior.covariance):
        return moved
    return replace(moved, temperature=after).at(posterior.prior.precision)


def _times(posterior: Posterior, factor: float) -> Posterior:
    """Returns the posterior at `(δ/c, c τ)`, or at the δ that the user gave."""
    precision = posterior.prior.precision if posterior.prior.fixed else posterior.prior.precision / factor
    return replace(posterior, temperature=posterior.temperature * factor).at(precision)
