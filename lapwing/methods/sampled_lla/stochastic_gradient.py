"""Stochastic gradients on batches: the draws of sampled LLA by Nesterov steps, where a pass over the data is long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import LapwingError, check_count, check_positive, is_one_of, is_positive, shown
from ...network import ranks
from ...tangent import Vectors
from ..cost import Outline
from ..passes import Batch, IteratePass, Method
from ..state import State
from .solver import Solved, Solving, check_solver, residual_of
from .system import CurvatureProducts, LinearSystem, inner

POWER_STEPS = 8
"""Power iterations for the largest curvature of the first batch."""


@dataclass(frozen=True)
class StochasticGradient:
    """Solves `(s G + Δ) z = b` by preconditioned Nesterov steps on batches, `G ≈ n/B G_batch`, and averages the last.

    The objective is `1/2 zᵀ(s G)z + 1/2 ‖Δ^(1/2)(z - z₀)‖²`, `z₀ = Δ⁻¹ b`, whose gradient noise vanishes with z in the
    directions that the data fix (Antorán et al. 2023, section 3). Draws start at those of the prior, so that directions
    which the steps do not reach stay too wide. It suits data of which a pass is expensive; `ConjugateGradients` is
    exact, and mostly faster. The loader's batches should be in random order.

    Args:
        steps: batches.
        learning_rate: step size, relative to the inverse of the largest preconditioned curvature of the first batch.
        momentum: of Nesterov's method, in [0, 1).
        average: the mean is taken over this part of the steps, the last ones.
        clip: gradients are kept within so many times `‖b‖`, or the first residual where that is larger.
        tolerance: of the relative residual above which a warning is logged.
        preconditioner: as for `ConjugateGradients`.

    Raises:
        LapwingError: for numbers out of range, a preconditioner that is not a method, or steps that diverge.

    Cost: `steps` batches, and a pass for the residual; memory of about seven numbers per weight and draw.

    Example:
        >>> import lapwing as lw
        >>> lw.StochasticGradient(steps=500, learning_rate=0.3).momentum
        0.9
    """

    measure: ClassVar[str] = "relative residuals"
    steps: int = 1000
    learning_rate: float = 0.3
    momentum: float = 0.9
    average: float = 0.5
    clip: float = 10.0
    tolerance: float = 0.1
    preconditioner: Method | None = None

    def __post_init__(self) -> None:
        """Checks numbers and method."""
        name = "StochasticGradient"
        check_count(name, "steps", self.steps)
        check_solver(name, self.tolerance, self.preconditioner)
        check_positive(name, "learning_rate", self.learning_rate, 0.3)
        check_positive(name, "average", self.average, 0.5, limit=1.0)
        check_positive(name, "clip", self.clip, 10.0)
        if not is_one_of(self.momentum, (0, 0.0)) and not (is_positive(self.momentum) and self.momentum < 1):
            raise LapwingError(
                f"{name}(momentum={shown(self.momentum)}) needs a number from 0 to below 1. Write {name}(momentum=0.9)."
            )

    def expected_batches(self, count: int) -> int:
        """Returns the steps, and those of a pass for the residual."""
        return self.steps + count

    def most_passes(self, outline: Outline) -> float:
        """Returns the steps and the power iterations in passes, and one for the residual."""
        return (self.steps + POWER_STEPS) * outline.batch / outline.samples + 1

    def more(self) -> str:
        """Returns what to write for a smaller residual."""
        return f"StochasticGradient(steps={4 * self.steps}), or ConjugateGradients(),"

    def solve(self, system: LinearSystem, start: Vectors, products: Vectors) -> Solving:
        """Yields passes; returns the solution. Arguments as for `ConjugateGradients.solve`."""
        residual, norms = residual_of(system, start, products)
        first = torch.maximum(inner(residual, residual).sqrt(), norms)
        del products, residual
        state = yield _Steps(self, system, start, first)
        solution = state.mean
        del state
        products = yield from system.products(solution)
        residual, norms = residual_of(system, solution, products)
        lengths = inner(residual, residual).sqrt()
        self.check(lengths / first)
        relative = lengths / norms
        return Solved(solution, products, relative, relative, self.steps)

    def check(self, relative: Tensor) -> None:
        """Raises where residuals are not finite, or have grown far beyond the first ones."""
        worst = float(relative.max())
        if not relative.isfinite().all() or worst > 10:
            raise LapwingError(
                f"The steps of StochasticGradient(learning_rate={self.learning_rate}) diverge: residuals grow by a "
                f"factor of {worst:.1e}. Write learning_rate={self.learning_rate / 4:g}, or take larger batches."
            )


@dataclass
class NesterovState(State):
    """Vectors (S, P_block) by block.

    Attributes:
        z: the present solution.
        velocity: of z.
        mean: the running mean of z over the final part of the steps.
        rate: the step size.
        taken: how many steps.
    """

    z: Vectors
    velocity: Vectors
    mean: Vectors
    rate: float = 0.0
    taken: int = 0


class _Steps(IteratePass[NesterovState]):
    """Nesterov's method: `v ← μ v - η Ψ̃ ∇(z + μ v)`, `z ← z + v`, and the running mean of the last z."""

    label = "stochastic gradients"
    joins_processes = True

    def __init__(self, options: StochasticGradient, system: LinearSystem, start: Vectors, first: Tensor) -> None:
        self._options, self._system, self._start, self._first = options, system, start, first
        self.steps = options.steps
        self._sides = system.right_hand_sides()
        self._precondition: Callable[[Vectors], Vectors] = system.preconditioner()

    def init(self) -> NesterovState:
        velocity, mean = ({name: torch.zeros_like(z) for name, z in self._start.items()} for _ in range(2))
        return NesterovState(self._start, velocity, mean)

    @torch.no_grad()
    def step(self, state: NesterovState, batch: Batch, generator: torch.Generator) -> None:
        options, taken = self._options, state.taken
        if not taken:
            state.rate = options.learning_rate / self._largest(batch, generator)
        ahead = {name: z + options.momentum * state.velocity[name] for name, z in state.z.items()}
        gradient = {name: image.sub_(self._sides[name]) for name, image in self._image(batch, ahead).items()}
        sizes = inner(gradient, gradient).sqrt() / self._first
        if not sizes.isfinite().all() or (taken > 10 and float(sizes.median()) > 1e4):
            options.check(sizes * torch.inf)
        shrink = (options.clip / sizes.clamp_min(options.clip))[:, None]
        for name, moved in self._precondition(gradient).items():
            velocity, z = state.velocity[name], state.z[name]
            velocity.mul_(options.momentum).add_(moved * shrink.to(moved), alpha=-state.rate)
            z.add_(velocity)
            averaged = taken - self.steps + max(1, round(options.average * self.steps))
            if averaged >= 0:
                state.mean[name].lerp_(z, 1 / (averaged + 1))
        state.taken += 1

    def _image(self, batch: Batch, vectors: Vectors) -> Vectors:
        """Returns `(n/B s G_batch + Δ) V`."""
        products = CurvatureProducts(self._system.problem, self._system.root, vectors)
        image = products.init()
        products.update(image, batch)
        problem = self._system.problem
        sums = ranks.summed(self.label, image.blocks, problem.tangent.device)
        factor = problem.summary().samples / batch.count
        return replace(self._system, scale=factor * self._system.scale).completed(vectors, sums)

    def _largest(self, batch: Batch, generator: torch.Generator) -> float:
        """Returns about the largest eigenvalue of `Ψ̃ (n/B s G_batch + Δ)`, by the power method."""
        vectors = {
            name: torch.randn((1, z.shape[1]), generator=generator, dtype=z.dtype, device=z.device)
            for name, z in self._start.items()
        }
        ranks.agree("a random vector", vectors.values())
        grown = torch.ones((), dtype=torch.float64)
        for _ in range(POWER_STEPS):
            moved = self._precondition(self._image(batch, vectors))
            grown = inner(moved, moved).sqrt()
            vectors = {name: v / grown.to(v) for name, v in moved.items()}
        return float(grown)
