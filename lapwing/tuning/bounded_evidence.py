"""Tuning by the evidence, bounded by the training data: a classifier's spread, and the noise of a regression."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..covariance import PriorCovariance
from ..errors import LapwingError
from ..methods.options import check_count, check_positive
from ..network import batches
from ..network.eager import outside_modes
from ..network.loaders import other_size
from ..posterior import Posterior
from .base import Training, Tuning
from .evidence import Evidence
from .held_out import held_out_scores, mean_variances
from .leave_one_out import leave_one_out
from .search import evenly

log = logging.getLogger("lapwing")

WARN_FACTOR = 2.0
"""A noise variance that is raised to more than so many times the evidence's is warned of."""

POINTS = 13
"""Noise variances that are looked at between the residuals' and the evidence's."""


@dataclass(frozen=True)
class BoundedEvidence(Tuning):
    """The maximum of the evidence, moved where the training data refute it: by default, what `lw.fit` tunes with.

    `δ = max(δ_evidence, min{δ : mean_n [log p(y_n|f_n) - log p(y_n|N(f_n, J_n Σ_δ J_nᵀ))] <= nats})`, or
    `σ² = max(r², {σ² : σ² + mean_n J_n Σ J_nᵀ = s})` and δ of the evidence at that σ² (where all weights are treated,
    not above the evidence's σ²).

    The evidence takes the loss for a quadratic. A classifier that is sure of its training labels lies where the loss is
    flat, beside a slope. Its curvature is small there, and the evidence (of Evidence, with one δ) spreads the weights
    too wide. The prior precision is raised until the spread costs the training data no more than `nats` a sample.

    In a regression Diagonal, KFAC and subspaces overestimate the effective number of weights γ in `σ² = Σ r²/(NC - γ)`
    (MacKay 1992), or count as noise the curvature that they leave out: σ² can be a thousand times the mean squared
    residual r². It is lowered until predictions of the training data are as wide as s, the leave-one-out variance of
    the exact linearised model, but never below r². A posterior of some weights alone, such as the last layer, does not
    see what the other weights have memorised. For it σ² is also raised, to the s of all trained weights
    (`requires_grad`: freeze those that other data trained). This needs at least half the data, since s of fewer
    samples is too large, and a network of at most a million weights, few of them without a layer family.

    Args:
        nats: what the spread may cost, in nats a training sample, with the default link.
        samples: how many training samples are used at most, twice as many for a regression, in whole batches spread
            evenly over the loader, which should not be sorted.
        decades: how far above the evidence's δ to search, in powers of ten.
        points: candidates in that range; between them the cost is interpolated.

    Raises:
        LapwingError: for numbers out of range, or a loader without samples.

    Cost: the evidence's, and one pass through the loader for `samples` samples. For classifiers they are recorded and
    contracted once, with `points` variances (or Gram matrices, if the link reads covariances) an output. For
    regression: a kernel of at most 1 000 rows, of all trained weights, its eigenvalues, three searches for δ more, and
    one record of the samples with 13 variances an output.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> wide = lw.fit(model, [(x, y)]).prior_precision
        >>> lw.fit(model, [(x, y)], tune=lw.BoundedEvidence()).prior_precision >= wide
        True
    """

    nats: float = 0.005
    samples: int = 500
    decades: float = 8.0
    points: int = 17

    def __post_init__(self) -> None:
        """Checks the numbers."""
        check_positive("lw.BoundedEvidence", "nats", self.nats, 0.005)
        check_positive("lw.BoundedEvidence", "decades", self.decades, 8.0)
        check_count("lw.BoundedEvidence", "samples", self.samples)
        check_count("lw.BoundedEvidence", "points", self.points)
        if self.points < 3:
            raise LapwingError(
                f"lw.BoundedEvidence(points={self.points}) interpolates between 3 points or more. Write "
                "lw.BoundedEvidence(points=17)."
            )

    @outside_modes
    def tune(self, posterior: Posterior, training: Training = Training()) -> Posterior:  # noqa: B008 (frozen)
        """Returns the posterior at the maximum of the evidence, or at the nearest point within the bound."""
        tuned = self._with_bounded_noise(posterior, Evidence().tune(posterior), training)
        is_bounded = posterior.prior.given or tuned.noise_variance is not None
        if is_bounded or not isinstance(tuned.covariance, PriorCovariance):
            return tuned
        exponents = evenly(0.0, self.decades, self.points)
        candidates = [_raised(tuned, exponent) for exponent in exponents]
        costs = self.costs(candidates, training.loader, training.shown)
        exponent = crossing(exponents, costs, self.nats)
        if exponent == 0:
            return tuned
        log.info(
            "The spread at the evidence's prior precision %.3g costs %.3g nats a training sample: raised to %.3g",
            float(tuned.prior.precision[0]), costs[0], float(tuned.prior.precision[0]) * 10**exponent,
        )  # fmt: skip
        if exponent == exponents[-1]:
            log.warning(
                "BoundedEvidence of %s reached the end of its range, prior precision %.0e, where the spread still "
                "costs the training data %.1g nats a sample; BoundedEvidence(decades=%g) looks further.",
                tuned.method, float(tuned.prior.precision[0]) * 10**exponent, costs[-1], self.decades + 4,
            )  # fmt: skip
        return _raised(tuned, exponent)

    def _with_bounded_noise(self, posterior: Posterior, tuned: Posterior, training: Training) -> Posterior:
        """Returns the maximum of the evidence, or that at the σ² with which predictions have the width s."""
        residual, best = posterior.likelihood.residual_variance(posterior.statistics), tuned.noise_variance
        if posterior.noise_given or residual is None or best is None:
            return tuned
        parts = list(spread(training.loader, 2 * self.samples, posterior, training.shown))
        exact = leave_one_out(posterior, parts)
        inputs = [part for part, _ in parts]
        bound = exact.width
        if best + mean_variances([tuned], inputs)[0] > bound:  # too wide: lower σ², if the residual leaves room
            if best <= residual:
                return tuned
            top = min(best, bound)
        else:  # too narrow: raise it, if s comes from more weights than the posterior treats and from enough samples
            if (
                not exact.more_weights
                or 2 * exact.samples < (training.shown or posterior.samples) * posterior.data_factor
            ):
                return tuned
            top = bound
        low, high = math.log(residual), math.log(max(residual, top))
        logs = evenly(low, high, POINTS)
        ends = [_at_noise(posterior, math.exp(x)) for x in (low, (low + high) / 2, high)]
        candidates = [posterior.at(_between(ends, i / (POINTS - 1)), math.exp(x)) for i, x in enumerate(logs)]
        totals = [math.exp(x) + v for x, v in zip(logs, mean_variances(candidates, inputs), strict=True)]
        falling = [-x for x in reversed(logs)]  # from the widest predictions to the narrowest
        chosen = math.exp(-crossing(falling, totals[::-1], bound))
        log.info(
            "The evidence's noise variance %.3g is %s to %.3g: on its training data %s is as wide as the exact "
            "linearised model on samples left out, %.3g",
            best, "lowered" if chosen < best else "raised", chosen, posterior.method, bound,
        )  # fmt: skip
        if chosen > WARN_FACTOR * best:
            log.warning(
                "The noise variance is %.3g, the mean squared residual %.3g: %s seems to have memorised its training "
                "targets. If the weights that %s leaves out were trained on other data, freeze them before the fit: "
                "parameter.requires_grad_(False).",
                chosen, residual, type(posterior.tangent.model).__name__, posterior.method,
            )  # fmt: skip
        return _at_noise(posterior, chosen)

    def costs(self, candidates: Sequence[Posterior], loader: Iterable[Any], shown: int | None = None) -> list[float]:
        """Returns what the spread of each candidate costs, in nats a training sample; negative where it helps.

        Args:
            candidates: posteriors of one fit.
            loader: the training data.
            shown: how many samples it shows; those of the candidates where None.

        Raises:
            LapwingError: for a loader without samples.
        """
        first = candidates[0]
        totals, count = [0.0] * len(candidates), 0
        for inputs, targets in spread(loader, self.samples, first, shown):
            size = batches.size(inputs)
            scores = held_out_scores(candidates, None, [(inputs, targets)])  # checks the targets
            certain = float(first.likelihood.log_prob(first.tangent.outputs_of(inputs), targets).double().sum())
            totals = [cost + certain - size * score for cost, (score,) in zip(totals, scores, strict=True)]
            count += size
        return [cost / count for cost in totals]


def spread(loader: Iterable[Any], limit: int, posterior: Posterior, shown: int | None) -> Iterator[tuple[Any, Tensor]]:
    """Yields whole batches spread evenly over the training data of a posterior, up to a number of samples.

    Args:
        loader: the training data.
        limit: how many samples.
        posterior: whose device they are put on.
        shown: how many samples the loader shows; those of the posterior where None.

    Raises:
        LapwingError: for a loader without samples, or that ends after other samples than the fit had, if it had all.
    """
    device, whole = posterior.tangent.device, shown or posterior.samples
    start = taken = 0
    for batch in loader:
        inputs, targets = batches.split(batch)
        size, left = batches.size(inputs), limit - taken
        if size and left > 0 and taken * whole <= start * limit:
            if size > left:  # every so many of its samples
                rows = slice(0, left * (size // left), size // left)
                inputs, targets = batches.take(inputs, rows), targets[rows]
            taken += batches.size(inputs)
            yield batches.plain(inputs, device), batches.plain(targets, device)
        start += size
        if taken >= limit:
            return
    if not taken or (shown == posterior.samples and start != whole):
        raise other_size(start, "to the tuning", posterior.samples)


def crossing(points: Sequence[float], costs: Sequence[float], bound: float) -> float:
    """Returns the point from which on costs keep within a bound: geometric interpolation, linear where a cost is <= 0.

    Args:
        points: rising.
        costs: one a point; NaN counts as above the bound.
        bound: positive.

    Returns:
        The first point where no cost is above the bound, the last where the last one is.
    """
    above = [i for i, cost in enumerate(costs) if not cost <= bound]
    if not above:
        return points[0]
    at = above[-1]
    if at == len(points) - 1 or not math.isfinite(costs[at]):
        return points[min(at + 1, len(points) - 1)]
    high, low = costs[at], costs[at + 1]
    part = math.log(high / bound) / math.log(high / low) if low > 0 else (high - bound) / (high - low)
    return points[at] + (points[at + 1] - points[at]) * part


def _raised(posterior: Posterior, exponent: float) -> Posterior:
    """Returns the posterior at 10^exponent times its prior precision."""
    return posterior.at(posterior.prior.precision * 10**exponent, posterior.noise_variance)


def _at_noise(posterior: Posterior, noise_variance: float) -> Posterior:
    """Returns the posterior at a noise variance, with the evidence's δ there unless it was given."""
    likelihood = posterior.likelihood.with_noise_variance(noise_variance)
    return replace(Evidence().tune(replace(posterior, likelihood=likelihood, noise_given=True)), noise_given=False)


def _between(ends: Sequence[Posterior], place: float) -> Tensor:
    """Returns the prior precisions between those at the ends and the middle of a range, by a parabola in logarithms."""
    low, middle, high = (end.prior.precision.log() for end in ends)
    x = 2 * place - 1
    return (middle + x * (high - low) / 2 + x**2 * (low + high - 2 * middle) / 2).exp()
