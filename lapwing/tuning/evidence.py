"""What a tuning is, and the first of them: prior precision and noise variance by the evidence."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..covariance import has_prior, has_rank
from ..errors import LapwingError
from ..methods import FitShape, Method
from ..network.entry import outside_modes
from ..options import Options, number, option
from ..posterior import Posterior
from .search import ascend, best_of_grid, golden_section

log = logging.getLogger("lapwing")

LOWEST, HIGHEST = -8.0, 10.0
"""Decades that the prior precision is searched in; further down for a large noise variance, further up for a small."""

BEYOND = 5.0
"""Decades by which an ascent may leave that range and come back: at its end it would have no slope."""


@dataclass(frozen=True)
class Training:
    """What a tuning gets of a fit, beside the posterior.

    Attributes:
        loader: the training data.
        prefixes: posteriors of the first samples alone, by rising number, if the tuning asks for them; with
            `data_size`, the posterior of all samples too, not scaled.
        shown: how many samples the loader shows, or None if unknown. The posterior may be of fewer.
        chosen: whether the loader holds only the samples that the tuning reads: see `Tuning.training_samples`.
    """

    loader: Iterable[Any] = ()
    prefixes: tuple[Posterior, ...] = ()
    shown: int | None = None
    chosen: bool = False


class Tuning(Options, ABC):
    """How prior precision and noise variance are chosen where the user gave none.

    Attributes:
        prefixes: for how many first parts of the data (a half, a quarter, ...) the tuning needs posteriors.
    """

    prefixes: int = 0

    def reads_evidence(self, prior_open: bool, noise_open: bool) -> bool:
        """Whether the tuning reads the lower bound of the evidence, by what is open."""
        return prior_open or noise_open

    def check(self, method: Method, shape: FitShape) -> None:
        """Raises for a method that the tuning is not for: `lw.fit` and `lw.plan` call it before any pass.

        Raises:
            LapwingError: says what is wrong and what to do.
        """

    def training_samples(self, posterior: Posterior) -> int:
        """Returns the maximum number of training samples that tuning this posterior reads.

        In a fit over several processes, rank 0 tunes, and gets only these.
        """
        return 0

    @abstractmethod
    def tune(self, posterior: Posterior, training: Training) -> Posterior:
        """Returns the tuned posterior; numbers that the user gave are kept."""


@dataclass(frozen=True)
class Evidence(Tuning):
    """Maximises the Laplace evidence over δ and σ² (MacKay 1992; Immer et al. 2021, section 3).

    Subspace posteriors maximise its lower bound, which subtracts the curvature outside the subspace: without it the
    evidence would favour a δ for that subspace alone.

    Args:
        per_layer: one δ for each block instead of one for all.
        rank_gap: for subspaces, keep the fewest leading directions whose lower bound, each at its own best δ, is within
            this many nats of that of all of them; None keeps all.

    Raises:
        LapwingError: for a negative gap.

    Cost: no pass over the data; some hundred evaluations of a log determinant from eigenvalues, condensed to some
        thousand points where a block has more than 100 000.

    Example:
        >>> import lapwing as lw
        >>> lw.Evidence(per_layer=True)
        Evidence(per_layer=True, rank_gap=None)
    """

    per_layer: bool = False
    rank_gap: float | None = option(None, number(0), write="1.0")

    def reads_evidence(self, prior_open: bool, noise_open: bool) -> bool:
        """True: `log_marginal_likelihood(lower_bound=True)` may follow."""
        return True

    def check(self, method: Method, shape: FitShape) -> None:
        """Raises if a rank is to be chosen and the method has none."""
        footprint = None if self.rank_gap is None else method.footprint(shape)
        if footprint is not None and method.can_change_prior and footprint.rank is None:
            raise self._without_rank(repr(method))

    def _without_rank(self, method: str) -> LapwingError:
        return LapwingError(
            f"rank_gap={self.rank_gap} needs a subspace, and {method} has no rank. Leave rank_gap out, or fit "
            "lw.ELLA(rank=20)."
        )

    @outside_modes
    def tune(self, posterior: Posterior, training: Training = Training()) -> Posterior:
        """Returns the posterior at the maximum of the evidence."""
        best, covariance = self._tuned(posterior), posterior.covariance
        if self.rank_gap is None:
            return best
        if not has_rank(covariance):
            raise self._without_rank(str(posterior.method))
        enough = _value(best) - self.rank_gap
        low, high = 0, covariance.rank  # the bound grows with the rank: bisect
        while high - low > 1:
            middle = (low + high) // 2
            shorter = self._tuned(replace(posterior, covariance=covariance.with_rank(middle)))
            if _value(shorter) >= enough:
                high, best = middle, shorter
            else:
                low = middle
        return best

    def _tuned(self, posterior: Posterior) -> Posterior:
        if not has_prior(posterior.covariance):
            return posterior
        precision, noise = _maximum(posterior, self.per_layer)
        lowest, highest = _decades(noise)
        ends = [] if posterior.prior.fixed else [round(math.log10(delta), 3) for delta in precision.tolist()]
        if any(end <= lowest or end >= highest for end in ends):
            log.warning(
                "The evidence has no maximum inside the searched range, prior precision %.0e to %.0e: it ends at %.0e",
                10**lowest, 10**highest, 10 ** min(ends) if min(ends) <= lowest else 10 ** max(ends),
            )  # fmt: skip
        return posterior.at(precision, noise)


def _value(posterior: Posterior) -> float:
    """Returns the lower bound of the log evidence."""
    return float(posterior.log_evidence(posterior.prior.precision, posterior.noise_variance))


def _maximum(posterior: Posterior, per_layer: bool) -> tuple[Tensor, float | None]:
    """Returns δ (n_blocks,) and σ² where the log evidence is highest; what the user gave is kept.

    A grid over one δ for all blocks, at the σ² of the residuals, then an ascent in log δ and log σ², and from there one
    in every block's log δ. One δ is a factor of ones: its gradient takes no more than eigenvalues. Where it is all that
    is open, golden sections take its place: values alone cost less.
    """
    evidence, precision = posterior.log_evidence, posterior.prior.precision
    open_prior, open_noise = not posterior.prior.fixed, not posterior.noise_fixed
    noise = posterior.likelihood.residual_variance(posterior.statistics) if open_noise else posterior.noise_variance
    if not (open_prior or open_noise):
        return precision, noise
    ranges, starts = [], []
    low, high = _decades(noise)
    if open_prior:
        precision = torch.ones_like(precision)
        at = lambda log10: float(evidence(precision, noise, 10**log10))  # noqa: E731
        points = math.ceil(2 * (high - low)) + 1
        if open_noise:
            grid, best = best_of_grid(at, low, high, points)
            starts.append(grid[best])
        else:
            starts.append(golden_section(at, low, high, points))
        ranges.append((low - BEYOND, high + BEYOND))
    if open_noise:
        assert noise is not None  # an open σ² has a residual
        starts.append(math.log10(noise))
        ranges.append((starts[-1] - 1, starts[-1] + 6))  # the best σ² is not below the residual's (MacKay 1992)

    def value(point: Tensor) -> Tensor:
        """Returns the log evidence at log10 δ, for all blocks or for each, and log10 σ², where they are open."""
        deltas, variance = point[: len(point) - open_noise], 10 ** point[-1] if open_noise else noise
        if len(deltas) > 1:
            return evidence(10**deltas, variance)
        return evidence(precision, variance, 10 ** deltas[0] if open_prior else 1.0)

    point = torch.tensor(starts, dtype=torch.float64, device=precision.device)
    if open_noise:
        point = ascend(value, point, *zip(*ranges, strict=True))
    if open_prior:
        blocks = len(precision)
        if per_layer and blocks > 1:
            point = torch.cat([point[:1].expand(blocks), point[1:]])
            point = ascend(value, point, *zip(*[ranges[0]] * blocks, *ranges[1:], strict=True))
        deltas = point[: len(point) - open_noise].clamp(low, high)
        precision = 10**deltas * torch.ones_like(precision)
    return precision, float(10 ** point[-1]) if open_noise else noise


def _decades(noise: float | None) -> tuple[float, float]:
    """Returns the ends of the range that the prior precision is searched in: it scales as the inverse noise may."""
    shift = 0.0 if noise is None else math.log10(noise)
    return LOWEST - max(0.0, shift), HIGHEST + max(0.0, -shift)
