"""Where the samples are in each value of a network: a batch may be transposed, or merged with heads or positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ... import batches
from ...errors import LapwingError
from .graph import Graph, run_all


@dataclass(frozen=True)
class Rows:
    """The dimension of the samples in each value that has them, which may be merged with others.

    Attributes:
        dims: name of a value -> dimension.
        fastest: names of the values where the samples run fastest in that dimension; elsewhere slowest.
    """

    dims: Mapping[str, int]
    fastest: frozenset[str] = frozenset()

    def _cut(self, name: str, length: int, samples: int) -> tuple[tuple[int, int], int]:
        """Returns the sizes of the dimension's two parts, and which of them holds the samples."""
        others = length // samples
        return ((others, samples), 1) if name in self.fastest else ((samples, others), 0)

    def flat(self, name: str, x: Tensor, samples: int) -> Tensor:
        """Returns a value as (B, n)."""
        return self.columns(name, x[None], samples)[..., 0]

    def columns(self, name: str, x: Tensor, samples: int) -> Tensor:
        """Returns K tensors of a value's shape, (K, *shape), as (B, n, K)."""
        dim = self.dims[name] + 1
        sizes, place = self._cut(name, x.shape[dim], samples)
        return x.unflatten(dim, sizes).movedim(dim + place, 0).flatten(2).mT  # (B, K, n) transposed

    def tensors(self, name: str, columns: Tensor, shape: torch.Size) -> Tensor:
        """Returns (B, n, K) as (K, *shape), the inverse of `columns`."""
        dim, (samples, _, count) = self.dims[name], columns.shape
        sizes, place = self._cut(name, shape[dim], samples)
        rest = (*shape[:dim], sizes[1 - place], *shape[dim + 1 :])
        x = columns.permute(2, 0, 1).reshape(count, samples, *rest)
        return x.movedim(1, dim + 1 + place).flatten(dim + 1, dim + 2)


def read_rows(graph: Graph, inputs: Any, network: str) -> Rows:
    """Finds the samples' dimension of every value by the length that stands for the batch, and checks it.

    Args:
        graph: the network's calls.
        inputs: B samples.
        network: name of the network's class.

    Raises:
        LapwingError: a batch of a fixed size; samples in the midst of a dimension that they share.

    Cost: two passes of two samples where a dimension is shared.
    """
    leaves = [shape for shape in graph.shapes if shape]
    symbol = leaves[0][0]
    if not isinstance(symbol, str):
        raise LapwingError(
            f"Asked for streamlined prediction through {network}, found a forward that takes batches of one size only, "
            "where covariances, or a call without a moment rule, need to know the samples; accepted is a forward that "
            "takes batches of any size: write via=lw.Linearized() instead."
        )
    dims: dict[str, int] = {}
    shared: list[str] = []
    placeholders = [node for node in graph.nodes[0].graph.nodes if node.op == "placeholder"]
    for node in (*placeholders, *graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.ndim or node.name in graph.tensors:
            continue
        for dim, length in enumerate(value.shape):
            if isinstance(length, torch.SymInt) and symbol in map(str, length.node.expr.free_symbols):
                dims[node.name] = dim
                if str(length.node.expr) != symbol:
                    shared.append(node.name)
                break
    return _checked(graph, inputs, Rows(dims), shared, network) if shared else Rows(dims)


def _checked(graph: Graph, inputs: Any, rows: Rows, shared: list[str], network: str) -> Rows:
    """Finds how the samples run where they share a dimension: another second sample must leave the first as it is."""
    last, device = batches.size(inputs) - 1, next(iter(graph.tensors.values())).device
    if last == 0:
        other = batches.take(inputs, torch.zeros(2, dtype=torch.long, device=device))
        inputs, last = _moved(other), 1
    pairs = [torch.tensor(pair, device=device) for pair in ((0, last), (0, 0))]
    with torch.no_grad():
        first, second = (run_all(graph, batches.take(inputs, pair)) for pair in pairs)
    fastest = set[str]()
    for name in shared:
        for way in (Rows(rows.dims), Rows(rows.dims, frozenset([name]))):
            found = [way.flat(name, values[name], 2)[0] for values in (first, second)]
            if torch.allclose(found[0].double(), found[1].double(), rtol=1e-3, atol=1e-6, equal_nan=True):
                fastest.update(way.fastest)
                break
        else:
            raise LapwingError(
                f"Asked for streamlined prediction through {network}, found a value ({name}) in which the samples are "
                "merged between other dimensions; accepted is a batch that is merged first or last: write "
                "via=lw.Linearized() instead."
            )
    return Rows(rows.dims, frozenset(fastest))


def _moved(inputs: Any) -> Any:
    """Makes the second of two equal samples another one, where the inputs are real numbers."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim or not leaf.is_floating_point():
            return leaf
        return torch.cat([leaf[:1], leaf[1:].flip(-1) * 0.5 + 0.25])

    return pytree.tree_map(move, inputs)
