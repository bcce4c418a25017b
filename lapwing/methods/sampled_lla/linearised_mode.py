"""The mode of the linearised model `f + J m`, by Newton steps: each is one more right-hand side of the system.

`(sG + Δ) step = ∇_m [log p(y | f + J m)/τ - 1/2 ‖Δ^(1/2)(θ̂ + m - μ0)‖²]`. For Gaussian noise one step reaches the
mode. Otherwise G approximates the Hessian, and a line search keeps the log joint from falling.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor

from ...likelihoods import Likelihood, apply_weights
from ...linalg import doubled
from ...tangent import Record, Vectors
from ..passes import Batch, Step, SumPass
from ..problem import Problem
from ..state import BlockSums, TensorSum
from .system import LinearSystem, inner_by_block

LENGTHS = tuple(0.5**i for i in range(9))  # fractions of a Newton step that the line search compares


class LinearisedMode:
    """`θ_lin = θ̂ + m` with m = `offset` (1, P_block) by block; it stays θ̂ unless the mode is `wanted`."""

    def __init__(self, problem: Problem, wanted: bool) -> None:
        self._problem, self.wanted = problem, wanted
        self.offset = {block.name: problem.zeros(1, block.size) for block in problem.tangent.blocks}

    def distance(self, features: Vectors | None) -> Tensor:
        """Returns `‖θ_lin - μ0‖²` by block (n_blocks,), weighted by the features g."""
        weighted = apart = self._apart()
        if features is not None:
            weighted = {name: value * features[name] for name, value in apart.items()}
        return inner_by_block(apart, weighted)[:, 0]

    def gradient(self, system: LinearSystem, noise_variance: float | None) -> Generator[Step, Any, Vectors]:
        """Yields a pass; returns the gradient of the log joint at m, (1, P_block) by block."""
        likelihood = self._problem.likelihood.with_noise_variance(noise_variance)
        state = yield _Score(self._problem, likelihood, self.offset)
        factor, prior, apart = system.scale * (likelihood.noise_variance or 1.0), system.prior(), self._apart()
        return {name: factor * score - prior[name] * apart[name] for name, score in state.blocks.items()}

    def advance(self, system: LinearSystem, noise_variance: float | None, step: Vectors) -> Generator[Step, Any, None]:
        """Yields a pass; moves m by the fraction of the step with the highest log joint, which may be 0."""
        likelihood = self._problem.likelihood.with_noise_variance(noise_variance)
        state = yield _Along(self._problem, likelihood, self.offset, step)
        factor, prior, apart = system.scale * (likelihood.noise_variance or 1.0), system.prior(), self._apart()
        # log joint at m + t step: k Σ log p(y|f + J(m + t step)) - t stepᵀΔ(θ - μ0) - t²/2 stepᵀΔ step, t (10,)
        length = torch.tensor((0.0, *LENGTHS), dtype=torch.float64, device=state.total.device)
        weighted = {name: prior[name] * value for name, value in step.items()}
        slope, curve = inner_by_block(apart, weighted).sum(), inner_by_block(step, weighted).sum()
        joint = factor * state.total - length * slope - length.square() * curve / 2
        best = float(length[joint.nan_to_num(-torch.inf).argmax()])
        for name, value in self.offset.items():
            value.add_(step[name], alpha=best)

    def _apart(self) -> Vectors:
        mean, prior = self._problem.tangent.mean(), self._problem.prior.mean
        return {name: value + mean[name] - prior[name] for name, value in self.offset.items()}


class _Score(SumPass[BlockSums]):
    """Sums `Σ_n J_nᵀ ∇_f log p(y_n | f_n + J_n m)`, (1, P_block) by block."""

    label = "gradient of the linearised model"

    def __init__(self, problem: Problem, likelihood: Likelihood, offset: Vectors) -> None:
        self._problem, self._likelihood, self._offset = problem, likelihood, offset

    def init(self) -> BlockSums:
        return BlockSums({name: torch.zeros_like(value) for name, value in self._offset.items()})

    def update(self, state: BlockSums, batch: Batch) -> None:
        for part, record in _records(batch):
            outputs = record.outputs + record.jvp(self._offset)[..., 0]
            score = _of_rows(batch, part, record, outputs, self._likelihood.score)
            score = score.reshape_as(outputs)[..., None]  # (B, C, 1)
            if record.cotangents > 2:  # J m used forward mode; one backward pass is cheaper than one per output
                record = batch.tangent.record(batch.inputs.take(part), score)
                score = torch.ones_like(score[:, :1])
            for name, total in state.blocks.items():
                total += record[name].vjp(score)


class _Along(SumPass[TensorSum]):
    """Sums `Σ_n log p(y_n | f_n + J_n (m + t step))` for t = 0 and each of `LENGTHS`."""

    label = "search along a step of the linearised model"

    def __init__(self, problem: Problem, likelihood: Likelihood, offset: Vectors, step: Vectors) -> None:
        self._problem, self._likelihood = problem, likelihood
        self._both = {name: torch.cat([value, step[name].to(value)]) for name, value in offset.items()}

    def init(self) -> TensorSum:
        return TensorSum(self._problem.zeros(1 + len(LENGTHS), dtype=torch.float64))

    def update(self, state: TensorSum, batch: Batch) -> None:
        for part, record in _records(batch):
            moved = record.jvp(self._both)  # (B, C, 2)
            for i, length in enumerate((0.0, *LENGTHS)):
                outputs = record.outputs + moved[..., 0] + length * moved[..., 1]
                log_prob = _of_rows(batch, part, record, outputs, self._likelihood.log_prob)
                state.total[i] += doubled(log_prob).sum()


def _records(batch: Batch) -> Iterator[tuple[slice, Record]]:
    """Yields records of all outputs, at all positions, for each chunk of a batch."""
    if not batch.tangent.positions.several:
        yield from batch.records()
        return
    for part, chunk in batch.inputs.chunks(batch.tangent.chunk_length(2)):
        yield part, batch.tangent.record(chunk)


def _of_rows(
    batch: Batch, part: slice, record: Record, outputs: Tensor, function: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Returns a function of outputs (N, C) and targets, times weights, at the samples of a part or their positions."""
    count = batch.tangent.outputs
    places = batch.tangent.positions.places(len(outputs), record.sizes)
    values = function(outputs.reshape(-1, count), places.targets(batch.targets[part], count))
    if batch.weights is None:
        return values
    return apply_weights(values, batch.weights[part].repeat_interleave(places.count))
