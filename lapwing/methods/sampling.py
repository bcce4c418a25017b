"""Random choice of samples, uniform or balanced over classes, and the inputs that a pass keeps of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..network import batches
from .state import State


def class_labels(inputs: Any, targets: Any) -> Tensor:
    """Returns a batch's class labels (B,) int64 on the CPU, -1 where targets are not labels."""
    if isinstance(targets, Tensor) and targets.ndim == 1 and not (targets.is_floating_point() or targets.is_meta):
        return targets.cpu().long()
    return torch.full((batches.size(inputs),), -1)


def choose(total: int, count: int, generator: torch.Generator) -> Tensor:
    """Returns `count` of the numbers below `total` in random order, without repetition and without O(total) memory."""
    if total <= 2**24 or count > total // 2:
        return torch.randperm(total, generator=generator)[:count]
    drawn = torch.randint(total, (2 * count,), generator=generator)
    values, inverse = drawn.unique(return_inverse=True)
    first = torch.full_like(values, len(drawn)).scatter_reduce_(0, inverse, torch.arange(len(drawn)), "amin")
    return drawn[first.sort().values[:count]]


def choose_balanced(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Returns `count` places in labels (n,), as many of each class as there are, without repetition."""
    order = choose(len(labels), len(labels), generator)
    return order[rank_in_class(labels[order]).argsort(stable=True)[:count]]


def rank_in_class(labels: Tensor) -> Tensor:
    """Returns for each of labels (n,) how many of the same class come before it."""
    counts = labels.unique(return_counts=True)[1]
    before = (counts.cumsum(0) - counts).repeat_interleave(counts)  # samples of lower classes
    rank = torch.empty_like(labels)
    rank[labels.argsort(stable=True)] = torch.arange(len(labels)) - before
    return rank


@dataclass
class KeptInputs(State):
    """Inputs of samples or batches that a pass keeps, each under a key.

    Attributes:
        leaves: tensors, by `key/number`.
        nests: how the tensors nest, JSON as uint8, by key.
        labels: class labels, -1 where targets are not labels, by key.
        shared: which tensors all samples share, by key; empty where that is not kept.
    """

    leaves: dict[str, Tensor] = field(default_factory=dict)
    nests: dict[str, Tensor] = field(default_factory=dict)
    labels: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)

    def keep(self, key: int, leaves: list[Tensor], nest: str, labels: Tensor) -> None:
        """Keeps what `batches.flatten` returns, and the labels."""
        self.leaves |= {f"{key}/{i}": leaf for i, leaf in enumerate(leaves)}
        self.nests[str(key)] = torch.tensor(list(nest.encode()), dtype=torch.uint8)
        self.labels[str(key)] = labels

    def flattened(self, key: int) -> tuple[list[Tensor], str]:
        """Returns the tensors and the nesting that are kept under a key."""
        leaves: list[Tensor] = []
        while f"{key}/{len(leaves)}" in self.leaves:
            leaves.append(self.leaves[f"{key}/{len(leaves)}"])
        return leaves, bytes(self.nests[str(key)].tolist()).decode()
