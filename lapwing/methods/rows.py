"""Which rows of the Jacobian a subspace is made of: their choice, and the pass that collects their inputs."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import LapwingError, shown
from ..network import batches
from ..tangent import Anchors
from .passes import Batch, Pass, Problem, State, SumPass, class_labels

Sampling = Literal["uniform", "balanced", "label"]
SAMPLINGS: tuple[Sampling, ...] = ("uniform", "balanced", "label")


def sampled_anchors(
    problem: Problem, rows: int | Literal["all"], sampling: Sampling
) -> Generator[Pass, State, Anchors]:
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
                "Asked for rows sampled by sampling='balanced', found a loader that shows another order on each pass; "
                "one order is needed to find the chosen samples again: write DataLoader(..., shuffle=False), or "
                "sampling='uniform'."
            )
    return _anchors(problem, chosen, state, samples, outputs)


def anchors_at(problem: Problem, samples: Tensor, outputs: Tensor) -> Generator[Pass, State, Anchors]:
    """Yields the pass that collects samples by their place in the loader; returns anchors at (sample, output) pairs."""
    chosen = _ChosenInputs(samples.unique(), problem.tangent.plan.shared)
    return _anchors(problem, chosen, (yield chosen), samples, outputs)


def _anchors(problem: Problem, chosen: _ChosenInputs, state: State, samples: Tensor, outputs: Tensor) -> Anchors:
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
            f"Asked for rows sampled by sampling={shown(sampling)}, found targets that are no class labels"
            f"{f' from 0 to {width - 1}' if sampling == 'label' else ''}; integer labels (n,) are needed: write "
            "sampling='uniform'."
        )
    count = min(rows, len(labels))
    if sampling == "label":
        samples = choose(len(labels), count, generator)
        return samples, labels[samples]
    order = choose(len(labels), len(labels), generator)
    mine = labels[order]
    turn = torch.empty_like(mine)  # how many of its class come before a sample
    for label in mine.unique():
        turn[mine == label] = torch.arange(int((mine == label).sum()))
    samples = order[turn.argsort(stable=True)[:count]]
    return samples, torch.randint(width, (count,), generator=generator)


def choose(total: int, count: int, generator: torch.Generator) -> Tensor:
    """Returns `count` of the numbers below `total` in random order, without repetition and without O(total) memory."""
    if total <= 2**24 or count > total // 2:
        return torch.randperm(total, generator=generator)[:count]
    drawn = torch.randint(total, (2 * count,), generator=generator)
    values, inverse = drawn.unique(return_inverse=True)
    first = torch.full_like(values, len(drawn)).scatter_reduce_(0, inverse, torch.arange(len(drawn)), "amin")
    return drawn[first.sort().values[:count]]


class _ChosenInputs(SumPass):
    """The inputs of chosen samples, under the place of each.

    `place/leaf` are the tensors of one sample, `place/shared` says which of them all samples share, `place/nest` how
    they nest, and `place/label` is the class.

    Args:
        samples: places in the loader, rising.
        shared: of each tensor of the first batch, whether its samples shared it.
    """

    label = "inputs of sampled rows"

    def __init__(self, samples: Tensor, shared: tuple[bool, ...]) -> None:
        self._samples, self._shared = samples, shared

    def init(self) -> State:
        return {}

    def update(self, state: State, batch: Batch) -> None:
        first, last = torch.searchsorted(
            self._samples, torch.tensor([batch.start, batch.start + batches.size(batch.inputs)])
        ).tolist()
        shared = batches.shared(batch.inputs)  # of one sample alone not all are known to be
        shared = self._shared if len(shared) == len(self._shared) else shared
        copies = [x.clone() if same else x for x, same in zip(batches.tensors(batch.inputs), shared, strict=True)]
        for place in self._samples[first:last].tolist():
            at = place - batch.start
            leaves, nest = batches.flatten(batches.take(batch.inputs, slice(at, at + 1)))
            state[f"{place}/nest"] = torch.tensor(list(nest.encode()), dtype=torch.uint8)
            state[f"{place}/label"] = class_labels(batch.inputs, batch.targets)[at : at + 1]
            state[f"{place}/shared"] = torch.tensor(shared)
            for i, leaf in enumerate(leaves):
                state[f"{place}/{i}"] = copies[i] if shared[i] else leaf.clone()  # a view would keep the batch

    def labels(self, state: State) -> Tensor:
        """Returns the class labels of the chosen samples, -1 where there are none."""
        return torch.cat([state[f"{place}/label"] for place in self._samples.tolist()])

    def groups(self, state: State) -> tuple[Any, ...]:
        """Returns the inputs in the order of the loader, joined while their shapes and nesting agree."""
        found: list[tuple[tuple[str, list[bool]], list[list[Tensor]]]] = []
        for place in self._samples.tolist():
            kind = bytes(state[f"{place}/nest"].tolist()).decode(), state[f"{place}/shared"].tolist()
            leaves: list[Tensor] = []
            while f"{place}/{len(leaves)}" in state:
                leaves.append(state[f"{place}/{len(leaves)}"])
            if found and found[-1][0] == kind and _joinable(found[-1][1][-1], leaves, kind[1]):
                found[-1][1].append(leaves)
            else:
                found.append((kind, [leaves]))
        return tuple(group for (nest, shared), parts in found for group in _joined(nest, shared, parts))


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
