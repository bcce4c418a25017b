"""MacKay's fixed point for prior precision and noise, from the effective dimension γ, however it was computed.

    δ ← γ / ‖θ̂ - μ0‖²        σ² ← Σ r² / (n C - γ τ n/N)

Both sides agree where the Laplace evidence has its maximum (MacKay 1992). Between steps `γ(δ)` falls, and by less than
δ grows: `d log γ / d log δ` lies in (-1, 0). So steps are damped, and for one δ alone guided by that slope.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = 0.01
"""Steps end where no hyper-parameter would move by more than this, relatively."""

MAX_LOG_STEP = 20.0
"""A step changes no logarithm by more."""


@dataclass
class EvidenceSteps:
    """Prior precision δ (n_blocks,) and noise variance on their way to the evidence's maximum.

    Attributes:
        precision: δ.
        noise_variance: σ², None where there is none.
        squared_error: `Σ r²/(n C)` at the network's outputs, None where σ² is not open.
        count: `n C N/(n τ)`, the number of observed values, as much as they count.
        open_precision: whether δ is open.
        per_block: whether each block has its own δ.
        moving_mode: whether `‖θ̂ - μ0‖²` follows δ too, which then may fall more slowly than δ grows.
    """

    precision: Tensor
    noise_variance: float | None
    squared_error: float | None
    count: float
    open_precision: bool
    per_block: bool
    moving_mode: bool = False
    _before: tuple[Tensor, Tensor] | None = None

    def step(self, effective: Tensor, distance: Tensor) -> bool:
        """Takes a step unless it would move nothing; returns whether it did.

        Args:
            effective: γ by block (n_blocks,), at the present δ and σ².
            distance: `‖θ̂ - μ0‖²` by block (n_blocks,), weighted by features where there are some.
        """
        moves = []
        if self.open_precision:
            moves.append(self._of_precision(effective, distance))
        noise = 0.0
        if self.squared_error is not None:
            assert self.noise_variance is not None
            left = max(1 - float(effective.sum()) / self.count, 0.01)
            wanted = torch.tensor(self.squared_error / left, dtype=torch.float64)
            noise = self._damping * float(wanted.log() - torch.tensor(self.noise_variance).double().log())
            moves.append(torch.tensor([noise], dtype=torch.float64, device=effective.device))
        if not moves or torch.cat(moves).abs().max() <= TOLERANCE:
            return False
        if self.open_precision:
            self.precision = self.precision * moves[0].clamp(-MAX_LOG_STEP, MAX_LOG_STEP).exp()
        if self.noise_variance is not None:
            self.noise_variance *= float(torch.tensor(noise).exp())
        return True

    @property
    def _damping(self) -> float:
        """Both at once have slopes that sum to (-2, 0): half a step contracts by 1/2; one alone, 2/3 by 1/3."""
        return 1 / 2 if self.open_precision and self.squared_error is not None else 2 / 3

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
        if self._before is not None and not self.per_block and self.squared_error is None:
            was, wanted_then = self._before
            slope = (wanted - wanted_then) / torch.where(now == was, 1.0, now - was)
            slope = slope.clamp(-1, 0.5 if self.moving_mode else 0)
            damping = torch.where(now == was, damping, 1 / (1 - slope))
        self._before = now, wanted
        return (damping * (wanted - now)).expand_as(self.precision)
