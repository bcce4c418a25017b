"""Numbers of held-out data for likelihoods without noise variance and logit temperature: a factor, and other noise."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..covariance import has_prior, without_spread
from ..data.data import Data
from ..data.inputs import checked
from ..linalg import doubled
from ..methods.passes import Batch
from ..methods.temperature_scaling import refined
from ..posterior import Posterior
from ..prediction.aim import Aim
from .held_out import sample_scores
from .held_out_choice import surely_better
from .search import evenly, pull

log = logging.getLogger("lapwing")

LATENT_FACTORS = evenly(-2.0, 4.0, 13)
"""Candidates for log10 of the factor."""


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
    totals = torch.zeros(len(candidates), dtype=torch.float64)
    for samples in checked(held_out, tangent.device):
        rows = Batch.of(tangent, samples).rows()
        latent = without_spread(doubled(rows["outputs"]))
        totals += torch.stack([one.predict(latent).log_prob(rows["targets"]).sum() for one in candidates]).cpu()
    found = candidates[int(totals.argmax())]
    return [*posteriors, *(_with_noise(one, found) for one in posteriors)]


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
