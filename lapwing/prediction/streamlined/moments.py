"""The moments of a value: means, variances, and correlations of positions.

Positions (pixels, tokens) of one channel share a layer's weights. Entries of one channel at positions t and t' have the
covariance `√(ρ_t v_t) √(ρ_t' v_t')`, with variances v and ρ in [0, 1]. A layer sets ρ such that the mean over its
positions has the right variance,

    ρ (mean_t √v_t)² + (1 - ρ) mean_t v_t / T
        = Σ_ii' ā_i ā_i' Cov[W_ji, W_ji'] + Σ_c (Σ_k W_jck)² (mean_t √(ρ_ct v_ct))² + Σ_c w_jcᵀ M w_jc mean_t e_ct,

with `e = (1 - ρ) v` and ā the mean of its inputs over positions. M (K, K) has the inputs that two kernel entries share,
over T²; it is I/T if patches do not overlap. The contribution of the weights is exact, and costs one more position. A
function of one tensor keeps ρ. A sum has the mean of ρ over its sides, weighted by their variances. Averages and
attention act on `√(ρ v)` as on a mean, and on e as on independent entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

_SMALLEST_VARIANCE = 1e-30
"""Smaller variances count as 0. (Square roots of denormal numbers are very slow.)"""


@dataclass(frozen=True)
class Layout:
    """The dimensions of a value.

    Attributes:
        batch: the dimension of the samples.
        merged: "" if that dimension has only samples. If it also has positions: "slowest" or "fastest", the order of
            the samples in it.
        positions: the dimensions along which entries share weights, in order.
        channels: number of each entry's channel in its layer; length 1 along samples and positions.
    """

    batch: int
    merged: str
    positions: tuple[int, ...]
    channels: Tensor = field(repr=False, compare=False)

    @property
    def shared(self) -> bool:
        """Whether the value has positions."""
        return bool(self.merged or self.positions)

    def mean(self, x: Tensor, samples: int, channel: int = -1) -> Tensor:
        """Returns the means over all dimensions but samples and channels, (B, n)."""
        channel %= x.ndim
        if self.merged:
            slowest = self.merged == "slowest"
            x = x.unflatten(self.batch, (samples, -1) if slowest else (-1, samples)).mean(self.batch + slowest)
        averaged = [dim for dim in range(x.ndim) if dim not in (self.batch, channel)]
        x = x.mean(averaged) if averaged else x
        return x if self.batch < channel else x.mT

    def expanded(self, x: Tensor, like: Tensor, channel: int = -1) -> Tensor:
        """Returns (B, n) in a shape that broadcasts to a value, constant over positions."""
        channel %= like.ndim
        if self.merged:
            times = like.shape[self.batch] // x.shape[0]
            slowest = self.merged == "slowest"  # no repeat_interleave: ONNX would fix its count
            x = x[:, None].expand(-1, times, -1).flatten(0, 1) if slowest else x.repeat(times, 1)
        shape = [1] * like.ndim
        shape[self.batch], shape[channel] = x.shape
        return (x if self.batch < channel else x.mT).reshape(shape)


@dataclass(frozen=True)
class Moments:
    """Gaussians of the entries of one tensor. Only positions of a channel are correlated.

    Attributes:
        correlation: ρ, in a shape that expands to the means; None if positions are independent.
        origin: source of the values of an attention (`rules.attention.Origin`), for `attention="features"`.
        covariance: covariances (B, n, n) of the n entries of a sample at the end of a network, else None.
        centred: variances (B, n) of the entries minus their average, if known more precisely than from `covariance`.
    """

    mean: Tensor
    variance: Tensor
    correlation: Tensor | None = None
    origin: Any = field(default=None, repr=False, compare=False)
    covariance: Tensor | None = None
    centred: Tensor | None = None

    @classmethod
    def joint(cls, mean: Tensor, covariance: Tensor, centred: Tensor | None = None) -> Moments:
        """Returns the moments of a tensor with covariances (B, n, n) within each sample."""
        variance = covariance.diagonal(dim1=1, dim2=2).reshape(mean.shape)
        return cls(mean, variance, covariance=covariance, centred=centred)

    @property
    def common(self) -> Tensor:
        """`√(ρ v)`, the standard deviations of the part that the positions of a channel share."""
        assert self.correlation is not None  # callers treat independent positions otherwise
        return root(self.correlation * self.variance)

    @property
    def individual(self) -> Tensor:
        """`(1 - ρ) v`, the variances of the independent part of each position."""
        return self.variance if self.correlation is None else (1 - self.correlation) * self.variance

    def averages(self, layout: Layout, samples: int, channel: int = -1) -> tuple[Tensor | None, Tensor]:
        """Returns the means (B, n) over positions of `common`, None for independent positions, and of `individual`."""
        rho = self.correlation
        if rho is None:
            return None, layout.mean(self.variance, samples, channel)
        if layout.merged or rho.ndim < self.mean.ndim or not is_constant(rho, rho.ndim, layout.positions):
            return layout.mean(self.common, samples, channel), layout.mean(self.individual, samples, channel)
        rho, average = layout.mean(rho, samples, channel), layout.mean(self.variance, samples, channel)
        return root(rho) * layout.mean(root(self.variance), samples, channel), (1 - rho) * average

    def moved(self, move: Callable[[Tensor], Tensor]) -> Moments:
        """Returns the moments of moved, picked or repeated entries."""
        rho = None if self.correlation is None else move(self.correlation.expand_as(self.variance))
        return Moments(move(self.mean), move(self.variance), rho)


@dataclass(frozen=True, eq=False)
class FeatureCorrelation:
    """The correlation `R = F Fᵀ + diag(r)` of the n inputs of a last layer: F (n, K) as `factor`, r (n,) as `rest`.

    `posterior` (P, 3) has the fingerprints of the variances of the posterior to which R was fitted.
    """

    factor: Tensor = field(repr=False)
    rest: Tensor = field(repr=False)
    posterior: Tensor = field(repr=False)


Value = Any
"""A certain value (a tensor, a number, a tuple of them), `Moments`, or a tuple with some `Moments`."""


def mean_of(value: Value) -> Value:
    """Returns the mean of an uncertain value, or of each in a tuple, and certain values unchanged."""
    if isinstance(value, Moments):
        return value.mean
    return tuple(map(mean_of, value)) if isinstance(value, (tuple, list)) else value


def variance_of(value: Value) -> Tensor | None:
    """Returns the variances of an uncertain value, or None for a certain value."""
    return value.variance if isinstance(value, Moments) else None


def root(x: Tensor) -> Tensor:
    """Returns √x, with a finite derivative at 0."""
    return x.clamp_min(_SMALLEST_VARIANCE).sqrt_()


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Returns `ρ = part/whole`, at most 1, and 0 if both are 0."""
    return (part / whole.clamp_min(_SMALLEST_VARIANCE)).clamp_max(1)


def layer_correlation(variance: Tensor, pooled: Tensor, layout: Layout, samples: int, channel: int) -> Tensor:
    """Returns ρ with `ρ (mean_t √v_t)² + (1 - ρ) mean_t v_t / T = pooled`, in [0, 1], laid out for the variances.

    v are the variances of a layer's outputs, and `pooled` (B, n) the variances of their means over the T positions.
    """
    count = variance.numel() // pooled.numel()  # T
    alone = layout.mean(variance, samples, channel) / count
    amplitude = layout.mean(root(variance), samples, channel).square()
    return layout.expanded(ratio((pooled - alone).clamp_min(0), amplitude - alone), variance, channel)


def sum_correlation(
    total: Tensor, parts: Iterable[tuple[Tensor, Tensor | float | None]], positions: tuple[int, ...] = ()
) -> Tensor | None:
    """Returns `ρ = Σ ρ_i v_i / Σ v_i` of a sum of independent parts (v_i, ρ_i), or None if no part has a ρ.

    Parts without a ρ may be left out, unless there are `positions`: then all v_i are averaged over them, if no ρ_i
    depends on the position.
    """
    parts = list(parts)
    known = [rho for _, rho in parts if rho is not None]
    if not known:
        return None
    if positions and all(not isinstance(r, Tensor) or is_constant(r, total.ndim, positions) for r in known):
        parts = [(v.expand_as(total).mean(positions, keepdim=True), r) for v, r in parts]
        total = total_of([variance for variance, _ in parts])
    return ratio(total_of([variance * rho for variance, rho in parts if rho is not None]), total)


def is_constant(x: Tensor, ndim: int, positions: tuple[int, ...]) -> bool:
    """Whether x, which expands to a value with `ndim` dimensions, is constant over its positions."""
    missing = ndim - x.ndim
    return all(dim < missing or x.shape[dim - missing] == 1 for dim in positions)


def total_of(parts: Iterable[Tensor | None]) -> Any:
    """Returns the sum of the tensors that are not None, or None if all are None."""
    total = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total
