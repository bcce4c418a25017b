"""Sampled linearised Laplace: exact draws from the posterior by linear solves, and the prior by EM."""

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
from ...tangent import MemoryNeed, Tangent, Vectors
from ..diagonal import SquaredSums
from ..footprint import FitShape, Footprint
from ..passes import FitResult, Method, Passes, Step, check_within, prior_covariance, with_seen
from ..problem import Problem
from ..state import append
from .conjugate_gradients import ConjugateGradients, Solving
from .em import EvidenceSteps
from .linearised_mode import LinearisedMode
from .system import FirstProducts, LinearSystem, PositionedRoot, inner, inner_by_block

log = logging.getLogger("lapwing")

SMALL_VARIANCE = 1e-3  # maximum variance by rounding of stored draws, relative to the variance of predictions
NO_CURVATURE = 1e-6  # a feature with less than this fraction of the mean curvature is rounding noise


@dataclass(frozen=True)
class SampledLLA(Method):
    """Full linearised Laplace by draws, `Σ = (1/S) Σ_k z_k z_kᵀ` with `z_k ~ N(0, (sG + Δ)⁻¹)` exactly, matrix-free.

    Each draw solves `(s G + Δ) z = √s JᵀRε + Δ^(1/2) ε₀`. The method makes no assumption about the structure of G, but
    Σ has rank S: its entries are Monte-Carlo estimates, a variance with a relative error of √(2/S). Σ belongs to one
    prior, which EM chooses if it is open, and which cannot be changed afterwards. For n <= S, `posterior.sample(n)`
    returns the draws themselves, each with a random sign.

    EM finds δ and, for Gaussian noise, σ²: `δ = γ/‖θ̂ - μ0‖²` and `σ² = Σ r²/(n C - γ)`, with the effective dimension
    `γ = tr(sGΨ)` estimated by the draws, `1/S Σ_k s z_kᵀ G z_k`. This is the maximum of Full's evidence, up to the
    Monte-Carlo error. EM ends if no number would change by more than 1 %. Each solve starts from the draws of the
    previous one, so directions that the data do not determine stay exact. So Σ equals Full's up to the Monte-Carlo
    error even at σ² = 1e-10, in float64 and with conjugate gradients without a preconditioner.

    For networks that fit their training labels closely, Full's evidence spreads the weights too much: on an MNIST
    network (2 000 images) the test NLL was 0.435, and the network's own 0.049. With a δ from held-out data, a hundred
    times larger, it was 0.049 with `lw.Probit(scale="class")` and 0.048 with `lw.SampledLink()`. So for classifiers
    compare a few values of `prior_precision=` on held-out data; these solves are fast (7 iterations instead of 45).

    Source: Antorán et al. 2023, Sampling-based Inference for Large Linear Models, with Application to Linearised
    Laplace, sections 3 and 4. The paper solves for each draw by stochastic gradients; here conjugate gradients solve
    for all draws at once, to a tolerance.

    Args:
        draws: S, the number of draws.
        solver: options of the conjugate gradients.
        em_steps: maximum number of solves after the first one, to tune an open δ or σ²; 0 keeps δ = 1, and the mean
            squared residual for σ².
        prior: "isotropic", or "g" for `Δ = δ g`, `g_p = G_pp / mean(G_pp)`: isotropic over features of equal second
            moment, so that the scale of a weight does not matter (below batch or layer norm it has no meaning). A
            weight with a curvature below a millionth of the mean keeps `g_p = 1`.
        per_block: whether each block has its own δ.
        linearised_mode: whether EM measures δ at the mode of the linearised model instead of θ̂, which is not its
            optimum at that δ. It costs two more passes per solve. It has no effect if δ is given, or on the means of
            predictions.

    Raises:
        LapwingError: if an option is invalid, or if the draws exceed the memory budget.

    Cost: a pass for the right-hand sides and first products, then for each solve (3 to 9 if δ is open) about one pass
    per iteration; with `per_block` one more for each later solve. `lw.plan` counts all iterations of all solves, and
    most fits end far sooner. A pass is C backward passes and products of S vectors with J. A fit needs
    memory for six numbers in float64 per weight and draw, the posterior for one in the network's dtype: with 11 million
    weights and 32 draws, 2.8 GB per copy in float64, and 1.4 GB in float32. A prediction needs S products with J.

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
        if self.solver.preconditioner is not None:
            check_within(self.solver.preconditioner, "preconditioner", tangent, likelihood)

    def passes(self, problem: Problem) -> Passes:
        problem.tangent.require(self._need(problem.tangent))
        system, start, products = yield from self._system((yield from with_seen(problem)))
        problem = system.problem
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
            both = solved.solution, solved.products  # with a row for the mode, if it is wanted
            solution, products = ({name: v[: self.draws] for name, v in part.items()} for part in both)
            effective = system.scale * inner_by_block(solution, products).mean(1)
            append(history, precision=steps.precision, effective_dimension=effective.sum())
            append(history, iterations=solved.iterations)
            if steps.noise_variance is not None:
                append(history, noise_variance=steps.noise_variance)
            if not left or not steps.step(effective, mode.distance(system.features)):
                break
            before, left = system.precision, left - 1
            start, products = solved.solution, solved.products
            del solved, solution
        if system.scale < wanted:
            log.warning(
                "SampledLLA used %.3g times the noise variance for its draws, because %s rounding would dominate them "
                "at a smaller value. Fit the network and its data in float64 for the noise variance itself.",
                wanted / system.scale, str(problem.tangent.dtype).removeprefix("torch."),
            )  # fmt: skip
        worst = float(solved.errors[: self.draws].max())
        if worst > self.solver.tolerance:
            log.warning(
                "The draws of SampledLLA were solved to errors, in standard deviations, of up to %.1e, not to %.1e; "
                "so variances are too large. Pass SampledLLA(solver=lw.ConjugateGradients(iterations=%d)), or a larger "
                "prior_precision than %.3g.",
                worst, self.solver.tolerance, 4 * self.solver.iterations, system.precision.min(),
            )  # fmt: skip
        draws = {name: z.to(problem.tangent.dtype, copy=True) for name, z in solution.items()}
        return FitResult(
            Draws(problem.tangent.blocks, draws, system.precision),
            system.precision, float(history["noise_variance"][-1]) if problem.likelihood.needs_noise else None,
            {"residuals": solved.residuals[: self.draws], **history},
        )  # fmt: skip

    def _need(self, tangent: Tangent) -> MemoryNeed:
        return MemoryNeed(
            f"SampledLLA(draws={self.draws})", 6 * tangent.size * self.draws * tangent.contraction_dtype.itemsize,
            f"six numbers for each of {tangent.size} weights and each draw", "take fewer draws or parameters",
        )  # fmt: skip

    def _solve(
        self, system: LinearSystem, noise: float | None, mode: LinearisedMode, start: Vectors, products: Vectors
    ) -> Solving:
        """Solves for the draws, and for the mode of the linearised model if it is wanted."""
        if not mode.wanted:
            return (yield from self.solver.solve(system, start, products))
        gradient = yield from mode.gradient(system, noise)
        for vectors in (start, products):
            for value in vectors.values():
                value[-1] = 0
        solved = yield from self.solver.solve(replace(system, extra=gradient), start, products)
        yield from mode.advance(system, noise, {name: z[-1:] for name, z in solved.solution.items()})
        return solved

    def _system(self, problem: Problem) -> Generator[Step, Any, tuple[LinearSystem, Vectors, Vectors]]:
        """Yields the passes for features, right-hand sides and preconditioner; returns the system, Z₀ and `G Z₀`."""
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
        problem = yield from with_seen(problem)
        scale = problem.curvature_scale()
        return replace(system, problem=problem, noise=noise, curvature=curvature, scale=scale), start, products

    def footprint(self, shape: FitShape) -> Footprint | None:
        """Returns the footprint at all iterations of all solves, or None if the preconditioner has no footprint."""
        draws, tangent, prepared = self.draws, shape.tangent, self.solver.preconditioner
        before = Footprint(0, 0, 0.0) if prepared is None else prepared.footprint(shape)
        if before is None:
            return None
        kept, dtype = shape.stored(Draws, {"count": draws}), tangent.contraction_dtype
        peak = 6 * shape.stored(Draws, {"count": draws}, dtype) + before.kept
        peak += shape.chunk(dtype, 3 * shape.columns * draws)
        sums = (1 + self.em_steps) * (self.solver.iterations + 1) + 2
        passes = before.passes + sums * shape.pass_length
        return Footprint(kept, max(before.peak, peak), passes, needs=(*before.needs, self._need(tangent)))


def _largest_scale(system: LinearSystem, start: Vectors, products: Vectors) -> float:
    """Returns the largest s/δ for which rounding is smaller than the posterior variances of a regression.

    With `λ = Σ λ_i² / Σ λ_i` of G at unit precision, computed from `G Z₀`, and the rounding ε of a dtype, the solve
    needs `ε λ s/δ < 1` in its own dtype. The draws, and the products with J in predictions, have the dtype of the
    network: their rounding is ε times the prior's standard deviation. It is infinite for classifiers.
    """
    if system.problem.noise_variance() is None:
        return math.inf
    prior = system.prior()
    squares = inner(products, {name: v / prior[name] for name, v in products.items()}).sum()
    largest = float(squares / inner(start, products).sum()) * float(system.precision.min())
    tangent = system.problem.tangent
    solve, kept = (torch.finfo(dtype).eps for dtype in (tangent.contraction_dtype, tangent.dtype))
    return min(1 / solve, SMALL_VARIANCE / kept**2) / largest if largest > 0 else math.inf


def _features(problem: Problem) -> Generator[Step, Any, Vectors]:
    """Yields a pass; returns `g_p = G_pp / mean(G_pp)`, or 1 for weights without curvature."""
    diagonals = (yield SquaredSums(problem)).blocks
    mean = total(doubled(d).sum() for d in diagonals.values()) / problem.tangent.size
    ratios = {name: d / mean.clamp_min(torch.finfo(d.dtype).tiny).to(d) for name, d in diagonals.items()}
    return {name: torch.where(ratio > NO_CURVATURE, ratio, 1.0) for name, ratio in ratios.items()}
