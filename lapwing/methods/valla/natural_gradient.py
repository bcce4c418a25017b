"""VaLLA at fixed inducing points: the optimal A in closed form, or by mini-batch natural gradients, free of N."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ...covariance import Basis, LowRankWithResidual
from ...errors import LapwingError, shown
from ...network import batches
from ...tangent import Anchors, Record
from ..passes import Batch, IteratePass, Passes, Problem, State, check_count
from ..subspace import on_basis, span_of_anchors


class VallaFit(ABC):
    """How A, and with it what else is open, is found: `ClosedForm`, `NaturalGradient`, ..."""

    @abstractmethod
    def passes(self, problem: Problem, anchors: Anchors) -> Passes:
        """Yields passes, given the rows of J at the inducing points; returns the covariance or what was found."""


@dataclass(frozen=True)
class ClosedForm(VallaFit):
    """`A = K_Z⁻¹ (Σ_n k_Zn Λ_n k_nZ) K_Z⁻¹`, the optimum at fixed Z, by one pass (Ortega et al. 2024, equation 39).

    For Gaussian noise this is the optimum of Titsias (equation 37), and with every output at every training point Full.

    Cost: one pass over the data, C backward passes a sample.

    Example:
        >>> import lapwing as lw
        >>> lw.VaLLA(50, fit=lw.ClosedForm())
        VaLLA(inducing_points=50, fit=ClosedForm(), initial='kmeans')
    """

    def passes(self, problem: Problem, anchors: Anchors) -> Passes:
        """The curvature on the span of the rows."""
        basis = span_of_anchors(problem, anchors, len(anchors), "prior")
        return (yield from on_basis(problem, basis, "prior"))


@dataclass(frozen=True)
class NaturalGradient(VallaFit):
    """The same optimum at fixed Z by mini-batches, `H ← (1-ρ_t) H + ρ_t (N/B) Σ_batch φᵀΛφ`; the cost is free of N.

    Natural gradients of the bound (5) in the precision. By `ρ_t = B_t/(B_1 + ... + B_t)` H is that of the samples seen,
    scaled to N, and after one pass over the data, where it ends, `ClosedForm`'s. The loader should be shuffled.

    Args:
        steps: batches at most.
        rate: a constant ρ in place of `ρ_t`, which forgets the first samples and begins at the prior.

    Raises:
        LapwingError: for numbers out of range.

    Cost: C backward passes for each sample of `steps` batches.

    Example:
        >>> import lapwing as lw
        >>> lw.VaLLA(50, fit=lw.NaturalGradient(steps=20))
        VaLLA(inducing_points=50, fit=NaturalGradient(steps=20, rate=None), initial='kmeans')
    """

    steps: int = 100
    rate: float | None = None

    def __post_init__(self) -> None:
        """Checks the numbers."""
        check_count("NaturalGradient", "steps", self.steps)
        if self.rate is not None:
            check_rate("NaturalGradient", "rate", self.rate, 1.0)

    def passes(self, problem: Problem, anchors: Anchors) -> Passes:
        """Steps on the span of the rows."""
        basis = span_of_anchors(problem, anchors, len(anchors), "prior")
        steps = NaturalSteps(problem, basis, self.steps, self.rate)
        return steps.finish((yield steps))


class NaturalSteps(IteratePass):
    """`h ← (1-ρ) h + ρ 1/B Σ φᵀΛφ`, natural gradients of the bound in the precision, here a sample.

    Args:
        problem: for Λ and what is wanted.
        basis: W; `φ = J Wᵀ`.
        steps: how many.
        rate: ρ; None for `B_t/(B_1 + ... + B_t)`, the mean of what was seen.
    """

    label = "natural gradients"

    def __init__(self, problem: Problem, basis: Basis, steps: int, rate: float | None) -> None:
        self.steps, self._problem, self._basis, self._rate = steps, problem, basis, rate

    def init(self) -> State:
        """Returns h, the trace of each block of G a sample, and how many samples were seen."""
        rank, zeros = self._basis.rank, self._problem.zeros
        blocks = len(self._problem.tangent.blocks)
        return {
            "h": zeros(rank, rank, dtype=torch.float64),
            "traces": zeros(blocks, dtype=torch.float64),
            "samples": zeros(dtype=torch.float64),
            "done": torch.zeros((), dtype=torch.bool),
        }

    def converged(self, state: State) -> bool:
        """Whether the mean is that of all data."""
        return bool(state["done"])

    @torch.no_grad()
    def step(self, state: State, batch: Batch, generator: torch.Generator) -> None:
        count, problem, basis = batches.size(batch.inputs), self._problem, self._basis
        if self._rate is None and not batch.start and state["samples"]:  # all over again
            state["done"] = torch.ones_like(state["done"])
            return
        state["samples"] += count
        rate = count / state["samples"] if self._rate is None else self._rate
        state["h"] *= 1 - rate
        state["traces"] *= 1 - rate
        for _, record in batch.records(problem.root, basis.dtype, problem.root.columns * basis.scratch_per_row):
            projected = basis.project(record).flatten(0, 1).double()  # (B R, K)
            state["h"] += rate / count * projected.T @ projected
            if problem.traces_wanted:
                state["traces"] += rate / count * squared_norms(record)

    def finish(self, state: State) -> LowRankWithResidual:
        """Returns the covariance: the curvature of a sample, times the n seen, which the posterior scales to N."""
        problem, seen = self._problem, self._problem.seen().samples
        return LowRankWithResidual(
            problem.tangent.blocks, self._basis, seen * state["h"], seen * state["traces"], problem.precision,
            problem.scale,
        )  # fmt: skip


def squared_norms(record: Record) -> Tensor:
    """Returns the trace of each block of G (n_blocks,) of a record's samples, float64."""
    return torch.stack([record[name].squared_norm() for name in record]).double()


def check_rate(method: str, name: str, value: Any, most: float) -> None:
    """Raises for a hyper-parameter that is no positive number up to `most` (case 15)."""
    real = isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)
    if not (real and 0 < float(value) <= most):
        raise LapwingError(
            f"Asked for {method}({name}={shown(value)}); a positive number of at most {most:g} is needed: write "
            f"{method}({name}=0.05)."
        )
