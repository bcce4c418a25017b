"""`Evidence`: prior precision and noise variance by the evidence."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..covariance import has_prior, has_rank
from ..errors import LapwingError
from ..methods import FitShape, Method
from ..network.entry import outside_modes
from ..options import number, option
from ..posterior import Posterior
from ..posterior.evidence import LogEvidence
from ..posterior.tuned import Training, Tuning
from .search import ascend, best_of_grid, golden_section

log = logging.getLogger("lapwing")

LOWEST, HIGHEST = -8.0, 10.0  # searched decades of the prior precision, at a noise variance of 1
MUCH_NOISE = 5.0  # if σ² exceeds this number of mean squared residuals, the network was not trained at this prior
BEYOND = 5.0  # an ascent may leave that range by this many decades, for a slope at its ends; its result is clamped


@dataclass(frozen=True)
class Evidence(Tuning):
    """Maximises the Laplace evidence over δ and σ² (MacKay 1992; Immer et al. 2021, section 3).

    Subspace posteriors maximise its lower bound, which subtracts the curvature outside the subspace. Without this term
    the evidence would choose a δ that suits only the subspace.

    Args:
        per_layer: one δ for each block instead of one for all.
        rank_gap: for subspaces, keeps the fewest leading directions whose lower bound, at their own best δ, is at most
            this many nats below the bound of all directions; None keeps all.

    Raises:
        LapwingError: if the gap is negative.

    Cost: no pass over the data; a few hundred evaluations of a log determinant from eigenvalues. The eigenvalues of a
        block with more than 100 000 are condensed to a few thousand points.

    Example:
        >>> import lapwing as lw
        >>> lw.Evidence(per_layer=True)
        Evidence(per_layer=True, rank_gap=None)
    """

    tunes_updates: ClassVar[bool] = True
    per_layer: bool = False
    rank_gap: float | None = option(None, number(0), write="1.0")

    def check(self, method: Method, shape: FitShape) -> None:
        footprint = None if self.rank_gap is None else method.footprint(shape)
        if footprint is not None and method.can_change_prior and footprint.rank is None:
            raise no_rank_error("rank_gap", self.rank_gap, repr(method))

    @outside_modes
    def tune(self, posterior: Posterior, training: Training = Training()) -> Posterior:  # noqa: B008 (frozen)
        covariance = posterior.covariance
        best = at_maximum(posterior, self.per_layer) if has_prior(covariance) else posterior
        residual, noise = posterior.likelihood.residual_variance(posterior.statistics), best.noise_variance
        if not posterior.noise_fixed and residual and noise and noise > MUCH_NOISE * residual:
            log.warning(
                "The evidence of %s chooses the noise variance %.3g, %.0f times the mean squared residual: the network "
                "was not trained at its prior precision. Intervals may be far too wide. Leave out tune=, or pass "
                "validation=held_out.", posterior.method, noise, noise / residual,
            )  # fmt: skip
        if self.rank_gap is None:
            return best
        if not has_rank(covariance):
            raise no_rank_error("rank_gap", self.rank_gap, str(posterior.method))
        enough = _value(best) - self.rank_gap
        low, high = 0, covariance.rank  # the bound grows with the rank: bisect
        while high - low > 1:
            middle = (low + high) // 2
            shorter = at_maximum(replace(posterior, covariance=covariance.with_rank(middle)), self.per_layer)
            if _value(shorter) >= enough:
                high, best = middle, shorter
            else:
                low = middle
        return best


def at_maximum(posterior: Posterior, per_layer: bool = False) -> Posterior:
    """Returns the posterior at the `maximum` of its evidence; warns if δ ends at an end of the searched range."""
    precision, noise, (lowest, highest) = maximum(posterior, per_layer)
    ends = [] if posterior.prior.fixed else [round(math.log10(delta), 3) for delta in precision.tolist()]
    if any(end <= lowest or end >= highest for end in ends):
        log.warning(
            "The evidence of %s has no maximum inside the searched range, prior precision %.0e to %.0e: it ends at "
            "%.0e. Pass validation=held_out or prior_precision= to lw.fit.",
            posterior.method, 10**lowest, 10**highest, 10 ** min(ends) if min(ends) <= lowest else 10 ** max(ends),
        )  # fmt: skip
    return posterior.at(precision, noise)


def no_rank_error(option: str, value: Any, method: str) -> LapwingError:
    """Returns the error for an option of a tuning that only subspaces have."""
    return LapwingError(
        f"{option}={value} needs a subspace, and {method} has no rank. Leave {option} out, or fit lw.ELLA(rank=20)."
    )


def _value(posterior: Posterior) -> float:
    """Returns the lower bound of the log evidence."""
    return float(posterior.log_evidence(posterior.prior.precision, posterior.noise_variance))


def maximum(posterior: Posterior, per_layer: bool) -> tuple[Tensor, float | None, tuple[float, float]]:
    """Returns the δ (n_blocks,) and σ² of highest log evidence, and the ends of the searched log10 δ.

    Values that the user gave are kept. If only one δ is open, it is found by golden sections: values cost less than
    gradients. Otherwise a grid over one δ, at the σ² of the residuals, starts an ascent.
    """
    evidence, precision = posterior.log_evidence, posterior.prior.precision
    open_prior, open_noise = not posterior.prior.fixed, not posterior.noise_fixed
    noise = posterior.likelihood.residual_variance(posterior.statistics) if open_noise else posterior.noise_variance
    shift = math.log10(noise or 1.0)  # the best δ may scale with the inverse noise variance
    low, high = LOWEST - max(0.0, shift), HIGHEST + max(0.0, -shift)
    exponents = []  # log10 δ; empty if δ is given
    if open_prior:
        precision, points = torch.ones_like(precision), math.ceil(2 * (high - low)) + 1
        at = lambda log10: float(evidence(precision, noise, 10**log10))  # noqa: E731
        if open_noise:
            grid, best = best_of_grid(at, low, high, points)
            exponents.append(grid[best])
        else:
            exponents.append(golden_section(at, low, high, points))
    point = torch.tensor(exponents, dtype=torch.float64, device=precision.device)
    if open_noise or (per_layer and len(precision) > 1):
        around = low - BEYOND, high + BEYOND
        point, noise = _ascended(evidence, precision, point, noise, open_noise, per_layer, around)
    if open_prior:
        precision = 10 ** point.clamp(low, high) * precision
    return precision, noise, (low, high)


def _ascended(
    evidence: LogEvidence, precision: Tensor, exponents: Tensor, noise: float | None, open_noise: bool, per_layer: bool,
    around: tuple[float, float],
) -> tuple[Tensor, float | None]:  # fmt: skip
    """Returns the log10 δ (1,), or (n_blocks,) with `per_layer`, and the σ² of highest log evidence, from a start.

    Log10 δ stays within `around`. Without `exponents` δ is `precision`. The first ascent is in one log10 δ and
    log10 σ², and starts one in all δ.
    """
    point, ranges = exponents, [around] * len(exponents)

    def value(point: Tensor) -> Tensor:
        """Returns the log evidence at a point of log10 δ (one, or one per block) and log10 σ², if they are open."""
        deltas, variance = point[: len(point) - open_noise], 10 ** point[-1] if open_noise else noise
        if len(deltas) > 1:
            return evidence(10**deltas, variance)
        return evidence(precision, variance, 10 ** deltas[0] if len(deltas) else 1.0)

    if open_noise:
        assert noise is not None  # an open σ² has a residual
        start = math.log10(noise)
        ranges.append((start - 1, start + 6))  # the best σ² is not below the residual's (MacKay 1992)
        point = ascend(value, torch.cat([point, point.new_tensor([start])]), *zip(*ranges, strict=True))
    blocks = len(precision)
    if per_layer and len(exponents) and blocks > 1:
        point = torch.cat([point[:1].expand(blocks), point[1:]])
        point = ascend(value, point, *zip(*[ranges[0]] * blocks, *ranges[1:], strict=True))
    return (point[:-1], float(10 ** point[-1])) if open_noise else (point, noise)
