"""Mini-batches of moving points for outputs with positions: all positions that count are rows, or a sample of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...likelihoods import Likelihood, apply_weights
from ...linalg import double_device, doubled
from ...tangent import Anchors
from ...tangent.anchors import Weights
from ..passes import Batch
from .inducing import Kernel, PickedPositions, kernel_at_positions

SOME_OUTPUTS = 100  # maximum number of outputs of an input in one step: all outputs of some positions, at least one


class ObjectiveRows(NamedTuple):
    """The NTK blocks, targets and weights (N,) of the rows that an objective sums: samples, or positions of samples."""

    blocks: Kernel
    targets: Tensor
    weights: Tensor | None

    def doubled(self) -> ObjectiveRows:
        """Returns the rows with outputs in float64, and targets and weights on the same device."""
        outputs = doubled(self.blocks.outputs)
        weights = None if self.weights is None else self.weights.to(outputs.device)
        return ObjectiveRows(self.blocks._replace(outputs=outputs), self.targets.to(outputs.device), weights)

    def times_weights(self, values: Tensor) -> Tensor:
        """Returns values (N,), each times the weight of its row."""
        return apply_weights(values, self.weights)


def picked_count(positions: int, outputs: int) -> int:
    """Returns the number of positions S of an input in one step: all T positions if `T C` is small."""
    return positions if positions * outputs <= SOME_OUTPUTS else min(positions, max(1, SOME_OUTPUTS // outputs))


def picked_positions(counted: Tensor, outputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns S random positions of each input (B, S), among those that count (B, T), and their weights (B, S) float64.

    A weight is the number of positions divided by the number of drawn ones, so weighted sums are unbiased.
    """
    keys = torch.rand(counted.shape, generator=generator, device=generator.device).to(counted.device)
    some = picked_count(counted.shape[1], outputs)
    picked = torch.where(counted, keys, 2.0).topk(some, largest=False).indices.sort().values
    known = counted.sum(1, keepdim=True).double()
    return picked, counted.gather(1, picked) * known / known.clamp(1, some)


def rows_at_positions(
    anchors: Anchors, weights: Weights, batch: Batch, likelihood: Likelihood, generator: torch.Generator
) -> ObjectiveRows:
    """Returns the blocks of the NTK at S positions of each input, with weights as in `picked_positions`."""
    every, outputs = batch.rows(), batch.tangent.outputs
    likelihood.check(every["outputs"], every["targets"])
    samples, count = every["samples"], len(every["outputs"]) // every["samples"]
    counted = torch.ones(samples, count, dtype=torch.bool) if batch.counted is None else batch.counted.flatten(1)
    counted = counted.to(double_device(every["outputs"].device))
    picked, repeats = picked_positions(counted, outputs, generator)
    repeats = repeats.flatten()
    rows = (picked + count * torch.arange(samples, device=picked.device)[:, None]).flatten()
    if every["weights"] is not None:
        repeats = repeats * every["weights"][rows].to(repeats)
    chosen = PickedPositions(picked, count, outputs)
    inner, cross, within, _ = kernel_at_positions(anchors, weights, batch.inputs, chosen)
    if len(cross) < len(rows):  # rows of a sample are together
        shape = picked.shape[1], outputs
        cross = cross.unflatten(1, shape).flatten(0, 1)
        within = within.unflatten(2, shape).unflatten(1, shape).diagonal(dim1=1, dim2=3).movedim(-1, 1).flatten(0, 1)
    return ObjectiveRows(Kernel(inner, cross, within, every["outputs"][rows]), every["targets"][rows], repeats)
