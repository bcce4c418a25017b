"""Heads that act on every position and are then read at one: the position is picked first, which is the same.

`linear(x)[:, t] = linear(x[:, t])`, and the mean over positions of a linear layer is the layer of the mean. In this
order the head's weights act once a sample, so that their covariances count in full.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from .fusion import aten


def pick_first(graph: fx.Graph) -> None:
    """Moves picks of positions, and means over them, before the linear layer that they read, in place."""
    changed = True
    while changed:
        changed = any([_moved(graph, node) for node in list(graph.nodes) if node.target is aten.linear.default])


def _moved(graph: fx.Graph, layer: fx.Node) -> bool:
    readers = [user for user in layer.users if user.target is not aten.sym_size.int]
    value = layer.meta.get("val")
    if len(readers) != 1 or len(layer.users) != 1 or not isinstance(value, Tensor):
        return False
    (reader,), x = readers, layer.args[0]
    if not isinstance(x, fx.Node) or not _leaves_features(reader, layer, value.ndim):
        return False
    with graph.inserting_before(reader):
        picked = graph.call_function(reader.target, (x, *reader.args[1:]), dict(reader.kwargs))  # type: ignore[arg-type]
        args, kwargs = fx.map_arg((picked.args, picked.kwargs), lambda node: node.meta["val"])
        picked.meta = {**reader.meta, "val": picked.target(*args, **kwargs)}  # type: ignore[operator]
        applied = graph.call_function(layer.target, (picked, *layer.args[1:]), dict(layer.kwargs))  # type: ignore[arg-type]
        applied.meta = {**layer.meta, "val": reader.meta["val"]}
    reader.replace_all_uses_with(applied)
    graph.erase_node(reader)
    graph.erase_node(layer)
    return True


def _leaves_features(reader: fx.Node, layer: fx.Node, ndim: int) -> bool:
    """Whether a call picks, or averages, along other dimensions than the last."""
    if not reader.args or reader.args[0] is not layer:
        return False
    arguments: Any = reader.args
    if reader.target in (aten.select.int, aten.slice.Tensor):
        return (arguments[1] if len(arguments) > 1 else 0) % ndim != ndim - 1
    if reader.target is aten.index.Tensor:
        return len(arguments[1]) < ndim and all(isinstance(index, fx.Node) for index in arguments[1])
    if reader.target is aten.mean.dim:
        dims: Any = arguments[1] if len(arguments) > 1 else reader.kwargs.get("dim")
        return bool(dims) and all(dim % ndim != ndim - 1 for dim in dims) and "dtype" not in reader.kwargs
    return False
