"""Which dimensions of a value are positions that share weights, and how far entries move together along them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

_LEAST = 1e-30
"""Variances below it count as none. (Processors take very long for the square roots of denormal numbers.)"""


@dataclass(frozen=True)
class Layout:
    """What the dimensions of a value are.

    Attributes:
        batch: the dimension of the samples.
        merged: what shares it with them: "" nothing, else positions, with the samples "slowest" or "fastest".
        positions: the dimensions along which entries share weights, in order.
        channels: the number of each entry's channel in the layer that it comes from; of length 1 along the other
            dimensions.
    """

    batch: int
    merged: str
    positions: tuple[int, ...]
    channels: Tensor = field(repr=False, compare=False)

    @property
    def shared(self) -> bool:
        """Whether the value has positions at all."""
        return bool(self.merged or self.positions)

    def mean(self, x: Tensor, samples: int, channel: int = -1) -> Tensor:
        """Returns the means over all dimensions but samples and channels, (B, n)."""
        channel %= x.ndim
        if self.merged:
            slowest = self.merged == "slowest"
            x = x.unflatten(self.batch, (samples, -1) if slowest else (-1, samples)).mean(self.batch + slowest)
        others = [dim for dim in range(x.ndim) if dim not in (self.batch, channel)]
        x = x.mean(others) if others else x
        return x if self.batch < channel else x.mT

    def spread(self, x: Tensor, like: Tensor, channel: int = -1) -> Tensor:
        """Returns (B, n) in a shape that fits a value's own, the same at all positions."""
        channel %= like.ndim
        if self.merged:
            times = like.shape[self.batch] // x.shape[0]
            slowest = self.merged == "slowest"  # no repeat_interleave: ONNX would fix its count
            x = x[:, None].expand(-1, times, -1).flatten(0, 1) if slowest else x.repeat(times, 1)
        shape = [1] * like.ndim
        shape[self.batch], shape[channel] = x.shape
        return (x if self.batch < channel else x.mT).reshape(shape)


def root(x: Tensor) -> Tensor:
    """Returns √x, with a finite derivative at 0."""
    return x.clamp_min(_LEAST).sqrt()


def quotient(pooled: Tensor, whole: Tensor) -> Tensor:
    """Returns `ρ = pooled/whole`, at most 1, and 0 where there is nothing."""
    return (pooled / whole.clamp_min(_LEAST)).clamp_max(1)


def together(
    variance: Tensor, pooled: Tensor, own: Tensor | None, layout: Layout, samples: int, channel: int
) -> Tensor:
    """Returns ρ (B, n) with `ρ (mean_t √v_t)² + (1 - ρ) mean_t v_t / T = pooled + own/T`, in [0, 1].

    Args:
        variance: v, of a value.
        pooled: the variances that the means over its T positions have from what these share (B, n).
        own: means over positions of the variances that each has on its own (B, n), None for none.
        layout: the value's.
        samples: B.
        channel: its dimension of the channels.
    """
    count = variance.numel() // pooled.numel()  # T
    alone = layout.mean(variance, samples, channel) / count
    amplitude = layout.mean(root(variance), samples, channel).square()
    excess = pooled - alone if own is None else pooled + own / count - alone
    return quotient(excess.clamp_min(0), amplitude - alone)


def share(
    total: Tensor, parts: Iterable[tuple[Tensor, Tensor | float | None]], positions: tuple[int, ...] = ()
) -> Tensor | None:
    """Returns `ρ = Σ ρ_i v_i / Σ v_i` of a sum of independent parts (v_i, ρ_i), None where no part has one.

    Where no ρ_i depends on the position, v_i and their sum are averaged over positions first.
    """
    some = [(variance, rho) for variance, rho in parts if rho is not None]
    if not some:
        return None
    if positions and all(not isinstance(r, Tensor) or constant(r, total.ndim, positions) for _, r in some):
        some = [(v.expand_as(total).mean(positions, keepdim=True), r) for v, r in some]
        total = total.mean(positions, keepdim=True)
    found = some[0][0] * some[0][1]
    for variance, rho in some[1:]:
        found = found + variance * rho
    return quotient(found, total)


def constant(rho: Tensor, ndim: int, positions: tuple[int, ...]) -> bool:
    """Whether ρ, which expands to a value of so many dimensions, is the same at all of its positions."""
    missing = ndim - rho.ndim
    return all(dim < missing or rho.shape[dim - missing] == 1 for dim in positions)
