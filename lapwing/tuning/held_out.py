"""The search that tunings on held-out data share: many candidates scored from one record of each batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..covariance import Latent, Subspace
from ..errors import LapwingError, shown
from ..likelihoods import Prediction
from ..network import batches
from ..posterior import Posterior
from ..tangent import Record
from .search import evenly

log = logging.getLogger("lapwing")


PLATEAU = 1e-4
"""Candidates whose scores differ by less are tied, in nats a sample."""

NOISE_EXPONENTS = evenly(-3.0, 3.0, 25)
"""Candidates for log10 of σ² relative to the evidence's."""


def check_grid(tuning: str, decades: Any, points: Any) -> None:
    """Raises for a range or number that makes no grid."""
    pair = isinstance(decades, tuple) and len(decades) == 2
    rising = pair and all(isinstance(end, Real) for end in decades) and decades[0] < decades[1]
    if not (rising and isinstance(points, int) and points >= 3):
        raise LapwingError(
            f"{tuning} needs a rising range and at least 3 points, and has decades={shown(decades)}, "
            f"points={shown(points)}. Write decades=(-5, 7), points=25."
        )


def with_ranks(posterior: Posterior, ranks: Sequence[int]) -> list[Posterior]:
    """Returns the posterior on its first directions, for each rank below its own; itself last.

    Raises:
        LapwingError: for a posterior that has no rank, or ranks below 1.
    """
    if isinstance(ranks, tuple) and not ranks:
        return [posterior]
    covariance = posterior.covariance
    numbers = isinstance(ranks, (tuple, list)) and all(isinstance(rank, int) and rank > 0 for rank in ranks)
    if not numbers or not isinstance(covariance, Subspace):
        raise LapwingError(
            f"ranks={shown(ranks)} of {posterior.method} are not ranks from 1 up of a subspace. Leave ranks out, or "
            "fit lw.ELLA(rank=20) with ranks=(5, 10)."
        )
    shorter = [rank for rank in sorted(set(ranks)) if rank < covariance.rank]
    return [*(replace(posterior, covariance=covariance.with_rank(rank)) for rank in shorter), posterior]


def best_of(
    posteriors: Sequence[Posterior], decades: tuple[float, float], points: int, loader: Iterable[Any]
) -> Posterior:
    """Returns the posterior with the best held-out log likelihood, at its best scalar δ and noise variance.

    What the user gave is kept. All pairs of a grid are compared, and the best is refined by parabolas through its
    neighbours. Raising σ² by a factor q at δ/q multiplies the whole covariance of y by q, so a candidate for σ² needs
    no contraction:
    `log N(y; f, q S) = log N(f + (y - f)/√q; f, S) - C/2 log q`.
    """
    first = posteriors[0]
    open_noise = not first.noise_given and first.noise_variance is not None
    if first.prior.given:
        best = first
        if len(posteriors) > 1:
            scores = held_out_scores(posteriors, None, loader)[:, 0, 0].tolist()
            best = posteriors[max(range(len(scores)), key=scores.__getitem__)]
        return _best_noise(best, loader) if open_noise else best
    deltas, factors = evenly(*decades, points), NOISE_EXPONENTS if open_noise else [0.0]
    table = held_out_scores(posteriors, [10**e for e in deltas], loader, [10**e for e in factors])
    which, at, k = (int(i) for i in torch.unravel_index(table.nan_to_num(-math.inf).argmax(), table.shape))
    delta = _refined(deltas, table[which, :, k].tolist(), at)
    factor = 10 ** _refined(factors, table[which, at].tolist(), k)
    if at in (0, len(deltas) - 1):
        row = table[which, :, k].tolist()
        tied = sum(row[at] - score < PLATEAU for score in row)
        low, high = decades
        if tied > 1:
            advice = f"{tied} candidates there differ by less than {PLATEAU:g} nats, so that it matters little"
        else:
            meaning = "no spread in the weights at all" if at else "the widest spread in the range"
            advice = f"the held-out data ask for {meaning}; decades=({low - 3:g}, {high + 3:g}) looks further"
        log.warning(
            "Validation of %s chose the edge of its range, prior precision %.3g%s: %s.",
            posteriors[which].method, 10**delta / factor,
            f" (1e{delta:g} at the evidence's noise)" if open_noise else "", advice,
        )  # fmt: skip
    best = posteriors[which]
    noise = None if best.noise_variance is None else best.noise_variance * factor
    return best.at(torch.full_like(best.prior.precision, 10**delta / factor), noise)


def _best_noise(posterior: Posterior, loader: Iterable[Any]) -> Posterior:
    """Scans σ² at a given prior precision."""

    def at(exponent: float) -> Posterior:
        assert posterior.noise_variance is not None
        return posterior.at(posterior.prior.precision, posterior.noise_variance * 10**exponent)

    row = held_out_scores([at(exponent) for exponent in NOISE_EXPONENTS], None, loader)[:, 0, 0].tolist()
    return at(_refined(NOISE_EXPONENTS, row, max(range(len(row)), key=row.__getitem__)))


def _refined(points: Sequence[float], scores: Sequence[float], at: int) -> float:
    """Returns the top of the parabola through the best point of a grid and its neighbours; at an edge the point."""
    if at in (0, len(points) - 1):
        return points[at]
    left, middle, right = scores[at - 1 : at + 2]
    shift = 0.5 * (left - right) / min(left - 2 * middle + right, -1e-300)  # in grid steps
    return points[at] + (points[1] - points[0]) * max(-0.5, min(0.5, shift))


def held_out_scores(
    posteriors: Sequence[Posterior],
    precisions: Sequence[float] | None,
    loader: Iterable[Any],
    factors: Sequence[float] = (1.0,),
) -> Tensor:
    """Returns mean held-out log likelihoods (posteriors, precisions, factors), linearised, with the default link.

    Args:
        posteriors: of one fit.
        precisions: candidates for a scalar δ; None keeps each posterior's own.
        loader: held-out batches.
        factors: of the whole covariance of y.

    Raises:
        LapwingError: for an empty loader.
    """
    first = posteriors[0]
    link = first.likelihood.default_link
    marginal = not link.reads_covariance or (link.closed_form and first.tangent.outputs == 1)
    groups = _contraction_groups(posteriors)
    scratch = _numbers_per_sample(posteriors, len(precisions or [0]), marginal)
    count = 0
    totals = torch.zeros(len(posteriors), len(precisions or [0]), len(factors), dtype=torch.float64)
    with torch.no_grad():
        for batch in loader:
            inputs, targets = batches.split(batch, first.tangent.device)
            for part, record in first.tangent.records(inputs, None, first.covariance.record_dtype, scratch):
                labels = targets[part]
                first.likelihood.check(record.outputs, labels)
                count += record.samples
                for members in groups:
                    candidates = {
                        (i, j): posteriors[i] if precisions is None else _at(posteriors[i], precisions[j])
                        for i in members
                        for j in range(totals.shape[1])
                    }
                    latents = _latents(record, list(candidates.values()), marginal)
                    for (place, candidate), latent in zip(candidates.items(), latents, strict=True):
                        prediction = candidate.likelihood.predict(latent)
                        totals[place] += _log_probs(prediction, record.outputs, labels, factors)
    if not count:
        raise LapwingError(
            "The loader of validation data shows no batch. Write lw.Validation([(x_val, y_val)]), with held-out "
            "batches in a loader that can be gone through twice."
        )
    return totals / count


def mean_variances(posteriors: Sequence[Posterior], parts: Iterable[Any]) -> list[float]:
    """Returns the mean of `J_n Σ J_nᵀ` over batches of inputs and outputs, linearised.

    The posteriors come from one by `at`, so that they differ in prior and noise alone.
    """
    first = posteriors[0]
    totals, count = torch.zeros(len(posteriors), dtype=torch.float64), 0
    scratch = _numbers_per_sample(posteriors, 1, marginal=True)
    with torch.no_grad():
        for inputs in parts:
            for _, record in first.tangent.records(inputs, None, first.covariance.record_dtype, scratch):
                latents = _latents(record, posteriors, marginal=True)
                totals += torch.stack([latent.variance.double().sum().cpu() for latent in latents])
                count += record.outputs.numel()
    return (totals / count).tolist()


def _log_probs(prediction: Prediction, outputs: Tensor, labels: Tensor, factors: Sequence[float]) -> Tensor:
    """Returns the log likelihood of a batch, summed, for each factor of y's covariance."""
    if list(factors) == [1.0]:
        return prediction.log_prob(labels).double().sum().cpu()
    labels = labels.reshape(outputs.shape)
    sums = [
        prediction.log_prob(outputs + (labels - outputs) / q**0.5).double().sum() - outputs.numel() * math.log(q) / 2
        for q in factors
    ]
    return torch.stack(sums).cpu()


def _at(posterior: Posterior, precision: float) -> Posterior:
    return posterior.at(torch.full_like(posterior.prior.precision, precision), posterior.noise_variance)


def _contraction_groups(posteriors: Sequence[Posterior]) -> list[list[int]]:
    """Returns the indices of posteriors whose covariances one contraction of J gives."""
    groups: list[list[int]] = []
    for i, posterior in enumerate(posteriors):
        covariance: Any = posterior.covariance
        group = next((g for g in groups if covariance.is_contracted_with(posteriors[g[0]].covariance)), None)
        if group is None:
            groups.append([i])
        else:
            group.append(i)
    return groups


def _numbers_per_sample(posteriors: Sequence[Posterior], priors: int, marginal: bool) -> int:
    """Estimates how many numbers a sample takes in the latents of all candidates, and on the way to them."""
    tangent, count = posteriors[0].tangent, len(posteriors) * priors
    widest = max(block.matrix_shape[1] for block in tangent.blocks)
    one = tangent.outputs * max(posterior.covariance.scratch_per_row for posterior in posteriors)
    return one + count * (widest + (2 * tangent.outputs if marginal else tangent.outputs**2))


def _latents(record: Record, candidates: Sequence[Posterior], marginal: bool) -> Iterable[Latent]:
    """Returns the latent of each candidate of one contraction, with variances alone where the link reads no more."""
    covariances: list[Any] = [candidate.covariance for candidate in candidates]
    if marginal:
        variances = covariances[0].output_marginals(record, covariances)
        return (Latent(record.outputs, (marginals,)) for marginals in variances)
    return (Latent(record.outputs, terms) for terms in covariances[0].output_covariances(record, covariances))
