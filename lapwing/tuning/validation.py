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

    All candidates are scored from one contraction of each batch: a candidate costs a Gram matrix, not a pass. The best
    point of the grid is refined by a parabola through its neighbours. The noise variance, where it is None, is tuned by
    the evidence.

    Args:
        loader: held-out (inputs, targets) batches, not the training data.
        decades: the range of log10 δ.
        points: candidates.

    Raises:
        LapwingError: for a range or number that makes no grid.

    Cost: one pass over the loader: one record and contraction a batch, and `points` Gram matrices (C, C) an input.
    """

    loader: Iterable[Any]
    decades: tuple[float, float] = (-3.0, 6.0)
    points: int = 19

    def __post_init__(self) -> None:
        """Checks the grid."""
        if not (self.decades[0] < self.decades[1] and isinstance(self.points, int) and self.points >= 3):
            raise LapwingError(
                f"Asked for Validation(decades={self.decades}, points={self.points}); a rising range and at least 3 points "
                "are needed: write decades=(-3, 6), points=19."
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
            log.warning(
                "Validation chose the edge of its range, prior precision 1e%g: widen it with decades=(%g, %g)",
                grid[at], low - 3, high + 3,
            )  # fmt: skip
            return posterior.at(torch.full_like(posterior.prior.precision, 10 ** grid[at]), noise)
        left, middle, right = scores[at - 1 : at + 2]
        shift = 0.5 * (left - right) / min(left - 2 * middle + right, -1e-300)  # the parabola's top, in grid steps
        best = grid[at] + (grid[1] - grid[0]) * max(-0.5, min(0.5, shift))
        return posterior.at(torch.full_like(posterior.prior.precision, 10**best), noise)

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
                    found = posterior.covariance.output_covariances(record, [c.covariance for c in candidates])
                    for i, (candidate, terms) in enumerate(zip(candidates, found, strict=True)):
                        latent = Latent(record.outputs, terms)
                        totals[i] += float(candidate.likelihood.predict(latent).log_prob(labels).double().sum())
        if not count:
            raise LapwingError(
                "Asked to tune on validation data, found no batch in the loader; held-out (inputs, targets) batches are "
                "needed, and a loader that can be gone through twice: write lw.Validation([(x_val, y_val)])."
            )
        return [total / count for total in totals]
