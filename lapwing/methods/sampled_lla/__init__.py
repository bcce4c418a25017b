"""Sampled linearised Laplace: exact draws from the posterior by solving for them, and the prior by EM."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...covariance import Draws
from ...likelihoods import Likelihood
from ...linalg import doubled, total
from ...options import at_least, instance_of, option
from ...tangent import Tangent, Vectors
from ..diagonal import SquaredSums
from ..footprint import FitShape, Footprint
from ..passes import FitResult, Method, Pass, Passes, check_within, prior_covariance
from ..problem import MemoryNeed, Problem
from .conjugate_gradients import ConjugateGradients, Solved, Solving
from .em import EvidenceSteps
from .linearised_mode import LinearisedMode
from .system import FirstProducts, LinearSystem, PositionedRoot, inner, inner_by_block

log = logging.getLogger("lapwing")

NO_CURVATURE = 1e-6
"""Relative to the mean, curvature below which a weight's feature is rounding noise and not scaled."""


@dataclass(frozen=True)
class SampledLLA(Method):
    """Full linearised Laplace by draws, `Σ = (1/S) Σ_k z_k z_kᵀ` with `z_k ~ N(0, (sG + Δ)⁻¹)` exactly, matrix-free.

    Each draw solves `(s G + Δ) z = √s JᵀRε + Δ^(1/2) ε₀`. Nothing is assumed of G's structure, but Σ has rank S: its
    entries are Monte-Carlo estimates, a variance with a relative error of √(2/S). It belongs to one prior, which is
    chosen on the way where it is open and cannot be changed afterwards. `posterior.sample(n)` gives the draws
    themselves, each with a random sign, for n up to S.

    EM finds δ and, for Gaussian noise, σ²: `δ = γ/‖θ̂ - μ0‖²` and `σ² = Σ r²/(n C - γ)`, with the effective dimension
    `γ = tr(sGΨ)` estimated by the draws, `1/S Σ_k s z_kᵀ G z_k`. That is the maximum of Full's evidence up to their
    error. It ends where no number would move by more than 1 %. Later solves start from the draws before, which keeps
    directions that the data do not determine exact. So Σ is Full's to Monte-Carlo error at σ² = 1e-10 too, in float64
    and by conjugate gradients without a preconditioner.

    On an MNIST network (2 000 images) Full's evidence spreads the weights far too wide, as it does for networks that
    are sure of their training labels: test NLL 0.435, the network's own 0.049. At a δ chosen by held-out data, a
    hundred times larger, it was 0.049 by `lw.Probit(scale="class")` and 0.048 by `lw.SampledLink()`. So compare a few
    `prior_precision=` on held-out data for classifiers; solves are quick there (7 iterations in place of 45).

    Source: Antorán et al. 2023, Sampling-based Inference for Large Linear Models, with Application to Linearised
    Laplace, sections 3 and 4, which solves for the draws by stochastic gradients, one by one. Conjugate gradients
    solve for all draws at once, to a tolerance.

    Args:
        draws: S.
        solver: options of the conjugate gradients.
        em_steps: solves after the first one, at most, to tune what is open; 0 keeps δ = 1 and σ² the mean squared
            residual.
        prior: "isotropic", or "g" for `Δ = δ g`, `g_p = G_pp / mean(G_pp)`: isotropic over features of equal second
            moment, so that the scale of a weight does not matter (below batch or layer norm, it has no meaning). A
            weight whose curvature is below a millionth of the mean keeps `g_p = 1`.
        per_block: a δ for each block.
        linearised_mode: measure δ by the mode of the linearised model instead of θ̂, which is not its optimum at that
            δ; takes two more passes per solve. Where δ is given it changes nothing: means of predictions stay the
            network's.

    Raises:
        LapwingError: for numbers out of range, another label or solver, or draws that do not fit the memory budget.

    Cost: a pass for the right-hand sides and first products, then about as many as the solver has iterations, for each
    of the solves (3 to 9 where δ is open); with `per_block` one more for each later solve. A pass is C backward passes
    and products of S vectors with J. Memory of six numbers per weight and draw while fitting, one afterwards: 11
    million weights in float32 take 1.4 GB a copy for 32 draws. A prediction takes S products with J.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(64, 4), torch.randint(3, (64,))
        >>> posterior = lw.fit(torch.nn.Linear(4, 3).eval(), [(x, y)], lw.SampledLLA(draws=16))
        >>> posterior.predict(x).probs.shape
        torch.Size([64, 3])
        >>> bool(posterior.history["residuals"].max() < 0.1)
        True
    """

    can_change_prior: ClassVar[bool] = False
    draws: int = option(32, at_least(1))
    solver: ConjugateGradients = option(
        ConjugateGradients(),
        instance_of("lw.ConjugateGradients()", ConjugateGradients),
        write="lw.ConjugateGradients()",
    )
    em_steps: int = option(8, at_least(0))
    prior: Literal["isotropic", "g"] = "isotropic"
    per_block: bool = False
    linearised_mode: bool = False

    def check(self, tangent: Tangent, likelihood: Likelihood) -> None:
        """Raises for a preconditioner without a prior."""
        if self.solver.preconditioner is not None:
            check_within(self.solver.preconditioner, "preconditioner", tangent, likelihood)

    def passes(self, problem: Problem) -> Passes:
        """Yields passes for right-hand sides and preconditioner, then solves and steps of EM in turn."""
        self.check(problem.tangent, problem.likelihood)
        problem.require(self._need(problem.tangent))
        system, start, products = yield from self._system(problem)
        steps, most = EvidenceSteps.of(problem, self.per_block), _largest_scale(system, start, products)
        mode = LinearisedMode(problem, self.linearised_mode and self.em_steps > 0 and steps.open_precision)
        for vectors in (start, products):
            for name, value in vectors.items():
                vectors[name] = torch.nn.functional.pad(value, (0, 0, 0, int(mode.wanted)))  # a row for the mode
        if self.em_steps:
            steps.begin(system, mode.distance(system.features))
            steps = replace(steps, moving_mode=mode.wanted, before=None)
        history: dict[str, Tensor] = {}
        before, left = problem.precision, self.em_steps
        while True:
            wanted = problem.scale_at(steps.noise_variance).of_curvature
            system = replace(system, precision=steps.precision, scale=min(wanted, most * float(steps.precision.min())))
            yield from system.start(start, products, before)
            solving = self._solve(system, steps.noise_variance, mode, start, products)
            del start, products
            solved = yield from solving
            solution, products = (
                {name: v[: self.draws] for name, v in part.items()} for part in (solved.solution, solved.products)
            )
            effective = system.scale * inner_by_block(solution, products).mean(1)
            _note(history, steps, effective, solved)
            if not left or not steps.step(effective, mode.distance(system.features)):
                break
            before, left = system.precision, left - 1
            start, products = solved.solution, solved.products
            del solved, solution
        if system.scale < wanted:
            log.warning(
                "The draws of SampledLLA have %.3g times the noise variance: at less, rounding of %s would drown them. "
                "Fit the network and its data in float64 for the noise variance itself.",
                wanted / system.scale, str(problem.tangent.dtype).removeprefix("torch."),
            )  # fmt: skip
        worst = float(solved.errors[: self.draws].max())
        if worst > self.solver.tolerance:
            log.warning(
                "The draws of SampledLLA were solved to errors, in standard deviations, of up to %.1e, not to %.1e; "
                "ConjugateGradients(iterations=%d) reaches it.",
                worst, self.solver.tolerance, 2 * self.solver.iterations,
            )  # fmt: skip
        return FitResult(
            Draws(problem.tangent.blocks, {name: z.clone() for name, z in solution.items()}, system.precision),
            system.precision, float(history["noise_variance"][-1]) if problem.likelihood.needs_noise else None,
            {"residuals": solved.residuals[: self.draws], **history},
        )  # fmt: skip

    def _need(self, tangent: Tangent) -> MemoryNeed:
        return MemoryNeed(
            f"SampledLLA(draws={self.draws})", 6 * tangent.size * self.draws * tangent.dtype.itemsize,
            f"six numbers for each of {tangent.size} weights and each draw", "take fewer draws or parameters",
        )  # fmt: skip

    def footprint(self, shape: FitShape) -> Footprint | None:
        """Returns the footprint at all iterations of all solves, or None if the preconditioner has no footprint."""
        draws, tangent, prepared = self.draws, shape.tangent, self.solver.preconditioner
        before = Footprint(0, 0, 0.0) if prepared is None else prepared.footprint(shape)
        if before is None:
            return None
        kept, solves = shape.stored(Draws, {"count": draws}), 1 + self.em_steps
        vectors = 6 * tangent.size * (draws + self.linearised_mode) * tangent.dtype.itemsize
        peak = vectors + before.kept + shape.chunk(tangent.dtype, 3 * shape.columns * draws)
        sums = 1 + (self.prior == "g") + solves * (self.solver.iterations + 1)
        sums += 2 * solves * (self.linearised_mode and self.em_steps > 0)
        return Footprint(
            kept, max(before.peak, peak), before.passes + sums * shape.pass_length,
            needs=(*before.needs, self._need(tangent)),
            note=f"SampledLLA needs at most this many passes, in up to {solves} solves; most fits end far sooner.",
        )  # fmt: skip

    def _solve(
        self, system: LinearSystem, noise: float | None, mode: LinearisedMode, start: Vectors, products: Vectors
    ) -> Solving:
        """Solves for the draws, and with them for the linearised model's mode if it is wanted."""
        if not mode.wanted:
            return (yield from self.solver.solve(system, start, products))
        gradient = yield from mode.gradient(system, noise)
        for vectors in (start, products):
            for value in vectors.values():
                value[-1] = 0
        solved = yield from self.solver.solve(replace(system, extra=gradient), start, products)
        yield from mode.advance(system, noise, {name: z[-1:] for name, z in solved.solution.items()})
        return solved

    def _system(self, problem: Problem) -> Generator[Pass, Any, tuple[LinearSystem, Vectors, Vectors]]:
        """Yields the passes of features, right-hand sides and preconditioner; returns Z₀ and `G Z₀` too."""
        root = PositionedRoot(problem)
        features = (yield from _features(problem)) if self.prior == "g" else None
        system = LinearSystem(problem, root, {}, features, None, problem.precision, 1.0)
        start = system.prior_draws(self.draws)
        sums = (yield FirstProducts(problem, root, start)).blocks
        noise = {name: value[: self.draws].clone() for name, value in sums.items()}
        products = {name: sums.pop(name)[self.draws :].clone() for name in noise}
        curvature = None
        if self.solver.preconditioner is not None:
            curvature = yield from prior_covariance(self.solver.preconditioner, problem, "preconditioner")
        scale = problem.curvature_scale()
        return replace(system, noise=noise, curvature=curvature, scale=scale), start, products


def _largest_scale(system: LinearSystem, start: Vectors, products: Vectors) -> float:
    """Returns s/δ above which rounding is larger than what a regression's data leave of the prior's variance.

    That is `1/(ε λ)`, ε the dtype's rounding and `λ = Σ λ_i² / Σ λ_i` of G at unit precision, from `G Z₀`.
    """
    if system.problem.noise_variance() is None:
        return math.inf
    prior = system.prior()
    squares = inner(products, {name: v / prior[name] for name, v in products.items()}).sum()
    largest = float(squares / inner(start, products).sum()) * float(system.precision.min())
    epsilon = torch.finfo(system.problem.tangent.dtype).eps
    return 1 / (epsilon * largest) if largest > 0 else math.inf


def _features(problem: Problem) -> Generator[Pass, Any, Vectors]:
    """Yields a pass; returns `g_p = G_pp / mean(G_pp)`, 1 for weights that the data do not move."""
    diagonals = (yield SquaredSums(problem)).blocks
    mean = total(doubled(d).sum() for d in diagonals.values()) / problem.tangent.size
    ratios = {name: d / mean.clamp_min(torch.finfo(d.dtype).tiny).to(d) for name, d in diagonals.items()}
    return {name: torch.where(ratio > NO_CURVATURE, ratio, 1.0) for name, ratio in ratios.items()}


def _note(history: dict[str, Tensor], steps: EvidenceSteps, effective: Tensor, solved: Solved) -> None:
    """Adds one solve's numbers to the history."""
    numbers = {"precision": steps.precision, "effective_dimension": effective.sum()}
    numbers["iterations"] = torch.tensor(float(solved.iterations), dtype=torch.float64)
    if steps.noise_variance is not None:
        numbers["noise_variance"] = torch.tensor(steps.noise_variance, dtype=torch.float64)
    for name, value in numbers.items():
        before = history.get(name, value.new_zeros(0, *value.shape))
        history[name] = torch.cat([before, value[None]])
