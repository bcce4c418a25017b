"""What the fits with moving inducing points share: Adam on the points, δ and σ², with a check for divergence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...errors import LapwingError
from ...linalg import cholesky
from ...network import batches
from ...tangent import Anchors
from ...tangent.inducing import Kernel
from ..adam import AdamState
from ..passes import Batch, IteratePass, LikelihoodPass, Pass
from ..problem import Problem
from ..state import State
from .inducing_points import POOL, movable

EXPLODED = 1e3
"""An objective this many times its scale above the first one has diverged."""


def initial_noise(problem: Problem) -> Generator[Pass, Any, float | None]:
    """Yields a pass over the first samples if σ² is open; returns the mean squared residual there, or σ²."""
    likelihood = problem.likelihood
    if not likelihood.needs_noise:
        return None
    summary = yield LikelihoodPass(problem, limit=POOL)
    return likelihood.residual_variance(summary.statistics)


def remaining(kernel: Kernel, factor: Tensor, root: Tensor) -> Tensor:
    """Returns `K_x - K_xZ L (I + LᵀK_Z L)⁻¹ Lᵀ K_Zx` (B, R, R), the covariance of a batch under `A = L Lᵀ`.

    Args:
        kernel: blocks of the NTK, prior included.
        factor: the Cholesky factor of `I + LᵀK_Z L`.
        root: L (M, M).
    """
    batch, columns = kernel.cross.shape[:2]
    taken = torch.linalg.solve_triangular(factor, root.T @ kernel.cross.flatten(0, 1).T, upper=False)  # (M, B R)
    taken = taken.T.reshape(batch, columns, -1)
    return kernel.within - taken @ taken.mT


def inner_factor(inner: Tensor, root: Tensor) -> Tensor:
    """Returns the Cholesky factor of `I + LᵀK_Z L` (M, M), never less than the identity."""
    return cholesky(torch.eye(len(root), dtype=root.dtype, device=root.device) + root.T @ inner @ root)


def divergence(factor: Tensor) -> Tensor:
    """Returns `1/2 [logdet E - M + tr E⁻¹]` for a Cholesky factor of E: what both forms of KL have but the distance."""
    eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    inverse = torch.linalg.solve_triangular(factor, eye, upper=False)
    return factor.diagonal().log().sum() + (inverse.square().sum() - len(factor)) / 2


@dataclass
class MovingState(State):
    """What is open, and what Adam has computed of it.

    Attributes:
        values: what is open, by name: inducing inputs `input/group/tensor`, `log_precision`, `log_noise`.
        adam: moments of the gradients.
        objective: step by step (steps,).
        taken: how many steps.
    """

    values: dict[str, Tensor]
    adam: AdamState
    objective: Tensor
    taken: int


M = TypeVar("M", bound=MovingState)


class MovingSteps(IteratePass[M]):
    """Adam on the inducing inputs, in units of their spread, and on log δ and log σ² where they are open.

    Args:
        problem: what a method may know of the fit.
        anchors: where the points begin; discrete ones stay.
        steps: at most.
        rate: Adam's step width.
        noise_variance: where σ² begins if it is open.
    """

    method: str
    """The fit's name, for messages."""

    def __init__(
        self, problem: Problem, anchors: Anchors, steps: int, rate: float, noise_variance: float | None
    ) -> None:
        self.problem, self.anchors, self.steps, self.rate = problem, anchors, steps, rate
        self._noise = noise_variance
        self._leaves = [batches.flatten(group)[0] for group in anchors.inputs] if movable(anchors) else []
        dtype = problem.tangent.dtype
        self._widths = [[_spread(leaf.to(dtype)) for leaf in leaves] for leaves in self._leaves]
        ratios = problem.precision / problem.precision[0]
        self.weights = {b.name: 1 / r for b, r in zip(problem.tangent.blocks, ratios.tolist(), strict=True)}
        distances = [(m - problem.prior.mean[n]).double().square().sum() for n, m in problem.tangent.mean().items()]
        self.distance = (ratios * torch.stack(distances)).sum()
        self.data_size = problem.data_size or problem.count()

    def init(self) -> M:
        """Returns the values at the start."""
        problem = self.problem
        values = {
            f"input/{i}/{j}": leaf.detach().to(problem.tangent.dtype, copy=True)
            for i, leaves in enumerate(self._leaves) for j, leaf in enumerate(leaves)
        }  # fmt: skip
        if not problem.prior.fixed:
            size = problem.tangent.size  # the weights' own spread, whatever the network's scale
            start = size / self.distance if self.distance > 0 else problem.precision[0]
            values["log_precision"] = start.log()
        if self._noise is not None:
            values["log_noise"] = problem.precision.new_tensor(self._noise).log()
        values |= self.further_values()
        return self.start(MovingState(values, AdamState.of(values), self.history(), 0))

    def further_values(self) -> dict[str, Tensor]:
        """Returns what else is open."""
        return {}

    def history(self) -> Tensor:
        """Returns room for one number per step."""
        return torch.zeros(self.steps, dtype=torch.float64)

    @abstractmethod
    def start(self, state: MovingState) -> M:
        """Returns the state at the start, with what a fit adds to it."""

    @abstractmethod
    def objective(self, state: M, values: Mapping[str, Tensor], batch: Batch, generator: torch.Generator) -> Tensor:
        """Returns what is to be minimised at the values of what is open; may add to the state."""

    def step(self, state: M, batch: Batch, generator: torch.Generator) -> None:
        """Takes one step of Adam, in units of `width`."""
        with torch.enable_grad():
            values = {name: value.detach().clone().requires_grad_() for name, value in state.values.items()}
            objective = self.objective(state, values, batch, generator)
            leaves = list(values.values())
            gradients = torch.autograd.grad(objective, leaves, allow_unused=True) if objective.requires_grad else ()
        self._check(state, float(objective.detach()), [g for g in gradients if g is not None])
        state.objective[state.taken] = objective.detach().cpu()
        rate = self.rate * (1 - state.taken / self.steps)
        state.taken += 1
        for name, gradient in zip(values, gradients, strict=False):
            if gradient is not None:
                move = torch.zeros_like(gradient)
                state.adam.step(name, move, gradient, rate, eps=1e-12)
                state.values[name] += move * self.width(name)

    def width(self, name: str) -> Tensor | float:
        """Returns the unit of a step: for inputs the spread of a coordinate over the points it began at."""
        kind, *place = name.split("/")
        return self._widths[int(place[0])][int(place[1])] if kind == "input" else 1.0

    @property
    def moves(self) -> bool:
        """Whether anything is open."""
        return bool(self._leaves) or not self.problem.prior.fixed or self._noise is not None

    def anchors_at(self, values: Mapping[str, Tensor]) -> Anchors:
        """Returns the anchors at inducing inputs, in the dtype that the network takes."""
        groups = list(self.anchors.inputs)
        for i, leaves in enumerate(self._leaves):
            moved = (values[f"input/{i}/{j}"].to(leaf.dtype) for j, leaf in enumerate(leaves))
            groups[i] = batches.unflatten(moved, self.anchors.nests()[i])
        return replace(self.anchors, inputs=tuple(groups))

    def precision_at(self, values: Mapping[str, Tensor]) -> Tensor:
        """Returns δ of the first block, a scalar; those of others are in proportion."""
        return values["log_precision"].exp() if "log_precision" in values else self.problem.precision[0]

    def noise_at(self, values: Mapping[str, Tensor]) -> Tensor | None:
        """Returns σ² where it is open."""
        return values["log_noise"].exp() if "log_noise" in values else None

    def check_finite(self, state: MovingState, tensor: Tensor) -> Tensor:
        """Returns the tensor, if all of it is finite."""
        if not torch.isfinite(tensor).all():
            raise self._diverged(state, float("nan"))
        return tensor

    def _check(self, state: MovingState, value: float, gradients: list[Tensor]) -> None:
        first = float(state.objective[0]) if state.taken else value
        too_far = value > first + EXPLODED * max(abs(first), self.data_size / self.problem.temperature)
        if not isfinite(value) or too_far or not all(torch.isfinite(gradient).all() for gradient in gradients):
            raise self._diverged(state, value)

    def _diverged(self, state: MovingState, value: float) -> LapwingError:
        first, taken = float(state.objective[0]), state.taken
        return LapwingError(
            f"The objective of {self.method}(learning_rate={self.rate:g}) diverged: {value:.3g} at step {taken + 1}"
            + (f" after {first:.3g} at the first" if taken else "")
            + f". Take smaller steps: write {self.method}(learning_rate={self.rate / 10:g})."
        )


def _spread(leaf: Tensor) -> Tensor:
    """Returns the standard deviation of each coordinate over samples, 1 for a single one."""
    return leaf.std(0, correction=0) if len(leaf) > 1 else torch.ones_like(leaf[0])


def scaled(kernel: Kernel, precision: Tensor) -> Kernel:
    """Returns the blocks with the prior, `κ/δ`."""
    return Kernel(kernel.inner / precision, kernel.cross / precision, kernel.within / precision, kernel.outputs)
