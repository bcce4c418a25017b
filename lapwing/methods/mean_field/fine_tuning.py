"""Bayesian fine-tuning: steps down the variational objective of a Gaussian with independent weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import LapwingError
from ...likelihoods import Likelihood
from ...network import batches
from ...tangent import split
from ..passes import Batch, IteratePass, Problem, State
from .reparametrisation import drawn_outputs, own_draws

MOMENTUM, SQUARES = 0.9, 0.999
"""Adam's decay rates, those of its paper."""

MEMORY_OF_NOISE = 0.99
"""What remains a step of the squared residuals that σ² is taken from: about the last hundred batches count."""


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


def adam(value: Tensor, gradient: Tensor, first: Tensor, second: Tensor, taken: int, rate: float) -> None:
    """Takes a step of Adam (Kingma and Ba 2015, algorithm 1) in place, after `taken` others; moments are updated."""
    first.lerp_(gradient, 1 - MOMENTUM)
    second.lerp_(gradient.square(), 1 - SQUARES)
    root = (second / (1 - SQUARES ** (taken + 1))).sqrt_().add_(1e-8)
    value.addcdiv_(first, root, value=-rate / (1 - MOMENTUM ** (taken + 1)))


class FineTuning(IteratePass):
    """Minimises `1/τ Σ_n -E_q[log p(y_n | f(x_n, θ))] + KL(q ‖ N(μ0, Δ⁻¹))` over m and log σ.

    One draw a sample and step. The log likelihood of a batch is scaled to all N samples, and its gradient taken through
    the draws; that of the divergence is exact. δ, where it is open, is the best one at every step; so is σ², from
    recent batches.

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
        self._own = {name: (value.shape, value.dtype) for name, value in self._tangent.parameters.items()}
        self._axes = own_draws(self._tangent)
        self._centre = self._flat(split(self._tangent.blocks, problem.prior.mean))

    def init(self) -> State:
        """Starts at the trained weights."""
        mean = self._flat(self._tangent.parameters)
        state = {"mean": mean, "log_std": torch.full_like(mean, math.log(self._initial_std))}
        for name in self._rates:
            state |= {f"first/{name}": torch.zeros_like(mean), f"second/{name}": torch.zeros_like(mean)}
        told = ["objective", "log_likelihood", "divergence"]
        told += ["prior_precision"] * (not self._problem.prior.given)
        told += ["noise_variance"] * self._problem.likelihood.needs_noise
        state |= {f"history/{name}": torch.zeros(self.steps, dtype=torch.float64) for name in told}
        return {**state, "taken": torch.zeros((), dtype=torch.int64)}

    def step(self, state: State, batch: Batch, generator: torch.Generator) -> None:
        """Takes a step of Adam on m and log σ."""
        taken, log_std, offset = int(state["taken"]), state["log_std"], state["mean"] - self._centre
        factor = self._size / batches.size(batch.inputs) / self._problem.temperature
        fit, gradients = self._log_likelihood(state, batch, generator)
        precision = self.weight_precision(state)
        apart = divergence(log_std, offset, precision)
        objective = float(apart) - factor * fit
        self._tell(state, taken, objective=objective, log_likelihood=fit / batches.size(batch.inputs),
                   divergence=float(apart), prior_precision=float(precision.flatten()[0]))  # fmt: skip
        if not (math.isfinite(objective) and all(bool(gradient.isfinite().all()) for gradient in gradients.values())):
            raise self._diverged("an objective and gradients", taken)
        pull = {"mean": precision * offset, "log_std": precision * (2 * log_std).exp() - 1}
        cosine = (1 + math.cos(math.pi * taken / self.steps)) / 2
        for name, rate in self._rates.items():
            downhill = pull[name] - factor * gradients[name]
            adam(state[name], downhill, state[f"first/{name}"], state[f"second/{name}"], taken, rate * cosine)
        state["taken"] += 1

    def weight_precision(self, state: State) -> Tensor:
        """Returns δ of each weight (P,) where the user gave it, else the best number."""
        problem, blocks = self._problem, self._tangent.blocks
        if not problem.prior.given:
            return best_precision(state["log_std"], state["mean"] - self._centre)
        if bool((problem.precision == problem.precision[0]).all()):
            return problem.precision[0].to(state["mean"])
        sizes = torch.tensor([block.size for block in blocks], device=problem.precision.device)
        return problem.precision.repeat_interleave(sizes).to(state["mean"])

    def noise_variance(self, state: State) -> float | None:
        """Returns σ² where it is open, the mean squared residual under the draws of recent batches."""
        if not self._problem.likelihood.needs_noise:
            return None
        sums = {name.removeprefix("noise/"): value for name, value in state.items() if name.startswith("noise/")}
        return self._problem.likelihood.residual_variance(sums)

    def by_parameter(self, flat: Tensor) -> dict[str, Tensor]:
        """Cuts a vector (P,) into parameters."""
        parts = flat.split([math.prod(shape) for shape, _ in self._own.values()])
        return {name: part.reshape(shape) for part, (name, (shape, _)) in zip(parts, self._own.items(), strict=True)}

    def _log_likelihood(
        self, state: State, batch: Batch, generator: torch.Generator
    ) -> tuple[float, dict[str, Tensor]]:
        """Returns the batch's `Σ log p(y|f)` under draws, and its gradients in m and log σ, chunk by chunk."""
        likelihood, tangent = self._problem.likelihood, self._tangent
        leaves = {name: state[name].detach().requires_grad_() for name in self._rates}
        gradients = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        for name in [name for name in state if name.startswith("noise/")]:
            state[name] *= MEMORY_OF_NOISE
        fit = 0.0
        for rows, inputs in batches.chunks(batch.inputs, tangent.chunk_length(1)):
            targets = batch.targets[rows]
            with torch.enable_grad():
                means, stds = self._in_model(leaves["mean"]), self._in_model(leaves["log_std"].exp())
                outputs = drawn_outputs(tangent, inputs, means, stds, self._axes, generator)
                if not bool(outputs.isfinite().all()):
                    raise self._diverged("outputs", int(state["taken"]))
                likelihood.check(outputs, targets)
                known = self._at_noise(likelihood, state, outputs.detach(), targets)
                value = known.log_prob(outputs, targets).sum()
                found = torch.autograd.grad(value, list(leaves.values()))
            for total, part in zip(gradients.values(), found, strict=True):
                total += part
            fit += float(value.detach())
            batch.outputs.append((rows, outputs.detach().to(tangent.dtype)))
        return fit, gradients

    def _at_noise(self, likelihood: Likelihood, state: State, outputs: Tensor, targets: Tensor) -> Likelihood:
        """Returns the likelihood with the best σ² so far, this chunk included, where it is open."""
        if not likelihood.needs_noise:
            return likelihood
        for name, value in likelihood.statistics(outputs, targets).items():
            state[f"noise/{name}"] = state.get(f"noise/{name}", 0) + value
        noise = self.noise_variance(state)
        if noise is None or not math.isfinite(noise):
            raise self._diverged("squared residuals", int(state["taken"]))
        self._tell(state, int(state["taken"]), noise_variance=noise)
        return likelihood.with_noise_variance(noise)

    def _diverged(self, what: str, taken: int) -> LapwingError:
        """Returns the error of numbers that are no longer finite."""
        rate, spread = self._rates["mean"], self._initial_std
        return LapwingError(
            f"Asked for MeanField(learning_rate={rate}, initial_std={spread}), found {what} at step {taken + 1} of "
            f"{self.steps} that are not finite; smaller steps and spreads are needed: write "
            f"lw.MeanField(learning_rate={rate / 10:g}, initial_std={spread / 10:g})."
        )

    def _tell(self, state: State, step: int, **numbers: Any) -> None:
        for name, number in numbers.items():
            if f"history/{name}" in state:
                state[f"history/{name}"][step] = number

    def _in_model(self, flat: Tensor) -> dict[str, Tensor]:
        """Cuts a vector into parameters of the model's dtypes."""
        return {name: part.to(self._own[name][1]) for name, part in self.by_parameter(flat).items()}

    def _flat(self, values: Mapping[str, Tensor]) -> Tensor:
        """Joins parameters, in the accumulation dtype."""
        return torch.cat([values[name].detach().flatten().to(self._tangent.dtype) for name in self._own])
