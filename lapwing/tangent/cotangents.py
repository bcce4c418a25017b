"""Cotangents: combinations of the outputs, whose gradients a record holds. `Reading`: what its reader needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor


class FisherParts(NamedTuple):
    """Λ with this diagonal (B, C) and off-diagonal `-v vᵀ` for the vector v (B, C), or 0 if v is None."""

    diagonal: Tensor
    vector: Tensor | None

    def times(self, factors: Tensor) -> FisherParts:
        """Returns the parts of `F Λ F` for F = diag(factors), per sample (B, 1) or output (B, C)."""
        factors = factors.to(self.diagonal)
        return FisherParts(self.diagonal * factors.square(), None if self.vector is None else self.vector * factors)

    def root(self) -> Tensor:
        """Returns U (B, C, C) with `U Uᵀ = Λ = D - v vᵀ`: `√D (I - a w wᵀ)`, `w = v/√D`, `a wᵀw = 1 - √(1 - wᵀw)`."""
        if self.vector is None:
            return torch.diag_embed(self.diagonal.sqrt())
        sides = (self.diagonal + self.vector.square()).sqrt()
        w = torch.where(sides > 0, self.vector / sides, 0.0)
        size = w.square().sum(1, keepdim=True)
        part = (1 - (1 - size).clamp_min(0.0).sqrt()) / torch.where(size > 0, size, 1.0)
        return torch.diag_embed(sides) - self.vector[:, :, None] * (part * w)[:, None]


class Cotangents(ABC):
    """R combinations of the outputs of each sample: a record has their gradients `uᵀJ`, one backward pass for each."""

    columns: int | None  # R for a sample, in estimates of memory; None means the C outputs themselves
    by_position: ClassVar[bool] = False  # whether each position has the same ones, and a record of its own
    skips_uncounted: ClassVar[bool] = False  # whether positions whose target does not count have no record

    @abstractmethod
    def __call__(self, outputs: Tensor) -> Any:
        """Returns u (B, C, R) at the outputs (B, C), or `FisherParts`, or None for the C outputs themselves."""

    def take(self, rows: slice) -> Cotangents:
        """Returns the cotangents of some samples of a batch."""
        return self


class EveryOutput(Cotangents):
    """The C outputs themselves, of each sample or of each position."""

    columns = None
    by_position = True

    def __call__(self, outputs: Tensor) -> None:
        return None


EVERY_OUTPUT = EveryOutput()


class RandomCotangents(Cotangents):
    """R combinations `u = (s - mean(s))/√C` of C outputs: `E[uᵀ V u]` is the mean variance of `f - mean(f)`."""

    by_position = True

    def __init__(self, outputs: int, columns: int) -> None:
        self.columns: int = columns
        self._outputs, self._generator = outputs, torch.Generator().manual_seed(0)

    def __call__(self, outputs: Tensor) -> Tensor | None:
        """Returns u (B, C, R) with new random signs s, or None for outputs (B, T C): positions are asked for later."""
        if outputs.shape[1] != self._outputs:
            return None
        signs = torch.randn(len(outputs), self._outputs, self.columns, generator=self._generator).sign()
        return ((signs - signs.mean(1, keepdim=True)) / self._outputs**0.5).to(outputs)


class GivenCotangents(Cotangents):
    """Cotangents u (B, C, R) of the samples of one batch."""

    def __init__(self, u: Tensor) -> None:
        self.u = u
        self.columns: int = u.shape[-1]

    def __call__(self, outputs: Tensor) -> Tensor:
        return self.u

    def take(self, rows: slice) -> GivenCotangents:
        return GivenCotangents(self.u[rows])


class ComputedCotangents(Cotangents):
    """Cotangents by a function of the outputs, in estimates of memory one for each of the C outputs."""

    def __init__(self, function: Callable[[Tensor], Any], outputs: int) -> None:
        self._function, self.columns = function, outputs

    def __call__(self, outputs: Tensor) -> Any:
        return self._function(outputs)


@dataclass(frozen=True)
class Reading:
    """What the reader of records needs beyond their rows."""

    scratch_per_sample: int = 0  # number of entries of the records' dtype that the reader needs per sample
    recorded: Tensor | None = None  # mask (B, T) of the positions to record if positions are samples; None means all
    max_positions: int | None = None  # of each input, times `CHEAP_POSITIONS_FACTOR` if positions are samples
    chosen_from: Tensor | None = None  # mask (T,) of the positions to choose these from if positions are not samples
    variances_only: bool = False  # whether only variances of a layer that gives the outputs are read, no C² entries


READING = Reading()
