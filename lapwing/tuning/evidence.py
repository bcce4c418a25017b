"""Tuning by the evidence: prior precision (scalar or per layer) and noise variance, without validation data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..covariance import PriorCovariance, Subspace
from ..errors import LapwingError, shown
from ..posterior import Posterior
from .base import Training, Tuning

log = logging.getLogger("lapwing")

LOWEST, HIGHEST = -8.0, 10.0
"""Decades that the prior precision is searched in; further down for a large noise variance, further up for a small."""


@dataclass(frozen=True)
class Evidence(Tuning):
    """Maximises the Laplace evidence over δ and σ² (MacKay 1992; Immer et al. 2021, section 3).

    Subspace posteriors maximise its lower bound, which charges them for the curvature they do not see: their own
    evidence would tune δ wrongly.

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
    rank_gap: float | None = None

    def __post_init__(self) -> None:
        """Checks the gap."""
        if not isinstance(self.per_layer, bool):
            raise LapwingError(
                f"Asked for Evidence(per_layer={shown(self.per_layer)}); True or False is needed: write per_layer=True."
            )
        if self.rank_gap is not None and not (isinstance(self.rank_gap, (int, float)) and self.rank_gap >= 0):
            raise LapwingError(
                f"Asked for Evidence(rank_gap={shown(self.rank_gap)}); a number of nats from 0 up is needed: write "
                "rank_gap=1.0, or leave it out to keep every direction."
            )

    def reads_evidence(self, prior_open: bool, noise_open: bool) -> bool:
        """Asked for by name, always: `log_marginal_likelihood(lower_bound=True)` may follow."""
        return True

    def tune(self, posterior: Posterior, training: Training = Training()) -> Posterior:  # noqa: B008 (frozen)
        """Returns the posterior at the maximum of the evidence."""
        best, covariance = self._tuned(posterior), posterior.covariance
        if self.rank_gap is None:
            return best
        if not isinstance(covariance, Subspace):
            raise LapwingError(
                f"Asked for Evidence(rank_gap={self.rank_gap}), found {posterior.method} without a rank; a subspace "
                "method is needed: leave rank_gap out, or fit lw.ELLA(rank=20)."
            )
        enough = best.log_evidence(best.prior.precision, best.likelihood, lower_bound=True) - self.rank_gap
        low, high = 0, covariance.rank  # the bound grows with the rank: bisect
        while high - low > 1:
            middle = (low + high) // 2
            shorter = self._tuned(replace(posterior, covariance=covariance.with_rank(middle)))
            if shorter.log_evidence(shorter.prior.precision, shorter.likelihood, lower_bound=True) >= enough:
                high, best = middle, shorter
            else:
                low = middle
        return best

    def _tuned(self, posterior: Posterior) -> Posterior:
        if not isinstance(posterior.covariance, PriorCovariance):
            return posterior
        precision, noise = posterior.prior.precision, posterior.noise_variance
        if not posterior.noise_given:
            noise = posterior.likelihood.residual_variance(posterior.statistics)
        free_prior = not posterior.prior.given
        value = -math.inf
        for _ in range(100):  # coordinate ascent; one round where σ² is given
            if free_prior:
                precision = self._best_precision(posterior, noise)
            if posterior.noise_given:
                break
            assert noise is not None  # where it is open, its residual was taken
            noise = self._best_noise(posterior, precision, noise)
            new = self._value(posterior, precision, noise)
            if new - value < 1e-4 * (1 + abs(new)):  # the ascent below finishes
                break
            value = new
        by_layer = self.per_layer and len(precision) > 1
        if free_prior and (by_layer or not posterior.noise_given):  # coordinate ascent ends slowly
            precision, noise = self._ascend(posterior, precision, noise, by_layer)
        lowest, highest = _decades(noise)
        ends = [round(math.log10(delta), 3) for delta in (precision.tolist() if free_prior else [])]
        if any(end <= lowest or end >= highest for end in ends):
            log.warning(
                "The evidence has no maximum inside the searched range, prior precision %.0e to %.0e: it ends at %.0e",
                10**lowest, 10**highest, 10 ** min(ends) if min(ends) <= lowest else 10 ** max(ends),
            )  # fmt: skip
        return posterior.at(precision, noise)

    def _value(self, posterior: Posterior, precision: Tensor, noise: float | None) -> float:
        likelihood = posterior.likelihood.with_noise_variance(noise)
        return float(posterior.log_evidence(precision, likelihood, lower_bound=True))

    def _best_precision(self, posterior: Posterior, noise: float | None) -> Tensor:
        """Searches the whole range on a grid, then refines around the best point."""
        ones = torch.ones_like(posterior.prior.precision)
        lowest, highest = _decades(noise)
        points = math.ceil(2 * (highest - lowest)) + 1
        return ones * 10 ** maximise(
            lambda log10: self._value(posterior, ones * 10**log10, noise), lowest, highest, points
        )

    def _best_noise(self, posterior: Posterior, precision: Tensor, noise: float) -> float:
        start, low = math.log10(noise), math.log10(self._least_noise(posterior))
        value = lambda log10: self._value(posterior, precision, 10**log10)  # noqa: E731
        return 10 ** maximise(value, max(start - 1.5, low), start + 1.5, 13)

    @staticmethod
    def _least_noise(posterior: Posterior) -> float:
        """A tenth of the mean squared residual: the best σ² is never below it, `Σ r²/(NC - γ)` (MacKay 1992)."""
        residual = posterior.likelihood.residual_variance(posterior.statistics)
        assert residual is not None
        return residual / 10

    def _ascend(
        self, posterior: Posterior, precision: Tensor, noise: float | None, by_layer: bool
    ) -> tuple[Tensor, float | None]:
        """Ascends in log δ (one, or one a block) and log σ² together by L-BFGS.

        Slopes are central differences, but for the precisions of blocks, which autograd gives in one go.
        """
        low, high = (end * math.log(10) for end in _decades(noise))
        beyond = 10 * math.log(10)  # the ascent may leave the range and come back: at an end it would have no slope
        free_noise = not posterior.noise_given
        start = precision.log() if by_layer else precision[:1].log()
        least = 0.0
        if free_noise:
            least = self._least_noise(posterior)
            start = torch.cat([start, start.new_tensor([math.log(noise or 1.0)])])
        logs = start.clone().requires_grad_()
        optimiser = torch.optim.LBFGS([logs], max_iter=200, tolerance_change=1e-10, line_search_fn="strong_wolfe")

        def at(point: Tensor) -> tuple[Tensor, float | None]:
            deltas = (point[:-1] if free_noise else point).clamp(low - beyond, high + beyond)
            deltas = deltas.exp().expand(len(precision))
            if not free_noise:
                return deltas, noise
            least_log = math.log(least)  # a step may be too large, or to NaN
            return deltas, math.exp(min(least_log + math.log(1e7), max(least_log, float(point[-1].detach()))))

        def slope(i: int) -> float:
            step = torch.zeros_like(start)
            step[i] = 1e-4
            ends = [self._value(posterior, *at(logs.detach() + sign * step)) for sign in (1, -1)]
            return (ends[0] - ends[1]) / 2e-4

        def loss() -> Tensor:
            optimiser.zero_grad()
            deltas, variance = at(logs if by_layer else logs.detach())
            likelihood = posterior.likelihood.with_noise_variance(variance)
            value = -posterior.log_evidence(deltas, likelihood, lower_bound=True)
            if by_layer:
                value.backward()
            else:
                logs.grad = torch.zeros_like(start)
                logs.grad[0] = -slope(0)
            if free_noise and logs.grad is not None:
                logs.grad[-1] = -slope(-1)
            return value.detach()

        with torch.enable_grad():
            before = float(loss())
            optimiser.step(loss)
            after = float(loss())
        found, variance = at(logs.detach() if after <= before else start)
        return found.clamp(math.exp(low), math.exp(high)), variance


def _decades(noise: float | None) -> tuple[float, float]:
    """Returns the ends of the range that the prior precision is searched in: it scales as the inverse noise may."""
    shift = 0.0 if noise is None else math.log10(noise)
    return LOWEST - max(0.0, shift), HIGHEST + max(0.0, -shift)


def maximise(function: Callable[[float], float], low: float, high: float, points: int) -> float:
    """Maximises a function of one number: a grid, then golden sections around its best point to 1e-6.

    Args:
        function: of one float.
        low: left end.
        high: right end.
        points: of the grid.

    Returns:
        The best point; an end of the range if the function is best there.
    """
    grid = [low + (high - low) * i / (points - 1) for i in range(points)]
    values = [function(x) for x in grid]
    best = max(range(points), key=lambda i: values[i] if not math.isnan(values[i]) else -math.inf)
    if best in (0, points - 1):
        return grid[best]
    left, right = grid[best - 1], grid[best + 1]
    golden = (math.sqrt(5) - 1) / 2
    inner, outer = right - golden * (right - left), left + golden * (right - left)
    at_inner, at_outer = function(inner), function(outer)
    while right - left > 1e-6:
        if at_inner >= at_outer:
            right, outer, at_outer = outer, inner, at_inner
            inner = right - golden * (right - left)
            at_inner = function(inner)
        else:
            left, inner, at_inner = inner, outer, at_outer
            outer = left + golden * (right - left)
            at_outer = function(outer)
    return (left + right) / 2
