"""Moments through pooling: means of windows, and the entry that wins a maximum."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from torch import Tensor, fx
from torch.nn import functional as F

from ..moments import Moments, sum_correlation
from ..operations import Kind, Operation, Rule, aten, broadcast, register_aten, shape_of
from ..sites import Site


def averaged(site: Site, arguments: dict[str, Any]) -> Moments:
    """Returns the moments of window means: the mean of the variances over the window's divisor."""
    x: Moments = arguments["self"]

    def apply(x: Tensor) -> Tensor:
        return site.apply(arguments, self=x)

    divisors = _divisors(arguments, x.mean)
    if x.correlation is None:
        return Moments(apply(x.mean), apply(x.variance) / divisors)
    common = apply(x.common).square()
    variance = common + apply(x.individual) / divisors
    return Moments(apply(x.mean), variance, sum_correlation(variance, [(common, 1.0)]))


def _divisors(arguments: dict[str, Any], x: Tensor) -> Tensor | int:
    """Returns what the sum of each window is divided by."""
    if arguments.get("divisor_override") is not None:
        return arguments["divisor_override"]
    if "output_size" in arguments:  # adaptive
        sizes = arguments["output_size"]
        sizes = [sizes] if isinstance(sizes, int) else sizes
        space = len(sizes)
        spans = [_adaptive(n, size) for n, size in zip(x.shape[-space:], sizes, strict=True)]
    else:
        kernel = arguments["kernel_size"]
        space = len(kernel)
        stride, padding = _numbers(arguments["stride"] or kernel, space), _numbers(arguments["padding"], space)
        kernel = _numbers(kernel, space)
        spans = [
            _windows(n, k, s, p, arguments["ceil_mode"], arguments["count_include_pad"])
            for n, k, s, p in zip(x.shape[-space:], kernel, stride, padding, strict=True)
        ]
    counts = x.new_ones(())
    for span in spans:
        counts = counts[..., None] * x.new_tensor(span)
    return counts


def _numbers(value: Any, space: int) -> list[int]:
    value = [value] if isinstance(value, int) else list(value)
    return value * (space if len(value) == 1 else 1)


def _adaptive(length: int, size: int) -> list[int]:
    return [ceil((i + 1) * length / size) - i * length // size for i in range(size)]


def _windows(length: int, kernel: int, stride: int, padding: int, up: bool, include: bool) -> list[int]:
    count = (length + 2 * padding - kernel + (stride - 1 if up else 0)) // stride + 1
    if up and (count - 1) * stride >= length + padding:  # the last window must start inside
        count -= 1
    spans = []
    for i in range(count):
        start = i * stride - padding
        stop = min(start + kernel, length + padding)
        spans.append(stop - start if include else min(stop, length) - max(start, 0))
    return spans


def _won(space: int) -> Rule:
    """Returns the rule of a maximum over windows: the moments of the entry that is largest on average."""
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[space - 1]

    def won(site: Site, arguments: dict[str, Any]) -> Moments:
        x: Moments = arguments["self"]
        options = {name: arguments[name] for name in ("kernel_size", "padding", "dilation", "ceil_mode")}
        mean, index = pool(x.mean, stride=arguments["stride"] or None, return_indices=True, **options)
        return _winners(x, mean, index, space)

    return won


def won_adaptively(site: Site, arguments: dict[str, Any]) -> tuple[Moments, Tensor]:
    """Returns the same for adaptive windows, and the places of the winners."""
    x: Moments = arguments["self"]
    mean, index = site.apply(arguments, self=x.mean)
    return _winners(x, mean, index, len(arguments["output_size"])), index


def _winners(x: Moments, mean: Tensor, index: Tensor, space: int) -> Moments:
    """Returns the moments of the entries at flat places of the last dimensions."""

    def at(values: Tensor) -> Tensor:
        return values.flatten(-space).gather(-1, index.flatten(-space)).reshape(index.shape)

    rho = x.full_correlation
    return Moments(mean, at(x.variance), None if rho is None else at(rho))


def largest(site: Site, arguments: dict[str, Any]) -> Any:
    """Returns the moments of the largest (or smallest) entry along a dimension."""
    x: Moments = arguments["self"]
    dims = arguments.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(x.mean.ndim))
    if len(dims) > 1:
        raise site.refusal("it is a maximum over several dimensions", "Take maxima over one dimension after another.")
    smallest = site.node.target in (aten.amin.default, aten.min.dim)
    best = (x.mean.min if smallest else x.mean.max)(dims[0], keepdim=True)
    parts = (best.values, x.variance.gather(dims[0], best.indices), best.indices)
    mean, variance, index = (part if arguments["keepdim"] else part.squeeze(dims[0]) for part in parts)
    moments = Moments(mean, variance)
    return (moments, index) if site.node.target in (aten.max.dim, aten.min.dim) else moments


def _window_label(node: fx.Node, labels: Mapping[str, Any]) -> Any:
    """Returns the channels of windows: those of the entries in them."""
    label = next(iter(labels.values()), None)
    return None if label is None else label[(..., *(slice(0, 1),) * (label.ndim - 2))].expand(shape_of(node))


register_aten(
    Operation(Kind.POOLING, averaged, _window_label),
    "avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default", "adaptive_avg_pool1d.default",
    "adaptive_avg_pool2d.default", "adaptive_avg_pool3d.default",
)  # fmt: skip
register_aten(Operation(Kind.POOLING, _won(1), _window_label), "max_pool1d.default")
register_aten(Operation(Kind.POOLING, _won(2), _window_label), "max_pool2d.default")
register_aten(Operation(Kind.POOLING, _won(3), _window_label), "max_pool3d.default")
register_aten(
    Operation(Kind.POOLING, won_adaptively, broadcast),
    "adaptive_max_pool1d.default", "adaptive_max_pool2d.default", "adaptive_max_pool3d.default",
)  # fmt: skip
register_aten(Operation(Kind.STATISTIC, largest, broadcast), "amax.default", "amin.default")
register_aten(Operation(Kind.OTHER, largest, broadcast), "max.dim", "min.dim")
