"""Prior precision and noise of sampled LLA by EM, from the effective dimension of the draws."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..problem import Problem
from .system import LinearSystem

TOLERANCE = 0.01  # steps end if no hyper-parameter would change by more than this, relatively
MAX_LOG_STEP = 20.0  # maximum change of log δ in one step


@dataclass
class EvidenceSteps:
    """MacKay's fixed point for prior precision and noise, from the effective dimension γ (MacKay 1992).

        δ ← γ / ‖θ̂ - μ0‖²        σ² ← Σ r² / (n C - γ τ n/N)

    Both sides agree at the maximum of the Laplace evidence. If δ grows, `γ(δ)` falls more slowly: `d log γ / d log δ`
    lies in (-1, 0). So steps are damped, and a single open δ uses the slope of the previous steps.
    """

    precision: Tensor  # δ
    noise_variance: float | None  # σ², or None for likelihoods without noise
    squared_error: float | None  # `Σ r²/(n C)` at the outputs of the network, or None if σ² is not open
    count: float  # `n C N/(n τ)`, the effective number of observed values
    open_precision: bool  # whether δ is open
    per_block: bool  # whether each block has its own δ
    moving_mode: bool = False  # whether `‖θ̂ - μ0‖²` depends on δ too, which changes the range of the slope
    before: Tensor | None = None  # log δ before the latest step, and its target (2, n); None before the first step

    @classmethod
    def of(cls, problem: Problem, per_block: bool) -> EvidenceSteps:
        """Returns the initial values of prior and noise, and which of them are open."""
        noise = problem.noise_variance()
        values, summary = float(problem.tangent.width), problem.seen.summary
        if "count" in summary.statistics:  # weighted number of Gaussian targets
            values = float(summary.statistics["count"]) / summary.samples
        count = problem.scale_of_means().effective_samples * values
        return cls(
            problem.precision, noise, noise if problem.likelihood.needs_noise else None, count,
            not problem.prior.fixed, per_block,
        )  # fmt: skip

    def begin(self, system: LinearSystem, distance: Tensor) -> None:
        """Moves to the maximum of the evidence of the preconditioner, which needs no pass.

        Without a preconditioner, δ starts at its largest possible value, by `γ ≤ tr(sG)/δ`; the system is then easy to
        solve.
        """
        if system.curvature is None:
            if self.open_precision and float(distance.sum()) > 0:
                ratio = system.scale * system.trace() / distance.sum()
                self.precision = torch.full_like(self.precision, max(float(ratio), 1e-12) ** 0.5)
            return
        for _ in range(100):
            scale = system.problem.scale_at(self.noise_variance).of_curvature
            at = replace(system, precision=self.precision, scale=scale)
            effective = system.curvature.effective_dimension(at.mean_precision(), at.scale)
            if not self.step(effective, distance):
                return

    def step(self, effective: Tensor, distance: Tensor) -> bool:
        """Takes a step and returns True, or returns False if the step would be within `TOLERANCE`.

        The arguments by block (n_blocks,) are γ at the present δ and σ², and `‖θ̂ - μ0‖²`, weighted by features if the
        prior has some.
        """
        move = self._of_precision(effective, distance) if self.open_precision else torch.zeros_like(self.precision)
        noise = 0.0  # the change of log σ²
        if self.squared_error is not None:
            assert self.noise_variance is not None
            left = max(1 - float(effective.sum()) / self.count, 0.01)  # σ² = Σr²/(n C) / (1 - γ/count)
            noise = self._damping * math.log(self.squared_error / left / self.noise_variance)
        if max(float(move.abs().max()), abs(noise)) <= TOLERANCE:
            return False
        self.precision = self.precision * move.clamp(-MAX_LOG_STEP, MAX_LOG_STEP).exp()
        if self.noise_variance is not None:
            self.noise_variance *= math.exp(noise)
        return True

    @property
    def _damping(self) -> float:
        """Factor of a step: 1/2 if both are open (the slopes sum to (-2, 0)), else 2/3, which contracts by 1/3."""
        return 1 / 2 if self.open_precision and self.squared_error is not None else 2 / 3

    def _of_precision(self, effective: Tensor, distance: Tensor) -> Tensor:
        """Returns the change of log δ (n_blocks,)."""
        if not self.per_block:
            effective, distance = effective.sum()[None], distance.sum()[None]
        # 1. the target log γ/‖θ̂ - μ0‖² of the fixed point (n_blocks,), or (1,)
        known = distance > 0  # weights equal to the prior mean have no information on its width
        tiny = torch.finfo(torch.float64).tiny
        wanted = torch.where(known, effective.clamp_min(1e-9) / distance.clamp_min(tiny), 1.0).log()
        now = self.precision.log() if self.per_block else self.precision[:1].log()
        wanted = torch.where(known, wanted, now)
        # 2. damping: 1/(1 - a) with a = d target/d log δ by the latest two steps, as in Newton's method
        damping: Tensor | float = self._damping
        if self.before is not None and not self.per_block and self.squared_error is None:
            was, wanted_then = self.before
            slope = (wanted - wanted_then) / torch.where(now == was, 1.0, now - was)
            slope = slope.clamp(-1, 0.5 if self.moving_mode else 0)
            damping = torch.where(now == was, damping, 1 / (1 - slope))
        self.before = torch.stack([now, wanted])
        return (damping * (wanted - now)).expand_as(self.precision)
