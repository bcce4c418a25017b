"""The search that tunings on held-out data share: many candidates scored from one record of each batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from .. import batches
from ..covariance import Latent, MarginalLatent, PriorCovariance, Subspace
from ..errors import LapwingError
from ..likelihoods.links import LatentLike
from ..posterior import Posterior
from ..tangent import Record

log = logging.getLogger("lapwing")


@dataclass(frozen=True)
class Grid:
    """Candidates for one scalar δ.

    Attributes:
        decades: the range of log10 δ.
        points: how many.
    """

    decades: tuple[float, float]
    points: int

    def check(self, tuning: str) -> None:
        """Raises for a range or number that makes no grid."""
        rising = isinstance(self.decades, tuple) and len(self.decades) == 2 and self.decades[0] < self.decades[1]
        if not (rising and isinstance(self.points, int) and self.points >= 3):
            raise LapwingError(
                f"Asked for {tuning}(decades={self.decades}, points={self.points}); a rising range and at least 3 "
                "points are needed: write decades=(-5, 7), points=25."
            )

    @property
    def exponents(self) -> list[float]:
        """The values of log10 δ."""
        low, high = self.decades
        return [low + (high - low) * i / (self.points - 1) for i in range(self.points)]


def check_loader(tuning: str, loader: Any) -> None:
    """Raises for what is no loader of held-out batches."""
    if not hasattr(loader, "__iter__"):
        raise LapwingError(
            f"Asked for {tuning}({loader!r}); a loader of held-out (inputs, targets) batches is needed: write "
            f"lw.{tuning}([(x_val, y_val)])."
        )


def with_ranks(posterior: Posterior, ranks: Sequence[int]) -> list[Posterior]:
    """Returns the posterior on its first directions, for each rank below its own; itself last.

    Raises:
        LapwingError: for a posterior that has no rank, or ranks below 1.
    """
    if not ranks:
        return [posterior]
    covariance = posterior.covariance
    if not isinstance(covariance, Subspace) or any(not isinstance(rank, int) or rank < 1 for rank in ranks):
        raise LapwingError(
            f"Asked to choose among ranks={tuple(ranks)} for {posterior.method}; a subspace method and ranks of at "
            "least 1 are needed: leave ranks out, or fit lw.ELLA(rank=20)."
        )
    shorter = [rank for rank in sorted(set(ranks)) if rank < covariance.rank]
    return [*(replace(posterior, covariance=covariance.with_rank(rank)) for rank in shorter), posterior]


def best_of(posteriors: Sequence[Posterior], grid: Grid, loader: Iterable[Any]) -> Posterior:
    """Returns the posterior and the scalar δ with the best held-out log likelihood.

    The best point of the grid is refined by a parabola through its neighbours. Where δ is given, it is kept.
    """
    given = posteriors[0].prior.given
    exponents = [0.0] if given else grid.exponents
    scores = held_out_scores(posteriors, None if given else [10**exponent for exponent in exponents], loader)
    flat = [value if not math.isnan(value) else -math.inf for row in scores for value in row]
    which, at = divmod(max(range(len(flat)), key=flat.__getitem__), len(exponents))
    best = posteriors[which]
    if given:
        return best
    if at in (0, len(exponents) - 1):
        meaning = "no spread in the weights at all" if at else "the widest spread it was offered"
        low, high = grid.decades
        log.warning(
            "Validation of %s chose the edge of its range, prior precision 1e%g: the held-out data ask for %s; "
            "decades=(%g, %g) looks further.",
            best.method, exponents[at], meaning, low - 3, high + 3,
        )  # fmt: skip
        return _at(best, 10 ** exponents[at])
    left, middle, right = scores[which][at - 1 : at + 2]
    shift = 0.5 * (left - right) / min(left - 2 * middle + right, -1e-300)  # the parabola's top, in grid steps
    return _at(best, 10 ** (exponents[at] + (exponents[1] - exponents[0]) * max(-0.5, min(0.5, shift))))


def held_out_scores(
    posteriors: Sequence[Posterior], precisions: Sequence[float] | None, loader: Iterable[Any]
) -> list[list[float]]:
    """Returns the mean held-out log likelihood, linearised and with the default link, a row a posterior.

    Args:
        posteriors: of one fit.
        precisions: candidates for a scalar δ, a column each; None keeps each posterior's own.
        loader: held-out batches.

    Raises:
        LapwingError: for an empty loader.
    """
    first = posteriors[0]
    marginal = first.tangent.outputs == 1 or not first.likelihood.default_link.reads_covariance
    groups: dict[int, list[int]] = {}
    for i, posterior in enumerate(posteriors):
        assert isinstance(posterior.covariance, PriorCovariance)
        groups.setdefault(id(posterior.covariance.features), []).append(i)
    totals, count = [[0.0] * len(precisions or [0]) for _ in posteriors], 0
    with torch.no_grad():
        for batch in loader:
            inputs, targets = batches.split(batch)
            for part, record in first.tangent.records(inputs, dtype=first.covariance.record_dtype):
                labels = targets[part]
                first.likelihood.check(record.outputs, labels)
                count += record.samples
                for members in groups.values():
                    candidates = [
                        (i, j, posteriors[i] if precisions is None else _at(posteriors[i], precisions[j]))
                        for i in members
                        for j in range(len(totals[i]))
                    ]
                    latents = _latents(record, [candidate for _, _, candidate in candidates], marginal)
                    for (i, j, candidate), latent in zip(candidates, latents, strict=True):
                        prediction = candidate.likelihood.predict(cast(LatentLike, latent))
                        totals[i][j] += float(prediction.log_prob(labels).double().sum())
    if not count:
        raise LapwingError(
            "Asked to tune on validation data, found no batch in the loader; held-out (inputs, targets) batches "
            "are needed, and a loader that can be gone through twice: write lw.Validation([(x_val, y_val)])."
        )
    return [[value / count for value in row] for row in totals]


def _at(posterior: Posterior, precision: float) -> Posterior:
    return posterior.at(torch.full_like(posterior.prior.precision, precision), posterior.noise_variance)


def _latents(record: Record, candidates: Sequence[Posterior], marginal: bool) -> Sequence[Latent | MarginalLatent]:
    """Returns the latent of each candidate, with variances alone where that is all the link reads."""
    structures = [c.covariance for c in candidates if isinstance(c.covariance, PriorCovariance)]
    if marginal:
        found = structures[0].output_marginals(record, structures)
        return [MarginalLatent.of(record.outputs, terms) for terms in found]
    return [Latent(record.outputs, terms) for terms in structures[0].output_covariances(record, structures)]
