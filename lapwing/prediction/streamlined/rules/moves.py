"""Calls that move entries, their variances and the numbers of their channels, and pooling."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ..moments import Moments, Value, mean_of, sum_correlation
from ..operations import OPERATIONS, Kind, Operation, broadcast, length_of, named, register_aten, same_along, shape_of
from ..sites import Site
from .elementwise import one


def moved(site: Site, arguments: dict[str, Any]) -> Value:
    """Applies the call to means and variances. Certain tensors among its arguments have variance 0."""
    uncertain = [value for value in pytree.tree_leaves(arguments) if isinstance(value, Moments)]
    mean, variance = (_apply(site, arguments, part) for part in (mean_of, _variance))
    rho: Any = None
    if any(x.correlation is not None for x in uncertain):
        rho = _apply(site, arguments, _correlation)
    origin = uncertain[0].origin if len(uncertain) == 1 else None
    if isinstance(mean, (tuple, list)):
        rest = zip(mean, variance, rho or [None] * len(mean), strict=True)
        return tuple(Moments(*parts, origin) for parts in rest)
    return Moments(mean, variance, rho, origin)


def _apply(site: Site, arguments: dict[str, Any], part: Any) -> Any:
    """Applies the call to one part of the moments of its arguments."""
    parts: dict[str, Any] = pytree.tree_map(part, arguments)
    if "value" in parts and part is not mean_of:  # constant padding is certain
        parts["value"] = 0
    return site.apply(parts)


def _variance(value: Any) -> Any:
    return value.variance if isinstance(value, Moments) else _zeros(value)


def _correlation(value: Any) -> Any:
    if not isinstance(value, Moments):
        return _zeros(value)
    return _zeros(value.variance) if value.correlation is None else value.correlation.expand_as(value.variance)


def _zeros(value: Any) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return torch.zeros_like(value) if floats else value


def moved_label(node: fx.Node, labels: Mapping[str, Any]) -> Any:
    """Applies the call to labels. Entries of certain tensors have the label -1."""
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
    if "value" in kwargs:  # of padding
        kwargs = {**kwargs, "value": 0}
    return node.target(*args, **kwargs)  # type: ignore[operator]


def joined_label(node: fx.Node, labels: Mapping[str, Any]) -> Any:
    """Returns the labels of joined tensors. Joined along positions they are the labels of one fully labelled part."""
    arguments = named(node)
    dim, shape = arguments["dim"], shape_of(node)
    for part in arguments["tensors"]:
        label = labels.get(part.name)
        if isinstance(label, Tensor) and label.ndim > 1 and not bool((label == -1).any()):
            if same_along(label, dim):
                return label.narrow(dim, 0, 1).expand(shape)
            break
    return moved_label(node, labels)


# ---- means and maxima of windows


def averaged(site: Site, arguments: dict[str, Any]) -> Moments:
    """Returns the moments of window means: the mean of the variances over the window's divisor."""
    x: Moments = arguments["self"]

    def apply(x: Tensor) -> Tensor:
        return site.apply(arguments, self=x)

    divisors = _divisors(site, arguments, x.mean)
    if x.correlation is None:
        return Moments(apply(x.mean), apply(x.variance) / divisors)
    common = apply(x.common).square()
    variance = common + apply(x.individual) / divisors
    return Moments(apply(x.mean), variance, sum_correlation(variance, [(common, 1.0)]))


def _divisors(site: Site, arguments: dict[str, Any], x: Tensor) -> Tensor:
    """Returns the divisor of each window's sum (*grid): the number of its entries over its mean of ones.

    The lengths come from the variance of the indices in a window, which is `(n² - 1)/12` for length n.
    """
    windows: Any = arguments.get("kernel_size", arguments.get("output_size"))
    sizes = tuple(x.shape[-len(windows) :])

    def make() -> Tensor:
        ones = torch.ones(1, *sizes, dtype=torch.double)
        mean = site.apply(arguments, self=ones)
        count = torch.ones_like(mean)
        for dim in range(1, ones.ndim):
            place = ones.cumsum(dim)
            first, second = (site.apply(arguments, self=power) / mean for power in (place, place.square()))
            count = count * (12 * (second - first.square()) + 1).sqrt().round()
        return (count / mean)[0].to(x)

    return site.constant(f"divisors {sizes} {x.dtype}", make)


def won(site: Site, arguments: dict[str, Any], pool: Callable[..., Any]) -> Any:
    """Returns the moments of the entry with the largest mean in each window; adaptive pools return its index too."""
    x: Moments = arguments["self"]
    _, index = pool(x.mean, return_indices=True, **{n: value for n, value in arguments.items() if n != "self"})
    adaptive = "output_size" in arguments
    space = len(arguments["output_size" if adaptive else "kernel_size"])
    moments = x.moved(lambda part: part.flatten(-space).gather(-1, index.flatten(-space)).reshape(index.shape))
    return (moments, index) if adaptive else moments


def largest(site: Site, arguments: dict[str, Any], find: Callable[..., Any], indexed: bool) -> Any:
    """Returns the moments of the entry along a dimension that torch.max or torch.min finds, and its index if asked."""
    x: Moments = arguments["self"]
    dims = arguments.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(x.mean.ndim))
    if len(dims) > 1:
        raise site.refusal("it is a maximum over several dimensions", "Take maxima over one dimension after another.")
    best = find(x.mean, dims[0], keepdim=True)
    parts = (best.values, x.variance.gather(dims[0], best.indices), best.indices)
    mean, variance, index = (part if arguments["keepdim"] else part.squeeze(dims[0]) for part in parts)
    moments = Moments(mean, variance)
    return (moments, index) if indexed else moments


def _window_label(node: fx.Node, labels: Mapping[str, Any]) -> Any:
    """Returns the channels of windows, which are the channels of their entries."""
    label = next(iter(labels.values()), None)
    return None if label is None else label[(..., *(slice(0, 1),) * (label.ndim - 2))].expand(shape_of(node))


# ---- the table


def _moves(*names: str, kind: Kind = Kind.OTHER) -> None:
    register_aten(Operation(kind, moved, moved_label), *names)


_moves(
    "reshape.default", "flatten.using_ints", "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims",
    kind=Kind.VIEW | Kind.ORDERED,
)  # fmt: skip
_moves("unflatten.int", "transpose.int", "permute.default", kind=Kind.VIEW)
_moves("slice.Tensor", kind=Kind.ORDERED | Kind.PICK)
_moves(
    "select.int", "narrow.default", "index.Tensor", "index_select.default", "roll.default", "flip.default",
    kind=Kind.PICK,
)  # fmt: skip
_moves(
    "movedim.int", "movedim.intlist", "t.default", "numpy_T.default", "mT.default", "view_as.default",
    "reshape_as.default", "gather.default", "take_along_dim.default", "split.Tensor", "split.sizes",
    "split_with_sizes.default", "chunk.default", "unbind.int", "tensor_split.sections", "stack.default",
    "repeat.default", "tile.default", "repeat_interleave.self_int",
    "pixel_shuffle.default", "pixel_unshuffle.default", "channel_shuffle.default", "im2col.default", "unfold.default",
    "upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec", "diagonal.default", "tril.default",
    "triu.default", "rot90.default", "swapaxes.default", "swapdims.default", "hstack.default", "vstack.default",
    "select_copy.int", "masked_select.default", "adjoint.default", "pad.default", "constant_pad_nd.default",
)  # fmt: skip
register_aten(Operation(Kind.JOIN, moved, joined_label), "cat.default", "concat.default", "concatenate.default")
register_aten(
    Operation(Kind.ELEMENTWISE | Kind.IDENTITY, moved, moved_label, one), "clone.default", "contiguous.default"
)
register_aten(Operation(Kind.ELEMENTWISE | Kind.VIEW, moved, moved_label, one), "expand.default", "expand_as.default")
OPERATIONS[operator.getitem] = Operation(Kind.OTHER, lambda site, a: a["0"][a["1"]], moved_label, one)
register_aten(
    Operation(Kind.OTHER, averaged, _window_label),
    "avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default", "adaptive_avg_pool1d.default",
    "adaptive_avg_pool2d.default", "adaptive_avg_pool3d.default",
)  # fmt: skip
for _space in (1, 2, 3):
    for _name, _label in ((f"max_pool{_space}d", _window_label), (f"adaptive_max_pool{_space}d", broadcast)):
        register_aten(Operation(Kind.OTHER, partial(won, pool=getattr(F, _name)), _label), f"{_name}.default")
for _name, _find in (("max", torch.max), ("min", torch.min)):
    _found = partial(largest, find=_find)
    register_aten(Operation(Kind.STATISTIC, partial(_found, indexed=False), broadcast), f"a{_name}.default")
    register_aten(Operation(Kind.OTHER, partial(_found, indexed=True), broadcast), f"{_name}.dim")
