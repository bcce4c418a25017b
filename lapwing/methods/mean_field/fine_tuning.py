"""Bayesian fine-tuning: steps down the variational objective of a Gaussian with independent weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ...errors import LapwingError
from ...network import batches
from ...tangent import split
from ..descent import Descent
from ..passes import Batch, IteratePass
from ..problem import Problem
from ..state import DataSummary
from .reparametrisation import drawn_outputs, per_sample_axes

NOISE_DECAY = 0.99
"""The factor of each step on the sums of squared residuals that give σ²: about the last hundred batches count."""


def divergence(log_std: Tensor, offset: Tensor, precision: Tensor) -> Tensor:
    """Returns `KL(N(m, diag σ²) ‖ N(μ0, Δ⁻¹)) = 1/2 Σ [δ(σ² + (m - μ0)²) - 1 - log δ - 2 log σ]` in nats, float64.

    Args:
        log_std: log σ (P,).
        offset: m - μ0 (P,).
        precision: δ (P,), or one number.
    """
    terms = precision * ((2 * log_std).exp() + offset.square()) - 1 - precision.log() - 2 * log_std
    return terms.sum(dtype=torch.float64) / 2


def best_precision(log_std: Tensor, offset: Tensor) -> Tensor:
    """Returns the one δ of least divergence, `P / (‖m - μ0‖² + Σ σ²)`."""
    return len(offset) / (offset.square().sum() + (2 * log_std).exp().sum())


class FineTuning(IteratePass[Descent]):
    """Minimises `1/τ Σ_n -E_q[log p(y_n | f(x_n, θ))] + KL(q ‖ N(μ0, Δ⁻¹))` over m and log σ.

    One draw per sample and step. The log likelihood of a batch is scaled to all N samples, and its gradient taken
    through the draws; that of the divergence is exact. δ, where it is open, is the best one at every step; so is σ²,
    from recent batches.

    Args:
        problem: the fit.
        steps: how many.
        learning_rate: of m, for Adam with a cosine that ends at 0.
        std_rate: of log σ, likewise.
        initial_std: σ at the start.
    """

    label = "fine-tuning"

    def __init__(self, problem: Problem, steps: int, learning_rate: float, std_rate: float, initial_std: float) -> None:
        self.steps = steps
        self._problem, self._tangent, self._initial_std = problem, problem.tangent, initial_std
        self._rates = {"mean": learning_rate, "log_std": std_rate}
        self._size = problem.data_size or problem.count()
        self._layout = {name: (value.shape, value.dtype) for name, value in self._tangent.parameters.items()}
        self._axes = per_sample_axes(self._tangent)
        self._centre = self._flat(split(self._tangent.blocks, problem.prior.mean))

    def init(self) -> Descent:
        """Starts at the trained weights."""
        mean = self._flat(self._tangent.parameters)
        return Descent({"mean": mean, "log_std": torch.full_like(mean, math.log(self._initial_std))})

    def step(self, state: Descent, batch: Batch, generator: torch.Generator) -> None:
        """Takes a step of Adam on m and log σ."""
        log_std, offset = state.values["log_std"], state.values["mean"] - self._centre
        samples = batches.size(batch.inputs)
        factor = self._size / samples / self._problem.temperature
        fit, gradients = self._log_likelihood(state, batch, generator)
        precision = self.weight_precision(state)
        distance = divergence(log_std, offset, precision)
        objective = float(distance) - factor * fit
        state.note(objective=objective, log_likelihood=fit / samples, divergence=distance)
        if not self._problem.prior.fixed:
            state.note(prior_precision=precision)
        noise = self.noise_variance(state)
        if noise is not None:
            state.note(noise_variance=noise)
        if not (math.isfinite(objective) and all(bool(gradient.isfinite().all()) for gradient in gradients.values())):
            raise self._diverged("The objective or its gradients", state.taken)
        pull = {"mean": precision * offset, "log_std": precision * (2 * log_std).exp() - 1}
        cosine = (1 + math.cos(math.pi * state.taken / self.steps)) / 2
        for name, rate in self._rates.items():
            state.move(name, pull[name] - factor * gradients[name], rate * cosine)
        state.taken += 1

    def weight_precision(self, state: Descent) -> Tensor:
        """Returns δ of each weight (P,) where the user gave it, else the best number."""
        problem, blocks = self._problem, self._tangent.blocks
        if not problem.prior.fixed:
            return best_precision(state.values["log_std"], state.values["mean"] - self._centre)
        if bool((problem.precision == problem.precision[0]).all()):
            return problem.precision[0].to(state.values["mean"])
        sizes = torch.tensor([block.size for block in blocks], device=problem.precision.device)
        return problem.precision.repeat_interleave(sizes).to(state.values["mean"])

    def noise_variance(self, state: Descent) -> float | None:
        """Returns σ² where it is open: the mean squared residual under the draws of recent batches, which are kept."""
        return self._problem.likelihood.residual_variance(state.kept) if state.kept else None

    def by_parameter(self, flat: Tensor) -> dict[str, Tensor]:
        """Cuts a vector (P,) into parameters."""
        parts = flat.split([math.prod(shape) for shape, _ in self._layout.values()])
        return {name: part.reshape(shape) for part, (name, (shape, _)) in zip(parts, self._layout.items(), strict=True)}

    def _log_likelihood(
        self, state: Descent, batch: Batch, generator: torch.Generator
    ) -> tuple[float, dict[str, Tensor]]:
        """Returns the batch's `Σ log p(y|f)` under draws, and its gradients in m and log σ, chunk by chunk."""
        likelihood, tangent = self._problem.likelihood, self._tangent
        leaves = {name: value.detach().requires_grad_() for name, value in state.values.items()}
        gradients = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        for value in state.kept.values():
            value *= NOISE_DECAY
        fit = 0.0
        for rows, inputs in batches.chunks(batch.inputs, tangent.chunk_length(1)):
            targets = batch.targets[rows]
            with torch.enable_grad():
                means, stds = self._in_model(leaves["mean"]), self._in_model(leaves["log_std"].exp())
                outputs = drawn_outputs(tangent, inputs, means, stds, self._axes, generator)
                if not bool(outputs.isfinite().all()):
                    raise self._diverged("The outputs", state.taken)
                likelihood.check(outputs, targets)
                known = likelihood
                if likelihood.needs_noise:  # the best σ² so far, this chunk included
                    DataSummary(statistics=state.kept).add(likelihood, outputs.detach(), targets)
                    noise = self.noise_variance(state)
                    if noise is None or not math.isfinite(noise):
                        raise self._diverged("The squared residuals", state.taken)
                    known = likelihood.with_noise_variance(noise)
                value = known.log_prob(outputs, targets).sum()
                parts = torch.autograd.grad(value, list(leaves.values()))
            for total, part in zip(gradients.values(), parts, strict=True):
                total += part
            fit += float(value.detach())
            batch.note(outputs.detach().to(tangent.dtype), rows)
        return fit, gradients

    def _diverged(self, what: str, taken: int) -> LapwingError:
        """Returns the error of numbers that are no longer finite."""
        rate, spread = self._rates["mean"], self._initial_std
        return LapwingError(
            f"{what} of MeanField at step {taken + 1} of {self.steps} are not finite. Take smaller steps and spreads: "
            f"write lw.MeanField(learning_rate={rate / 10:g}, initial_std={spread / 10:g})."
        )

    def _in_model(self, flat: Tensor) -> dict[str, Tensor]:
        """Cuts a vector into parameters of the model's dtypes."""
        return {name: part.to(self._layout[name][1]) for name, part in self.by_parameter(flat).items()}

    def _flat(self, values: Mapping[str, Tensor]) -> Tensor:
        """Joins parameters, in the accumulation dtype."""
        return torch.cat([values[name].detach().flatten().to(self._tangent.dtype) for name in self._layout])
