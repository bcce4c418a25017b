"""What the fits share that move the inducing points: Adam on all that is open, with divergence told."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ...errors import LapwingError
from ...linalg import cholesky
from ...network import batches
from ...tangent import Anchors
from ...tangent.inducing import Kernel
from ..passes import Batch, IteratePass, Pass, Problem, State, SumPass
from .inducing_points import POOL, movable

DECAY = (0.9, 0.999)
"""Adam's, for the means of gradients and of their squares."""

EXPLODED = 1e3
"""An objective this many times its scale above the first one has diverged."""


def initial_noise(problem: Problem) -> Generator[Pass, State, float | None]:
    """Yields a pass over the first samples if σ² is open; returns the mean squared residual there, or σ²."""
    likelihood = problem.likelihood
    return likelihood.residual_variance((yield _Residuals(problem))) if likelihood.needs_noise else None


class _Residuals(SumPass):
    """The likelihood's statistics of the first samples."""

    label, limit = "residuals", POOL

    def __init__(self, problem: Problem) -> None:
        self._likelihood = problem.likelihood

    def init(self) -> State:
        return {}

    def update(self, state: State, batch: Batch) -> None:
        outputs = batch.tangent.outputs_of(batch.inputs)
        self._likelihood.check(outputs, batch.targets)
        for name, value in self._likelihood.statistics(outputs, batch.targets).items():
            state[name] = state[name] + value if name in state else value


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


class MovingSteps(IteratePass):
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

    def init(self) -> State:
        """Returns what is open, Adam's means of it, and room for the objective."""
        problem, state = self.problem, self.start()
        for i, leaves in enumerate(self._leaves):
            state.update({f"open/input/{i}/{j}": x.detach().to(problem.tangent.dtype) for j, x in enumerate(leaves)})
        if not problem.prior.given:
            size = problem.tangent.size  # the weights' own spread, whatever the network's scale
            start = size / self.distance if self.distance > 0 else problem.precision[0]
            state["open/log_precision"] = start.log()
        if self._noise is not None:
            state["open/log_noise"] = problem.precision.new_tensor(self._noise).log()
        for name in [name for name in state if name.startswith("open/")]:
            state[name.replace("open", "mean", 1)] = torch.zeros_like(state[name])
            state[name.replace("open", "square", 1)] = torch.zeros_like(state[name])
        return {**state, "taken": torch.zeros((), dtype=torch.int64), "objective": torch.zeros(self.steps).double()}

    def start(self) -> State:
        """Returns what else the state holds; what is named open/... is optimised."""
        return {}

    @abstractmethod
    def objective(self, state: State, values: State, batch: Batch, generator: torch.Generator) -> Tensor:
        """Returns what is to be minimised, given the values of what is open; may add to the state."""

    def step(self, state: State, batch: Batch, generator: torch.Generator) -> None:
        """Takes one step of Adam."""
        names = [name for name in state if name.startswith("open/")]
        with torch.enable_grad():
            values = {name.removeprefix("open/"): state[name].detach().clone().requires_grad_() for name in names}
            objective = self.objective(state, values, batch, generator)
            leaves = list(values.values())
            found = torch.autograd.grad(objective, leaves, allow_unused=True) if objective.requires_grad else ()
        self._check(state, float(objective.detach()), [g for g in found if g is not None])
        state["objective"][int(state["taken"])] = objective.detach().cpu()
        state["taken"] += 1
        with torch.no_grad():
            for name, gradient in zip(names, found, strict=False):
                if gradient is not None:
                    self._adam(state, name, gradient)

    def _adam(self, state: State, name: str, gradient: Tensor) -> None:
        mean, square = (state[name.replace("open", kind, 1)] for kind in ("mean", "square"))
        taken = int(state["taken"])
        mean.lerp_(gradient, 1 - DECAY[0])
        square.lerp_(gradient.square(), 1 - DECAY[1])
        move = mean / (1 - DECAY[0] ** taken) / ((square / (1 - DECAY[1] ** taken)).sqrt() + 1e-12)
        state[name] -= self.rate * (1 - (taken - 1) / self.steps) * move * self.width(name)

    def width(self, name: str) -> Tensor | float:
        """Returns the unit of a step: for inputs the spread of a coordinate over the points it began at."""
        kind, *place = name.split("/")[1:]
        return self._widths[int(place[0])][int(place[1])] if kind == "input" else 1.0

    @property
    def moves(self) -> bool:
        """Whether anything is open."""
        return bool(self._leaves) or not self.problem.prior.given or self._noise is not None

    def anchors_at(self, values: State) -> Anchors:
        """Returns the anchors at inducing inputs, in the dtype that the network takes."""
        groups = list(self.anchors.inputs)
        for i, leaves in enumerate(self._leaves):
            moved = (values[f"input/{i}/{j}"].to(leaf.dtype) for j, leaf in enumerate(leaves))
            groups[i] = batches.unflatten(moved, self.anchors.nests()[i])
        return replace(self.anchors, inputs=tuple(groups))

    def precision_at(self, values: State) -> Tensor:
        """Returns δ of the first block, a scalar; those of others are in proportion."""
        return values["log_precision"].exp() if "log_precision" in values else self.problem.precision[0]

    def noise_at(self, values: State) -> Tensor | None:
        """Returns σ² where it is open."""
        return values["log_noise"].exp() if "log_noise" in values else None

    def check_finite(self, state: State, tensor: Tensor) -> Tensor:
        """Returns the tensor, if all of it is finite."""
        if not torch.isfinite(tensor).all():
            raise self._diverged(state, float("nan"))
        return tensor

    def _check(self, state: State, value: float, gradients: list[Tensor]) -> None:
        first = float(state["objective"][0]) if state["taken"] else value
        too_far = value > first + EXPLODED * max(abs(first), self.data_size / self.problem.temperature)
        if not isfinite(value) or too_far or not all(torch.isfinite(gradient).all() for gradient in gradients):
            raise self._diverged(state, value)

    def _diverged(self, state: State, value: float) -> LapwingError:
        first, taken = float(state["objective"][0]), int(state["taken"])
        return LapwingError(
            f"Asked for {self.method}(learning_rate={self.rate:g}), found that its objective diverged: {value:.3g} at "
            f"step {taken + 1}" + (f" after {first:.3g} at the first" if taken else "") + "; smaller steps are needed: "
            f"write {self.method}(learning_rate={self.rate / 10:g})."
        )


def _spread(leaf: Tensor) -> Tensor:
    """Returns the standard deviation of each coordinate over samples, 1 for a single one."""
    return leaf.std(0, correction=0) if len(leaf) > 1 else torch.ones_like(leaf[0])


def finished(values: State) -> State:
    """Returns what was open at the end of a pass, by its plain names."""
    return {name.removeprefix("open/"): value for name, value in values.items() if name.startswith("open/")}


def scaled(kernel: Kernel, precision: Tensor) -> Kernel:
    """Returns the blocks with the prior, `κ/δ`."""
    return Kernel(kernel.inner / precision, kernel.cross / precision, kernel.within / precision, kernel.outputs)


def note_outputs(problem: Problem, batch: Batch, outputs: Tensor) -> Any:
    """Checks a batch's targets against its outputs, which the bookkeeping of the fit need not compute again."""
    problem.likelihood.check(outputs, batch.targets)
    batch.outputs.append((slice(0, len(outputs)), outputs))
