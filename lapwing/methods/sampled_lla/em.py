"""Prior precision and noise of sampled LLA by EM, from the effective dimension that the draws show."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..problem import Problem
from .system import LinearSystem

TOLERANCE = 0.01
"""Steps end where no hyper-parameter would move by more than this, relatively."""

MAX_LOG_STEP = 20.0
"""A step changes no logarithm by more."""


@dataclass
class EvidenceSteps:
    """MacKay's fixed point for prior precision and noise, from the effective dimension γ (MacKay 1992).

        δ ← γ / ‖θ̂ - μ0‖²        σ² ← Σ r² / (n C - γ τ n/N)

    Both sides agree where the Laplace evidence has its maximum. Between steps `γ(δ)` falls, and by less than δ grows:
    `d log γ / d log δ` lies in (-1, 0). So steps are damped, and for one δ alone guided by that slope.

    Attributes:
        precision: δ.
        noise_variance: σ², None where there is none.
        squared_error: `Σ r²/(n C)` at the network's outputs, None where σ² is not open.
        count: `n C N/(n τ)`, the number of observed values, as much as they count.
        open_precision: whether δ is open.
        per_block: whether each block has its own δ.
        moving_mode: whether `‖θ̂ - μ0‖²` follows δ too, which then may fall more slowly than δ grows.
        before: log δ before the latest step, and where it wanted to go (2, n); None before the first one.
    """

    precision: Tensor
    noise_variance: float | None
    squared_error: float | None
    count: float
    open_precision: bool
    per_block: bool
    moving_mode: bool = False
    before: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, per_block: bool) -> EvidenceSteps:
        """Returns what of the prior and the noise is open, where it begins."""
        noise = problem.noise_variance()
        values, summary = float(problem.tangent.width), problem.summary()
        if "count" in summary.statistics:  # of Gaussian targets, by their weights
            values = float(summary.statistics["count"]) / summary.samples
        count = problem.scale_of_means().effective_samples * values
        return cls(
            problem.precision, noise, noise if problem.likelihood.needs_noise else None, count,
            not problem.prior.fixed, per_block,
        )  # fmt: skip

    def begin(self, system: LinearSystem, distance: Tensor) -> None:
        """Takes steps to the maximum of the preconditioner's evidence, which needs no pass.

        Without one, δ begins where `γ ≤ tr(sG)/δ` ends: its largest possible value, and the system easy to solve.
        """
        if system.curvature is None:
            if self.open_precision and float(distance.sum()) > 0:
                ratio = system.scale * system.trace() / distance.sum()
                self.precision = torch.full_like(self.precision, max(float(ratio), 1e-12) ** 0.5)
            return
        for _ in range(100):
            scale = system.problem.scale_at(self.noise_variance).of_curvature
            at = replace(system, precision=self.precision, scale=scale)
            precision = at.mean_precision().clone().requires_grad_()
            with torch.enable_grad():
                ratio = system.curvature.log_det_ratio(precision, at.scale)
            effective = -precision.detach() * torch.autograd.grad(ratio, precision)[0]
            if not self.step(effective, distance):
                return

    def step(self, effective: Tensor, distance: Tensor) -> bool:
        """Takes a step unless it would move nothing; returns whether it did.

        Args:
            effective: γ by block (n_blocks,), at the present δ and σ².
            distance: `‖θ̂ - μ0‖²` by block (n_blocks,), weighted by features where there are some.
        """
        move = self._of_precision(effective, distance) if self.open_precision else torch.zeros_like(self.precision)
        noise = self._of_noise(effective) if self.squared_error is not None else 0.0
        if max(float(move.abs().max()), abs(noise)) <= TOLERANCE:
            return False
        self.precision = self.precision * move.clamp(-MAX_LOG_STEP, MAX_LOG_STEP).exp()
        if self.noise_variance is not None:
            self.noise_variance *= math.exp(noise)
        return True

    @property
    def _damping(self) -> float:
        """Both at once have slopes that sum to (-2, 0): half a step contracts by 1/2; one alone, 2/3 by 1/3."""
        return 1 / 2 if self.open_precision and self.squared_error is not None else 2 / 3

    def _of_noise(self, effective: Tensor) -> float:
        """Returns the change of log σ²."""
        assert self.noise_variance is not None
        assert self.squared_error is not None
        left = max(1 - float(effective.sum()) / self.count, 0.01)
        return self._damping * math.log(self.squared_error / left / self.noise_variance)

    def _of_precision(self, effective: Tensor, distance: Tensor) -> Tensor:
        """Returns the change of log δ (n_blocks,)."""
        if not self.per_block:
            effective, distance = effective.sum()[None], distance.sum()[None]
        known = distance > 0  # weights that are the prior's mean say nothing of its width
        tiny = torch.finfo(torch.float64).tiny
        wanted = torch.where(known, effective.clamp_min(1e-9) / distance.clamp_min(tiny), 1.0).log()
        now = self.precision.log() if self.per_block else self.precision[:1].log()
        wanted = torch.where(known, wanted, now)
        damping: Tensor | float = self._damping
        if self.before is not None and not self.per_block and self.squared_error is None:
            was, wanted_then = self.before
            slope = (wanted - wanted_then) / torch.where(now == was, 1.0, now - was)
            slope = slope.clamp(-1, 0.5 if self.moving_mode else 0)
            damping = torch.where(now == was, damping, 1 / (1 - slope))
        self.before = torch.stack([now, wanted])
        return (damping * (wanted - now)).expand_as(self.precision)
