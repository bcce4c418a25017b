"""Bayesian fine-tuning: steps down the variational objective of a Gaussian with independent weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...covariance.dense import expand
from ...data.inputs import Inputs
from ...errors import LapwingError
from ...jacobian.layers import READERS, BatchAxis
from ...likelihoods import apply_weights
from ...linalg import doubled
from ...methods import Batch, DataSummary, IteratePass, Problem
from ...methods.state import Descent, Values
from ...network import recurrent
from ...network.eager import EagerMode, swapped
from ...tangent import Tangent, split

Axes = Mapping[str, BatchAxis]
"""Parameters that are drawn separately for each sample -> sample axis of their layer."""

NOISE_DECAY = 0.99  # factor per step of the sums of squared residuals that give σ²: the last hundred batches or so


class FineTuning(IteratePass[Descent]):
    """Minimises `1/τ Σ_n -E_q[log p(y_n | f(x_n, θ))] + KL(q ‖ N(μ0, Δ⁻¹))` over m and log σ.

    Each step draws once for each sample. The log likelihood of a batch is scaled to all N samples, and its gradient is
    taken through the draws. The gradient of the divergence is exact. An open δ is the best one at every step, and an
    open σ² is the mean squared residual of recent batches. Learning rates follow a cosine schedule that ends at 0.
    """

    label = "fine-tuning"

    def __init__(self, problem: Problem, steps: int, learning_rate: float, std_rate: float, initial_std: float) -> None:
        self.steps = steps
        self._problem, self._tangent, self._initial_std = problem, problem.tangent, initial_std
        self._rates = {"mean": learning_rate, "log_std": std_rate}
        self._scale = problem.scale_of_means()
        self._layout = {name: (value.shape, value.dtype) for name, value in self._tangent.parameters.items()}
        self._axes = per_sample_axes(self._tangent)
        self._centre = self._flat(split(self._tangent.blocks, problem.prior.mean))

    def init(self) -> Descent:
        mean = self._flat(self._tangent.parameters)
        return Descent({"mean": mean, "log_std": torch.full_like(mean, math.log(self._initial_std))})

    def step(self, state: Descent, batch: Batch, generator: torch.Generator) -> None:
        log_std, offset = state.values["log_std"], state.values["mean"] - self._centre
        samples = batch.count
        # 1. Σ log p(y|f) of the batch by one draw, its gradients in m and log σ (P,), and the factor N/(B τ)
        factor = self._scale.of_likelihood / samples
        fit, gradients, statistics = self._log_likelihood(state, batch, generator)
        if statistics:
            fit, scale = self._at_noise(state, statistics)
            gradients = {name: scale * gradient for name, gradient in gradients.items()}
        # 2. KL(q ‖ N(μ0, Δ⁻¹)), at the best δ if it is open
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
        # 3. its gradients: Δ (m - μ0) in m, and δ σ² - 1 in log σ
        pull = {"mean": precision * offset, "log_std": precision * (2 * log_std).exp() - 1}
        cosine = (1 + math.cos(math.pi * state.taken / self.steps)) / 2
        for name, rate in self._rates.items():
            state.move(name, pull[name] - factor * gradients[name], rate * cosine)
        state.taken += 1

    def weight_precision(self, state: Descent) -> Tensor:
        """Returns the user's δ, a scalar or one per weight (P,), or the best scalar if δ is open."""
        mean, log_std, precision = state.values["mean"], state.values["log_std"], self._problem.precision
        if self._problem.prior.fixed:
            same = bool((precision == precision[0]).all())
            return (precision[0] if same else expand(self._tangent.blocks, precision)).to(mean)
        # d/dδ Σ [δ (σ² + (m - μ0)²) - log δ] = 0
        offset = mean - self._centre
        return len(offset) / (offset.square().sum() + (2 * log_std).exp().sum())  # of least divergence

    def _at_noise(self, state: Descent, statistics: dict[str, Tensor]) -> tuple[float, float]:
        """Returns the log likelihood of a batch at the σ² of recent batches, including this one, and 1/σ²."""
        for name, value in statistics.items():
            state.kept[name] = NOISE_DECAY * state.kept.get(name, 0) + value
        noise = self.noise_variance(state)
        if noise is not None and not math.isfinite(noise):
            raise self._diverged("The squared residuals", state.taken)
        noise = noise or 1.0
        likelihood = self._problem.likelihood.with_noise_variance(noise)
        return float(likelihood.log_likelihood(statistics)), 1 / noise

    def noise_variance(self, state: Descent) -> float | None:
        """Returns the mean squared residual of recent batches under their draws, or None if σ² is given or unknown."""
        if not state.kept or not bool(state.kept["count"].any()):  # no batch yet, or all targets missing so far
            return None
        return self._problem.likelihood.residual_variance(state.kept)

    def by_parameter(self, flat: Tensor) -> dict[str, Tensor]:
        """Splits a vector (P,) into parameters."""
        parts = flat.split([math.prod(shape) for shape, _ in self._layout.values()])
        return {name: part.reshape(shape) for part, (name, (shape, _)) in zip(parts, self._layout.items(), strict=True)}

    def _log_likelihood(
        self, state: Descent, batch: Batch, generator: torch.Generator
    ) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        """Returns `Σ log p(y|f)` of the batch under draws, its gradients in m and log σ, and statistics.

        If σ² is open, the sum and its gradients are at σ² = 1, and the statistics give the sum at any other σ².
        Otherwise there are no statistics.
        """
        likelihood, tangent, summary = self._problem.likelihood, self._tangent, DataSummary()
        known = likelihood.with_noise_variance(1.0) if likelihood.needs_noise else likelihood
        leaves = {name: value.detach().requires_grad_() for name, value in state.values.items()}
        gradients = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        fit, sizes = 0.0, tangent.places_of(batch.inputs).sizes
        places, all_targets, all_weights = batch.targets_of_rows(sizes)
        for part, inputs in batch.inputs.chunks(tangent.chunk_length(1)):
            here = slice(part.start * places, part.stop * places)  # the positions of these samples
            targets, weights = all_targets[here], None if all_weights is None else all_weights[here]
            with torch.enable_grad():
                means, stds = self._in_model(leaves["mean"]), self._in_model(leaves["log_std"].exp())
                outputs = drawn_outputs(tangent, inputs, means, stds, self._axes, generator)
                if not bool(outputs.isfinite().all()):
                    raise self._diverged("The outputs", state.taken)
                rows = outputs.reshape(-1, tangent.outputs)
                likelihood.check(rows, targets)
                if likelihood.needs_noise:
                    summary.add(likelihood, rows.detach(), targets, weights)
                logs = known.log_prob(rows, targets)
                value = apply_weights(logs, weights).sum()
                parts = torch.autograd.grad(value, list(leaves.values()))
            for total, gradient in zip(gradients.values(), parts, strict=True):
                total += gradient
            fit += float(value.detach())
            if not tangent.positions.several:
                batch.note(outputs.detach().to(tangent.dtype))
        return fit, gradients, summary.statistics

    def _diverged(self, what: str, taken: int) -> LapwingError:
        rate, spread = self._rates["mean"], self._initial_std
        return LapwingError(
            f"{what} of MeanField at step {taken + 1} of {self.steps} are not finite. Take smaller steps and spreads: "
            f"write lw.MeanField(learning_rate={rate / 10:g}, initial_std={spread / 10:g})."
        )

    def _in_model(self, flat: Tensor) -> dict[str, Tensor]:
        """Splits a vector into parameters of the model's dtypes."""
        return {name: part.to(self._layout[name][1]) for name, part in self.by_parameter(flat).items()}

    def _flat(self, values: Mapping[str, Tensor]) -> Tensor:
        """Joins parameters, in the accumulation dtype."""
        return torch.cat([values[name].detach().flatten().to(self._tangent.dtype) for name in self._layout])


class Drawing(EagerMode):
    """Adds noise to the outputs of layers whose weights are drawn for each sample.

    All three ways to draw are exact: the outputs of each sample have the distribution that a draw of the weights gives.

    - **local** (Kingma et al. 2015, section 2.2): a linear layer or convolution with one position per sample. Its
      outputs, `N(a Mᵀ, a² (σ²)ᵀ)`, are drawn directly for each sample.
    - **flipped** (Wen et al. 2018, equation 4): a linear layer or convolution with several positions, whose outputs
      depend on each other by the weights that they share. The batch has one draw ΔW, and each sample has random signs,
      `W_n = M + ΔW ∘ r_n s_nᵀ`.
    - **shared**: one draw for the batch, for all other layers, and for layers with an unknown axis of features.
    """

    def __init__(self, means: Values, stds: Values, axes: Axes, samples: int, generator: torch.Generator) -> None:
        super().__init__()
        self._names = {id(means[name]): name for name in axes}
        self._stds, self._axes, self._samples, self._generator = stds, axes, samples, generator

    def intercept(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a function; adds noise if it is a layer whose weight is drawn for each sample."""
        reader = READERS.get(function)
        use = reader(args, kwargs, lambda value: id(value) in self._names) if reader is not None else None
        out = function(*args, **kwargs)
        name = None if use is None else self._names.get(id(use.parameters.get("weight")))
        if use is None or name is None:
            return out
        matrix, axis = use.matrix(), self._axes[name]
        assert matrix is not None
        mean, shift = use.parameters["weight"], use.parameters.get("bias")
        weight, bias = self._stds[name], self._stds.get(self._names.get(id(shift), ""))

        def called(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            """Calls the layer with another input, weight and bias (None means zeros)."""
            replaced = {id(use.inputs): inputs, id(mean): weight}
            if use.view is not None:
                replaced[id(use.view)] = weight.mT
            if shift is not None:
                replaced[id(shift)] = torch.zeros_like(shift) if bias is None else bias
            return function(
                *(replaced.get(id(arg), arg) for arg in args),
                **{key: replaced.get(id(arg), arg) for key, arg in kwargs.items()},
            )

        if use.features is None:  # shared
            drawn = shift if shift is None or bias is None else shift + bias * self.normal(bias)
            return called(use.inputs, mean + weight * self.normal(weight), drawn)
        if out.numel() == self._samples * matrix.groups * matrix.outputs:  # local: `√(a² (σ²)ᵀ + σ_b²) ε`
            squares = called(use.inputs.square(), weight.square(), None if bias is None else bias.square())
            tiny = torch.finfo(squares.dtype).tiny  # the square root has no gradient at 0
            return out + squares.clamp_min(tiny).sqrt() * self.normal(squares)
        # flipped: `((a ∘ s) ΔWᵀ) ∘ r + σ_b ε`; all positions of a sample share s, r and ε
        signs = self._by_sample(use.inputs, axis, use.features, self._signs)
        noise = called(use.inputs * signs, weight * self.normal(weight), None)
        noise = noise * self._by_sample(noise, axis, use.features, self._signs)
        if bias is not None:
            noise = noise + self._by_sample(noise, axis, use.features, lambda like: self.normal(like) * bias)
        return out + noise

    def recurrent(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a recurrent layer with one draw of its weights for the batch."""
        named = [(m, self._names[id(m)]) for m in recurrent.tensors_of(args) if id(m) in self._names]
        drawn = {id(m): m + self._stds[name] * self.normal(m) for m, name in named}
        return super().recurrent(function, swapped(args, drawn), kwargs)

    def _by_sample(self, like: Tensor, axis: BatchAxis, channels: int, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """Draws (B, channels), repeated over the positions and laid along the axes of a layer's tensor."""
        drawn = draw(like.new_empty(self._samples, like.shape[channels]))
        positions = like.shape[axis.axis] // self._samples
        drawn = drawn.repeat(positions, 1) if axis.inner else drawn.repeat_interleave(positions, 0)
        shape = [1] * like.ndim
        shape[axis.axis], shape[channels] = drawn.shape
        return drawn.reshape(shape)

    def normal(self, like: Tensor) -> Tensor:
        """Draws from N(0, 1) in the shape of a tensor."""
        return torch.randn(like.shape, generator=self._generator, dtype=like.dtype, device=like.device)

    def _signs(self, like: Tensor) -> Tensor:
        return torch.randint(0, 2, like.shape, generator=self._generator, device=like.device).to(like.dtype) * 2 - 1


def per_sample_axes(tangent: Tangent) -> dict[str, BatchAxis]:
    """Returns the parameters that can be drawn separately for each sample, with the sample axis of their layer.

    They are weights and biases of linear layers and convolutions that the network uses once; two uses share a draw.
    """
    plan = tangent.plan
    if plan.single_sample:  # the axes are guesses
        return {}
    names = [name for use in plan.order for _, name in use.names]
    axes: dict[str, BatchAxis] = {}
    for block in tangent.blocks:
        uses = plan.uses.get(block.name, [])
        if block.matrix is None or block.matrix.one_hot or len(uses) != 1:
            continue
        ((index, axis, _),) = uses
        weight = dict(plan.order[index].names).get("weight")
        if weight is not None and names.count(weight) == 1:
            axes |= {name: axis for name in block.parameters if names.count(name) == 1}
    return axes


def drawn_outputs(
    tangent: Tangent, inputs: Inputs, means: Values, stds: Values, axes: Axes, generator: torch.Generator
) -> Tensor:
    """Returns the outputs (B, C) at random weights, differentiable in `means` and `stds`.

    `axes` is the result of `per_sample_axes`, or {} for one draw of all weights. Layers drawn per sample run twice.
    """
    with torch.enable_grad():
        means = {name: m.clone() if name in axes else m for name, m in means.items()}  # a view then has m as its base
        drawing = Drawing(means, stds, axes, inputs.samples, generator)
        weights = {name: m if name in axes else m + stds[name] * drawing.normal(m) for name, m in means.items()}
        with drawing:
            return tangent.call_with(weights, inputs)


def divergence(log_std: Tensor, offset: Tensor, precision: Tensor) -> Tensor:
    """Returns `KL(N(m, diag σ²) ‖ N(μ0, Δ⁻¹)) = 1/2 Σ [δ(σ² + (m - μ0)²) - 1 - log δ - 2 log σ]`; offset = m - μ0."""
    terms = precision * ((2 * log_std).exp() + offset.square()) - 1 - precision.log() - 2 * log_std
    return doubled(terms).sum() / 2
