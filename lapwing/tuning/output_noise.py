"""The noise variance of each output of a regression, by held-out residuals."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ..likelihoods import Gaussian
from ..linalg import doubled
from ..posterior import Posterior
from .held_out import contracted
from .search import evenly

log = logging.getLogger("lapwing")

SURE = 3.0
"""Standard errors by which noise variances of the outputs must be better than one, in the score of held-out data."""

PARTS = evenly(-1.5, 0.5, 41)
"""Candidates for log10 of the noise variance of an output over its mean squared held-out residual."""


@torch.no_grad()
def with_output_noise(posterior: Posterior, loader: Iterable[Any]) -> Posterior:
    """Returns the posterior with the noise ratios of the held-out data, if these surely show them, or unchanged.

    The noise variance of output c has the best log density of its targets, of variance σ_c² + J_c Σ J_cᵀ. These C
    numbers are taken if their density, minus the gain by chance `(C - 1)/N`, is better than that of one number by
    `SURE` paired standard errors. The covariance and σ² do not change.

    Cost: a pass over the held-out data, if there are several outputs and no ratios.
    """
    likelihood, outputs = posterior.likelihood, posterior.tangent.outputs
    if type(likelihood) is not Gaussian or likelihood.noise_ratios is not None or outputs == 1 or posterior.noise_fixed:
        return posterior
    parts = []
    for _, _, latent, labels, _ in contracted([posterior], lambda one: [one], loader):
        squares = (doubled(labels).reshape(latent.mean.shape) - doubled(latent.mean)).square()
        parts.append((squares.cpu(), doubled(latent.variance).cpu()))
    squares, variances = (torch.cat(part) for part in zip(*parts, strict=True))
    known = ~squares.isnan()
    squares, counts = squares.nan_to_num(), known.sum(0)
    if int(counts.min()) < 2:
        return posterior

    def scores(noise: torch.Tensor) -> torch.Tensor:
        total = variances + noise
        return -0.5 * (known * (total.log() + squares / total))

    grid = squares.sum(0) / counts * 10 ** torch.tensor(PARTS, dtype=squares.dtype)[:, None]  # (K, C)
    best = torch.stack([scores(noises).sum(0) for noises in grid]).argmax(0)
    noises = grid.gather(0, best[None])[0]
    noise = float(posterior.noise_variance or 0.0)
    gain = (scores(noises) - scores(torch.full_like(noises, noise))).sum(-1)
    error = float(gain.std(correction=0)) / len(gain) ** 0.5
    if not (noises > 0).all() or float(gain.mean()) - (outputs - 1) / len(gain) <= SURE * error:
        return posterior
    log.info("Held-out data show noise variances of the outputs from %.3g to %.3g", noises.min(), noises.max())
    ratios = tuple((noises / noise).tolist())
    return replace(posterior, likelihood=replace(likelihood, noise_ratios=ratios))
