"""The solvers of sampled LLA's systems: block conjugate gradients, and stochastic gradients on batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...errors import LapwingError, check_count, check_positive, is_one_of, is_positive, shown
from ...linalg import symmetric_eigen
from ...network import ranks
from ...tangent import Vectors
from ..cost import Outline
from ..passes import Batch, IteratePass, Landmark, Method, Pass
from ..state import State
from .system import CurvatureProducts, LinearSystem, gram, inner, recombine

log = logging.getLogger("lapwing")

NOISE = 1e-12
"""Relative eigenvalue of a Gram matrix, in float64, of which the direction is rounding noise."""

POWER_STEPS = 8
"""Power iterations for the largest curvature of the first batch."""


class Solved(NamedTuple):
    """What a solver returns.

    Attributes:
        solution: Z (S, P_block) by block.
        products: `G Z` (S, P_block) by block, from a separate pass.
        residuals: `‖b - A z‖ / ‖b‖` (S,) float64, of these products.
        errors: what the solver's tolerance bounds (S,) float64.
        iterations: products or steps that it took.
    """

    solution: Vectors
    products: Vectors
    residuals: Tensor
    errors: Tensor
    iterations: int


Solving = Generator[Pass, Any, Solved]


@dataclass(frozen=True)
class ConjugateGradients:
    """Solves `A z = b`, `A = s G + Δ`, for all draws at once, until each prediction `jᵀz` of a draw is close.

    An error e of z moves it by at most `√(eᵀ A e)` standard deviations `√(jᵀ A⁻¹ j)`, for any j. That length is at most
    `√(rᵀ Δ⁻¹ r)` of the residual r, and about that of the latest step: iterations end where the smaller one is below
    the tolerance. That is an estimate: in slow solves errors were 0.3 in place of 0.2, and up to 2 at σ² = 1e-10.

    Draws start at those of the prior, `Δ^(-1/2) ε₀`. Without a preconditioner they stay exact in directions that the
    data do not determine, however small σ² is. Where rounding would drown them, in float32 where the data narrow a
    direction more than some thousand times, they are solved for at a larger σ², and a warning says so.

    The draws are one block: each iteration gives S directions, and every draw goes along all of them, so that S times
    as much of the curvature is used per pass as by separate draws. (O'Leary 1980; the residual's factors are kept
    orthonormal as in Dubrulle 2001.) At the end the residual is computed anew from the solution, which takes one more
    pass; where rounding has driven it from the recurrence's, iterations go on from it.

    Args:
        iterations: at most; each is a pass over the data.
        tolerance: of the draws' errors, in standard deviations of any prediction.
        preconditioner: a method with a prior, such as `KFAC()`, `Diagonal()` or `ELLA(residual="prior")`, whose
            covariance replaces the inverse; None takes the prior's. Where the data fix far fewer directions than
            there are weights, A is the prior plus a low rank, which the draws find by themselves and other structures
            blur: for 400 images and the 29 034 weights of an MNIST network, 32 draws took 19 iterations to a relative
            residual of 1e-3 with None and 42 with ELLA of rank 100, and were above 2e-2 after 60 with `KFAC()`,
            `EKFAC()` and `Diagonal()`. The last three also mix directions that the data determine with those that they
            do not: take None where σ² is small.

    Raises:
        LapwingError: for numbers out of range, or a preconditioner that is not a method.

    Cost: one pass per iteration, memory of about six numbers per weight and draw.

    Example:
        >>> import lapwing as lw
        >>> lw.ConjugateGradients(iterations=50, tolerance=1e-3, preconditioner=lw.Diagonal())
        ConjugateGradients(iterations=50, tolerance=0.001, preconditioner=Diagonal())
    """

    measure: ClassVar[str] = "errors, in standard deviations,"
    iterations: int = 100
    tolerance: float = 0.2
    preconditioner: Method | None = None

    def __post_init__(self) -> None:
        """Checks numbers and method."""
        check_count("ConjugateGradients", "iterations", self.iterations)
        _check_solver(self)

    def expected_batches(self, count: int) -> int:
        """Returns those of ten iterations: how many there will be only the fit shows."""
        return min(10, self.iterations) * count

    def most_passes(self, outline: Outline) -> float:
        """Returns how many passes a solve takes at most, the one for the residual included."""
        return self.iterations + 1

    def more(self) -> str:
        """Returns what to write for a smaller residual."""
        return f"ConjugateGradients(iterations={2 * self.iterations})"

    def solve(self, system: LinearSystem, start: Vectors, products: Vectors) -> Solving:
        """Yields passes; returns the solution.

        Args:
            system: A and b.
            start: the first Z; its tensors are written.
            products: `G Z` of that; likewise.
        """
        solution, state = start, None
        while True:
            residual, norms = _residual(system, solution, products)
            relative, bound = inner(residual, residual).sqrt() / norms, _bound(system, residual)
            _check_finite(relative)
            worst = ranks.decided("residuals", float(relative.max()))
            if state is not None:
                errors = torch.minimum(bound, state.moved)
                again = errors > self.tolerance
                if state.taken > state.began + 1:
                    again |= bound > (2 * state.bound).clamp_min(self.tolerance)
                ended = not ranks.decided("errors", bool(again.any()))
                if ended or state.taken >= self.iterations or worst > state.before / 2:
                    return Solved(solution, products, relative, errors, state.taken)
            taken = 0 if state is None else state.taken
            del products, state
            state = yield from self._iterate(system, solution, residual, taken, worst)
            solution = state.solution
            del residual
            products = yield from system.products(solution)

    def _iterate(
        self, system: LinearSystem, solution: Vectors, residual: Vectors, taken: int, before: float
    ) -> Generator[Pass, Any, ConjugateState]:
        """Takes iterations, in place, until the draws are solved or there are enough; returns where they end.

        The residual is kept as `R = Q D` with `Qᵀ Ψ̃ Q = I` (Ψ̃ the preconditioner); directions P are conjugate to all
        before. In columns, an iteration is `α = (Pᵀ A P)⁻¹`, `Z ← Z + P α D`, `Q - A P α = Q' E`, `D ← E D`,
        `P ← Ψ̃ Q' + P Eᵀ`.
        """
        precondition, prior = system.preconditioner(), system.prior()
        moved = precondition(residual)
        mixing, inverse = _factor(gram(residual, moved))  # D (r, S) and what makes Q of R (r, S)
        recombine(inverse, residual)
        directions, unknown = recombine(inverse, moved), torch.full_like(mixing.sum(0), torch.inf)
        state = ConjugateState(solution, residual, directions, mixing, unknown, unknown, taken, taken, before)
        del moved
        while True:
            state = yield Landmark("iteration", state)
            solution, residual, directions, mixing = state.solution, state.residual, state.directions, state.mixing
            state.bound = _lengths(mixing, gram(residual, {name: v / prior[name] for name, v in residual.items()}))
            _check_finite(state.bound)
            errors = torch.minimum(state.bound, state.moved)
            log.debug("iteration %d: errors up to %.2e standard deviations", state.taken, errors.max())
            more = state.taken < self.iterations and bool((errors > self.tolerance).any())
            if not ranks.decided("errors", more):
                return state
            image = system.completed(directions, (yield from system.products(directions)))
            steps = _inverse(gram(directions, image))  # α (r, r)
            state.moved = _lengths(mixing, steps)
            for name, value in directions.items():
                solution[name].addmm_((mixing.T @ steps).to(value), value)
                residual[name].addmm_(steps.to(value), image[name], alpha=-1)
            del image
            moved = precondition(residual)
            change, inverse = _factor(gram(residual, moved))  # E (r', r)
            state.mixing = change @ mixing
            recombine(inverse, residual)
            for name, value in recombine(change, directions).items():
                value.addmm_(inverse.to(value), moved[name])
            del moved
            state.taken += 1


@dataclass
class ConjugateState(State):
    """Where conjugate gradients stand: Z, Q, P and D as in `ConjugateGradients`.

    Attributes:
        solution: Z (S, P_block) by block.
        residual: Q (r, P_block) by block.
        directions: P (r, P_block) by block.
        mixing: D (r, S).
        moved: the length `√(stepᵀ A step)` of each draw's latest step (S,), infinite before the first one.
        bound: that of `_bound`, of the recurrence's residual (S,).
        taken: how many iterations, since the start of the solve.
        began: how many of them before the recurrence began.
        before: the largest relative residual when it began.
    """

    solution: Vectors
    residual: Vectors
    directions: Vectors
    mixing: Tensor
    moved: Tensor
    bound: Tensor
    taken: int
    began: int
    before: float


def _residual(system: LinearSystem, solution: Vectors, products: Vectors) -> tuple[Vectors, Tensor]:
    """Returns `b - A Z` and `‖b‖` (S,), 1 where b is 0."""
    residual = system.right_hand_sides()
    norms, prior = inner(residual, residual).sqrt(), system.prior()
    for name, b in residual.items():
        b.add_(products[name], alpha=-system.scale).addcmul_(solution[name], prior[name], value=-1)
    return residual, torch.where(norms > 0, norms, 1.0)


def _bound(system: LinearSystem, residual: Vectors) -> Tensor:
    """Returns `√(rᵀ Δ⁻¹ r)` (S,), at least the length `√(eᵀ A e)` of the errors `e = A⁻¹ r`."""
    prior = system.prior()
    return inner(residual, {name: r / prior[name] for name, r in residual.items()}).sqrt()


def _lengths(mixing: Tensor, matrix: Tensor) -> Tensor:
    """Returns the square roots of the diagonal of `Dᵀ M D` (S,), for PSD M (r, r)."""
    return torch.einsum("rs,rq,qs->s", mixing, matrix, mixing).clamp_min(0).sqrt()


def _factor(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns E (r, S) and its right inverse's transpose F (r, S), `M = EᵀE` and `F M Fᵀ = I`, for PSD M (S, S).

    Directions that are rounding noise are left out, so that nothing is 0/0: those of draws that have converged.
    """
    scale = matrix.diagonal().clamp_min(torch.finfo(matrix.dtype).tiny).rsqrt()  # draws converge at their own pace
    values, vectors = symmetric_eigen(matrix * scale * scale[:, None])
    kept = values > NOISE * values.max().clamp_min(torch.finfo(values.dtype).tiny)
    values, vectors = values[kept].sqrt(), vectors[:, kept].T
    return values[:, None] * vectors / scale, vectors * scale / values[:, None]


def _inverse(matrix: Tensor) -> Tensor:
    """Returns the inverse of a PSD matrix on its range."""
    _, inverse = _factor((matrix + matrix.T) / 2)
    return inverse.T @ inverse


def _check_finite(relative: Tensor) -> None:
    if not relative.isfinite().all():
        raise LapwingError(
            f"The residuals of ConjugateGradients are not finite for {int((~relative.isfinite()).sum())} draws. Run "
            "the model in float32 with model.float(), or give a larger prior_precision."
        )


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
        _check_solver(self)
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
        residual, norms = _residual(system, start, products)
        first = torch.maximum(inner(residual, residual).sqrt(), norms)
        del products, residual
        state = yield _Steps(self, system, start, first)
        solution = state.mean
        del state
        products = yield from system.products(solution)
        residual, norms = _residual(system, solution, products)
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


def _check_solver(solver: ConjugateGradients | StochasticGradient) -> None:
    """Raises for a tolerance that is not between 0 and 1, or a preconditioner that is not a method."""
    name, tolerance, method = type(solver).__name__, solver.tolerance, solver.preconditioner
    if not is_positive(tolerance) or not tolerance < 1:
        raise LapwingError(
            f"{name}(tolerance={shown(tolerance)}) needs a number between 0 and 1. Write {name}(tolerance=0.01)."
        )
    if method is not None and not isinstance(method, Method):
        raise LapwingError(
            f"{name}(preconditioner={shown(method)}) needs a method with a prior, or None. Write "
            "preconditioner=lw.KFAC()."
        )
