"""Tuning without held-out data: a classifier's spread by the bounded evidence, a regression's width by leaving out."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..covariance import has_prior
from ..data import batches
from ..data.loaders import other_size
from ..data.progress import tracked
from ..network.entry import outside_modes
from ..network.positions import Positions
from ..options import at_least, option, positive
from ..posterior import Posterior
from .evidence import Evidence, Training, Tuning
from .held_out import SOME_POSITIONS, mean_variances, spread_costs
from .leave_one_out import leave_one_out
from .search import evenly

log = logging.getLogger("lapwing")

LOWEST_NOISE = 1e-6
"""The noise variance is at least this part of the width of predictions."""

POINTS = 25
"""Noise variances that are looked at where the user gave the prior precision."""

WARN_FACTOR, WARN_SAMPLES = 10.0, 100
"""A width of more than so many mean squared residuals is warned of, if so many samples tell it."""

CERTAIN_NLL = 0.05
"""Below this NLL, in nats a training sample, training labels show little of how calibrated a classifier is."""


@dataclass(frozen=True)
class BoundedEvidence(Tuning):
    """Prior precision and noise variance without held-out data: by default, what `lw.fit` tunes with.

    Classification: `δ = max(δ_evidence, min{δ : mean_n [log p(y_n|f_n) - log p(y_n|N(f_n, J_n Σ_δ J_nᵀ))] <= nats})`.
    The evidence takes the loss for a quadratic. A classifier that is sure of its training labels lies where the loss is
    flat, beside a slope. Its curvature is small there, and the evidence (of Evidence, with one δ) spreads the weights
    too wide. The prior precision is raised until the spread costs the training data no more than `nats` a sample.

    Regression: `(δ, σ²) = (δ*/c, c σ*²)`, `c = s/(σ*² + mean_n J_n Σ* J_nᵀ)`. The linearised network is a Gaussian
    process, with the evidence highest at (δ*, σ*²). From its leave-one-out predictions comes s, the width of targets
    that it has not seen, and c scales the covariance of any method to that width (of `Full`, which tells seen inputs
    from others, its width at unseen ones). So networks that overfit or interpolate get their width too, the last layer
    alone included. Widths are never below the mean squared residual. All trained weights count (`requires_grad`: freeze
    those that other data trained) in networks of at most a million weights, few of them without a layer family. In
    larger ones the treated weights alone do. A prior precision that the user gave is kept, and a covariance that chose
    its own (`SampledLLA`, `MeanField`), and σ² makes the width; of a given noise variance the evidence chooses the
    prior precision. Where the outputs have positions, a regression is tuned by the evidence alone.

    Args:
        nats: what the spread may cost, in nats a training sample, with the default link.
        samples: how many training samples are used at most, four times as many for a regression, in whole batches
            spread evenly over the loader, which should not be sorted. Of outputs with positions they are positions,
            for a last layer sixteen times as many, of 8 inputs or more.
        decades: how far above the evidence's δ to search, in powers of ten.
        points: candidates in that range; between them the cost is interpolated.

    Raises:
        LapwingError: for numbers out of range, or a loader without samples.

    Cost: for classifiers the evidence's, and one pass through the loader for `samples` samples, which are recorded and
    contracted once: for the default probit link the squares of J are summed over classes, and `points` candidates
    cost next to nothing; other links take variances or Gram matrices of the outputs for each. Of more than 1 000
    classes that take a backward pass each, 16 random combinations stand for the mean variance of all. For regression:
    a kernel of at most 2 000 rows, of all trained weights, its eigenvalues, and predictions of the samples.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> wide = lw.fit(model, [(x, y)]).prior_precision
        >>> lw.fit(model, [(x, y)], tune=lw.BoundedEvidence()).prior_precision >= wide
        True
    """

    nats: float = option(0.005, positive())
    samples: int = option(500, at_least(1))
    decades: float = option(8.0, positive())
    points: int = option(17, at_least(3))

    @outside_modes
    def tune(self, posterior: Posterior, training: Training = Training()) -> Posterior:  # noqa: B008 (frozen)
        """Returns the posterior at the evidence's prior precision within the bound, or at the width of a regression."""
        residual = posterior.likelihood.residual_variance(posterior.statistics)
        if residual is not None and _has_open_width(posterior):
            return self._with_width(posterior, residual, training)
        if not has_prior(posterior.covariance):
            return posterior
        tuned = Evidence().tune(posterior)
        if posterior.prior.fixed or tuned.noise_variance is not None:
            return tuned
        nll = -float(tuned.likelihood.log_likelihood(tuned.statistics)) / tuned.samples
        if nll < CERTAIN_NLL:
            log.warning(
                "%s has memorised its training labels, whose NLL is %.2g a sample: they cannot show how calibrated it "
                "is. For calibrated probabilities hold data out, and write lw.fit(model, loader, validation=held_out).",
                type(tuned.tangent.model).__name__, nll,
            )  # fmt: skip
        exponents = evenly(0.0, self.decades, self.points)
        candidates = [_raised(tuned, exponent) for exponent in exponents]
        costs = self.costs(candidates, training)
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

    def training_samples(self, posterior: Posterior) -> int:
        """Returns the samples that the kernel of a regression has, or whose spread is bounded."""
        if _has_open_width(posterior):
            return 4 * self.samples
        return 0 if posterior.prior.fixed or posterior.likelihood.needs_noise else self._limit(posterior)

    def _limit(self, posterior: Posterior) -> int:
        """Returns the maximum number of samples whose spread is bounded."""
        positions = posterior.tangent.positions
        return self.samples if positions is None else self._inputs(positions)

    def _inputs(self, positions: Positions) -> int:
        """Returns how many inputs with positions are used."""
        count = 16 * self.samples // min(positions.count, 1024)
        if not positions.direct:  # each position takes backward passes of its own
            count = min(count, self.samples // min(positions.count, SOME_POSITIONS))
        return max(8, count)

    def _with_width(self, posterior: Posterior, residual: float, training: Training) -> Posterior:
        """Returns the posterior of a regression whose predictions of unseen targets have the width s."""
        parts = list(spread(training, 4 * self.samples, posterior))
        size = max(training.shown or 0, posterior.samples * posterior.data_factor)
        exact = leave_one_out(posterior, parts, size, residual)
        explained = (exact.training_variance / exact.noise_variance - 1) * exact.samples / size
        width = max(exact.width, (1 + explained) * residual)  # the network may fit worse than its linearised model
        keeps_prior = posterior.prior.fixed or not has_prior(posterior.covariance)
        precision = torch.full_like(posterior.prior.precision, exact.precision)
        noise = exact.noise_variance
        start = posterior.with_noise(noise) if keeps_prior else posterior.at(precision, noise)
        variance = mean_variances([start], parts)[0]
        factor = width / exact.unseen(noise + variance)
        if exact.drawn:
            noise = (posterior.noise_variance or 0.0) + max(width - exact.drawn, 0.0)
        elif not has_prior(posterior.covariance):
            noise = max(factor * (noise + variance) - variance, residual)
        elif posterior.prior.fixed:
            noise = _noise_of_width(posterior, parts, factor * (noise + variance))
        else:
            noise = max(factor * noise, LOWEST_NOISE * width)
        log.info(
            "Targets that are left out have a variance of %.3g by the exact linearised model of %d weights and %d "
            "samples, and the mean squared residual is %.3g: the noise variance of %s is %.3g",
            exact.width, exact.weights, exact.samples, residual, posterior.method, noise,
        )  # fmt: skip
        if width > WARN_FACTOR * residual and exact.samples >= WARN_SAMPLES:
            log.warning(
                "%s has memorised its training targets: the mean squared residual is %.3g, and predictions of unseen "
                "targets need a variance of %.3g, which they have now. Train for a shorter time or with more weight "
                "decay. If other data trained some of the layers, freeze these before the fit: "
                "parameter.requires_grad_(False).",
                type(posterior.tangent.model).__name__, residual, width,
            )  # fmt: skip
        return posterior.with_noise(noise) if keeps_prior else posterior.at(precision / factor, noise)

    def costs(self, candidates: Sequence[Posterior], training: Training) -> list[float]:
        """Returns the cost of each candidate's spread, in nats per training sample; negative if it helps.

        The candidates are posteriors of one fit.
        """
        first = candidates[0]
        totals, count = spread_costs(candidates, spread(training, self._limit(first), first))
        return (totals / max(count, torch.finfo(torch.float64).tiny)).tolist()


def trained_product(posterior: Posterior, training: Training) -> float | None:
    """Returns `λ = δσ²` of a regression by the evidence of the exact linearised model; None without a prior.

    It says how predictions of different inputs differ in width; `(δ/c, c σ²)` has the same λ for every c.
    """
    if not has_prior(posterior.covariance) or posterior.tangent.positions is not None:
        return None
    parts = list(spread(training, 4 * BoundedEvidence.samples, posterior))
    size = max(training.shown or 0, posterior.samples * posterior.data_factor)
    residual = posterior.likelihood.residual_variance(posterior.statistics) or 0.0
    exact = leave_one_out(posterior, parts, size, residual)
    return exact.precision * exact.noise_variance


def _has_open_width(posterior: Posterior) -> bool:
    """Whether the width of a regression without positions is open."""
    return not posterior.noise_fixed and posterior.tangent.positions is None


def spread(
    training: Training, limit: int, posterior: Posterior, before: Sequence[int] | None = None
) -> Iterator[batches.Weighted]:
    """Yields whole batches spread evenly over the training data of a posterior, up to a number of samples.

    Args:
        training: training data.
        limit: maximum number of samples.
        posterior: posterior whose device they are put on.
        before: of several processes, the sizes of the batches of the processes before this one. None in one process.

    Raises:
        LapwingError: for a loader without samples, or that ends after other samples than the fit had, if it had all.
    """
    device, shown = posterior.tangent.device, training.shown
    if training.chosen:
        yield from (batches.plain(part, device) for part in training.loader)
        return
    whole = shown or posterior.samples
    start = taken = 0

    def count(size: int) -> int:
        """Returns how many samples of the next batch are taken."""
        return min(size, limit - taken) if taken < limit and taken * whole <= start * limit else 0

    for size in before or ():
        taken, start = taken + count(size), start + size
    if taken >= limit:
        return
    for batch in tracked(training.loader, "training data for the tuning"):
        inputs, targets = batches.split(batch)
        weights = batches.weights_of(batch, device)
        size = batches.size(inputs)
        some = count(size)
        if some:
            if some < size:  # every so many of its samples
                rows = slice(0, some * (size // some), size // some)
                inputs, targets = batches.take(inputs, rows), targets[rows]
                weights = None if weights is None else weights[rows]
            taken += some
            yield batches.Weighted(batches.plain(inputs, device), batches.plain(targets, device), weights)
        start += size
        if taken >= limit:
            return
    if before is None and (not taken or (shown == posterior.samples and start != whole)):
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


def _noise_of_width(posterior: Posterior, parts: Sequence[batches.Weighted], width: float) -> float:
    """Returns the σ² with which predictions at these batches have a mean variance, at the posterior's prior."""
    logs = evenly(math.log(LOWEST_NOISE * width), math.log(width), POINTS)
    candidates = [posterior.with_noise(math.exp(x)) for x in logs]
    widths = [math.exp(x) + v for x, v in zip(logs, mean_variances(candidates, parts), strict=True)]
    return math.exp(-crossing([-x for x in reversed(logs)], widths[::-1], width))  # from the widest to the narrowest
