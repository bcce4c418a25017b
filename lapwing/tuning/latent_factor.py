"""Factors of the spread and other noise, for likelihoods without one open σ²: by held-out or left-out targets."""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
from ..posterior.tuned import Training
from ..prediction.aim import Aim
from .evidence import at_maximum
from .held_out import sample_scores
from .held_out_choice import surely_better
from .leave_one_out import left_out_latents
from .search import evenly, pull

log = logging.getLogger("lapwing")

LATENT_FACTORS = evenly(-2.0, 4.0, 13)
"""Candidates for log10 of the factor."""

WIDER_FACTORS = evenly(0.0, 2.0, 17)
"""The same for left-out training targets: a network fits its training targets too well, if anything."""

SURELY_MORE, FEW_TARGETS = 4.5, 2
"""Minimum gain of log likelihood, in nats, for another noise or spread: three standard errors of one number.
The targets that gain most do not count, `FEW_TARGETS` of them."""


def with_latent_factor(posterior: Posterior, held_out: Data, aim: Aim) -> Posterior:
    """Returns the posterior at `(δ/c, c τ)`, whose covariance is c Σ, or unchanged.

    c maximises the log likelihood of held-out samples, with the pull of one sample towards 1. It must gain more than
    one paired standard error. `c τ` is the temperature of the curvature: targets that vary more than their
    likelihood says make Σ far too narrow, which no δ mends. A prior precision and a temperature of the user stay.

    Cost: one pass over the held-out data, with 13 candidates.
    """
    likelihood = posterior.likelihood
    has_number = likelihood.logit_temperature is not None or likelihood.noise_variance is not None
    if has_number or likelihood.head_numbers or not _may_be_multiplied(posterior):
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
    scores: Any = 0.0
    for samples in checked(held_out, tangent.device):
        rows = Batch.of(tangent, samples).rows()
        latent = without_spread(doubled(rows["outputs"]))
        scores = scores + _log_likelihoods([one.predict(latent) for one in candidates], rows["targets"]).sum(1)
    found = candidates[int(scores.argmax())]
    return [*posteriors, *(_with_noise(one, found) for one in posteriors)]


def with_left_out_noise(posterior: Posterior, training: Training, samples: int) -> Posterior:
    """Returns the posterior with the noise of highest likelihood for left-out training targets, or unchanged.

    A network is near its own training targets, so its residuals show too little noise. Censored targets have the spread
    of highest evidence; the spread of counts follows from their noise. Cost: a kernel of `samples` training samples, as
    of `leave_one_out`, and their predictions.
    """
    candidates = [posterior.likelihood, *posterior.likelihood.noise_candidates()]
    if len(candidates) == 1:
        return posterior
    settled = posterior.noise_variance is None or posterior.prior.fixed or not has_prior(posterior.covariance)
    tuned = posterior if settled else at_maximum(posterior)
    latent, targets, weights = left_out_latents(tuned, training, samples)
    found = candidates[_surely_best(_log_likelihoods([one.predict(latent) for one in candidates], targets), weights)]
    if found is candidates[0]:
        return posterior
    log.info("Training targets that are left out have the noise of %r, and residuals %r", found, posterior.likelihood)
    return _with_noise(posterior, found)


def with_left_out_spread(posterior: Posterior, training: Training, samples: int) -> Posterior:
    """Returns the posterior at `(δ/c, c τ)` with the c >= 1 of highest likelihood for left-out targets, or unchanged.

    Noise that a network predicts is too small if it has overfitted. A wider covariance widens the mean, and makes a log
    variance uncertain, so that predictions have longer tails. A prior precision and a temperature of the user stay.
    Cost: as `with_left_out_noise`.
    """
    if posterior.prior.fixed or not _may_be_multiplied(posterior):
        return posterior
    latent, targets, weights = left_out_latents(posterior, training, samples)
    predictions = [
        posterior.likelihood.predict(replace(latent, terms=tuple(term.scaled(10**exponent) for term in latent.terms)))
        for exponent in WIDER_FACTORS
    ]
    factor = 10 ** WIDER_FACTORS[_surely_best(_log_likelihoods(predictions, targets), weights)]
    if factor == 1:
        return posterior
    log.info("Training targets that are left out multiply the temperature of the curvature by %.3g", factor)
    return _times(posterior, factor)


def _log_likelihoods(predictions: Sequence[Any], targets: Tensor) -> Tensor:
    """Returns log densities of N targets under K predictions, (K, N) float64."""
    return torch.stack([one.log_prob(targets) for one in predictions]).double().cpu()


def _surely_best(scores: Tensor, weights: Tensor) -> int:
    """Returns which of K log densities (K, N) of targets with weights (N,) is best; 0 if it is not surely above that.

    It must gain `SURELY_MORE` over the first one, without the `FEW_TARGETS` that gain most.
    """
    scores = apply_weights(scores.T, weights.to(scores)).T
    gains = torch.where(scores.isfinite().all(0), scores - scores[0], 0.0)  # rates beyond the range show nothing
    gains = gains.sum(1) - gains.topk(min(FEW_TARGETS, gains.shape[1])).values.clamp_min(0.0).sum(1)
    return int(gains.argmax()) if gains.max() >= SURELY_MORE else 0


def _may_be_multiplied(posterior: Posterior) -> bool:
    """Whether the covariance may get a factor: the user gave no temperature, and the prior can be changed."""
    return posterior.temperature == 1 and has_prior(posterior.covariance)


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
