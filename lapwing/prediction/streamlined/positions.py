"""Positions that share a layer's weights: which dimensions of each value they are, and how far they move together.

Entries of one channel at positions t and t' are taken to have the covariance `√(ρ_t v_t) √(ρ_t' v_t')`, with ρ in
[0, 1] carried beside the variances v. A layer sets ρ so that the mean over its positions has the right variance,

    ρ (mean_t √v_t)² + (1 - ρ) mean_t v_t / T
        = Σ_ii' ā_i ā_i' Cov[W_ji, W_ji'] + Σ_c (Σ_k W_jck)² (mean_t √(ρ_ct v_ct))² + Σ_ck W_jck² mean_t e_ct / T,

with `e = (1 - ρ) v` and ā the mean of its inputs over positions: what the weights add is exact, and costs as much as
one position more. At functions of one tensor ρ stays; sums take the mean of their sides'; averages and attention take
`√(ρ v)` through as it is, and the rest as independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ...errors import LapwingError
from . import arithmetic, attention, conv, embedding, linear, pooling, shapes
from .fusion import aten
from .graph import Graph
from .layout import Layout
from .plan import Item, Plan
from .rows import first_rows, read_rows


def layouts(plan: Plan, graph: Graph, inputs: Any, network: str) -> dict[str, Layout]:
    """Finds the dimensions of every uncertain value, by the calls that move entries, run on the numbers of channels.

    Args:
        plan: the steps.
        graph: the network's calls.
        inputs: B samples.
        network: name of the network's class.

    Returns:
        Name of a value -> its dimensions; nothing for a network that merges its samples between other dimensions.
    """
    symbol = next(shape[0] for shape in graph.shapes if shape)
    if isinstance(symbol, str):
        try:
            rows = read_rows(graph, inputs, network)
        except LapwingError:
            return {}
    else:
        rows = first_rows(graph, inputs)
    labels: dict[str, Any] = {}
    found: dict[str, Layout] = {}
    for item in plan.items:
        name, value = item.node.name, item.node.meta.get("val")
        label = _label(item, labels) if item.uncertain else None
        if label is None:
            continue
        labels[name] = label
        if not isinstance(label, Tensor) or not isinstance(value, Tensor) or name not in rows.dims:
            continue
        batch = rows.dims[name]
        length: Any = value.shape[batch]
        alone = isinstance(length, int) or str(length) == symbol
        merged = "" if alone or not _constant(label, batch) else "fastest" if name in rows.fastest else "slowest"
        positions = [d for d in range(label.ndim) if d != batch and label.shape[d] > 1 and _constant(label, d)]
        channels = label
        for dim in (batch, *positions):
            channels = channels.narrow(dim, 0, 1)
        found[name] = Layout(batch, merged, tuple(positions), channels.long())
    return found


def _constant(label: Tensor, dim: int) -> bool:
    """Whether entries along a dimension belong to the same channels."""
    return label.stride(dim) == 0 or bool((label == label.narrow(dim, 0, 1)).all())


def _label(item: Item, labels: Mapping[str, Any]) -> Any:
    """Returns the channel that each entry belongs to; None where that is not known, and positions are independent."""
    node, target = item.node, item.node.target
    value = node.meta.get("val")
    shape = [length(n) for n in value.shape] if isinstance(value, Tensor) else []
    known = [name for name in item.uncertain if name in labels]
    if item.fused is None:
        if target in conv.RULES:
            return torch.arange(shape[1], dtype=torch.double).reshape(-1, *(1,) * (len(shape) - 2)).expand(shape)
        if linear.is_layer(node) or target in embedding.RULES:
            return torch.arange(shape[-1], dtype=torch.double).expand(shape)
        if not known:
            return None
        label = labels[known[0]]
        if target in shapes.RULES:
            return _moved(node, labels)
        if target in attention.RULES:
            values: Any = node.args[2]
            return _attended(labels[values.name], shape) if values.name in labels else None
        if target in linear.RULES:
            return _contracted(node, labels)
        if pooling.RULES.get(target) in (pooling.averaged, pooling.won):
            return label[(..., *(slice(0, 1),) * (label.ndim - 2))].expand(shape)
        if target is aten.glu.default:
            dim: int = (*node.args, -1)[1]  # type: ignore[assignment]
            return label.narrow(dim, 0, label.shape[dim] // 2)
        if target in (aten.mean.dim, aten.sum.dim_IntList):
            names = ("self", "dim", "keepdim")
            given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            return label.amax(given.get("dim") or [], keepdim=bool(given.get("keepdim", False)))
    for name in known:
        label = labels[name]
        if not isinstance(label, Tensor) or label.ndim != len(shape):
            continue
        if all(a in (1, b) for a, b in zip(label.shape, shape, strict=True)):
            return label.expand(shape)
    return None


def _attended(label: Tensor, shape: list[int]) -> Tensor | None:
    """Returns the labels of an attention's outputs from those of its values, heads repeated where queries have more."""
    if label.ndim != len(shape) or not _constant(label, -2):
        return None
    label = label.narrow(-2, 0, 1)
    if label.ndim > 3 and label.shape[-3] not in (1, shape[-3]):
        label = label.repeat_interleave(shape[-3] // label.shape[-3], -3)
    return label.expand(shape)


def _contracted(node: fx.Node, labels: Mapping[str, Any]) -> Any:
    """Runs a product on the labels of one side, where it sums over positions alone: attention written by hand."""
    if node.target is aten.einsum.default and len(node.args[1]) != 2:  # type: ignore[arg-type]
        return None
    sides, dims = arithmetic.operands(node), arithmetic.sums(node)
    if dims is None or sum(side.name in labels for side in sides) != 1:
        return None
    parts = []
    for side, summed in zip(sides, dims, strict=True):
        part = labels.get(side.name)
        if part is None:
            part = torch.ones([length(n) for n in side.meta["val"].shape], dtype=torch.double)
        elif not all(_constant(part, dim) for dim in summed):
            return None
        for dim in summed:
            part = part.narrow(dim, 0, 1)
        parts.append(part)
    if node.target is aten.einsum.default:
        return torch.einsum(node.args[0], *parts)
    return parts[0] @ parts[1]


def _moved(node: fx.Node, labels: Mapping[str, Any]) -> Any:
    """Runs a call that moves entries on labels; entries from elsewhere have one of their own."""

    def found(leaf: fx.Node) -> Any:
        if leaf.name in labels:
            return labels[leaf.name]
        value = leaf.meta.get("val")
        if isinstance(value, Tensor):
            integers = not value.is_floating_point()
            return torch.full(
                [length(n) for n in value.shape],
                0 if integers else -1,
                dtype=torch.long if integers else torch.double,
            )
        return value if value is None else length(value)

    mapped: Any = fx.map_arg((node.args, node.kwargs), found)
    args, kwargs = mapped
    if node.target in _VIEWS:  # labels may be laid out otherwise than in the network
        return args[0].reshape(args[1])
    if node.target in _JOINED:  # along positions: the channels of a part that has some
        given = {**dict(zip(("tensors", "dim"), args, strict=False)), **kwargs}
        parts: list[Tensor] = [part for part in given["tensors"] if part.ndim > 1]
        dim: int = given.get("dim", 0)
        first = next((part for part in parts if not bool((part == -1).any())), None)
        if first is not None and _constant(first, dim):
            shape = list(first.shape)
            shape[dim] = sum(part.shape[dim] for part in parts)
            return first.narrow(dim, 0, 1).expand(shape)
    if node.target in _PADS:
        kwargs = {**kwargs, "value": 0} if "value" in kwargs else kwargs
    return node.target(*args, **kwargs)  # type: ignore[operator]


def length(value: Any) -> int:
    """Returns a length, or the one it had when the network was read."""
    return value if isinstance(value, int) else int(value.node.hint or 1)


_JOINED = (aten.cat.default, aten.concat.default, aten.concatenate.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_PADS = (aten.pad.default, aten.constant_pad_nd.default)
