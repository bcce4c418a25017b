"""VaLLA as published: inducing points, A, δ and σ² together by Adam on an α-divergence, with early stopping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor

from ...covariance import Latent, LowRankWithResidual
from ...covariance.terms import DenseTerm
from ...errors import LapwingError, shown
from ...likelihoods import Probit
from ...network import batches
from ...tangent import Anchors
from ...tangent.inducing import Kernel, kernel
from ..passes import Batch, Found, Passes, Problem, State, check_count
from ..subspace import span_of_anchors
from .moving_points import (
    MovingSteps,
    divergence,
    finished,
    initial_noise,
    inner_factor,
    note_outputs,
    remaining,
    scaled,
)
from .natural_gradient import VallaFit, check_rate


@dataclass(frozen=True)
class AlphaDivergence(VallaFit):
    """Adam on `-N/B Σ_batch 1/α log E_q[p(y|f)^α] + KL` over Z, `A = L Lᵀ`, δ and σ² (Ortega et al. 2024, Algorithm 1).

    The published fit. `KL = 1/2 [logdet(I + LᵀK_Z L) - M + tr(I + LᵀK_Z L)⁻¹]`, equation 5 without the mean's constant
    part. L begins as the identity, an open δ as `P/‖θ̂-μ0‖²`. δ and σ² that you gave are kept. At α = 0, the bound, δ
    would run to infinity (appendix D); above, it fits the training data too closely in the end, so give `validation`.

    Args:
        alpha: α; 1 is the log predictive density, by the closed form of the likelihood's link where there is one.
        steps: mini-batches at most.
        learning_rate: Adam's, for inducing inputs in units of their spread.
        validation: held-out batches: their NLL is taken every `every` steps, steps end when it has not improved
            `patience` times in a row, and the best is returned; None returns the last.
        every: steps between two looks at it.
        patience: looks without improvement.

    Raises:
        LapwingError: for numbers out of range; where the objective diverges; where a batch's output covariances
            (B, C, C) do not fit the memory budget.

    Cost: a step takes C backward passes a sample and about six an inducing point, with O(M³); memory one chunk of each.
    A look at the validation data costs as much as its samples in a prediction.

    Example:
        >>> import lapwing as lw
        >>> lw.VaLLA(20, fit=lw.AlphaDivergence(steps=1000)).fit
        AlphaDivergence(alpha=1.0, steps=1000, learning_rate=0.01, every=100, patience=3)
    """

    alpha: float = 1.0
    steps: int = 2000
    learning_rate: float = 0.01
    validation: Iterable[Any] | None = field(default=None, repr=False)
    every: int = 100
    patience: int = 3

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name, value in (("steps", self.steps), ("every", self.every), ("patience", self.patience)):
            check_count("AlphaDivergence", name, value)
        check_rate("AlphaDivergence", "learning_rate", self.learning_rate, inf)
        number = isinstance(self.alpha, (int, float)) and not isinstance(self.alpha, bool)
        if not (number and 0 <= self.alpha < inf):
            raise LapwingError(
                f"Asked for AlphaDivergence(alpha={shown(self.alpha)}); a finite number of at least 0 is needed: write "
                "AlphaDivergence(alpha=1.0)."
            )
        if self.validation is not None and (
            isinstance(self.validation, Tensor) or not hasattr(self.validation, "__iter__")
        ):
            raise LapwingError(
                f"Asked for AlphaDivergence(validation={batches.describe(self.validation)}); a loader of held-out "
                "(inputs, targets) batches is needed: write AlphaDivergence(validation=[(x_val, y_val)])."
            )

    def passes(self, problem: Problem, anchors: Anchors) -> Passes:
        """The residuals where σ² is open, then the steps."""
        steps = _AlphaSteps(self, problem, anchors, (yield from initial_noise(problem)))
        return steps.finish((yield steps))


class _AlphaSteps(MovingSteps):
    """Also L, and the best of what was validated."""

    label, method = "alpha-divergence", "AlphaDivergence"

    def __init__(self, fit: AlphaDivergence, problem: Problem, anchors: Anchors, noise_variance: float | None) -> None:
        super().__init__(problem, anchors, fit.steps, fit.learning_rate, noise_variance)
        self._fit = fit
        self._start = problem.likelihood.noise_variance if noise_variance is None else noise_variance
        closed = fit.alpha == 1 and isinstance(problem.likelihood.default_link, Probit)
        self._link = problem.likelihood.default_link if closed else None

    def start(self) -> State:
        device = self.problem.tangent.device
        looks = 1 + -(-self.steps // self._fit.every) if self._fit.validation is not None else 0
        return {
            "open/root": torch.eye(len(self.anchors), dtype=torch.float64, device=device),
            "validation": torch.full((looks,), inf, dtype=torch.float64),
            "looks": torch.zeros((), dtype=torch.int64),
            "worse": torch.zeros((), dtype=torch.int64),
        }

    def width(self, name: str) -> Tensor | float:
        """For L so that all of its entries together reach `A = N/(M σ² τ)` in the time of one `1/learning_rate`."""
        if name != "open/root":
            return super().width(name)
        scale = self.problem.likelihood.with_noise_variance(self._start).curvature_scale / self.problem.temperature
        return float(self.data_size * scale) ** 0.5 / len(self.anchors)

    def step(self, state: State, batch: Batch, generator: torch.Generator) -> None:
        if not state["taken"]:
            self._check_memory(batches.size(batch.inputs))
            self._look(state)
        super().step(state, batch, generator)
        taken = int(state["taken"])
        if taken % self._fit.every == 0 or taken == self.steps:
            self._look(state)

    def _check_memory(self, samples: int) -> None:
        outputs = self.problem.tangent.outputs
        self.problem.require(
            f"AlphaDivergence with {outputs} outputs", 4 * 8 * samples * outputs**2,
            f"the output covariances of {samples} samples and their gradients",
            "give smaller batches, or write VaLLA(fit=lw.NaturalGradient())",
        )  # fmt: skip

    def objective(self, state: State, values: State, batch: Batch, generator: torch.Generator) -> Tensor:
        problem = self.problem
        blocks, factor = self._blocks(state, values, batch.inputs)
        note_outputs(problem, batch, blocks.outputs)
        spread = self.check_finite(state, remaining(blocks, factor, values["root"].tril()))
        logs = problem.likelihood.log_power_mean(
            blocks.outputs.double(),
            spread,
            batch.targets,
            self._fit.alpha,
            self.noise_at(values),
            generator,
            self._link,
        )
        return divergence(factor) - self.data_size / (len(logs) * problem.temperature) * logs.sum()

    def _blocks(self, state: State, values: State, inputs: Any) -> tuple[Kernel, Tensor]:
        """Returns the NTK's blocks with the prior, and the factor of `I + LᵀK_Z L`."""
        found = kernel(self.anchors_at(values), self.weights, inputs)
        found, root = scaled(found, self.precision_at(values)), values["root"].tril()
        self.check_finite(state, root.T @ found.inner @ root)
        return found, inner_factor(found.inner, root)

    def converged(self, state: State) -> bool:
        """Whether the validation NLL has not improved for long enough."""
        return int(state["worse"]) >= self._fit.patience

    @torch.no_grad()
    def _look(self, state: State) -> None:
        """Notes the validation NLL and what was best."""
        if self._fit.validation is None:
            return
        values, looks = finished(state), int(state["looks"])
        noise = self.noise_at(values)
        likelihood = self.problem.likelihood
        likelihood = likelihood if noise is None else likelihood.with_noise_variance(float(noise))
        logs = []
        for inputs, targets in self._held_out():
            blocks, factor = self._blocks(state, values, inputs)
            likelihood.check(blocks.outputs, targets)
            spread = remaining(blocks, factor, values["root"].tril()).to(blocks.outputs.dtype)
            logs.append(likelihood.predict(Latent(blocks.outputs, (DenseTerm(spread),))).log_prob(targets).double())
        value = -float(torch.cat(logs).mean())
        better = not looks or value < float(state["validation"].min())
        state["validation"][looks] = value
        state["looks"] += 1
        state["worse"] = torch.zeros_like(state["worse"]) if better else state["worse"] + 1
        if better:
            state.update({f"best/{name}": value.clone() for name, value in values.items()})

    def _held_out(self) -> Iterator[tuple[Any, Tensor]]:
        """Yields held-out batches, one at least."""
        empty, device = True, self.problem.tangent.device
        assert self._fit.validation is not None
        for raw in self._fit.validation:
            inputs, targets = batches.split(raw, device)
            batches.check_inputs(inputs, "the validation inputs")
            empty = False
            yield inputs, targets
        if empty:
            raise LapwingError(
                "Asked for AlphaDivergence(validation=...), found a loader without batches, or one that can be gone "
                "through once only; held-out batches are needed at every look: write [(x_val, y_val)]."
            )

    @torch.no_grad()
    def finish(self, state: State) -> Found:
        """Returns the covariance at the best or last values, with their δ and σ²."""
        problem, values = self.problem, finished(state)
        if self._fit.validation is not None:
            values = {name: state[f"best/{name}"] for name in values}
        anchors, noise = self.anchors_at(values), self.noise_at(values)
        precision = self.precision_at(values) * problem.precision / problem.precision[0]
        variance = None if noise is None else float(noise)
        basis = span_of_anchors(problem, anchors, len(anchors), "prior")
        seen = torch.zeros(basis.rank, len(anchors), dtype=torch.float64, device=problem.tangent.device)
        for slots, record in anchors.records(torch.float64, basis.scratch_per_row):
            seen[:, slots] = basis.project(record).flatten(0, 1).double().T  # W J̃ᵀ
        root = seen @ values["root"].tril()
        scale = problem.scale_at(variance or problem.likelihood.noise_variance)
        zeros = torch.zeros(len(problem.tangent.blocks), dtype=torch.float64, device=problem.tangent.device)
        covariance = LowRankWithResidual(problem.tangent.blocks, basis, root @ root.T / scale, zeros, precision, scale)
        history = {
            "objective": state["objective"][: int(state["taken"])],
            "validation": state["validation"][: int(state["looks"])],
        }
        return Found(covariance, precision, variance, {k: v for k, v in history.items() if len(v)})
