"""VaLLA as published: inducing points, A, δ and σ² by Adam on an α-divergence, with early stopping."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...covariance import Latent, LowRankWithResidual
from ...covariance.terms import DenseTerm
from ...data.data import Data
from ...data.frames import check_data, columns_of
from ...errors import LapwingError
from ...likelihoods import Link
from ...linalg import cholesky, generator_on
from ...options import at_least, instance_of, number, option, positive
from ...tangent import Anchors, MemoryNeed
from ..passes import Batch, FitResult, Passes, SamplesSeen, with_size
from ..problem import Problem, Seen
from ..state import Descent, Values
from ..subspace import span_of_anchors
from . import VallaFit
from .inducing import Kernel, ObjectiveRows, picked_count
from .moving_points import MovingSteps, divergence, initial_noise


@dataclass(frozen=True)
class AlphaDivergence(VallaFit):
    """Adam on `-N/B Σ_batch 1/α log E_q[p(y|f)^α] + KL` over Z, `A = L Lᵀ`, δ and σ² (Ortega et al. 2024, Algorithm 1).

    The settings of the paper are `learning_rate=1e-3`, `schedule="constant"`, `stop="first rise"`,
    `initial_prior_precision=1`, and for classes `link=lw.Probit(scale="marginal")`. Appendix D relies on a small δ at
    the start: δ rises until the validation NLL does. `KL = 1/2 [logdet(I + LᵀK_Z L) - M + tr(I + LᵀK_Z L)⁻¹]` is
    equation 5 without the constant part of the mean. L starts as the identity. δ and σ² that were given to `lw.fit`
    stay. At α = 0, the bound, δ would diverge to infinity (appendix D). With α > 0 the fit finally overfits the
    training data, so pass `validation`.

    Args:
        alpha: α; 1 is the log predictive density, in closed form if the link of the likelihood has one.
        steps: maximum number of mini-batches.
        learning_rate: Adam's learning rate, for inducing inputs in units of their spread.
        validation: held-out data in any form that `lw.fit` accepts, except frames. Their NLL, every `every` steps, ends
            the fit as `stop` says. None takes all steps and returns the final values.
        every: number of steps between two evaluations.
        patience: number of evaluations without improvement.
        link: link that computes `E_q[p(y|f)^α]` and the validation NLL; None means the likelihood's default if it has a
            closed form at this α, and draws or quadrature otherwise. A given link must fit the likelihood and α.
        schedule: "linear" lets the learning rate fall to 0 over `steps`; "constant" keeps it.
        stop: "patience" ends the steps after `patience` evaluations in a row without improvement, and returns the best
            values. "first rise" ends them at the first evaluation that is worse than the one before, and returns the
            values at this evaluation (appendix D).
        initial_prior_precision: δ at the start, if it is open. None means `P/‖θ̂-μ0‖²`, which suits the weights, but
            may be so large that hardly any variance is left.
        initial_noise_variance: σ² at the start, if it is open. None means the mean squared residual.

    Raises:
        LapwingError: if an option is invalid, if `stop="first rise"` has no `validation`, if both a value and
            its start are given, if the objective diverges, or if the output covariances (B, C, C) of a batch exceed the
            memory budget.

    Cost: a step needs C backward passes per sample and about six per inducing point, and O(M³); memory one chunk of
    each. An evaluation costs as much as a prediction of its samples.
    """

    stops_early: ClassVar[bool] = True  # the fit chooses the prior, and the tuning is skipped with a warning

    alpha: float = option(1.0, number(0))
    steps: int = option(2000, at_least(1))
    learning_rate: float = option(0.01, positive())
    validation: Any = field(default=None, repr=False)
    every: int = option(100, at_least(1))
    patience: int = option(3, at_least(1))
    link: Link | None = option(None, instance_of("a link", Link), write="lw.Probit()")
    schedule: Literal["linear", "constant"] = "linear"
    stop: Literal["patience", "first rise"] = "patience"
    initial_prior_precision: float | None = option(None, positive())
    initial_noise_variance: float | None = option(None, positive())

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation is not None:
            check_data(self.validation, "AlphaDivergence(validation=...)")
            if columns_of(self.validation):  # the fit's order of the columns is not known here
                raise LapwingError(
                    "AlphaDivergence(validation=...) reads no frames. Pass (x.to_numpy(), y.to_numpy())."
                )
        elif self.stop == "first rise":
            raise LapwingError(
                'AlphaDivergence(stop="first rise") ends at the first rise of a validation NLL, and has no validation '
                'data. Write AlphaDivergence(stop="first rise", validation=(x_val, y_val)).'
            )

    def passes(self, problem: Problem, anchors: Anchors) -> Passes:
        for name, is_open in (
            ("prior_precision", not problem.prior.fixed), ("noise_variance", problem.likelihood.needs_noise)
        ):  # fmt: skip
            if not is_open and getattr(self, f"initial_{name}") is not None:
                raise LapwingError(
                    f"AlphaDivergence(initial_{name}=...) is the start of an open {name}, and this fit has none: it is "
                    f"given, or the likelihood has no {name}. Leave initial_{name} out."
                )
        problem = yield from with_size(problem)
        steps = AlphaSteps(self, problem, anchors, self.initial_noise_variance or (yield from initial_noise(problem)))
        state = yield steps
        return steps.finish(state, (yield SamplesSeen()))


class AlphaSteps(MovingSteps):
    """Steps of Adam on the divergence; `values` contains L as `root`."""

    label, method = "alpha-divergence", "AlphaDivergence"

    def __init__(self, fit: AlphaDivergence, problem: Problem, anchors: Anchors, noise_variance: float | None) -> None:
        super().__init__(problem, anchors, fit.steps, fit.learning_rate, noise_variance)
        self._fit = fit
        self._held_out = None if fit.validation is None else Data(fit.validation, problem.tangent.model)
        self._start = problem.likelihood.noise_variance if noise_variance is None else noise_variance
        link = problem.likelihood.default_link
        closed = link.closed_form and type(link) in problem.likelihood.integrals(problem.tangent.outputs, fit.alpha)
        self._link = fit.link or (link if closed else None)

    def init(self) -> Descent:
        state = super().init()
        state.values["root"] = torch.eye(len(self.anchors)).to(self.distance)
        if self._fit.initial_prior_precision is not None:
            state.values["log_precision"] = self.distance.new_tensor(self._fit.initial_prior_precision).log()
        return state

    def width(self, name: str) -> Tensor | float:
        """Returns the unit of a step; for L such that A reaches `N/(M σ² τ)` in `1/learning_rate` steps."""
        if name != "root":
            return super().width(name)
        return replace(self.scale, noise_variance=self._start).of_curvature ** 0.5 / len(self.anchors)

    def rate_at(self, taken: int) -> float:
        return self.rate if self._fit.schedule == "constant" else super().rate_at(taken)

    def step(self, state: Descent, batch: Batch, generator: torch.Generator) -> None:
        if not state.taken:
            tangent, samples = self.problem.tangent, batch.count
            outputs = tangent.outputs * picked_count(tangent.width // tangent.outputs, tangent.outputs)
            self.problem.tangent.require(MemoryNeed(
                f"AlphaDivergence with {outputs} outputs", 4 * 8 * samples * outputs**2,
                f"the output covariances of {samples} samples and their gradients",
                "give smaller batches, or write VaLLA(fit=lw.NaturalGradient())",
            ))  # fmt: skip
            self._evaluate(state)
        super().step(state, batch, generator)
        if state.taken % self._fit.every == 0 or state.taken == self.steps:
            self._evaluate(state)

    def objective(self, state: Descent, values: Values, batch: Batch, generator: torch.Generator) -> Tensor:
        problem = self.problem
        # 1. K_Z, K_xZ, K_x with the prior, and F Fᵀ = I + LᵀK_Z L
        rows, factor = self._rows(state, values, batch, generator)
        blocks = rows.blocks
        # 2. the covariances of the outputs (B, R, R), equation 6
        spread = self.check_finite(state, remaining(blocks, factor, values["root"].tril()))
        # 3. 1/α log E_q[p(y_n|f_n)^α] (B,)
        logs = problem.likelihood.log_power_mean(
            blocks.outputs, spread, rows.targets, self._fit.alpha, self.noise_at(values),
            generator_on(spread.device, generator), self._link,
        )  # fmt: skip
        # 4. scaled from the batch to N samples, and the divergence of equation 5
        fit = self.scale.of_likelihood / batch.count * rows.times_weights(logs).sum()
        return divergence(factor) - fit

    def _rows(
        self, state: Descent, values: Values, batch: Batch, generator: torch.Generator
    ) -> tuple[ObjectiveRows, Tensor]:
        """Returns the blocks of the NTK with the prior, and the Cholesky factor of `I + LᵀK_Z L`."""
        rows, delta = self.rows(self.anchors_at(values), batch, generator), self.precision_at(values)
        unit, root = rows.blocks, values["root"].tril()
        blocks = Kernel(unit.inner / delta, unit.cross / delta, unit.within / delta, unit.outputs)
        self.check_finite(state, root.T @ blocks.inner @ root)
        return rows._replace(blocks=blocks), inner_factor(blocks.inner, root)

    def converged(self, state: Descent) -> bool:
        scores = state.history.get("validation", torch.zeros(1))
        if self._fit.stop == "first rise":
            return len(scores) > 1 and bool(scores[-1] > scores[-2])
        return len(scores) - 1 - int(scores.argmin()) >= self._fit.patience

    @torch.no_grad()
    def _evaluate(self, state: Descent) -> None:
        """Computes the validation NLL; keeps the best values unless the first rise ends the steps."""
        if self._held_out is None:
            return
        values, tangent, likelihood = state.values, self.problem.tangent, self.problem.likelihood
        noise = self.noise_at(values)
        likelihood = likelihood if noise is None else likelihood.with_noise_variance(float(noise))
        logs, counts = [], []
        generator = self.problem.generator()  # the same positions at every evaluation
        for samples in self._held_out:
            samples = samples.to(tangent.device)
            tangent.check(samples.inputs, "the validation inputs")
            batch = Batch.of(tangent, samples, likelihood.labelled(samples.targets))
            rows, factor = self._rows(state, values, batch, generator)
            spread = remaining(rows.blocks, factor, values["root"].tril())
            latent = Latent(rows.blocks.outputs, (DenseTerm(spread),))
            logs.append(rows.times_weights(likelihood.predict(latent, self._fit.link).log_prob(rows.targets)))
            counts.append(rows.times_weights(torch.ones_like(logs[-1])))
        if not logs:
            raise LapwingError(
                "The validation loader of AlphaDivergence is without batches, or gives them only once. Pass held-out "
                "data that can be read at every evaluation: (x_val, y_val)."
            )
        score, count = torch.cat(logs).sum(), torch.cat(counts).sum()
        state.note(validation=-score / count)
        history = state.history["validation"]
        if self._fit.stop == "patience" and int(history.argmin()) == len(history) - 1:
            state.kept = {name: value.clone() for name, value in values.items()}

    @torch.no_grad()
    def finish(self, state: Descent, seen: Seen) -> FitResult:
        """Returns the covariance, δ and σ² at the best values if these were kept, else at the final ones."""
        problem = replace(self.problem, read=seen)
        values = state.kept or state.values
        anchors, noise = self.anchors_at(values), self.noise_at(values)
        precision = self.precision_at(values) * problem.precision / problem.precision[0]
        variance = None if noise is None else float(noise)
        # 1. the span W of J_Z (K, P), and W J_Zᵀ (K, M)
        basis = span_of_anchors(problem, anchors, len(anchors), "prior")
        projected = problem.zeros(basis.rank, len(anchors), dtype=torch.float64)  # W J̃ᵀ
        for slots, record in anchors.records(torch.float64, basis.scratch_per_row):
            projected[:, slots] = basis.project(record).flatten(0, 1).to(projected).T
        # 2. s H = W J_Zᵀ A J_Z Wᵀ (K, K) with A = L Lᵀ
        root = projected @ values["root"].tril()
        scale = problem.scale_at(variance or problem.likelihood.noise_variance).of_curvature
        zeros = problem.zeros(len(problem.tangent.blocks), dtype=torch.float64)
        covariance = LowRankWithResidual(problem.tangent.blocks, basis, root @ root.T / scale, zeros, precision, scale)
        return FitResult(covariance, precision, variance, state.history)


def remaining(kernel: Kernel, factor: Tensor, root: Tensor) -> Tensor:
    """Returns `K_x - K_xZ L (I + LᵀK_Z L)⁻¹ Lᵀ K_Zx` (B, R, R), the covariance of a batch under `A = L Lᵀ`.

    The kernel includes the prior. `factor` is the Cholesky factor of `I + LᵀK_Z L`, and `root` is L (M, M).
    """
    # with F Fᵀ = I + LᵀK_Z L: K_x - XᵀX with X = F⁻¹ Lᵀ K_Zx
    batch, columns = kernel.cross.shape[:2]
    taken = torch.linalg.solve_triangular(factor, root.T @ kernel.cross.flatten(0, 1).T, upper=False)  # (M, B R)
    taken = taken.T.reshape(batch, columns, -1)
    return kernel.within - taken @ taken.mT


def inner_factor(inner: Tensor, root: Tensor) -> Tensor:
    """Returns the Cholesky factor of `I + LᵀK_Z L` (M, M)."""
    return cholesky(torch.eye(len(root), dtype=root.dtype, device=root.device) + root.T @ inner @ root)
