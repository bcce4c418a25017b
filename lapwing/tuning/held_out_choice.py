"""The choice of prior precision, noise and logit temperature by scores on held-out data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..covariance import has_prior, has_rank
from ..data.inputs import Samples, checked
from ..data.progress import tracked
from ..errors import LapwingError
from ..likelihoods import Likelihood
from ..likelihoods.inferred import warn_of_misfit
from ..methods import DataSummary
from ..methods.passes import Batch
from ..methods.temperature_scaling import refined, warn_of_end
from ..options import Rule
from ..posterior import Posterior
from ..prediction.aim import DEFAULT_AIM, Aim
from .evidence import no_rank_error
from .held_out import at_exponents, head_scores, no_batch_error, sample_scores, width_scores
from .search import evenly

log = logging.getLogger("lapwing")

PLATEAU = 1e-4  # difference of scores, in nats per sample, below which candidates are tied
TEMPERATURES = evenly(0.0, 1.5, 16)  # candidates for log10 T; T < 1 would sharpen the means and permit a huge spread
SHARPER = -0.1  # if this log10 T without spread scores best, the network is underconfident
SHARP = evenly(-2.0, 0.0, 21)  # candidates for log10 T of an underconfident network
WIDER = 1e-3  # maximum cost, in nats per sample, of a wider spread than the best, for any standard error
FAINT = 5e-3  # the spread of an underconfident network changes log probabilities by at most this, in nats per sample
SURE = 3.0  # λ of the training data, or one σ², loses only by more than this many paired standard errors
STEPS = evenly(-1.0, 7.0, 9)  # candidates for log10 of δ over the best one of linearised predictions, for another way
AROUND = evenly(-1.0, 1.5, 26)  # candidates for log10 of σ² over the best one of linearised predictions
NOISES = evenly(-6.0, 0.5, 27)  # candidates for log10 of σ² over the mean squared held-out residual at a given prior

RISING = Rule(
    lambda value: (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(end, Real) for end in value)
        and value[0] < value[1]
    ),
    "a rising pair of numbers",
)
"""A range of exponents."""


def with_ranks(posterior: Posterior, ranks: Sequence[int]) -> list[Posterior]:
    """Returns the posterior on its first directions, for each rank below its own, and last the posterior itself."""
    covariance = posterior.covariance
    if not ranks:
        return [posterior]
    if not has_rank(covariance):
        raise no_rank_error("ranks", ranks, str(posterior.method))
    shorter = [rank for rank in sorted(set(ranks)) if rank < covariance.rank]
    return [*(replace(posterior, covariance=covariance.with_rank(rank)) for rank in shorter), posterior]


def best_of(
    posteriors: Sequence[Posterior],
    decades: tuple[float, float],
    points: int,
    loader: Iterable[Any],
    temperatures: Sequence[float] = (),
    tolerance: float = 0.0,
    trained: tuple[float, float] | None = None,
    aim: Aim = DEFAULT_AIM,
) -> Posterior:
    """Returns the posterior with the best held-out log likelihood, at its best scalar δ, noise variance and T.

    Values that the user gave are kept. Each point of a grid over log10 δ uses the best second number: for classifiers T
    out of `temperatures` (() keeps T), for regressions the factor c of the covariance of y, see `width_scores`. The
    best point is refined by the parabola through its neighbours. `tolerance` is as in `Validation`; `trained` holds
    δ and σ² by the training data: their `λ = δσ²` is kept unless another λ is surely better, and σ² is `_pulled`. For
    another way than the linearised one, the best δ of linearised predictions is the start of a search over nine δ.
    """
    first = posteriors[0]
    open_prior = has_prior(first.covariance) and not first.prior.fixed
    exponents = evenly(*decades, points) if open_prior else []
    if aim.other_way is not None:
        start = best_of(posteriors, decades, points, loader, temperatures, tolerance, trained)
        exponents = [math.log10(float(start.prior.precision[0])) + step for step in STEPS] if open_prior else []
        if not first.noise_fixed:
            return _best_pair(posteriors, exponents, float(start.noise_variance or 0.0), loader, aim, trained)
    if first.noise_fixed:
        return _best_point(posteriors, exponents, loader, temperatures, tolerance, aim=aim)
    noise = _residual(first, loader)
    posteriors = [posterior.with_noise(noise) for posterior in posteriors]
    if not open_prior:
        exponents, at_noise = [math.log10(noise) + step for step in NOISES], lambda one, k: one.with_noise(10**k)
        return _best_point(posteriors, exponents, loader, (), 0.0, at_noise, trained=trained)
    if first.likelihood.has_closed_width:
        return _best_width(posteriors, exponents, noise, loader, trained)
    return _best_point(posteriors, exponents, loader, temperatures, tolerance)


def _best_point(
    posteriors: Sequence[Posterior],
    exponents: Sequence[float],
    loader: Iterable[Any],
    temperatures: Sequence[float],
    tolerance: float,
    at_noise: Callable[[Posterior, float], Posterior] | None = None,
    aim: Aim = DEFAULT_AIM,
    trained: tuple[float, float] | None = None,
) -> Posterior:
    """Returns the posterior at the best δ, or σ² with `at_noise`, if there are exponents, at the best T or heads."""
    moved = at_noise or (lambda posterior, exponent: posterior.at(10**exponent))

    def candidates(posterior: Posterior) -> list[Posterior]:
        return [moved(posterior, exponent) for exponent in exponents] or [posterior]

    open_temperature = bool(temperatures) and posteriors[0].logit_temperature == 1
    # 1. log likelihoods (posteriors, points, T, N); the first T is `SHARPER`
    heads: list[Likelihood] = []
    if posteriors[0].likelihood.head_numbers:
        scores, heads = head_scores(posteriors, candidates, loader, bool(temperatures))
    else:
        tried = [SHARPER, *temperatures] if open_temperature else ()
        scores = sample_scores(posteriors, candidates, loader, tried, aim)
    sharper, scores, every = scores[:, :, 0], scores[:, :, 1:] if open_temperature else scores, scores
    # 2. T < 1 without spread is best: another search
    if open_temperature and _is_underconfident(sharper, scores):
        which, _ = _highest(sharper[:, -1:].mean(-1, dtype=torch.float64))
        best = _sharpened(posteriors[which], exponents, candidates, loader, tolerance, aim)
        if not has_prior(best.covariance) and float(best.prior.precision.min()) > 0:
            log.warning(
                "Predictions by %s are underconfident on the held-out data, which chose a logit temperature of %.2g. "
                "validation= cannot change the prior precision of %s, here %.3g. If its spread is too wide, pass a "
                "larger one to lw.fit, such as prior_precision=%.2g.",
                best.method.name, best.logit_temperature, best.method.name, best.prior.precision.min().item(),
                100 * float(best.prior.precision.min()),
            )  # fmt: skip
        return best
    # 3. the best T of each point, scores there (posteriors, points, N), their means, and the best point of all
    places = scores.mean(-1, dtype=torch.float64).argmax(-1)
    tops, rows = _at_tops(every, [SHARPER, *temperatures]) if open_temperature else (None, scores.squeeze(2))
    table = rows.mean(-1, dtype=torch.float64)
    which, at = _highest(table)
    best, row, exponent = posteriors[which], table[which].tolist(), None
    if exponents:
        # 4. at the best T of each point (points, N): the widest that the data cannot distinguish from the best
        widest = widest_of_equals(rows[which], at, tolerance)
        exponent = refined(exponents, row, at) if widest == at and not heads else exponents[widest]
        at = widest
        exponent = exponent if at_noise is None else _pulled(exponent, trained, scores[which, at])
        spread = scores[which, at, places[which, at]] - scores[which, -1, places[which, at]]
        if best.logit_temperature is not None and float(spread.abs().mean()) < PLATEAU:
            _warn_of_no_spread(best)
        elif at in (0, len(exponents) - 1) and at_noise is None and aim.other_way is None:
            _warn_of_edge(best, exponents, row, at, exponent)
    if tops is not None:
        # 5. log10 T of each δ, interpolated at the chosen one
        top = float(tops[which, at]) if exponent is None else _between(exponents, tops[which].tolist(), at, exponent)
        temperature = 10 ** max(top, temperatures[0])
        if top >= temperatures[-1]:
            warn_of_end(temperature, "Validation")
        best = replace(best, likelihood=best.likelihood.with_logit_temperature(temperature))
    if heads:
        best = replace(best, likelihood=heads[which * len(row) + at])
    return best if exponent is None else moved(best, exponent)


def _at_tops(scores: Tensor, grid: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Returns log10 T >= 0 at the top of a parabola through the best T of a grid and its neighbours, and scores there.

    Scores are (posteriors, points, K, N) on a grid of K values whose first is below 0; the results are (posteriors,
    points) and (posteriors, points, N). Without the parabola T = 1 would win over a better T between two candidates.
    """
    means = scores.mean(-1, dtype=torch.float64).nan_to_num(-math.inf, neginf=-math.inf)
    at = means[..., 1:-1].argmax(-1, keepdim=True) + 1  # (posteriors, points, 1)
    left, middle, right = (means.gather(-1, at + k) for k in (-1, 0, 1))
    shift = (0.5 * (left - right) / (left - 2 * middle + right).clamp_max(-1e-300)).nan_to_num(0.0).clamp(-1, 1)
    points = torch.tensor(grid, dtype=means.dtype, device=means.device)
    shift = shift.maximum(-points[at] / (points[1] - points[0]))  # T >= 1
    # Lagrange's polynomials at the shift, for the scores of each sample as for their mean
    weights = torch.cat([shift * (shift - 1) / 2, 1 - shift.square(), shift * (shift + 1) / 2], -1)[..., None]
    places = torch.cat([at - 1, at, at + 1], -1)[..., None].expand(-1, -1, -1, scores.shape[-1])  # (.., 3, N)
    rows = torch.where(weights == 0, 0.0, weights * scores.gather(2, places)).sum(2).to(scores)  # 0 for a score of -inf
    return (points[at] + shift * (points[1] - points[0])).squeeze(-1), rows


def _best_pair(
    posteriors: Sequence[Posterior], exponents: Sequence[float], noise: float, loader: Iterable[Any], aim: Aim,
    trained: tuple[float, float] | None,
) -> Posterior:  # fmt: skip
    """Returns the posterior of a regression at the δ and σ² of the best predictions by a way.

    They are chosen in two steps, because σ² changes the covariance too: the best σ² of each δ at the covariance of one
    σ², `noise`, and then the best of these pairs.
    """
    # 1. scores (posteriors, points, σ²) with the covariances of one σ², and the best σ² of each point
    posteriors, noises = [one.with_noise(noise) for one in posteriors], [noise * 10**k for k in AROUND]
    candidates = at_exponents(exponents)
    means = sample_scores(posteriors, candidates, loader, aim=aim, noises=noises).mean(-1).nan_to_num(-math.inf)
    pairs = [
        [each.with_noise(noises[k]) for each, k in zip(candidates(one), line, strict=True)]
        for one, line in zip(posteriors, means.argmax(-1).tolist(), strict=True)
    ]
    # 2. scores of these pairs with their own covariances
    exact = sample_scores(posteriors, lambda one: pairs[posteriors.index(one)], loader, aim=aim)
    which, at = _highest(exact.squeeze(2).mean(-1))
    best = pairs[which][at]
    return best.with_noise(10 ** _pulled(math.log10(best.noise_variance or noise), trained, exact[which, at]))


def _best_width(
    posteriors: Sequence[Posterior],
    exponents: Sequence[float],
    noise: float,
    loader: Iterable[Any],
    trained: tuple[float, float] | None,
) -> Posterior:
    """Returns the posterior at the best δ and σ² of a regression: a grid over δ at one σ², and c in closed form.

    With training data only points count that are surely better than the λ of these data. Without such a point λ is that
    one, and (δ/c, c σ²) is `_pulled`. There the best of several posteriors may be another one.
    """
    # 1. scores at the best c of each δ; last the δ with λ = δσ² of the training data at σ² = `noise`
    every = [*exponents] if trained is None else [*exponents, math.log10(trained[0] * trained[1] / noise)]
    scores, factors = width_scores(posteriors, at_exponents(every), loader)
    table, (own, _) = scores.mean(-1)[:, : len(exponents)], _highest(scores[:, -1:].mean(-1))
    counted = table
    if trained is not None:
        better = [[surely_better(point, scores[own, -1], SURE) for point in line[:-1]] for line in scores]
        counted = torch.where(torch.tensor(better), table, -torch.inf)
    # 2. the best δ of the grid, and log10 c there
    which, at = _highest(counted)
    best, row = posteriors[which], table[which].tolist()
    exponent = refined(exponents, row, at)
    factor = _between(exponents, factors[which].tolist(), at, exponent)
    if counted[which, at] == -torch.inf:
        # 3. λ of the training data, with the best posterior there, and log c pulled to the noise of the training data
        best, exponent, unit = posteriors[own], every[-1], math.log10(noise)
        factor = _pulled(unit + float(factors[own, -1]), trained, scores[own, -1]) - unit
    elif at in (0, len(exponents) - 1):
        _warn_of_edge(best, exponents, row, at, exponent - factor)
    # 4. (δ, σ²) -> (δ/c, c σ²)
    return best.at(10 ** (exponent - factor), noise * 10**factor)


def _pulled(exponent: float, trained: tuple[float, float] | None, scores: Tensor) -> float:
    """Returns log10 σ², pulled towards its value by the training data with the weight of one sample.

    A few held-out samples, with these scores, may all have small residuals.
    """
    samples = int(scores.count_nonzero())  # of which some target is known
    return exponent if trained is None else (samples * exponent + math.log10(trained[1])) / (samples + 1)


def _highest(table: Tensor) -> tuple[int, int]:
    """Returns the indices of the posterior and of the point with the highest score; NaN is the lowest."""
    which, at = (int(i) for i in torch.unravel_index(table.nan_to_num(-math.inf).argmax(), table.shape))
    return which, at


def _warn_of_edge(best: Posterior, exponents: Sequence[float], row: Sequence[float], at: int, chosen: float) -> None:
    """Warns if the best choice is at an end of the range, unless other candidates have the same score."""
    if sum(row[at] - score < PLATEAU for score in row) == 1:
        log.warning(
            "Validation of %s chose an end of its range, prior precision %.3g: the held-out data prefer %s. "
            "decades=(%g, %g) of lw.Validation searches further.",
            best.method, 10**chosen, "no spread in the weights at all" if at else "the widest spread in the range",
            exponents[0] - 3, exponents[-1] + 3,
        )  # fmt: skip


def _warn_of_no_spread(best: Posterior) -> None:
    log.warning(
        "Validation of %s chose a prior precision that leaves no uncertainty of the weights: the mutual information is "
        "rounding noise, and only the confidence of the network ranks out-of-distribution inputs. For a map of what "
        "the network does not know, make a second posterior: lw.fit(model, loader, lw.KFAC()).", best.method,
    )  # fmt: skip


def _is_underconfident(sharper: Tensor, scores: Tensor) -> bool:
    """Whether T < 1 without spread is better than every spread with T >= 1, by `WIDER` and one paired standard error.

    Scores are (posteriors, points, N) at `SHARPER`, and (posteriors, points, temperatures, N).
    """
    best, reference = (
        part[int(part.mean(-1, dtype=torch.float64).nan_to_num(-math.inf).argmax())].double()
        for part in (sharper[:, -1], scores.flatten(0, 2))
    )
    return float((best - reference).mean()) > WIDER and surely_better(best, reference, 1.0)


def _sharpened(
    best: Posterior,
    exponents: Sequence[float],
    candidates: Callable[[Posterior], list[Posterior]],
    loader: Iterable[Any],
    tolerance: float,
    aim: Aim,
) -> Posterior:
    """Returns an underconfident posterior at the best T without spread, with a spread that hardly changes predictions.

    A wider spread could make up for means that are too sharp.
    """
    # 1. the best T < 1 without spread, at the largest δ: (points, temperatures, N)
    scores = sample_scores([best], candidates, loader, SHARP, aim)[0]
    line = scores[-1].mean(-1, dtype=torch.float64).nan_to_num(-math.inf)
    place, last = int(line.argmax()), len(scores) - 1
    best = replace(best, likelihood=best.likelihood.with_logit_temperature(10 ** refined(SHARP, line.tolist(), place)))
    if not exponents:
        return best
    # 2. the smallest δ at which the spread changes log probabilities by at most `FAINT`
    changes = (scores[:, place] - scores[last, place]).abs().mean(-1, dtype=torch.float64).tolist()
    at = next(i for i, change in enumerate(changes) if change <= (FAINT if tolerance else 0.0))
    if changes[at] < PLATEAU and at > 0:  # at = 0 is the widest spread, which is not switched off
        _warn_of_no_spread(best)
    return best.at(10 ** exponents[at])


def _residual(posterior: Posterior, loader: Iterable[Any]) -> float:
    """Returns the mean squared residual of held-out data, the noise variance at which the search starts."""
    summary, rows = DataSummary(), dict[str, Any]()
    for samples in checked(map(Samples.of, tracked(loader, "residuals of held-out data")), posterior.tangent.device):
        rows = Batch.of(posterior.tangent, samples).rows()
        summary.add(posterior.likelihood, **rows)
    if "targets" in summary.statistics:
        warn_of_misfit(posterior.likelihood, rows["outputs"], rows["targets"], summary.statistics, "held-out")
    residual = posterior.likelihood.residual_variance(summary.statistics) if summary.samples else None
    if residual is None:
        raise no_batch_error()
    dtype = posterior.tangent.dtype
    if residual > torch.finfo(dtype).max:
        raise LapwingError(
            f"The mean squared residual of the held-out data is {residual:.3g}, too large for {dtype}, because the "
            "targets are too large. Standardise them, y = (y - y.mean()) / y.std(), and train the network on these."
        )
    return residual


def surely_better(scores: Tensor, reference: Tensor, errors: float) -> bool:
    """Whether scores (N,) are better than the reference (N,) in the mean, by a number of paired standard errors."""
    gain = scores - reference
    return float(gain.mean()) > errors * float(gain.std(correction=0)) / math.sqrt(len(gain))


def widest_of_equals(scores: Tensor, at: int, tolerance: float) -> int:
    """Returns the index of the widest candidate that ties with the best one, or is within some paired standard errors.

    Candidates (points, N) go from the widest spread to the narrowest. If several are so wide that they predict the
    same, the narrowest of them is returned.
    """
    widest = at
    while tolerance and widest > 0:
        difference = scores[at].double() - scores[widest - 1]
        bound = min(WIDER, tolerance * float(difference.std(correction=0)) / math.sqrt(len(difference)))
        if not float(difference.mean()) <= max(bound, PLATEAU):
            break
        widest -= 1
    same = (scores - scores[0]).abs().mean(-1) < PLATEAU  # whether a candidate predicts the same as the widest of all
    while tolerance and widest + 1 < len(scores) and same[widest + 1]:
        widest += 1
    return widest


def _between(points: Sequence[float], values: Sequence[float], at: int, point: float) -> float:
    """Returns the value at a point by the parabola through the values at the closest grid point and its neighbours."""
    left, middle, right = values[at - 1 : at + 2] if 0 < at < len(points) - 1 else [values[at]] * 3
    if point == points[at] or not math.isfinite(left + right):
        return values[at]
    step = (point - points[at]) / (points[1] - points[0])
    return middle + step * (right - left) / 2 + step**2 * (left - 2 * middle + right) / 2
