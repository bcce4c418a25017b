"""Moments through calls that only move entries: the same call on means and on variances."""

from __future__ import annotations

import operator
from typing import Any

import torch

from .fusion import aten
from .moments import Moments, Rule, Site, Value, mean_of


def moved(site: Site, given: dict[str, Any]) -> Value:
    """Applies the call to means and variances alike; certain tensors among several have variances of 0."""
    mean = _apply(site, {name: _map(mean_of, value) for name, value in given.items()})
    variance = _apply(site, {name: _map(_variance, value) for name, value in given.items()})
    rho: Any = None
    if site.layouts and any(x.correlation is not None for x in _uncertain(given)):
        rho = _apply(site, {name: _map(_correlation, value) for name, value in given.items()})
    if isinstance(mean, (tuple, list)):
        rest = zip(mean, variance, rho or [None] * len(mean), strict=True)
        return tuple(Moments(*parts, _origin(given)) for parts in rest)
    return Moments(mean, variance, rho, _origin(given))


def padded(site: Site, given: dict[str, Any]) -> Value:
    """Pads: a constant has a variance of 0, what is repeated has its own."""
    x = given["self"]
    mean = _apply(site, {**given, "self": x.mean})
    variance = _apply(site, {**given, "self": x.variance, "value": 0})
    if x.correlation is None:
        return Moments(mean, variance)
    return Moments(mean, variance, _apply(site, {**given, "self": _correlation(x), "value": 0}))


def picked(site: Site, given: dict[str, Any]) -> Value:
    """Picks one of several tensors."""
    return given["0"][given["1"]]


def _apply(site: Site, given: dict[str, Any]) -> Any:
    if "size" in given and site.node.target in (aten.view.default, aten._unsafe_view.default):
        return given["self"].reshape(given["size"])
    return site.node.target(**given)  # type: ignore[operator]


def _map(function: Any, value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_map(function, item) for item in value]
    return function(value)


def _variance(value: Any) -> Any:
    if isinstance(value, Moments):
        return value.variance
    return _zeros(value)


def _correlation(value: Any) -> Any:
    if isinstance(value, Moments) and value.correlation is not None:
        return value.correlation.expand_as(value.variance)
    return _zeros(value.variance if isinstance(value, Moments) else value)


def _zeros(value: Any) -> Any:
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return torch.zeros_like(value) if floats else value


def _origin(given: dict[str, Any]) -> Any:
    """Returns where entries come from, if it is one place."""
    found = _uncertain(given)
    return found[0].origin if len(found) == 1 else None


def _uncertain(given: dict[str, Any]) -> list[Moments]:
    found: list[Moments] = []
    for value in given.values():
        found.extend(v for v in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(v, Moments))
    return found


_MOVES = (
    "view.default", "_unsafe_view.default", "reshape.default", "flatten.using_ints", "unflatten.int", "transpose.int",
    "permute.default", "movedim.int", "movedim.intlist", "t.default", "numpy_T.default", "mT.default", "select.int",
    "slice.Tensor", "narrow.default", "expand.default", "expand_as.default", "view_as.default", "reshape_as.default",
    "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "index.Tensor", "index_select.default",
    "gather.default", "split.Tensor", "split.sizes", "split_with_sizes.default", "chunk.default", "unbind.int",
    "tensor_split.sections", "cat.default", "concat.default", "concatenate.default", "stack.default", "roll.default",
    "flip.default", "repeat.default", "tile.default", "repeat_interleave.self_int", "pixel_shuffle.default",
    "pixel_unshuffle.default", "channel_shuffle.default", "im2col.default", "unfold.default", "contiguous.default",
    "clone.default", "upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec", "diagonal.default",
    "tril.default", "triu.default", "rot90.default", "swapaxes.default", "swapdims.default", "hstack.default",
    "vstack.default", "take_along_dim.default", "select_copy.int", "masked_select.default", "adjoint.default",
)  # fmt: skip


def _find(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload, None)


RULES: dict[Any, Rule] = {
    **{target: moved for target in map(_find, _MOVES) if target is not None},
    **{target: padded for target in (aten.pad.default, aten.constant_pad_nd.default)},
    operator.getitem: picked,
}
