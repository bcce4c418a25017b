"""VaLLA at fixed inducing points: the optimal A in closed form, or by mini-batch natural gradients, free of N."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ...covariance import Basis, LowRankWithResidual
from ...network import batches
from ...tangent import Anchors
from ..options import check_count, check_positive
from ..passes import Batch, IteratePass, Passes
from ..problem import Problem
from ..subspace import ProjectedCurvature, on_basis, span_of_anchors


class VallaFit(ABC):
    """A way to fit A, and what else is open: `ClosedForm`, `NaturalGradient`, ..."""

    @abstractmethod
    def passes(self, problem: Problem, anchors: Anchors) -> Passes:
        """Yields passes, from the rows of J at the inducing points; returns the covariance or a `FitResult`."""


@dataclass(frozen=True)
class ClosedForm(VallaFit):
    """`A = K_Z⁻¹ (Σ_n k_Zn Λ_n k_nZ) K_Z⁻¹`, the optimum at fixed Z, by one pass (Ortega et al. 2024, equation 39).

    For Gaussian noise this is the optimum of Titsias (equation 37), and with every output at every training point Full.

    Cost: one pass over the data, C backward passes per sample.

    Example:
        >>> import lapwing as lw
        >>> lw.VaLLA(50, fit=lw.ClosedForm())
        VaLLA(inducing_points=50, fit=ClosedForm(), initial='kmeans')
    """

    def passes(self, problem: Problem, anchors: Anchors) -> Passes:
        """Yields a pass for the curvature on the span of the rows."""
        basis = span_of_anchors(problem, anchors, len(anchors), "prior")
        return (yield from on_basis(problem, basis, "prior"))


@dataclass(frozen=True)
class NaturalGradient(VallaFit):
    """The same optimum at fixed Z by mini-batches, `H ← (1-ρ_t) H + ρ_t (N/B) Σ_batch φᵀΛφ`; the cost is free of N.

    Natural gradients of the bound (5) in the precision. By `ρ_t = B_t/(B_1 + ... + B_t)` H is that of the samples so
    far, scaled to N, and after one pass over the data, where it ends, `ClosedForm`'s. The loader should be shuffled.

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
            check_positive("NaturalGradient", "rate", self.rate, 0.05, limit=1.0)

    def passes(self, problem: Problem, anchors: Anchors) -> Passes:
        """Yields the steps on the span of the rows."""
        basis = span_of_anchors(problem, anchors, len(anchors), "prior")
        steps = NaturalSteps(problem, basis, self.steps, self.rate)
        return steps.finish((yield steps))


@dataclass
class NaturalState(ProjectedCurvature):
    """The curvature per sample.

    Attributes:
        samples: how many samples the steps have gone through.
        done: whether they have gone through all of them.
    """

    samples: int = 0
    done: bool = False


class NaturalSteps(IteratePass[NaturalState]):
    """`H ← (1-ρ) H + ρ 1/B Σ φᵀΛφ`, natural gradients of the bound in the precision, here per sample.

    Args:
        problem: for Λ.
        basis: W; `φ = J Wᵀ`.
        steps: how many.
        rate: ρ; None for `B_t/(B_1 + ... + B_t)`, the mean over the samples so far.
    """

    label = "natural gradients"

    def __init__(self, problem: Problem, basis: Basis, steps: int, rate: float | None) -> None:
        self.steps, self._problem, self._basis, self._rate = steps, problem, basis, rate

    def init(self) -> NaturalState:
        return NaturalState.zeros(self._problem, self._basis.rank)

    def converged(self, state: NaturalState) -> bool:
        """Whether the mean is that of all data."""
        return state.done

    @torch.no_grad()
    def step(self, state: NaturalState, batch: Batch, generator: torch.Generator) -> None:
        count = batches.size(batch.inputs)
        if self._rate is None and not batch.start and state.samples:  # the data begin again
            state.done = True
            return
        state.samples += count
        rate = count / state.samples if self._rate is None else self._rate
        state.H *= 1 - rate
        state.traces *= 1 - rate
        state.add(self._problem, self._basis, batch, rate / count)

    def finish(self, state: NaturalState) -> LowRankWithResidual:
        """Returns the covariance: the curvature per sample, times the n samples, which the posterior scales to N."""
        problem, samples = self._problem, self._problem.summary().samples
        return LowRankWithResidual(
            problem.tangent.blocks, self._basis, samples * state.H, samples * state.traces, problem.precision,
            problem.scale,
        )  # fmt: skip
