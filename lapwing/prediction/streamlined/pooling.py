"""Moments through pooling: means of windows, and the entry that wins a maximum."""

from __future__ import annotations

from math import ceil
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from .fusion import aten
from .layout import share
from .moments import Moments, Rule, Site


def averaged(site: Site, given: dict[str, Any]) -> Moments:
    """Returns the moments of window means: the mean of the variances over the window's divisor."""
    x: Moments = given["self"]

    def apply(x: Tensor) -> Tensor:
        return site.node.target(**{**given, "self": x})  # type: ignore[operator]

    divisors = _divisors(given, x.mean)
    if x.correlation is None:
        return Moments(apply(x.mean), apply(x.variance) / divisors)
    common = apply(x.common).square()
    variance = common + apply(x.own) / divisors
    return Moments(apply(x.mean), variance, share(variance, [(common, 1.0)]))


def _divisors(given: dict[str, Any], x: Tensor) -> Tensor | int:
    """Returns what the sum of each window is divided by."""
    if given.get("divisor_override") is not None:
        return given["divisor_override"]
    if "output_size" in given:  # adaptive
        sizes = (
            [_numbers(given["output_size"], 1)[0]] if isinstance(given["output_size"], int) else given["output_size"]
        )
        space = len(sizes)
        spans = [_adaptive(n, size) for n, size in zip(x.shape[-space:], sizes, strict=True)]
    else:
        kernel = given["kernel_size"]
        space = len(kernel)
        stride, padding = _numbers(given["stride"] or kernel, space), _numbers(given["padding"], space)
        kernel = _numbers(kernel, space)
        spans = [
            _windows(n, k, s, p, given["ceil_mode"], given["count_include_pad"])
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


def won(site: Site, given: dict[str, Any]) -> Moments:
    """Returns the moments of the entry that is largest on average, in each window."""
    x: Moments = given["self"]
    space = _MAXIMA.index(site.node.target) + 1
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[space - 1]
    stride = given["stride"] or None
    options = (given["kernel_size"], stride, given["padding"], given["dilation"], given["ceil_mode"])
    mean, index = pool(x.mean, *options, return_indices=True)
    rho = None if x.correlation is None else _at(x.correlation.expand_as(x.variance), index, space)
    return Moments(mean, _at(x.variance, index, space), rho)


def won_adaptively(site: Site, given: dict[str, Any]) -> tuple[Moments, Tensor]:
    """The same for adaptive windows; the second value is the place of the winner."""
    x: Moments = given["self"]
    mean, index = site.node.target(**{**given, "self": x.mean})  # type: ignore[operator]
    space = len(given["output_size"])
    rho = None if x.correlation is None else _at(x.correlation.expand_as(x.variance), index, space)
    return Moments(mean, _at(x.variance, index, space), rho), index


def _at(variance: Tensor, index: Tensor, space: int) -> Tensor:
    """Returns the variances at flat places of the last dimensions."""
    return variance.flatten(-space).gather(-1, index.flatten(-space)).reshape(index.shape)


def largest(site: Site, given: dict[str, Any]) -> Any:
    """Returns the moments of the largest (or smallest) entry along dimensions."""
    x: Moments = given["self"]
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(x.mean.ndim))
    if len(dims) > 1:
        raise site.refusal("over several dimensions", "is a maximum over one")
    smallest = site.node.target in (aten.amin.default, aten.min.dim)
    found = (x.mean.min if smallest else x.mean.max)(dims[0], keepdim=True)
    variance = x.variance.gather(dims[0], found.indices)
    keep = given["keepdim"]
    mean, variance, index = (v if keep else v.squeeze(dims[0]) for v in (found.values, variance, found.indices))
    moments = Moments(mean, variance)
    return (moments, index) if site.node.target in (aten.max.dim, aten.min.dim) else moments


_AVERAGES = (
    aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default, aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default,
)  # fmt: skip
_MAXIMA: tuple[Any, ...] = (aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default)
_LARGEST = (aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim)
RULES: dict[Any, Rule] = {
    **{target: averaged for target in _AVERAGES},
    **{target: won for target in _MAXIMA},
    **{
        target: won_adaptively
        for target in (aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default,
                       aten.adaptive_max_pool3d.default)
    },
    **{target: largest for target in _LARGEST},
}  # fmt: skip
