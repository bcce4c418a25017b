"""VaLLA by the variational bound: inducing points by Adam, A by natural gradients, δ and σ² left to the tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...covariance import Covariance
from ...errors import LapwingError, shown
from ...linalg import cholesky
from ...tangent import Anchors
from ...tangent.inducing import kernel
from ..options import check_count, check_positive
from ..passes import Batch, FitResult, Passes
from ..problem import Problem
from .moving_points import MovingState, MovingSteps, divergence, initial_noise
from .natural_gradient import ClosedForm, NaturalGradient, VallaFit

FORGET = 0.05
"""The lowest weight of a step in the running mean that gives A: older steps had other inducing points."""

JITTER = 1e-8
"""Relative, on the diagonal of the NTK among moving points; the final covariance has none."""


@dataclass(frozen=True)
class VariationalBound(VallaFit):
    """Adam on the bound `Σ_n [log p(y_n|f_n) - 1/2 tr(Λ_n K*_n)] - KL` over Z, δ and σ²; A is kept at its optimum.

    `KL = 1/2 [δ‖θ̂-μ0‖² + logdet(I + LᵀK_Z L) - M + tr(I + LᵀK_Z L)⁻¹]` is equation 5 with the mean's part, without
    which δ would run to infinity (appendix D). A follows by natural gradients over recent mini-batches. This is the
    lower bound of the evidence, so moving Z makes it tight.

    Only the points are kept: `then` computes A once more at the end, and `tune` sets δ and σ² as for any method. By
    `tune=lw.Evidence()` these are the bound's own, on all data that `then` goes through; by
    `tune=lw.Validation(loader)` it is appendix D's other way, δ by held-out data. `history` has the negative bound and
    both numbers step by step.

    Args:
        steps: mini-batches.
        learning_rate: Adam's, for inducing inputs in units of their spread.
        then: `ClosedForm()` or `NaturalGradient(steps)`.

    Raises:
        LapwingError: for numbers out of range; where the bound diverges.

    Cost: a step takes C backward passes per sample and about six per inducing point, with O(M³); memory one chunk of
    each; and what `then` costs.

    Example:
        >>> import lapwing as lw
        >>> lw.VaLLA(20, fit=lw.VariationalBound(steps=300)).fit.then
        ClosedForm()
    """

    steps: int = 500
    learning_rate: float = 0.01
    then: VallaFit = field(default_factory=ClosedForm)

    def __post_init__(self) -> None:
        """Checks the numbers."""
        check_count("VariationalBound", "steps", self.steps)
        check_positive("VariationalBound", "learning_rate", self.learning_rate, 0.01)
        if not isinstance(self.then, (ClosedForm, NaturalGradient)):
            raise LapwingError(
                f"VariationalBound(then={shown(self.then)}) is not an option: then is lw.ClosedForm() or "
                "lw.NaturalGradient(steps=100). Write VariationalBound(then=lw.ClosedForm())."
            )

    def passes(self, problem: Problem, anchors: Anchors) -> Passes:
        """Yields a pass for the residuals if σ² is open, the steps, then the passes for A."""
        steps = _BoundSteps(problem, anchors, self.steps, self.learning_rate, (yield from initial_noise(problem)))
        if not steps.moves:
            return (yield from self.then.passes(problem, anchors))
        state = yield steps
        covariance = yield from self.then.passes(problem, steps.anchors_at(state.values))
        assert isinstance(covariance, Covariance)
        history = {"objective": state.objective, "precision": state.precision, "noise_variance": state.noise_variance}
        return FitResult(covariance, history={name: value for name, value in history.items() if value is not None})


@dataclass
class BoundState(MovingState):
    """Also the curvature on the points.

    Attributes:
        h: (M, M), the mean of `φᵀΛφ` over recent samples, for `φ = J J̃ᵀ C⁻ᵀ` with `K_Z = C Cᵀ` at unit prior.
        precision: δ step by step (steps,).
        noise_variance: σ² step by step (steps,), None where it is not open.
    """

    h: Tensor
    precision: Tensor
    noise_variance: Tensor | None


class _BoundSteps(MovingSteps[BoundState]):
    """Steps down the negative bound."""

    label, method = "variational bound", "VariationalBound"

    def start(self, state: MovingState) -> BoundState:
        h = self.problem.zeros(len(self.anchors), len(self.anchors), dtype=torch.float64)
        noise = self.history() if self._noise is not None else None
        return BoundState(**vars(state), h=h, precision=self.history(), noise_variance=noise)

    def objective(
        self, state: BoundState, values: Mapping[str, Tensor], batch: Batch, generator: torch.Generator
    ) -> Tensor:
        problem, likelihood = self.problem, self.problem.likelihood
        blocks = kernel(self.anchors_at(values), self.weights, batch.checked, problem.root)
        likelihood.check(blocks.outputs, batch.targets)
        batch.note(blocks.outputs)
        precision, noise = self.precision_at(values), self.noise_at(values)
        inner = self.check_finite(state, blocks.inner)
        eye = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
        root = cholesky(inner + JITTER * inner.detach().diagonal().mean() * eye)
        features = torch.linalg.solve_triangular(root, blocks.cross.flatten(0, 1).T, upper=False)  # (M, B R)
        count = len(blocks.outputs)
        recent = (features @ features.T).detach() / count
        h = state.h.clone() if state.taken else recent  # of earlier batches: no sample explains itself
        unit = likelihood.curvature_scale if noise is None else 1 / noise
        weight = self.data_size / problem.temperature
        factor = cholesky(self.check_finite(state, eye + h * (weight * unit / precision)))
        shrunk = torch.linalg.solve_triangular(factor, features, upper=False)
        spread = blocks.within.diagonal(dim1=-2, dim2=-1).sum() - features.square().sum() + shrunk.square().sum()
        outputs = blocks.outputs.double()
        if noise is None:
            logs = likelihood.log_prob(outputs, batch.targets).sum()
        else:
            still = outputs.new_zeros(1, 1, 1).expand(*outputs.shape, outputs.shape[1])
            logs = likelihood.log_power_mean(outputs, still, batch.targets, 0.0, noise).sum()
        state.h.lerp_(recent, max(1 / (state.taken + 1), FORGET, count / self.data_size))
        state.precision[state.taken] = precision.detach().cpu()
        if noise is not None and state.noise_variance is not None:
            state.noise_variance[state.taken] = noise.detach().cpu()
        bound = weight / count * (logs - unit * spread / precision / 2) - divergence(factor)
        return precision * self.distance / 2 - bound
