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
from .graph import Graph, execute, run_all


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
    pairs = [batches.take(inputs, torch.tensor(pair, device=device)) for pair in ((0, last), (0, 0))]
    with torch.no_grad():
        first, second = _run_moved(graph, pairs[0], rows.dims, shared), run_all(graph, pairs[1])
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


def first_rows(graph: Graph, inputs: Any) -> Rows:
    """Finds the values whose first dimension is the samples', where the batch has a fixed size.

    Args:
        graph: the network's calls.
        inputs: B samples.

    Returns:
        The values that are the same along that dimension when all samples are, with the first as it was.

    Cost: two passes.
    """
    count = batches.size(inputs)
    device = next(iter(graph.tensors.values())).device
    with torch.no_grad():
        mixed = run_all(graph, inputs)
        alike = run_all(graph, batches.take(inputs, torch.zeros(count, dtype=torch.long, device=device)))
    found = {}
    for name, value in mixed.items():
        if not isinstance(value, Tensor) or name in graph.tensors or value.shape[:1] != (count,):
            continue
        same = alike[name].double()
        if torch.allclose(same, value[:1].double().expand_as(same), rtol=1e-3, atol=1e-6, equal_nan=True):
            found[name] = 0
    return Rows(found)


def _run_moved(graph: Graph, pair: Any, dims: Mapping[str, int], shared: list[str]) -> dict[str, Any]:
    """Runs the calls on two samples, the second made another one in case they are equal: integers where looked up."""
    values = graph.bind(_moved(pair))
    for node in graph.nodes:
        value = execute(node, lambda n: values[n.name])
        sources = [values[source.name] for source in node.all_input_nodes if source.name in dims]
        looked_up = bool(sources) and not any(source.is_floating_point() for source in sources)
        if looked_up and node.name in dims and node.name not in shared and value.is_floating_point():
            value = _other(value, dims[node.name])
        values[node.name] = value
    return values


def _moved(inputs: Any) -> Any:
    """Makes the second of two samples another one, where the inputs are real numbers."""

    def move(leaf: Any) -> Any:
        return _other(leaf, 0) if isinstance(leaf, Tensor) and leaf.ndim and leaf.is_floating_point() else leaf

    return pytree.tree_map(move, inputs)


def _other(x: Tensor, dim: int) -> Tensor:
    """Returns two samples, the second changed, also where it is constant and would be normalised."""
    first, second = x.narrow(dim, 0, 1), x.narrow(dim, 1, 1)
    ramp = torch.linspace(0.25, 1.0, second.shape[-1], dtype=x.dtype, device=x.device)
    return torch.cat([first, second.flip(-1) * 0.5 + ramp], dim)
