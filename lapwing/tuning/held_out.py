"""The search that tunings on held-out data share: many candidates scored from one record of each batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..covariance import Latent, PriorCovariance, Subspace
from ..errors import LapwingError, shown
from ..likelihoods import Gaussian, SampledLink
from ..network import batches
from ..posterior import Posterior
from ..tangent import Record
from .search import evenly

log = logging.getLogger("lapwing")


PLATEAU = 1e-4
"""Candidates whose scores differ by less are tied, in nats a sample."""

TEMPERATURES = evenly(0.0, 1.5, 16)
"""Candidates for log10 of the logit temperature T. Below 1 it would sharpen the means beside a huge spread."""

WIDER = 1e-3
"""A wider spread than the best may cost so many nats a sample, however large the standard error is."""

SURE = 3.0
"""A regression's λ = δσ² is that of the training data, unless another is better by so many paired standard errors."""

NOISES = evenly(-6.0, 0.5, 27)
"""Candidates for log10 of σ² beside the mean squared held-out residual, where the prior precision is the user's."""

Candidates = Callable[[Posterior], list[Posterior]]
"""Returns the candidates around a posterior, which differ in prior and noise alone."""


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
    posteriors: Sequence[Posterior],
    decades: tuple[float, float],
    points: int,
    loader: Iterable[Any],
    temperatures: Sequence[float] = (),
    tolerance: float = 0.0,
    product: float | None = None,
) -> Posterior:
    """Returns the posterior with the best held-out log likelihood, at its best scalar δ, noise variance and T.

    What the user gave is kept. The best point of a grid is refined by the parabola through its neighbours. At each
    point the second number has its best value there: for classifiers T, for regressions the factor c of the covariance
    of y, `(δ, σ²) -> (δ/c, c σ²)`, which needs no other contraction. c is in closed form, see `width_scores`.

    Args:
        posteriors: of one fit.
        decades: the range of log10 δ; of a regression beside the mean squared held-out residual as noise.
        points: candidates in that range.
        loader: held-out batches.
        temperatures: candidates for log10 T, rising; none leaves it.
        tolerance: among classifiers the widest is chosen whose score is at most so many standard errors below the
            best, and `WIDER`. The errors are those of the mean difference of the two, sample by sample.
        product: `λ = δσ²` of a regression by its training data, which is kept unless another is surely better; None
            for the best.
    """
    first = posteriors[0]
    priorless = not isinstance(first.covariance, PriorCovariance)
    open_noise, open_prior = not (first.noise_fixed or priorless), not (first.prior.fixed or priorless)
    open_scale = bool(temperatures) and first.logit_temperature == 1
    open_factor = open_noise and open_prior and isinstance(first.likelihood, Gaussian)
    noise = first.noise_variance
    if open_noise:
        noise = _residual(first, loader)
        posteriors = [posterior.at(posterior.prior.precision, noise) for posterior in posteriors]
    exponents = evenly(*decades, points) if open_prior else NOISES if open_noise else [0.0]
    start = math.log10(product / noise) if open_factor and product is not None and noise is not None else None

    def candidates(posterior: Posterior) -> list[Posterior]:
        if open_prior:
            every = exponents if start is None else [*exponents, start]
            return [_at(posterior, 10**exponent) for exponent in every]
        if noise is None or not open_noise:
            return [posterior]
        return [posterior.at(posterior.prior.precision, noise * 10**exponent) for exponent in exponents]

    second = torch.zeros(len(posteriors), len(exponents), dtype=torch.float64)
    if open_factor:
        scores, second = width_scores(posteriors, candidates, loader)
        table = scores.mean(-1)[:, : len(exponents)]
    else:
        scores = sample_scores(posteriors, candidates, loader, temperatures if open_scale else ())
        means = scores.mean(-1, dtype=torch.float64)  # (posteriors, points, temperatures)
        table, places = means.max(-1)
        scores = scores.gather(2, places[..., None, None].expand(-1, -1, 1, scores.shape[-1])).squeeze(2)
        if open_scale:
            flat = [_refined(temperatures, row.tolist(), int(row.argmax())) for row in means.flatten(0, 1)]
            second = torch.tensor(flat, dtype=torch.float64).view_as(table)
    which, at = (int(i) for i in torch.unravel_index(table.nan_to_num(-math.inf).argmax(), table.shape))
    best, row = posteriors[which], table[which].tolist()
    exponent = _refined(exponents, row, at)
    if open_prior and not open_factor and (widest := _widest(scores[which], at, tolerance)) != at:
        at, exponent = widest, exponents[widest]
    other = _between(exponents, second[which].tolist(), at, exponent)
    if start is not None and not _surely_better(scores[which, at], scores[which, -1]):
        exponent, other = start, float(second[which, -1])
    elif open_prior and at in (0, len(exponents) - 1):
        _warn_of_edge(best, exponents, row, at, exponent - other if open_factor else exponent, open_noise)
    if open_scale:
        temperature = 10 ** max(other, temperatures[0])
        best = replace(best, likelihood=best.likelihood.with_logit_temperature(temperature))
    if open_noise and not open_prior:
        assert noise is not None
        return best.at(best.prior.precision, noise * 10**exponent)
    if not open_prior:
        return best
    factor = 10**other if open_factor else 1.0
    precision = torch.full_like(best.prior.precision, 10**exponent / factor)
    return best.at(precision, None if noise is None else noise * factor)


def held_out_report(posterior: Posterior, loader: Iterable[Any]) -> str:
    """Returns what was chosen, and a classifier's score by the default link and by draws, which should agree.

    Cost: a pass over the loader.
    """
    delta = posterior.prior_precision
    chosen = "" if delta is None else f"prior precision {posterior.prior.precision.min().item():.3g}, "
    if posterior.logit_temperature is None:
        return chosen + f"noise variance {posterior.noise_variance:.3g}"
    link, likelihood = posterior.likelihood.default_link, posterior.likelihood
    if SampledLink not in likelihood.links:
        return f"{chosen}logit temperature {posterior.logit_temperature:.3g}"
    sums, count = torch.zeros(2, dtype=torch.float64), 0
    for batch in loader:
        inputs, targets = batches.split(batch, posterior.tangent.device)
        if batches.size(inputs):
            latent = posterior.latent(inputs)
            for k, each in enumerate((link, SampledLink())):
                sums[k] += likelihood.predict(latent, each).log_prob(targets).double().sum().cpu()
            count += batches.size(inputs)
    closed, drawn = (-sums / count).tolist()
    return (
        f"{chosen}logit temperature {posterior.logit_temperature:.3g}. Its negative log likelihood is {closed:.4f} "
        f"by {link} and {drawn:.4f} by draws of the outputs"
    )


def _warn_of_edge(
    best: Posterior, exponents: Sequence[float], row: Sequence[float], at: int, chosen: float, open_noise: bool
) -> None:
    """Warns of a choice at an end of the range; says so where it is one of many wide ones that are alike."""
    low, high = exponents[0], exponents[-1]
    tied = sum(row[at] - score < PLATEAU for score in row)
    if tied > 1:
        advice = f"{tied} candidates there differ by less than {PLATEAU:g} nats, so that it matters little"
    else:
        meaning = "no spread in the weights at all" if at else "the widest spread in the range"
        further = f"tune=lw.Validation(loader, decades=({low - 3:g}, {high + 3:g}))"
        advice = f"the held-out data ask for {meaning}; {further} looks further"
    if at and best.logit_temperature is not None:
        advice += ". Without spread foreign inputs are ranked by the network's own confidence alone"
    log.log(
        logging.INFO if 1 < tied < len(row) and not at else logging.WARNING,
        "Validation of %s chose the edge of its range, prior precision %.3g%s: %s.",
        best.method, 10**chosen,
        f" (1e{exponents[at]:g} beside the mean squared held-out residual)" if open_noise else "", advice,
    )  # fmt: skip


def _residual(posterior: Posterior, loader: Iterable[Any]) -> float:
    """Returns the mean squared residual of held-out data, where the search for widths starts."""
    sums: dict[str, Tensor] = {}
    for batch in loader:
        inputs, targets = batches.split(batch, posterior.tangent.device)
        if batches.size(inputs):
            outputs = posterior.tangent.outputs_of(posterior.tangent.check(inputs).inputs)
            posterior.likelihood.check(outputs, targets)
            values = posterior.likelihood.statistics(outputs, targets)
            sums = {name: value + sums.get(name, 0.0) for name, value in values.items()}
    residual = posterior.likelihood.residual_variance(sums) if sums else None
    if residual is None:
        raise _no_batch()
    return residual


def _surely_better(scores: Tensor, others: Tensor) -> bool:
    """Whether scores (N,) are better than others in the mean, by more than chance."""
    gain = scores - others
    return float(gain.mean()) > SURE * float(gain.std(correction=0)) / math.sqrt(len(gain))


def _widest(scores: Tensor, at: int, tolerance: float) -> int:
    """Returns the lowest of the candidates (points, N) below the best that are within so many paired errors of it.

    Spreads so wide that wider ones predict the same, down to the end of the range, are one: its narrowest is returned.
    """

    def saturated(place: int) -> bool:
        """Whether the candidates up to the next one predict the same."""
        return place + 1 < len(scores) and float((scores[place + 1] - scores[0]).abs().mean()) < PLATEAU

    widest = at
    while tolerance and widest > 0:
        difference = scores[at].double() - scores[widest - 1]
        bound = min(WIDER, tolerance * float(difference.std(correction=0)) / math.sqrt(len(difference)))
        if not float(difference.mean()) <= bound:
            break
        widest -= 1
    while tolerance and saturated(widest):
        widest += 1
    return widest


def _refined(points: Sequence[float], scores: Sequence[float], at: int) -> float:
    """Returns the top of the parabola through the best point of a grid and its neighbours; at an edge the point."""
    if at in (0, len(points) - 1):
        return points[at]
    left, middle, right = scores[at - 1 : at + 2]
    shift = 0.5 * (left - right) / min(left - 2 * middle + right, -1e-300)  # in grid steps
    return points[at] + (points[1] - points[0]) * max(-0.5, min(0.5, shift))


def _between(points: Sequence[float], values: Sequence[float], at: int, point: float) -> float:
    """Returns the value at a point by the parabola through those at the closest point of a grid and its neighbours."""
    left, middle, right = values[at - 1 : at + 2] if 0 < at < len(points) - 1 else [values[at]] * 3
    if point == points[at] or not math.isfinite(left + right):
        return values[at]
    step = (point - points[at]) / (points[1] - points[0])
    return middle + step * (right - left) / 2 + step**2 * (left - 2 * middle + right) / 2


def held_out_scores(
    posteriors: Sequence[Posterior], precisions: Sequence[float] | None, loader: Iterable[Any]
) -> Tensor:
    """Returns mean held-out log likelihoods (posteriors, precisions, 1), linearised, with the default link.

    Args:
        posteriors: of one fit.
        precisions: candidates for a scalar δ; None keeps each posterior's own.
        loader: held-out batches.
    """

    def candidates(posterior: Posterior) -> list[Posterior]:
        return [posterior] if precisions is None else [_at(posterior, precision) for precision in precisions]

    return sample_scores(posteriors, candidates, loader).mean(-1, dtype=torch.float64)


def sample_scores(
    posteriors: Sequence[Posterior], candidates: Candidates, loader: Iterable[Any], temperatures: Sequence[float] = ()
) -> Tensor:
    """Returns the log likelihood of each held-out sample, (posteriors, candidates, temperatures, N).

    Args:
        posteriors: of one fit.
        candidates: around a posterior.
        loader: held-out batches.
        temperatures: log10 of T; the likelihood's own alone where there are none.

    Raises:
        LapwingError: for an empty loader.
    """
    rows: dict[tuple[int, int], list[Tensor]] = {}
    divisors = [10**exponent for exponent in temperatures]
    for place, candidate, latent, labels in _contracted(posteriors, candidates, loader, max(1, len(divisors))):
        likelihood = candidate.likelihood
        if divisors:
            latent = latent.at_temperatures(divisors)
            labels = labels.repeat(len(divisors), *[1] * (labels.ndim - 1))
        scores = likelihood.predict(latent).log_prob(labels)
        rows.setdefault(place, []).append(scores.cpu().unflatten(0, (max(1, len(divisors)), -1)))
    joined = [torch.cat(parts, 1) for _, parts in sorted(rows.items())]
    return torch.stack(joined).unflatten(0, (len(posteriors), -1))


def width_scores(
    posteriors: Sequence[Posterior], candidates: Candidates, loader: Iterable[Any]
) -> tuple[Tensor, Tensor]:
    """Returns held-out log likelihoods (posteriors, candidates, N) at the best factor c of y's covariance, and log10 c.

    With `r = y - f` and the covariance S of y, `log N(y; f, c S)` is highest in the mean at `c = mean rᵀS⁻¹r / C`. For
    one output that is `mean r²/(σ² + v)`. Of a Gaussian likelihood; float64.

    Raises:
        LapwingError: for an empty loader.
    """
    rows: dict[tuple[int, int], list[Tensor]] = {}
    outputs = posteriors[0].tangent.outputs
    for place, candidate, latent, labels in _contracted(posteriors, candidates, loader):
        prediction = candidate.likelihood.predict(latent.compact(covariances=outputs > 1))
        volume = prediction.log_prob(latent.mean.double())  # of r = 0
        squares = 2 * (volume - prediction.log_prob(labels))
        rows.setdefault(place, []).append(torch.stack([volume, squares]).cpu())
    joined = torch.stack([torch.cat(parts, 1) for _, parts in sorted(rows.items())])
    volume, squares = joined.unflatten(0, (len(posteriors), -1)).unbind(2)  # (posteriors, candidates, N)
    factor = (squares.mean(-1, keepdim=True) / outputs).clamp_min(torch.finfo(squares.dtype).tiny)
    return volume - (squares / factor + outputs * factor.log()) / 2, factor.squeeze(-1).log10()


def _contracted(
    posteriors: Sequence[Posterior], candidates: Candidates, loader: Iterable[Any], copies: int = 1
) -> Iterator[tuple[tuple[int, int], Posterior, Latent, Tensor]]:
    """Yields the place of each candidate, itself, its latent and the labels, batch by batch.

    Raises:
        LapwingError: for an empty loader.
    """
    first = posteriors[0]
    link = first.likelihood.default_link
    marginal = not link.reads_covariance or (link.closed_form and first.tangent.outputs == 1)
    groups = _contraction_groups(posteriors)
    scratch = _numbers_per_sample(posteriors, len(candidates(first)), marginal)
    scratch += 4 * copies * first.tangent.outputs * (1 if marginal else first.tangent.outputs)
    count = 0
    with torch.no_grad():
        for batch in loader:
            inputs, targets = batches.split(batch, first.tangent.device)
            for part, record in first.tangent.records(inputs, None, first.covariance.record_dtype, scratch):
                labels = targets[part]
                first.likelihood.check(record.outputs, labels)
                count += record.samples
                for members in groups:
                    some = {(i, j): one for i in members for j, one in enumerate(candidates(posteriors[i]))}
                    latents = _latents(record, list(some.values()), marginal)
                    for (place, candidate), latent in zip(some.items(), latents, strict=True):
                        yield place, candidate, latent, labels
    if not count:
        raise _no_batch()


def _no_batch() -> LapwingError:
    return LapwingError(
        "The loader of validation data shows no batch. Write lw.Validation([(x_val, y_val)]), with held-out batches in "
        "a loader that can be gone through twice."
    )


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
    if not isinstance(covariances[0], PriorCovariance):
        return [Latent(record.outputs, covariance.output_covariance(record)) for covariance in covariances]
    if marginal:
        variances = covariances[0].output_marginals(record, covariances)
        return (Latent(record.outputs, (marginals,)) for marginals in variances)
    return (Latent(record.outputs, terms) for terms in covariances[0].output_covariances(record, covariances))
