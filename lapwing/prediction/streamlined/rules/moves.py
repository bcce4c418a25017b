"""Calls that only move entries: the same call on means, on variances, and on the numbers of their channels."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..moments import Moments, Value, mean_of
from ..operations import OPERATIONS, Kind, Operation, length_of, named, register_aten, same_along, shape_of
from ..sites import RESHAPED, Site
from .elementwise import one


def moved(site: Site, arguments: dict[str, Any]) -> Value:
    """Applies the call to means and variances alike; certain tensors among several have variances of 0."""
    uncertain = [value for value in _flat(arguments.values()) if isinstance(value, Moments)]
    mean, variance = (_apply(site, arguments, part) for part in (mean_of, _variance))
    rho: Any = None
    if any(x.correlation is not None for x in uncertain):
        rho = _apply(site, arguments, _correlation)
    origin = uncertain[0].origin if len(uncertain) == 1 else None
    if isinstance(mean, (tuple, list)):
        rest = zip(mean, variance, rho or [None] * len(mean), strict=True)
        return tuple(Moments(*parts, origin) for parts in rest)
    return Moments(mean, variance, rho, origin)


def padded(site: Site, arguments: dict[str, Any]) -> Value:
    """Pads: a constant has a variance of 0, what is repeated keeps its variance."""
    x, constant = arguments["self"], {**arguments, "value": 0}
    rho = None if x.correlation is None else site.apply(constant, self=x.full_correlation)
    return Moments(site.apply(arguments, self=x.mean), site.apply(constant, self=x.variance), rho)


def picked(site: Site, arguments: dict[str, Any]) -> Value:
    """Picks one of several tensors."""
    return arguments["0"][arguments["1"]]


def _flat(values: Any) -> list[Any]:
    return [v for value in values for v in (value if isinstance(value, (tuple, list)) else (value,))]


def _apply(site: Site, arguments: dict[str, Any], part: Any) -> Any:
    """Runs the call on one part of the moments of its arguments."""
    parts: dict[str, Any] = {
        name: [part(item) for item in value] if isinstance(value, (tuple, list)) else part(value)
        for name, value in arguments.items()
    }
    if site.node.target in RESHAPED:
        return parts["self"].reshape(arguments["size"])
    return site.apply(parts)


def _variance(value: Any) -> Any:
    return value.variance if isinstance(value, Moments) else _zeros(value)


def _correlation(value: Any) -> Any:
    if not isinstance(value, Moments):
        return _zeros(value)
    return _zeros(value.variance) if value.correlation is None else value.full_correlation


def _zeros(value: Any) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return torch.zeros_like(value) if floats else value


def moved_label(node: fx.Node, labels: Mapping[str, Any]) -> Any:
    """Runs the call on labels; entries from elsewhere have the label -1."""
    if not labels:
        return None

    def label_of(leaf: fx.Node) -> Any:
        if leaf.name in labels:
            return labels[leaf.name]
        value = leaf.meta.get("val")
        if not isinstance(value, Tensor):
            return None if value is None else length_of(value)
        if value.is_floating_point():
            return torch.full(shape_of(leaf), -1.0, dtype=torch.double)
        return torch.zeros(shape_of(leaf), dtype=torch.long)

    mapped: Any = fx.map_arg((node.args, node.kwargs), label_of)
    args, kwargs = mapped
    if node.target in RESHAPED:
        return args[0].reshape(args[1])
    if "value" in kwargs:  # of padding
        kwargs = {**kwargs, "value": 0}
    return node.target(*args, **kwargs)  # type: ignore[operator]


def joined_label(node: fx.Node, labels: Mapping[str, Any]) -> Any:
    """Returns the labels of joined tensors; along positions those of one part that has labels throughout."""
    arguments = named(node, node.args, node.kwargs)
    dim, shape = arguments["dim"], shape_of(node)
    for part in arguments["tensors"]:
        label = labels.get(part.name)
        if isinstance(label, Tensor) and label.ndim > 1 and not bool((label == -1).any()):
            if same_along(label, dim):
                return label.narrow(dim, 0, 1).expand(shape)
            break
    return moved_label(node, labels)


def _moves(*names: str, kind: Kind = Kind.OTHER) -> None:
    register_aten(Operation(Kind.MOVE | kind, moved, moved_label), *names)


_moves(
    "view.default", "_unsafe_view.default", "reshape.default", "flatten.using_ints", "unsqueeze.default",
    "squeeze.default", "squeeze.dim", "squeeze.dims", kind=Kind.VIEW | Kind.ORDERED,
)  # fmt: skip
_moves("unflatten.int", "transpose.int", "permute.default", kind=Kind.VIEW)
_moves("slice.Tensor", kind=Kind.ORDERED)  # where it leaves nothing out
_moves(
    "movedim.int", "movedim.intlist", "t.default", "numpy_T.default", "mT.default", "select.int", "narrow.default",
    "view_as.default", "reshape_as.default", "index.Tensor", "index_select.default", "gather.default", "split.Tensor",
    "split.sizes", "split_with_sizes.default", "chunk.default", "unbind.int", "tensor_split.sections",
    "stack.default", "roll.default", "flip.default", "repeat.default", "tile.default", "repeat_interleave.self_int",
    "pixel_shuffle.default", "pixel_unshuffle.default", "channel_shuffle.default", "im2col.default", "unfold.default",
    "upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec", "diagonal.default", "tril.default",
    "triu.default", "rot90.default", "swapaxes.default", "swapdims.default", "hstack.default", "vstack.default",
    "take_along_dim.default", "select_copy.int", "masked_select.default", "adjoint.default",
)  # fmt: skip
register_aten(Operation(Kind.MOVE, moved, joined_label), "cat.default", "concat.default", "concatenate.default")
register_aten(
    Operation(Kind.MOVE | Kind.ELEMENTWISE | Kind.IDENTITY, moved, moved_label, one), "clone.default",
    "contiguous.default",
)  # fmt: skip
register_aten(
    Operation(Kind.MOVE | Kind.ELEMENTWISE | Kind.VIEW, moved, moved_label, one), "expand.default", "expand_as.default"
)
register_aten(Operation(Kind.MOVE, padded, moved_label), "pad.default", "constant_pad_nd.default")
OPERATIONS[operator.getitem] = Operation(Kind.MOVE, picked, moved_label, one)
