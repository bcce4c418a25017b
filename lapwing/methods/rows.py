"""Random choice of samples and of rows of the Jacobian, and the pass that collects their inputs."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..data import nesting
from ..data.inputs import Inputs, Samples
from ..errors import LapwingError, shown
from ..tangent import Anchors
from .passes import Batch, LabelsOfData, Step, SumPass
from .problem import Problem
from .state import State

Sampling = Literal["uniform", "balanced", "label"]


def class_labels(samples: Samples | Batch) -> Tensor:
    """Returns the class labels of a batch (B,) int64 on the CPU; all -1 if the targets are not labels."""
    targets = samples.targets
    if isinstance(targets, Tensor) and targets.ndim == 1 and not (targets.is_floating_point() or targets.is_meta):
        return targets.cpu().long()
    return torch.full((samples.count,), -1)


def choose(total: int, count: int, generator: torch.Generator) -> Tensor:
    """Returns `count` different integers below `total` in random order; memory O(count) if `total` is large."""
    if total <= 2**24 or count > total // 2:
        return torch.randperm(total, generator=generator)[:count]
    drawn = torch.randint(total, (2 * count,), generator=generator)
    values, inverse = drawn.unique(return_inverse=True)
    first = torch.full_like(values, len(drawn)).scatter_reduce_(0, inverse, torch.arange(len(drawn)), "amin")
    return drawn[first.sort().values[:count]]


def choose_balanced(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Returns `count` different indices into labels (n,), spread over the classes as evenly as possible."""
    order = choose(len(labels), len(labels), generator)
    return order[rank_in_class(labels[order]).argsort(stable=True)[:count]]


def rank_in_class(labels: Tensor) -> Tensor:
    """Returns, for each of labels (n,), the number of equal labels before it."""
    counts = labels.unique(return_counts=True)[1]
    before = (counts.cumsum(0) - counts).repeat_interleave(counts)  # samples of lower classes
    rank = torch.empty_like(labels)
    rank[labels.argsort(stable=True)] = torch.arange(len(labels)) - before
    return rank


@dataclass
class KeptInputs(State):
    """Inputs of samples or batches that a pass keeps, each under an integer key."""

    leaves: dict[str, Tensor] = field(default_factory=dict)  # `key/number` -> tensor
    nests: dict[str, Tensor] = field(default_factory=dict)  # key -> nesting of the tensors, JSON as uint8
    labels: dict[str, Tensor] = field(default_factory=dict)  # key -> class labels; -1 if the targets are not labels
    shared: dict[str, Tensor] = field(default_factory=dict)  # key -> which tensors all samples share, if it is kept

    def keep(self, key: int, leaves: list[Tensor], nest: str, labels: Tensor) -> None:
        """Keeps the flattened inputs and the labels of a sample or a batch."""
        self.leaves |= {f"{key}/{i}": leaf for i, leaf in enumerate(leaves)}
        self.nests[str(key)] = torch.tensor(list(nest.encode()), dtype=torch.uint8)
        self.labels[str(key)] = labels

    def classes(self) -> Tensor:
        """Returns all class labels in the order of the keys."""
        return torch.cat([self.labels[key] for key in sorted(self.labels, key=int)])

    def flattened(self, key: int) -> tuple[list[Tensor], str]:
        """Returns the tensors and the nesting of a key."""
        leaves: list[Tensor] = []
        while f"{key}/{len(leaves)}" in self.leaves:
            leaves.append(self.leaves[f"{key}/{len(leaves)}"])
        return leaves, bytes(self.nests[str(key)].tolist()).decode()


def anchors_at(
    problem: Problem, samples: Tensor, outputs: Tensor, every: bool = False, sampling: Sampling = "uniform"
) -> Generator[Step, Any, Anchors]:
    """Yields the pass that collects samples by their place in the loader; returns anchors at (sample, output) pairs.

    `every` says that these are all pairs. Then samples with more positions than the first batch have all pairs too.
    `sampling` says how `choose_rows` has chosen them.
    """
    distinct, places = samples.unique(return_inverse=True)
    chosen = _ChosenInputs(distinct, problem.tangent.plan.shared)
    state = yield chosen
    if sampling != "uniform":  # a shuffling loader shows other samples at these places
        shown = state.classes()[places]
        if sampling == "label":
            outputs = shown
        elif not torch.equal(shown, (yield LabelsOfData())[samples]):
            raise LapwingError(
                "The loader shows another order on each pass, and sampling='balanced' needs one order. Write "
                "DataLoader(..., shuffle=False), or sampling='uniform'."
            )
    groups = chosen.groups(state)
    if problem.tangent.positions.several:  # outputs were drawn for the number of positions of the first batch
        widths = torch.cat([torch.full((g.samples,), problem.tangent.width_of(g)) for g in groups])
        if every:
            places = torch.arange(len(widths)).repeat_interleave(widths)
            outputs = torch.arange(len(places)) - (widths.cumsum(0) - widths)[places]
        else:
            outputs = outputs % widths[places]
    return Anchors(problem.tangent, groups, places, outputs)


def choose_rows(
    problem: Problem, labels: Tensor, rows: int | Literal["all"], sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Returns places of samples (M,) and outputs (M,) of M different pairs; raises if `sampling` needs class labels.

    `labels` are the class labels of all samples (n,), -1 if the targets are not labels.
    """
    generator, width = problem.generator(), problem.tangent.width
    if rows == "all" or sampling == "uniform":
        total = len(labels) * width
        picked = choose(total, total if rows == "all" else min(rows, total), generator)
        return picked // width, picked % width
    if int(labels.min()) < 0 or (sampling == "label" and int(labels.max()) >= width):  # one logit, two classes
        raise LapwingError(
            f"sampling={shown(sampling)} needs targets that are class "
            f"labels{f' from 0 to {width - 1}' if sampling == 'label' else ''}, integers (n,). Write "
            "sampling='uniform'."
        )
    count = min(rows, len(labels))
    if sampling == "label":
        samples = choose(len(labels), count, generator)
        return samples, labels[samples]
    samples = choose_balanced(labels, count, generator)
    return samples, torch.randint(width, (count,), generator=generator)


class _ChosenInputs(SumPass[KeptInputs]):
    """Collects the inputs of chosen samples, each under its place; the places are in rising order."""

    label = "inputs of sampled rows"

    def __init__(self, samples: Tensor, shared: tuple[bool, ...]) -> None:
        self._samples, self._shared = samples, shared  # which tensors all samples of the first batch shared

    def init(self) -> KeptInputs:
        return KeptInputs()

    def update(self, state: KeptInputs, batch: Batch) -> None:
        ends = torch.tensor([batch.start, batch.start + batch.count])
        first, stop = torch.searchsorted(self._samples, ends).tolist()
        shared = batch.inputs.shared  # unknown for a batch of one sample
        shared = self._shared if len(shared) == len(self._shared) else shared
        copies = [x.clone() if same else x for x, same in zip(batch.inputs.tensors, shared, strict=True)]
        labels = class_labels(batch)
        for place in self._samples[first:stop].tolist():
            row = slice(place - batch.start, place - batch.start + 1)
            leaves, nest = nesting.flatten(batch.inputs.take(row))
            leaves = [copies[i] if shared[i] else leaf.clone() for i, leaf in enumerate(leaves)]  # no view of the batch
            state.keep(place, leaves, nest, labels[row])
            state.shared[str(place)] = torch.tensor(shared)

    def groups(self, state: KeptInputs) -> tuple[Inputs, ...]:
        """Returns the inputs in the order of the loader, joined while their shapes and nesting agree."""
        groups: list[tuple[tuple[str, list[bool]], list[list[Tensor]]]] = []
        for place in self._samples.tolist():
            leaves, nest = state.flattened(place)
            kind = nest, state.shared[str(place)].tolist()
            if groups and groups[-1][0] == kind and _joinable(groups[-1][1][-1], leaves, kind[1]):
                groups[-1][1].append(leaves)
            else:
                groups.append((kind, [leaves]))
        return tuple(group for (nest, shared), parts in groups for group in _concatenated(nest, shared, parts))


def _joinable(before: list[Tensor], after: list[Tensor], shared: list[bool]) -> bool:
    """Whether two samples can be in one batch: shared tensors are equal, and others have equal shapes."""
    pairs = [(a, b, same) for a, b, same in zip(before, after, shared, strict=True) if a is not b]
    fits = all(a.shape == b.shape and (same or (a.ndim > 0 and len(a) == 1)) for a, b, same in pairs)
    return fits and all(torch.equal(a, b) for a, b, same in pairs if same)


def _concatenated(nest: str, shared: list[bool], parts: list[list[Tensor]]) -> Iterator[Inputs]:
    """Yields samples in batches, of a length that no shared tensor has."""
    lengths = {len(leaf) for leaf, same in zip(parts[0], shared, strict=True) if same and leaf.ndim} - {1}
    while parts:
        count = next(count for count in range(len(parts), 0, -1) if count not in lengths)
        taken, parts = parts[:count], parts[count:]
        columns = zip(zip(*taken, strict=True), shared, strict=True)
        yield nesting.unflatten((leaves[0] if same else torch.cat(leaves) for leaves, same in columns), nest)
