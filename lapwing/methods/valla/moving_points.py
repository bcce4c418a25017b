"""VaLLA with moving inducing points: the steps of its fits, and the fit by the variational bound."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, cast

import torch
from torch import Tensor

from ...covariance import Covariance
from ...data import nesting
from ...errors import LapwingError
from ...likelihoods import curvature_weights
from ...linalg import cholesky, doubled
from ...options import at_least, instance_of, option, positive
from ...tangent import Anchors, Cotangents
from ...tangent.cotangents import EVERY_OUTPUT
from ..passes import Batch, FitResult, IteratePass, LikelihoodPass, Passes, Step, with_size
from ..problem import FisherRoot, Problem
from ..state import Descent, Values
from . import ClosedForm, NaturalGradient, VallaFit
from .inducing import DrawnOnce, ObjectiveRows, kernel, rows_at_positions
from .points import POOL, movable

EXPLODED = 1e3  # increase of the objective over its first value, in units of its scale, above which it has diverged
FORGET = 0.05  # minimum weight of a step in the running mean that gives A: older steps had other inducing points
JITTER = 1e-8  # relative jitter on the diagonal of the NTK of moving points; the final covariance has none


@dataclass(frozen=True)
class VariationalBound(VallaFit):
    """Adam on the bound `Σ_n [log p(y_n|f_n) - 1/2 tr(Λ_n K*_n)] - KL` over Z, δ and σ²; A is kept at its optimum.

    `KL = 1/2 [δ‖θ̂-μ0‖² + logdet(I + LᵀK_Z L) - M + tr(I + LᵀK_Z L)⁻¹]` is equation 5 with the part of the mean. Without
    this part δ would diverge to infinity (appendix D). A follows by natural gradients over recent mini-batches. The
    bound is a lower bound of the evidence, and moving Z makes it tight.

    Only the points are kept: `then` computes A again at the end, and `tune` sets δ and σ² as for any method.
    `tune=lw.Evidence()` maximises the same bound, on all data that `then` reads. `tune=lw.Validation(loader)` is the
    second way of appendix D, δ by held-out data. `history` has the negative bound, δ and σ² for each step.

    Args:
        steps: number of mini-batches.
        learning_rate: Adam's learning rate, for inducing inputs in units of their spread.
        then: `ClosedForm()` or `NaturalGradient(steps)`.

    Raises:
        LapwingError: if an option is invalid, or if the bound diverges.

    Cost: a step needs C backward passes per sample and about six per inducing point, and O(M³); memory one chunk of
    each. The cost of `then` comes on top.
    """

    steps: int = option(500, at_least(1))
    learning_rate: float = option(0.01, positive())
    then: VallaFit = option(
        ClosedForm,
        instance_of("lw.ClosedForm() or lw.NaturalGradient()", ClosedForm, NaturalGradient),
        write="lw.ClosedForm()",
    )

    def passes(self, problem: Problem, anchors: Anchors) -> Passes:
        problem = yield from with_size(problem)
        steps = BoundSteps(problem, anchors, self.steps, self.learning_rate, (yield from initial_noise(problem)))
        if not steps.init().values:  # nothing is open
            return (yield from self.then.passes(problem, anchors))
        state = yield steps
        covariance = yield from self.then.passes(problem, steps.anchors_at(state.values))
        return FitResult(cast("Covariance", covariance), history=state.history)


class MovingSteps(IteratePass[Descent]):
    """Adam on the inducing inputs, in units of their spread, and on log δ and log σ² if they are open.

    The steps begin at the anchors and at `noise_variance`, which is None if σ² is given. Discrete inputs stay.
    """

    method: str  # name of the fit, for messages

    def __init__(
        self, problem: Problem, anchors: Anchors, steps: int, rate: float, noise_variance: float | None
    ) -> None:
        self.problem, self.anchors, self.steps, self.rate = problem, anchors, steps, rate
        self._noise = noise_variance
        self._leaves = [nesting.flatten(group)[0] for group in anchors.inputs] if movable(anchors) else []
        points = [[leaf.to(problem.tangent.dtype) for leaf in leaves] for leaves in self._leaves]
        self._widths = [  # the standard deviation of each coordinate over samples, or 1 for a single sample
            [x.std(0, correction=0) if len(x) > 1 else torch.ones_like(x[0]) for x in group] for group in points
        ]
        ratios = problem.precision / problem.precision[0]
        self.weights = {b.name: 1 / r for b, r in zip(problem.tangent.blocks, ratios.tolist(), strict=True)}
        distances = [doubled(m - problem.prior.mean[n]).square().sum() for n, m in problem.tangent.mean().items()]
        self.distance = (ratios * torch.stack(distances)).sum()
        self.scale = problem.scale_of_means()

    def init(self) -> Descent:
        problem = self.problem
        values = {
            f"input/{i}/{j}": leaf.detach().to(problem.tangent.dtype, copy=True)
            for i, leaves in enumerate(self._leaves) for j, leaf in enumerate(leaves)
        }  # fmt: skip
        if not problem.prior.fixed:
            size = problem.tangent.size  # δ from the spread of the weights, whatever their scale
            start = size / self.distance if self.distance > 0 else problem.precision[0]
            values["log_precision"] = start.log()
        if self._noise is not None:
            values["log_noise"] = problem.precision.new_tensor(self._noise).log()
        return Descent(values)

    @abstractmethod
    def objective(self, state: Descent, values: Values, batch: Batch, generator: torch.Generator) -> Tensor:
        """Returns the objective to minimise at the open values; may add to the state."""

    def rate_at(self, taken: int) -> float:
        """Returns the learning rate after a number of steps; it falls to 0 over all steps."""
        return self.rate * (1 - taken / self.steps)

    def step(self, state: Descent, batch: Batch, generator: torch.Generator) -> None:
        with torch.enable_grad():
            values = {name: value.detach().clone().requires_grad_() for name, value in state.values.items()}
            objective = self.objective(state, values, batch, generator)
            leaves = list(values.values())
            gradients = torch.autograd.grad(objective, leaves, allow_unused=True) if objective.requires_grad else ()
        parts = {name: part for name, part in zip(values, gradients, strict=False) if part is not None}
        objective = objective.detach()
        self._check(state, float(objective), list(parts.values()))
        state.note(objective=objective)
        for name, gradient in parts.items():
            state.move(name, gradient, self.rate_at(state.taken), self.width(name), eps=1e-12)
        state.taken += 1

    def rows(
        self, anchors: Anchors, batch: Batch, generator: torch.Generator, root: Cotangents = EVERY_OUTPUT
    ) -> ObjectiveRows:
        """Returns the blocks of the NTK at a batch; outputs without positions are multiplied by `root`."""
        likelihood = self.problem.likelihood
        if batch.tangent.positions.several:
            return rows_at_positions(anchors, self.weights, batch, likelihood, generator).doubled()
        blocks = kernel(anchors, self.weights, batch.inputs, root)
        likelihood.check(blocks.outputs, batch.targets)
        batch.note(blocks.outputs)
        return ObjectiveRows(blocks, batch.targets, batch.weights).doubled()

    def width(self, name: str) -> Tensor | float:
        """Returns the unit of a step; for inputs the spread of each coordinate over the initial points."""
        kind, *place = name.split("/")
        return self._widths[int(place[0])][int(place[1])] if kind == "input" else 1.0

    def anchors_at(self, values: Values) -> Anchors:
        """Returns the anchors at inducing inputs, in the dtype of the network's inputs."""
        groups = list(self.anchors.inputs)
        for i, leaves in enumerate(self._leaves):
            moved = (values[f"input/{i}/{j}"].to(leaf.dtype) for j, leaf in enumerate(leaves))
            groups[i] = nesting.unflatten(moved, self.anchors.nests()[i])
        return replace(self.anchors, inputs=tuple(groups))

    def precision_at(self, values: Values) -> Tensor:
        """Returns δ of the first block, a scalar; the ratios to the other blocks are fixed."""
        return values["log_precision"].exp() if "log_precision" in values else self.problem.precision[0]

    def noise_at(self, values: Values) -> Tensor | None:
        """Returns σ² if it is open, else None; at least 1e-150, so that its square is above 0 in float64."""
        return values["log_noise"].clamp_min(-345.0).exp() if "log_noise" in values else None

    def check_finite(self, state: Descent, tensor: Tensor) -> Tensor:
        if not torch.isfinite(tensor).all():
            raise self._diverged(state, float("nan"))
        return tensor

    def _check(self, state: Descent, value: float, gradients: list[Tensor]) -> None:
        first = float(state.history["objective"][0]) if state.taken else value
        too_far = value > first + EXPLODED * max(abs(first), self.scale.effective_samples)
        if not isfinite(value) or too_far or not all(torch.isfinite(gradient).all() for gradient in gradients):
            raise self._diverged(state, value)

    def _diverged(self, state: Descent, value: float) -> LapwingError:
        after = f" after {float(state.history['objective'][0]):.3g} at the first" if state.taken else ""
        return LapwingError(
            f"The objective of {self.method}(learning_rate={self.rate:g}) diverged: {value:.3g} at step "
            f"{state.taken + 1}{after}. Take smaller steps: write {self.method}(learning_rate={self.rate / 10:g})."
        )


class BoundSteps(MovingSteps):
    """Steps of Adam on the negative bound.

    They keep `h` (M, M), the mean of `φᵀΛφ` over recent samples, for `φ = J J̃ᵀ C⁻ᵀ` with `K_Z = C Cᵀ` at unit prior.
    """

    label, method = "variational bound", "VariationalBound"

    def objective(self, state: Descent, values: Values, batch: Batch, generator: torch.Generator) -> Tensor:
        likelihood = self.problem.likelihood
        rows = self._root_rows(values, batch, generator)
        blocks, targets = rows.blocks, rows.targets
        precision, noise = self.precision_at(values), self.noise_at(values)
        # 1. K_Z = C Cᵀ and φᵀR = C⁻¹ K_Zx R (M, B R), at δ = 1
        inner = self.check_finite(state, blocks.inner)
        eye = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
        root = cholesky(inner + JITTER * inner.detach().diagonal().mean() * eye)
        features = torch.linalg.solve_triangular(root, blocks.cross.flatten(0, 1).T, upper=False)  # (M, B R)
        # 2. h (M, M): φᵀΛφ per sample, a mean over earlier batches
        count = batch.count
        recent = (features @ features.T).detach() / count
        h = state.kept.get("h", recent)  # from earlier batches, so that no sample explains itself
        # 3. F Fᵀ = I + N h/(σ² τ δ) (M, M), which has the log determinant of I + LᵀK_Z L at the optimal A
        scale = replace(self.scale, noise_variance=likelihood.noise_variance if noise is None else noise)
        factor = cholesky(self.check_finite(state, eye + h * (scale.of_curvature / precision)))
        shrunk = torch.linalg.solve_triangular(factor, features, upper=False)
        # 4. δ Σ tr(Λ K*) = Σ tr Rᵀ(K_x - φφᵀ + φ (F Fᵀ)⁻¹ φᵀ)R over the batch
        spread = blocks.within.diagonal(dim1=-2, dim2=-1).sum() - features.square().sum() + shrunk.square().sum()
        # 5. Σ log p(y_n|f_n), differentiable in σ² if it is open
        if noise is None:
            logs = likelihood.log_prob(blocks.outputs, targets)
        else:
            outputs = blocks.outputs
            still = outputs.new_zeros(1, 1, 1).expand(*outputs.shape, outputs.shape[1])
            logs = likelihood.log_power_mean(outputs, still, targets, 0.0, noise)
        logs = rows.times_weights(logs).sum()
        # 6. h forgets old batches, whose inducing points were others
        state.kept["h"] = h.lerp(recent, max(1 / (state.taken + 1), FORGET, count / self.scale.data_size))
        state.note(precision=precision)
        if noise is not None:
            state.note(noise_variance=noise)
        # 7. the negative bound of equation 5, scaled to N samples, with the part of the mean
        fit = (scale.of_likelihood * logs - scale.of_curvature * spread / precision / 2) / count
        return divergence(factor) + precision * self.distance / 2 - fit

    def _root_rows(self, values: Values, batch: Batch, generator: torch.Generator) -> ObjectiveRows:
        """Returns the blocks of the NTK at the columns of the Fisher root of a batch."""
        root = self.problem.root
        rows = self.rows(self.anchors_at(values), batch, generator, DrawnOnce(WeightedRoot(root, batch)))
        if not batch.tangent.positions.several:
            return rows
        blocks = rows.blocks
        weights = curvature_weights(self.problem.likelihood, blocks.outputs, rows.targets, rows.weights)
        u = root(blocks.outputs)
        u = u if weights is None else u * weights.sqrt().to(u.dtype)[..., None]
        return rows._replace(blocks=blocks._replace(cross=u.mT @ blocks.cross, within=u.mT @ blocks.within @ u))


class WeightedRoot(Cotangents):
    """The Fisher root of a batch, times the roots of its weights; to be called for its chunks in order."""

    def __init__(self, root: FisherRoot, batch: Batch) -> None:
        self._root, self._batch, self._start, self.columns = root, batch, 0, root.columns

    def __call__(self, outputs: Tensor) -> Tensor:
        """Returns the root (B, C, R) at the outputs (B, C) of the next B samples."""
        part = slice(self._start, self._start + len(outputs))
        self._start = part.stop
        weights, root = self._batch.curvature_weights(outputs, part), self._root(outputs)
        return root if weights is None else root * weights.sqrt().to(root)[..., None]


def initial_noise(problem: Problem) -> Generator[Step, Any, float | None]:
    """Yields a pass over the first samples if σ² is open; returns their mean squared residual, or None."""
    likelihood = problem.likelihood
    if not likelihood.needs_noise:
        return None
    summary = yield LikelihoodPass(problem, limit=POOL)
    return likelihood.residual_variance(summary.statistics)


def divergence(factor: Tensor) -> Tensor:
    """Returns `1/2 [logdet E - M + tr E⁻¹]` for a Cholesky factor of E: the KL divergence without the distance."""
    # tr E⁻¹ = ‖F⁻¹‖² and logdet E = 2 Σ log F_ii, with E = F Fᵀ
    eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    inverse = torch.linalg.solve_triangular(factor, eye, upper=False)
    return factor.diagonal().log().sum() + (inverse.square().sum() - len(factor)) / 2
