"""Tuning on validation data: the prior precision with the best held-out log likelihood."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from .. import batches
from ..covariance import Latent, MarginalLatent, PriorCovariance
from ..errors import LapwingError
from ..likelihoods.links import LatentLike
from ..posterior import Posterior
from ..tangent import Record
from .evidence import Evidence, Tuning

log = logging.getLogger("lapwing")


@dataclass(frozen=True)
class Validation(Tuning):
    """Chooses one scalar δ by the mean log likelihood of held-out data, linearised and with the default link.

    All candidates are scored from one contraction of each batch: a candidate costs next to nothing. The best
    point of the grid is refined by a parabola through its neighbours. The noise variance, where it is None, is tuned by
    the evidence.

    Args:
        loader: held-out (inputs, targets) batches, not the training data.
        decades: the range of log10 δ.
        points: candidates.

    Raises:
        LapwingError: for a range or number that makes no grid.

    Cost: one pass over the loader: one record and contraction a batch, and `points` variances (or Gram matrices, if
    the link reads covariances) an output.
    """

    loader: Iterable[Any]
    decades: tuple[float, float] = (-5.0, 7.0)
    points: int = 25

    def __post_init__(self) -> None:
        """Checks the grid."""
        if not hasattr(self.loader, "__iter__"):
            raise LapwingError(
                f"Asked for Validation({self.loader!r}); a loader of held-out (inputs, targets) batches is needed: "
                "write lw.Validation([(x_val, y_val)])."
            )
        rising = isinstance(self.decades, tuple) and len(self.decades) == 2 and self.decades[0] < self.decades[1]
        if not (rising and isinstance(self.points, int) and self.points >= 3):
            raise LapwingError(
                f"Asked for Validation(decades={self.decades}, points={self.points}); a rising range and at least 3 "
                "points are needed: write decades=(-5, 7), points=25."
            )

    def tune(self, posterior: Posterior) -> Posterior:
        """Returns the posterior at the best δ."""
        by_evidence = Evidence().tune(posterior)
        if posterior.prior.given:
            return by_evidence
        noise = by_evidence.noise_variance
        low, high = self.decades
        grid = [low + (high - low) * i / (self.points - 1) for i in range(self.points)]
        scores = self.scores(posterior, [10**exponent for exponent in grid], noise)
        at = max(range(self.points), key=lambda i: scores[i] if not math.isnan(scores[i]) else -math.inf)
        if at in (0, self.points - 1):
            meaning = "no spread in the weights at all" if at else "the widest spread it was offered"
            log.warning(
                "Validation of %s chose the edge of its range, prior precision 1e%g: the held-out data ask for %s; "
                "Validation(loader, decades=(%g, %g)) looks further.",
                posterior.method, grid[at], meaning, low - 3, high + 3,
            )  # fmt: skip
            return posterior.at(torch.full_like(posterior.prior.precision, 10 ** grid[at]), noise)
        left, middle, right = scores[at - 1 : at + 2]
        shift = 0.5 * (left - right) / min(left - 2 * middle + right, -1e-300)  # the parabola's top, in grid steps
        best = grid[at] + (grid[1] - grid[0]) * max(-0.5, min(0.5, shift))
        return posterior.at(torch.full_like(posterior.prior.precision, 10**best), noise)

    def scores(self, posterior: Posterior, precisions: list[float], noise: float | None) -> list[float]:
        """Returns the mean held-out log likelihood of each candidate δ."""
        candidates = [posterior.at(torch.full_like(posterior.prior.precision, value), noise) for value in precisions]
        covariance = posterior.covariance
        structures = [c.covariance for c in candidates if isinstance(c.covariance, PriorCovariance)]
        assert isinstance(covariance, PriorCovariance)  # and so are all candidates
        marginal = posterior.tangent.outputs == 1 or not posterior.likelihood.default_link.reads_covariance
        totals, count = [0.0] * len(candidates), 0
        with torch.no_grad():
            for batch in self.loader:
                inputs, targets = batches.split(batch)
                for part, record in posterior.tangent.records(inputs, dtype=posterior.covariance.record_dtype):
                    labels = targets[part]
                    posterior.likelihood.check(record.outputs, labels)
                    count += record.samples
                    for i, latent in enumerate(_latents(covariance, record, structures, marginal)):
                        prediction = candidates[i].likelihood.predict(cast(LatentLike, latent))
                        totals[i] += float(prediction.log_prob(labels).double().sum())
        if not count:
            raise LapwingError(
                "Asked to tune on validation data, found no batch in the loader; held-out (inputs, targets) batches "
                "are needed, and a loader that can be gone through twice: write lw.Validation([(x_val, y_val)])."
            )
        return [total / count for total in totals]


def _latents(
    covariance: PriorCovariance, record: Record, candidates: list[PriorCovariance], marginal: bool
) -> Sequence[Latent | MarginalLatent]:
    """Returns the latent of each candidate, with variances alone where that is all the link reads."""
    if marginal:
        return [MarginalLatent.of(record.outputs, terms) for terms in covariance.output_marginals(record, candidates)]
    return [Latent(record.outputs, terms) for terms in covariance.output_covariances(record, candidates)]
