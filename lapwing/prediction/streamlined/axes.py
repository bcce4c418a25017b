"""The dimensions of each value: samples, positions and channels.

A network may transpose a batch, or merge it with heads or positions. Positions are the dimensions along which entries
belong to the same channel of their layer; the labels of the table of operations give the channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...data.inputs import Inputs
from ...errors import LapwingError
from .graph import Graph, execute
from .moments import Layout
from .operations import broadcast, operation_of, same_along, shape_of
from .schedule import Schedule


@dataclass(frozen=True)
class SampleAxes:
    """The dimension of the samples in each value that has samples. It may be merged with other dimensions."""

    dims: Mapping[str, int]
    fastest: frozenset[str] = frozenset()
    """Names of the values in which the samples vary fastest along a merged dimension; in others slowest."""

    def _cut(self, name: str, length: int, samples: int) -> tuple[tuple[int, int], int]:
        """Returns the sizes of the two parts of the dimension, and the index of the part with the samples."""
        rest = length // samples
        return ((rest, samples), 1) if name in self.fastest else ((samples, rest), 0)

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


def read_axes(graph: Graph, inputs: Inputs) -> SampleAxes:
    """Returns the dimension of the samples in every value, found by the symbolic length of the batch."""
    symbol = _batch_length(graph)
    if not isinstance(symbol, str):
        raise LapwingError(
            f"The forward of {graph.network} accepts batches of one size only, but covariances, and calls without a "
            "moment rule, need to tell the samples apart. Write a forward for batches of any size. Or predict with "
            "via=lw.Linearized()."
        )
    dims: dict[str, int] = {}
    shared: list[str] = []
    for node in _nodes(graph):
        for dim, length in enumerate(node.meta["val"].shape):
            if isinstance(length, torch.SymInt) and symbol in map(str, length.node.expr.free_symbols):
                dims[node.name] = dim
                if str(length.node.expr) != symbol:
                    shared.append(node.name)
                break
    if not shared:
        return SampleAxes(dims)
    # in shared dimensions the order of samples is the one in which the first of two has no NaN of the second
    pair = torch.tensor((0, inputs.samples - 1), device=inputs.tensors[0].device)
    values = _with_nan(graph, inputs.take(pair), {n: dim for n, dim in dims.items() if n not in shared})
    fastest = set[str]()
    for name in shared:
        for order in (SampleAxes(dims), SampleAxes(dims, frozenset([name]))):
            if not order.flat(name, values[name], 2)[0].isnan().any():
                fastest.update(order.fastest)
                break
        else:
            raise LapwingError(
                f"{graph.network} merges its samples between other dimensions, in the value {name}, so streamlined "
                "prediction cannot tell them apart. Merge the batch first or last. Or predict with "
                "via=lw.Linearized()."
            )
    return SampleAxes(dims, frozenset(fastest))


def _nodes(graph: Graph) -> list[fx.Node]:
    """Returns the inputs and calls whose values are tensors with dimensions."""
    placeholders = [node for node in graph.nodes[0].graph.nodes if node.op == "placeholder"]
    return [node for node in (*placeholders, *graph.nodes) if node.name not in graph.tensors and shape_of(node)]


def _batch_length(graph: Graph) -> int | str:
    """Returns the length of the batch, or its symbol if it may vary."""
    return next(shape[0] for shape in graph.shapes if shape)


def _axes_of_fixed_batch(graph: Graph, inputs: Inputs) -> SampleAxes:
    """Returns the values whose first dimension has the samples, for a batch of fixed size: NaN stays in its sample."""
    count = inputs.samples
    dims = {node.name: 0 for node in _nodes(graph) if shape_of(node)[0] == count}
    values = _with_nan(graph, inputs, dims)
    nan = {name: values[name].isnan().reshape(count, -1).any(1) for name in dims}
    return SampleAxes({name: 0 for name, found in nan.items() if found[-1] and not found[:-1].any()})


def _with_nan(graph: Graph, inputs: Inputs, dims: Mapping[str, int]) -> dict[str, Any]:
    """Runs the calls with NaN in the last sample of floating-point inputs, and of values looked up by integers."""

    def with_nan(name: str, x: Tensor) -> Tensor:
        last = x.shape[dims[name]] - 1
        return x.index_fill(dims[name], torch.tensor([last], device=x.device), torch.nan)

    values = graph.bind(inputs)
    for name in values.keys() & dims.keys():
        if values[name].is_floating_point():
            values[name] = with_nan(name, values[name])
    with torch.no_grad():
        for node in graph.nodes:
            value = execute(node, values)
            sources = [values[source.name] for source in node.all_input_nodes if source.name in dims]
            looked_up = bool(sources) and not any(source.is_floating_point() for source in sources)
            if looked_up and node.name in dims and value.is_floating_point():
                value = with_nan(node.name, value)
            values[node.name] = value
    return values


def read_layouts(schedule: Schedule, graph: Graph, inputs: Inputs) -> dict[str, Layout]:
    """Returns the dimensions of every uncertain value by its labels, if samples are not merged between dimensions."""
    symbol = _batch_length(graph)
    try:
        axes = read_axes(graph, inputs) if isinstance(symbol, str) else _axes_of_fixed_batch(graph, inputs)
    except LapwingError:
        return {}
    labels: dict[str, Any] = {}
    layouts: dict[str, Layout] = {}
    for step in schedule.steps:
        name, value = step.node.name, step.node.meta.get("val")
        if not step.uncertain:
            continue
        label_of = (None if step.fused else operation_of(step.node).label) or broadcast
        label = label_of(step.node, {source: labels[source] for source in step.uncertain if source in labels})
        if label is None:
            continue
        labels[name] = label
        if not isinstance(label, Tensor) or not isinstance(value, Tensor) or name not in axes.dims:
            continue
        batch = axes.dims[name]
        length: Any = value.shape[batch]
        alone = isinstance(length, int) or str(length) == symbol
        merged = "" if alone or not same_along(label, batch) else "fastest" if name in axes.fastest else "slowest"
        positions = [d for d in range(label.ndim) if d != batch and label.shape[d] > 1 and same_along(label, d)]
        channels = label
        for dim in (batch, *positions):
            channels = channels.narrow(dim, 0, 1)
        layouts[name] = Layout(batch, merged, tuple(positions), channels.long())
    return layouts
