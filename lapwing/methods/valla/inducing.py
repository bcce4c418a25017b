"""Differentiable blocks of the NTK between a batch and moving anchors, with the graph of one chunk at a time.

The forward pass sums the blocks without a graph. The backward pass goes through the chunks of anchors: it computes the
NTK of one differentiable record with records that are not differentiable. So the memory holds one chunk of each kind,
for any network, batch and M.

`ObjectiveRows` are the rows of a mini-batch. For outputs with positions all positions that count are rows, or a sample
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...data.inputs import Inputs
from ...likelihoods import Likelihood, apply_weights
from ...linalg import double_device, doubled, total
from ...tangent.anchors import Anchors, Weights, ntk
from ...tangent.cotangents import EVERY_OUTPUT, Cotangents, GivenCotangents, Reading
from ...tangent.record import Record
from ...tangent.tangent import Tangent
from ..passes import Batch

SOME_OUTPUTS = 100  # maximum number of outputs of an input in one step: all outputs of some positions, at least one
GRAPH = 5  # maximum memory of a differentiable record, with the graph of a contraction, relative to a plain record


class PickedPositions(Cotangents):
    """Cotangents (B, T C, S C) that select the C outputs of S positions of each sample."""

    def __init__(self, picked: Tensor, places: int, outputs: int) -> None:
        """Accepts indices of positions (B, S), ascending, T and C."""
        self.picked, self.places, self.outputs = picked, places, outputs
        self.columns: int = picked.shape[1] * outputs

    def __call__(self, outputs: Tensor) -> Tensor:
        each = torch.arange(self.outputs, device=self.picked.device)
        rows = (self.picked[:, :, None] * self.outputs + each).flatten(1).to(outputs.device)
        u = torch.zeros(*outputs.shape, self.columns, dtype=outputs.dtype, device=outputs.device)
        return u.scatter_(1, rows[:, None], 1.0)

    def take(self, rows: slice) -> PickedPositions:
        return PickedPositions(self.picked[rows], self.places, self.outputs)

    @property
    def mask(self) -> Tensor:
        """Mask of the selected positions (B, T)."""
        mask = torch.zeros(len(self.picked), self.places, dtype=torch.bool, device=self.picked.device)
        return mask.scatter_(1, self.picked, True)


class DrawnOnce(Cotangents):
    """Other cotangents, computed once for each sample, in order. Samples that are taken later have the same ones."""

    def __init__(self, given: Cotangents) -> None:
        self._given, self.columns = given, given.columns
        self._parts: list[Any] = []

    def __call__(self, outputs: Tensor) -> Any:
        self._parts.append(self._given(outputs))
        return self._parts[-1]

    def take(self, rows: slice) -> Cotangents:
        """Returns the computed cotangents of some samples, or itself if none were computed."""
        return GivenCotangents(torch.cat(self._parts)[rows]) if self._parts else self


class Kernel(NamedTuple):
    """Blocks of the NTK `κ = Σ_b w_b J_b J_bᵀ`, float64."""

    inner: Tensor  # K_Z (M, M), between anchors; differentiable in their inputs
    cross: Tensor  # K_xZ (B, R, M), between the batch and the anchors; differentiable in the anchors' inputs
    within: Tensor  # K_x (B, R, R), within each sample of the batch
    outputs: Tensor  # f (B, C) of the batch


def kernel(anchors: Anchors, weights: Weights, inputs: Inputs, cotangents: Cotangents = EVERY_OUTPUT) -> Kernel:
    """Returns the NTK blocks of a batch and anchors (M, P), differentiable if the anchors' inputs require gradients.

    Gradients read the cotangents again, so wrap cotangents with random numbers in `DrawnOnce`. If the treated layer
    gives the outputs, each of `PickedPositions` is a sample with R = C.

    Cost: one forward pass per sample and anchor, R backward passes per sample and one per anchor. Gradients need about
    five more passes per anchor. If chunks do not fit the budget, anchors run again for each chunk of the batch.
    """
    chunks: Any = _batch_chunks
    if isinstance(cotangents, PickedPositions) and anchors.tangent.treats_output_alone:
        chunks = _position_chunks
    cut = partial(chunks, anchors.tangent, inputs, cotangents)
    moving = [leaf for leaf in _leaves(anchors) if leaf.requires_grad]
    return Kernel(*_Blocks.apply(anchors, dict(weights), cut, *moving))


_Chunks = Sequence[tuple[Any, Callable[[], Record]]]
"""Consecutive chunks: the places of their rows, and a function that returns the record."""


def _chunks(tangent: Tangent, parts: Iterable[tuple[Any, Inputs, Cotangents]]) -> _Chunks:
    """Returns chunks of `(places, inputs, cotangents)`. The record of a single chunk is kept, others run again."""
    makers = [(places, partial(tangent.record, inputs, u, torch.float64)) for places, inputs, u in parts]
    return makers if len(makers) > 1 else [(places, cache(make)) for places, make in makers]


def _anchor_chunks(anchors: Anchors, scratch: int) -> _Chunks:
    """Cuts anchors into chunks that fit half the budget with `scratch` entries per row. Places are slots."""
    return _chunks(anchors.tangent, anchors.requests(torch.float64, scratch, share=2))


def _batch_chunks(tangent: Tangent, inputs: Inputs, cotangents: Cotangents, scratch: int) -> _Chunks:
    """Cuts samples into chunks that fit half the budget with `scratch` entries per row. Places are slices."""
    columns = tangent.outputs if cotangents.columns is None else cotangents.columns
    length = max(1, tangent.chunk_length(columns, torch.float64, columns * scratch) // 2)
    chunks = tangent.check(inputs).chunks(length)
    return _chunks(tangent, ((part, chunk, cotangents.take(part)) for part, chunk in chunks))


def _position_chunks(tangent: Tangent, inputs: Inputs, picked: PickedPositions, scratch: int) -> _Chunks:
    """Cuts picked positions of which each is a sample; their records are small enough to keep."""
    records = tangent.records(inputs, EVERY_OUTPUT, torch.float64, Reading(tangent.outputs * scratch, picked.mask))
    return [(rows, lambda record=record: record) for rows, record in records]  # type: ignore[misc]


class _Blocks(torch.autograd.Function):
    """Autograd function of the blocks. `moving` are the anchors' tensors that require gradients, in order."""

    @staticmethod
    def forward(
        ctx: Any, anchors: Anchors, weights: Weights, cut: Callable[[int], _Chunks], *moving: Tensor
    ) -> tuple[Tensor, ...]:
        there, batch = _anchor_chunks(_detached(anchors), 0), cut(len(anchors))
        count, device = len(anchors), double_device(anchors.tangent.device)
        inner = torch.zeros(count, count, dtype=torch.float64, device=device)
        for i, (mine, make) in enumerate(there):
            record = make()
            for j, (theirs, make_other) in enumerate(there[: i + 1]):
                other = record if i == j else make_other()
                part = ntk(record, other, weights).reshape(len(mine), len(theirs))
                inner[mine[:, None], theirs] = part
                inner[theirs[:, None], mine] = part.T
        parts = [_batch_blocks(make(), there, weights, count) for _, make in batch]
        ctx.anchors, ctx.weights, ctx.cut, ctx.chunks = anchors, weights, cut, (there, batch)
        cross, within, outputs = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.mark_non_differentiable(within, outputs)
        return inner, cross, within, outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, inner: Tensor, cross: Tensor, *rest: Any) -> tuple[Any, ...]:
        anchors, (there, batch) = ctx.anchors, ctx.chunks
        size = anchors.tangent.size  # rows of one side are kept for the gradients of the other
        smaller = _anchor_chunks(_detached(anchors), size)
        there = there if len(smaller) == len(there) == 1 else smaller
        smaller = ctx.cut(size)
        batch = batch if len(smaller) == len(batch) == 1 else smaller
        return None, None, None, *_push_back(anchors, ctx.weights, there, batch, inner, cross)


def _batch_blocks(record: Record, there: _Chunks, weights: Weights, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns K_xZ, K_x and f of one chunk of the batch."""
    outputs, columns = record.outputs, record.cotangents
    double: Any = {"dtype": torch.float64, "device": record.device}
    cross = torch.zeros(record.samples, columns, count, **double)
    within = torch.zeros(record.samples, columns, columns, **double)
    for i, (slots, make) in enumerate(there):
        anchors = make()
        for name, weight in weights.items():
            block = record[name]
            cross[:, :, slots] += weight * block.gram(anchors[name]).flatten(2)
            if not i:
                within += block.weighted_gram(torch.full((block.size,), weight, **double))
    return cross, within, outputs


@torch.enable_grad()
def _push_back(
    anchors: Anchors, weights: Weights, there: _Chunks, batch: _Chunks, inner: Tensor, cross: Tensor
) -> list[Tensor]:
    """Returns the gradients of the anchors' inputs from the gradients of K_Z (M, M) and K_xZ (B, R, M)."""
    flags = [leaf.requires_grad for leaf in _leaves(anchors)]
    free = _detached(anchors, moving=True)
    leaves = [leaf for leaf, moves in zip(_leaves(free), flags, strict=True) if moves]
    sums = [torch.zeros_like(leaf) for leaf in leaves]
    sides, at_once = len(there) + len(batch), len(there) == len(batch) == 1
    for slots, chunk, u in free.requests(torch.float64, 0, share=GRAPH):
        record, values = free.tangent.record(chunk, u, torch.float64), []
        for i in range(sides):
            if i < len(there):  # both arguments of K_Z move
                places, make = there[i]
                weighting = (inner + inner.T)[slots][:, places]
            else:
                places, make = batch[i - len(there)]
                weighting = cross[places].flatten(0, 1).T[slots]
            values.append((ntk(record, make(), weights).reshape(weighting.shape) * weighting).sum())
            if at_once and i + 1 < sides:
                continue
            grads = torch.autograd.grad(total(values), leaves, retain_graph=i + 1 < sides, allow_unused=True)
            values = []
            for sum_, grad in zip(sums, grads, strict=True):
                if grad is not None:
                    sum_ += grad
    return sums


def _leaves(anchors: Anchors) -> list[Tensor]:
    """Returns the tensors of the anchors' inputs, in order."""
    return [leaf for group in anchors.inputs for leaf in group.tensors]


def _detached(anchors: Anchors, moving: bool = False) -> Anchors:
    """Returns the anchors with inputs detached. With `moving`, inputs that required gradients require them again."""

    def detached(x: Any) -> Any:
        return x.detach().requires_grad_(moving and x.requires_grad) if isinstance(x, Tensor) else x

    groups = (group.with_leaves(dict(enumerate(map(detached, group.leaves)))) for group in anchors.inputs)
    return replace(anchors, inputs=tuple(groups))


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
    inner, cross, within, _ = kernel(anchors, weights, batch.inputs, chosen)
    if len(cross) < len(rows):  # rows of a sample are together
        shape = picked.shape[1], outputs
        cross = cross.unflatten(1, shape).flatten(0, 1)
        within = within.unflatten(2, shape).unflatten(1, shape).diagonal(dim1=1, dim2=3).movedim(-1, 1).flatten(0, 1)
    return ObjectiveRows(Kernel(inner, cross, within, every["outputs"][rows]), every["targets"][rows], repeats)
