"""VaLLA by the variational bound: inducing points by Adam, A by natural gradients, δ and σ² left to the tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from ...covariance import Covariance
from ...errors import LapwingError, shown
from ...linalg import cholesky
from ...tangent import Anchors
from ...tangent.inducing import kernel
from ..passes import Batch, Found, Passes, Problem, State, check_count
from .moving_points import MovingSteps, divergence, finished, initial_noise, note_outputs
from .natural_gradient import ClosedForm, NaturalGradient, VallaFit, check_rate

FORGET = 0.05
"""What a step counts in the mean that A is made of, at least: older samples were seen at other points."""

JITTER = 1e-8
"""Relative, for the NTK among points that move together; the final covariance has none."""


@dataclass(frozen=True)
class VariationalBound(VallaFit):
    """Adam on the bound `Σ_n [log p(y_n|f_n) - 1/2 tr(Λ_n K*_n)] - KL` over Z, δ and σ²; A is kept at its optimum.

    `KL = 1/2 [δ‖θ̂-μ0‖² + logdet(I + LᵀK_Z L) - M + tr(I + LᵀK_Z L)⁻¹]` is equation 5 with the mean's part, without
    which δ would run to infinity (appendix D). A follows by natural gradients over recent mini-batches. This is the
    lower bound of the evidence, so moving Z makes it tight.

    Only the points are kept: A is found once more at the end, by `then`, and `tune` sets δ and σ² as for any method. By
    `tune=lw.Evidence()` these are the bound's own, on all data that `then` saw; by `tune=lw.Validation(loader)` it is
    appendix D's other way, δ by held-out data. `history` holds the
    negative bound and both numbers step by step.

    Args:
        steps: mini-batches.
        learning_rate: Adam's, for inducing inputs in units of their spread.
        then: `ClosedForm()` or `NaturalGradient(steps)`.

    Raises:
        LapwingError: for numbers out of range; where the bound diverges.

    Cost: a step takes C backward passes a sample and about six an inducing point, with O(M³); memory one chunk of each;
    and what `then` costs.

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
        check_rate("VariationalBound", "learning_rate", self.learning_rate, inf)
        if not isinstance(self.then, (ClosedForm, NaturalGradient)):
            raise LapwingError(
                f"Asked for VariationalBound(then={shown(self.then)}); accepted are lw.ClosedForm() and "
                "lw.NaturalGradient(steps=100): write VariationalBound(then=lw.ClosedForm())."
            )

    def passes(self, problem: Problem, anchors: Anchors) -> Passes:
        """The residuals where σ² is open, the steps, then A at the points found."""
        steps = _BoundSteps(problem, anchors, self.steps, self.learning_rate, (yield from initial_noise(problem)))
        if not steps.moves:
            return (yield from self.then.passes(problem, anchors))
        state = yield steps
        found = yield from self.then.passes(problem, steps.anchors_at(finished(state)))
        assert isinstance(found, Covariance)
        names = ("objective", "precision", "noise_variance")
        return Found(found, history={name: state[name] for name in names if name in state})


class _BoundSteps(MovingSteps):
    """Also h (M, M), the mean of `φᵀΛφ` over recent samples, for `φ = J J̃ᵀ C⁻ᵀ` with `K_Z = C Cᵀ` at unit prior."""

    label, method = "variational bound", "VariationalBound"

    def start(self) -> State:
        count, room = len(self.anchors), torch.zeros(self.steps, dtype=torch.float64)
        device = self.problem.tangent.device
        state = {"h": torch.zeros(count, count, dtype=torch.float64, device=device), "precision": room}
        return {**state, "noise_variance": room.clone()} if self._noise is not None else state

    def objective(self, state: State, values: State, batch: Batch, generator: torch.Generator) -> Tensor:
        problem, likelihood, taken = self.problem, self.problem.likelihood, int(state["taken"])
        blocks = kernel(self.anchors_at(values), self.weights, batch.inputs, problem.root)
        note_outputs(problem, batch, blocks.outputs)
        precision, noise = self.precision_at(values), self.noise_at(values)
        inner = self.check_finite(state, blocks.inner)
        eye = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
        root = cholesky(inner + JITTER * inner.detach().diagonal().mean() * eye)
        features = torch.linalg.solve_triangular(root, blocks.cross.flatten(0, 1).T, upper=False)  # (M, B R)
        count = len(blocks.outputs)
        recent = (features @ features.T).detach() / count
        h = state["h"].clone() if taken else recent  # of earlier batches: no sample explains itself
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
        state["h"].lerp_(recent, max(1 / (taken + 1), FORGET, count / self.data_size))
        state["precision"][taken] = precision.detach().cpu()
        if noise is not None:
            state["noise_variance"][taken] = noise.detach().cpu()
        bound = weight / count * (logs - unit * spread / precision / 2) - divergence(factor)
        return precision * self.distance / 2 - bound
