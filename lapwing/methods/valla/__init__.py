"""VaLLA: the linearised posterior as a sparse Gaussian process on the rows of J at inducing points.

This file has the method and its fits at fixed points: the optimal A in closed form, or by natural gradients on
mini-batches. `moving_points.py` and `alpha_divergence.py` move the points too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ...covariance import Basis
from ...data.inputs import Inputs
from ...likelihoods import Likelihood
from ...options import Options, at_least, instance_of, option, positive
from ...tangent import Anchors, Tangent
from ..footprint import FitShape, Footprint
from ..passes import Batch, IteratePass, Method, Passes, SamplesSeen
from ..problem import Problem
from ..state import State
from ..subspace import ProjectedCurvature, ProjectionPass, footprint_on_rows, on_basis, span_of_anchors
from .points import POOL, InducingPoints, Initial, anchors_of, inducing_points


class VallaFit(Options, ABC):
    """A way to fit A and other open values: `ClosedForm`, `NaturalGradient`, ..."""

    stops_early: ClassVar[bool] = False  # see `Method.allows_early_stopping`

    @abstractmethod
    def passes(self, problem: Problem, anchors: Anchors) -> Passes:
        """Yields passes for the rows of J at the inducing points; returns the covariance or a `FitResult`."""


@dataclass(frozen=True)
class ClosedForm(VallaFit):
    """`A = K_Z⁻¹ (Σ_n k_Zn Λ_n k_nZ) K_Z⁻¹`, the optimum at fixed Z, by one pass (Ortega et al. 2024, equation 39).

    For Gaussian noise this is the optimum of Titsias (equation 37). With every output at every training point it equals
    Full.

    Cost: one pass over the data, C backward passes per sample.
    """

    stops_early: ClassVar[bool] = True

    def passes(self, problem: Problem, anchors: Anchors) -> Passes:
        basis = span_of_anchors(problem, anchors, len(anchors), "prior")
        return (yield from on_basis(problem, basis, "prior"))


@dataclass(frozen=True)
class NaturalGradient(VallaFit):
    """The same optimum at fixed Z by mini-batches, `H ← (1-ρ_t) H + ρ_t (N/B) Σ_batch φᵀΛφ`, at a cost without N.

    The steps are natural gradients of the bound (5) in the precision. With `ρ_t = B_t/(B_1 + ... + B_t)`, H is the
    curvature of the samples so far, scaled to N. After one pass over the data the steps end, and H equals
    `ClosedForm`'s. The loader should be shuffled.

    Args:
        steps: maximum number of batches.
        rate: constant ρ instead of `ρ_t`. It forgets the first samples, and H starts at the prior.

    Cost: C backward passes for each sample of `steps` batches.
    """

    steps: int = option(100, at_least(1))
    rate: float | None = option(None, positive(limit=1.0), write="0.05")

    def passes(self, problem: Problem, anchors: Anchors) -> Passes:
        basis = span_of_anchors(problem, anchors, len(anchors), "prior")
        state = yield _NaturalSteps(problem, basis, self)
        samples = (yield SamplesSeen()).summary.samples  # the posterior scales the curvature of n samples to N
        return ProjectionPass(problem, basis, "prior").finish(state.mean.mapped(lambda mean: samples * mean))


@dataclass(frozen=True)
class VaLLA(Method):
    """Variational linearised Laplace, `Σ = (Δ + J_Zᵀ A J_Z)⁻¹` (Ortega et al. 2024, equation 6).

    J_Z are rows of J at M inducing points, which are pairs of an input and an output. The latent covariance is the
    sparse Gaussian process `κ(x,x') - κ_xZ (A⁻¹ + K_Z)⁻¹ κ_Zx'` with the NTK `κ = J Δ⁻¹ Jᵀ`. Its variance never exceeds
    the prior's, and it equals Full's if every output at every training point is an inducing point. The mean is the
    network's. Outputs may be dependent.

    Without held-out data, σ² and δ are tuned by a bound that penalises the information outside of M points, so too few
    points make intervals too wide. Then tune on held-out data, `tune=lw.Validation(loader)`, or move the points,
    `fit=lw.VariationalBound()`. With 824 samples of 8 features and M = 100 the test NLL was 1.23 nats by default, 0.90
    with moved points, and 0.13 with validation; Full had 0.28, and the network 1.11.

    Args:
        inducing_points: M, or your own `InducingPoints`.
        fit: the way to fit A and other open values.
        initial: initial position of M points: "kmeans" for centres of clusters of the first `max(2000, 20 M)` samples,
            class by class, or "data" for some of these samples. Discrete inputs are always samples.

    Cost: memory O(M P), or O(M²) if that exceeds the budget; the time of the fit, and O(M³).

    Example:
        >>> import torch, lapwing as lw
        >>> x = torch.linspace(-1, 1, 64)[:, None]
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1)).eval()
        >>> posterior = lw.fit(model, [(x, x.sin())], lw.VaLLA(inducing_points=10))
        >>> posterior.predict(x).std.shape
        torch.Size([64, 1])
    """

    inducing_points: int | InducingPoints = option(
        100, at_least(1).or_else(instance_of("lw.InducingPoints", InducingPoints))
    )
    fit: VallaFit = option(
        ClosedForm,
        instance_of("lw.ClosedForm(), lw.NaturalGradient(), lw.VariationalBound() or lw.AlphaDivergence()", VallaFit),
        write="lw.ClosedForm()",
    )
    initial: Initial = "kmeans"

    def check(self, tangent: Tangent, likelihood: Likelihood) -> None:
        if isinstance(self.inducing_points, InducingPoints):
            anchors_of(tangent, self.inducing_points)

    def allows_early_stopping(self) -> bool:
        return self.fit.stops_early

    def passes(self, problem: Problem) -> Passes:
        anchors = yield from inducing_points(problem, self.inducing_points, self.initial)
        return (yield from self.fit.passes(problem, anchors))

    def footprint(self, shape: FitShape) -> Footprint | None:
        """Returns the footprint of the points' rows and of the curvature on them, or None if the fit moves points."""
        points, width = self.inducing_points, shape.tangent.width
        if not isinstance(self.fit, (ClosedForm, NaturalGradient)):
            return None
        if isinstance(points, InducingPoints):
            count = Inputs.of(points.inputs).samples * (width if points.outputs is None else 1)
            return footprint_on_rows(shape, count, count, "prior")
        count, pool = min(points, shape.samples * width), min(shape.samples, max(POOL, 20 * points))
        on_rows = footprint_on_rows(shape, count, count, "prior")
        return replace(on_rows, peak=max(on_rows.peak, on_rows.kept + pool * shape.sample_bytes * 4))


@dataclass
class NaturalState(State):
    """The curvature per sample."""

    mean: ProjectedCurvature  # H and traces, each per sample
    samples: int = 0
    done: bool = False  # whether the steps have read all data


class _NaturalSteps(IteratePass[NaturalState]):
    """Steps `H ← (1-ρ) H + ρ 1/B Σ φᵀΛφ`, `φ = J Wᵀ` on a basis W; ρ as in `NaturalGradient`."""

    label = "natural gradients"

    def __init__(self, problem: Problem, basis: Basis, fit: NaturalGradient) -> None:
        self.steps, self._problem, self._basis, self._rate = fit.steps, problem, basis, fit.rate

    def init(self) -> NaturalState:
        return NaturalState(ProjectedCurvature.zeros(self._problem, self._basis.rank))

    def converged(self, state: NaturalState) -> bool:
        return state.done

    @torch.no_grad()
    def step(self, state: NaturalState, batch: Batch, generator: torch.Generator) -> None:
        problem, count = self._problem, batch.count
        if self._rate is None and batch.epoch:
            state.done = True
            return
        # with ρ_t = B_t/(B_1 + ... + B_t), H is the mean over all samples so far
        state.samples += count
        rate = count / state.samples if self._rate is None else self._rate
        more = ProjectedCurvature.zeros(problem, self._basis.rank)
        more.add(problem, self._basis, batch, rate / count)
        state.mean = state.mean.mapped(lambda mean: (1 - rate) * mean).added(more)
