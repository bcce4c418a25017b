"""The choice of the rows of the Jacobian that span a subspace, and the pass that collects their inputs."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import LapwingError, shown
from ..network import batches
from ..tangent import Anchors
from .passes import Batch, Pass, SumPass
from .problem import Problem
from .sampling import KeptInputs, choose, choose_balanced, class_labels

Sampling = Literal["uniform", "balanced", "label"]
SAMPLINGS: tuple[Sampling, ...] = ("uniform", "balanced", "label")


def sampled_anchors(problem: Problem, rows: int | Literal["all"], sampling: Sampling) -> Generator[Pass, Any, Anchors]:
    """Yields the pass that collects M sampled (input, output) pairs; returns them as anchors."""
    samples, outputs = choose_rows(problem, rows, sampling)
    chosen = _ChosenInputs(samples.unique(), problem.tangent.plan.shared)
    state = yield chosen
    if sampling != "uniform":  # a shuffling loader shows another sample at the place
        shown = chosen.labels(state)[torch.searchsorted(samples.unique(), samples)]
        if sampling == "label":
            outputs = shown
        elif not torch.equal(shown, problem.labels()[samples]):
            raise LapwingError(
                "The loader shows another order on each pass, and sampling='balanced' needs one order. Write "
                "DataLoader(..., shuffle=False), or sampling='uniform'."
            )
    return _anchors(problem, chosen, state, samples, outputs)


def anchors_at(problem: Problem, samples: Tensor, outputs: Tensor) -> Generator[Pass, Any, Anchors]:
    """Yields the pass that collects samples by their place in the loader; returns anchors at (sample, output) pairs."""
    chosen = _ChosenInputs(samples.unique(), problem.tangent.plan.shared)
    return _anchors(problem, chosen, (yield chosen), samples, outputs)


def _anchors(problem: Problem, chosen: _ChosenInputs, state: KeptInputs, samples: Tensor, outputs: Tensor) -> Anchors:
    return Anchors(problem.tangent, chosen.groups(state), torch.searchsorted(samples.unique(), samples), outputs)


def choose_rows(problem: Problem, rows: int | Literal["all"], sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Returns places of samples (M,) and outputs (M,), without repetition.

    Args:
        problem: for n, C, the labels and the seed.
        rows: M, or "all" pairs.
        sampling: "uniform" over all pairs; "balanced", as many inputs of each class, with outputs at random; "label",
            inputs at random with the output of their own class.

    Raises:
        LapwingError: for targets that are no class labels, where they are needed.
    """
    generator, width = problem.generator(), problem.tangent.outputs
    labels = problem.labels()
    if rows == "all" or sampling == "uniform":
        total = len(labels) * width
        picked = choose(total, total if rows == "all" else min(rows, total), generator)
        return picked // width, picked % width
    if int(labels.min()) < 0 or (sampling == "label" and int(labels.max()) >= width):  # one logit has two classes
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
    """The inputs of chosen samples, each under its place.

    Args:
        samples: places in the loader, rising.
        shared: of each tensor of the first batch, whether its samples shared it.
    """

    label = "inputs of sampled rows"

    def __init__(self, samples: Tensor, shared: tuple[bool, ...]) -> None:
        self._samples, self._shared = samples, shared

    def init(self) -> KeptInputs:
        return KeptInputs()

    def update(self, state: KeptInputs, batch: Batch) -> None:
        ends = torch.tensor([batch.start, batch.start + batches.size(batch.inputs)])
        first, stop = torch.searchsorted(self._samples, ends).tolist()
        shared = batches.shared(batch.inputs)  # a batch of one sample does not show which tensors are shared
        shared = self._shared if len(shared) == len(self._shared) else shared
        copies = [x.clone() if same else x for x, same in zip(batches.tensors(batch.inputs), shared, strict=True)]
        labels = class_labels(batch.inputs, batch.targets)
        for place in self._samples[first:stop].tolist():
            row = slice(place - batch.start, place - batch.start + 1)
            leaves, nest = batches.flatten(batches.take(batch.inputs, row))
            leaves = [copies[i] if shared[i] else leaf.clone() for i, leaf in enumerate(leaves)]  # no view of the batch
            state.keep(place, leaves, nest, labels[row])
            state.shared[str(place)] = torch.tensor(shared)

    def labels(self, state: KeptInputs) -> Tensor:
        """Returns the class labels of the chosen samples, -1 where targets are not labels."""
        return torch.cat([state.labels[str(place)] for place in self._samples.tolist()])

    def groups(self, state: KeptInputs) -> tuple[Any, ...]:
        """Returns the inputs in the order of the loader, joined while their shapes and nesting agree."""
        groups: list[tuple[tuple[str, list[bool]], list[list[Tensor]]]] = []
        for place in self._samples.tolist():
            leaves, nest = state.flattened(place)
            kind = nest, state.shared[str(place)].tolist()
            if groups and groups[-1][0] == kind and _joinable(groups[-1][1][-1], leaves, kind[1]):
                groups[-1][1].append(leaves)
            else:
                groups.append((kind, [leaves]))
        return tuple(group for (nest, shared), parts in groups for group in _joined(nest, shared, parts))


def _joinable(before: list[Tensor], after: list[Tensor], shared: list[bool]) -> bool:
    """Whether two samples can stand in one batch: what they share is the same, the rest has the same shape."""
    pairs = [(a, b, same) for a, b, same in zip(before, after, shared, strict=True) if a is not b]
    fits = all(a.shape == b.shape and (same or (a.ndim > 0 and len(a) == 1)) for a, b, same in pairs)
    return fits and all(torch.equal(a, b) for a, b, same in pairs if same)


def _joined(nest: str, shared: list[bool], parts: list[list[Tensor]]) -> Iterator[Any]:
    """Yields samples in batches, none as long as a tensor that its samples share."""
    lengths = {len(leaf) for leaf, same in zip(parts[0], shared, strict=True) if same and leaf.ndim} - {1}
    while parts:
        count = next(count for count in range(len(parts), 0, -1) if count not in lengths)
        taken, parts = parts[:count], parts[count:]
        columns = zip(zip(*taken, strict=True), shared, strict=True)
        yield batches.unflatten((leaves[0] if same else torch.cat(leaves) for leaves, same in columns), nest)
