"""Tuning on validation data: the prior precision with the best held-out log likelihood."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .. import batches
from ..covariance import Latent
from ..errors import LapwingError
from ..posterior import Posterior
from .evidence import Evidence, Tuning

log = logging.getLogger("lapwing")


@dataclass(frozen=True)
class Validation(Tuning):
    """Chooses one scalar δ by the mean log likelihood of held-out data under linearised prediction and the default link.

    All candidates are scored from one record of a batch: a candidate costs a contraction, not a pass. A grid of decades
    first, then a finer one around the best. The noise variance, where it is None, is tuned by the evidence.

    Args:
        loader: held-out (inputs, targets) batches, not the training data.
        decades: the range of log10 δ.
        points: candidates a pass.

    Raises:
        LapwingError: for a range or number that makes no grid.

    Cost: two passes over the loader, each one record and `points` contractions a batch.
    """

    loader: Iterable[Any]
    decades: tuple[float, float] = (-3.0, 6.0)
    points: int = 10

    def __post_init__(self) -> None:
        """Checks the grid."""
        if not (self.decades[0] < self.decades[1] and isinstance(self.points, int) and self.points >= 3):
            raise LapwingError(
                f"Asked for Validation(decades={self.decades}, points={self.points}); a rising range and at least 3 points "
                "are needed: write decades=(-3, 6), points=10."
            )

    def tune(self, posterior: Posterior) -> Posterior:
        """Returns the posterior at the best δ."""
        by_evidence = Evidence().tune(posterior)
        if posterior.prior.given:
            return by_evidence
        noise = by_evidence.noise_variance
        low, high = self.decades
        grid = [low + (high - low) * i / (self.points - 1) for i in range(self.points)]
        best = self._best(posterior, grid, noise)
        if best in (grid[0], grid[-1]):
            log.warning(
                "Validation chose the edge of its range, prior precision 1e%g: widen it with decades=(%g, %g)",
                best, low - 3, high + 3,
            )  # fmt: skip
        step = grid[1] - grid[0]
        finer = [best + step * (2 * i / (self.points + 1) - 1) for i in range(self.points + 2)]
        best = self._best(posterior, [*finer, best], noise)
        return posterior.at(torch.full_like(posterior.prior.precision, 10**best), noise)

    def _best(self, posterior: Posterior, exponents: list[float], noise: float | None) -> float:
        scores = self.scores(posterior, [10**exponent for exponent in exponents], noise)
        return exponents[max(range(len(exponents)), key=lambda i: scores[i] if not math.isnan(scores[i]) else -math.inf)]

    def scores(self, posterior: Posterior, precisions: list[float], noise: float | None) -> list[float]:
        """Returns the mean held-out log likelihood of each candidate δ."""
        candidates = [posterior.at(torch.full_like(posterior.prior.precision, value), noise) for value in precisions]
        totals, count = [0.0] * len(candidates), 0
        with torch.no_grad():
            for batch in self.loader:
                inputs, targets = batches.split(batch)
                for part, record in posterior.tangent.records(inputs, dtype=posterior.covariance.record_dtype):
                    labels = targets[part]
                    posterior.likelihood.check(record.outputs, labels)
                    count += record.samples
                    for i, candidate in enumerate(candidates):
                        latent = Latent(record.outputs, candidate.covariance.output_covariance(record))
                        totals[i] += float(candidate.likelihood.predict(latent).log_prob(labels).double().sum())
        if not count:
            raise LapwingError(
                "Asked to tune on validation data, found no batch in the loader; held-out (inputs, targets) batches are "
                "needed, and a loader that can be gone through twice: write lw.Validation([(x_val, y_val)])."
            )
        return [total / count for total in totals]
