"""Matrix scaling: an affine map of the logits, shrunken to the identity, as strongly as cross-validation chooses."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..covariance import Latent
from ..posterior import Posterior
from .held_out import candidate_latents
from .search import ascend

log = logging.getLogger("lapwing")

FOLDS = 5
STRENGTHS = 300.0, 100.0, 30.0, 10.0, 3.0
"""Candidates for the precision of the entries of the map, in units of the logits: the first one shrinks most."""
PAYS = 0.5
"""Standard errors by which the predictions of left-out folds must be better than without a map."""
MOST_OUTPUTS = 100
"""Maximum number of outputs, since the map has C (C + 1) entries."""
LARGEST_ENTRY = 30.0
"""Largest size of an entry of the map."""


def matrix_scaled(posterior: Posterior, loader: Iterable[Any]) -> Posterior:
    """Returns the posterior with the map of its logits that held-out data choose, or unchanged if none pays.

    Cost: one contraction of the held-out data with covariances, and about 1 000 evaluations of their N predictions, in
        time O(N C³) each.
    """
    likelihood: Any = posterior.likelihood
    parts, targets = [], []
    if likelihood.logit_map:
        return posterior
    for _, _, latent, labels, _ in candidate_latents([posterior], lambda one: [one], loader, "covariances"):
        counted = likelihood.labelled(labels)
        rows = torch.arange(len(labels)).to(labels.device) if counted is None else counted.nonzero().flatten()
        parts.append(latent.compact(covariances=True).taken(rows))
        targets.append(labels[rows])
    chosen = chosen_map(likelihood, Latent.concatenate(parts), torch.cat(targets))
    return replace(posterior, likelihood=replace(likelihood, logit_map=chosen))


def chosen_map(likelihood: Any, latent: Latent, labels: Tensor) -> tuple[float, ...]:
    """Returns the map `W z + b` of the logits z of a `LogitLikelihood`'s predictions, as `logit_map`; () if none pays.

    `W = I + D + R` has a diagonal D and a rest R, which is 0 for sigmoids. With s the standard deviation of the logits,
    it maximises `Σ_n log p(y_n) - λ/2 [Σ (s D)² + √C Σ (s R)² + Σ b²]`, where the sum includes a pseudo-row with a
    uniform label. λ is the one of `STRENGTHS` whose predictions of left-out folds gain most, less `PAYS` standard
    errors. The folds are random, and the same at every call.

    Source: Berta et al. 2025, Structured Matrix Scaling for Multi-Class Calibration (arXiv 2511.03685): it has the
    separate penalties. λ by cross-validation, and the spread of the logits, are lapwing's.
    """
    latent, plain = likelihood.tempered(latent), likelihood.with_logit_temperature(None)
    # 1. penalties (C, C + 1): s² on D, √C s² on R, 1 on b; R is fixed at 0 for sigmoids
    size, count = latent.mean.shape[1], len(labels)
    identity = torch.eye(size, size + 1).to(latent.mean)
    centred = latent.mean - latent.mean.mean(-1, keepdim=True) if likelihood.activation == "softmax" else latent.mean
    weights = centred.square().mean() * (identity + size**0.5 * (1 - identity))
    free = torch.ones_like(identity) if likelihood.activation == "softmax" else identity.clone()
    weights[:, -1] = free[:, -1] = 1.0

    def scores(point: Tensor, rows: Tensor) -> Tensor:
        moved, part = identity + point.reshape(size, -1) * free, latent.taken(rows)
        prediction = plain.predict(part.mapped(moved[:, :-1], moved[:, -1]))
        uniform = prediction.pseudo_row(part.mean)
        return prediction.log_prob(labels[rows]) + uniform.mean() / count

    def best(rows: Tensor, strength: float, start: Tensor) -> Tensor:
        def score(point: Tensor) -> Tensor:
            return (scores(point, rows).sum() - strength / 2 * (weights.flatten() * point.square()).sum()) / len(rows)

        return ascend(score, start, [-LARGEST_ENTRY] * len(start), [LARGEST_ENTRY] * len(start))

    # 2. for each λ the mean gain of left-out folds, minus `PAYS` standard errors
    every, none = torch.arange(count).to(labels.device), torch.zeros_like(identity).flatten()
    fold = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(labels.device) % FOLDS
    without, points, table = scores(none, every).detach(), [none] * FOLDS, []
    for strength in STRENGTHS if count >= 2 * FOLDS else ():
        points = [best(every[fold != k], strength, points[k]) for k in range(FOLDS)]
        gains = -without
        for k in range(FOLDS):
            gains[fold == k] += scores(points[k], every[fold == k]).detach()
        table.append(float(gains.mean() - PAYS * gains.std() / count**0.5))
        if len(table) > 1 and table[-1] < table[-2]:
            break
    if not table or max(table) <= 0:
        log.info("Matrix scaling does not pay on the held-out data, and is left out.")
        return ()
    # 3. the map of all samples at the best λ
    strength = STRENGTHS[table.index(max(table))]
    log.info("Matrix scaling gains at least %.2g nats per left-out sample, at strength %g.", max(table), strength)
    return tuple((identity + best(every, strength, none).reshape(size, -1) * free).flatten().tolist())
