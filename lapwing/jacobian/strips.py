"""Strips of the T positions (pixels, tokens) of a sample, so that one large sample fits the memory budget.

A layer builds patches and products of positions for one strip at a time. Contractions are sums over positions, so the
results of strips, or of pairs of strips, add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from math import prod

import torch
from torch import Tensor

Box = tuple[slice, ...]
"""Consecutive positions along each dimension of a grid, such as rows and columns of pixels."""

Strip = tuple[Tensor, Tensor]
"""Inputs a (B, t, G, I) and output gradients g (B, R, t, G, O) at t positions."""


def boxes(grid: Sequence[int], limit: int) -> list[Box]:
    """Cuts a grid into boxes of at most `limit` positions (at least one), along the first dimensions first."""
    sides = []
    for dim, size in enumerate(grid):
        step = max(1, min(size, limit // max(1, prod(grid[dim + 1 :]))))
        sides.append([slice(start, min(start + step, size)) for start in range(0, max(1, size), step)])
    return list(product(*sides))


def at(values: Tensor, box: Box, lead: int) -> Tensor:
    """Returns a view of values (lead..., *grid, rest...) at a box of the grid."""
    return values[(slice(None),) * lead + box]


def at_positions(weights: Tensor, positions: int) -> Tensor:
    """Returns weights (B, T) for a layer with some number of positions: their own, or the mean of each sample."""
    if weights.shape[1] == positions:
        return weights
    return weights.mean(1, keepdim=True).expand(-1, positions)


class Strips:
    """a and g at all positions: one strip, which is kept, or several, which each sweep computes and frees.

    `shape` is (B, R, T, G, O, I), with T over all strips.
    """

    def __init__(
        self, makers: Sequence[Callable[[], Strip]], shape: tuple[int, int, int, int, int, int], dtype: torch.dtype
    ) -> None:
        self._makers, self.shape, self.dtype = makers, shape, dtype
        if len(makers) == 1:
            strip = makers[0]()
            self._makers = [lambda: strip]

    @classmethod
    def whole(cls, a: Tensor, g: Tensor) -> Strips:
        """Returns all positions in one strip."""
        return cls([lambda: (a, g)], (*g.shape[:4], g.shape[-1], a.shape[-1]), a.dtype)

    @classmethod
    def cut(
        cls, part: Callable[[Box], Strip], grid: Sequence[int], shape: Sequence[int], dtype: torch.dtype, limit: int
    ) -> Strips:
        """Cuts a grid of positions into the largest strips with at most `limit` entries of a and g and their rotations.

        `part` returns a and g at a box of positions, and `shape` is (B, R, G, O, I).
        """
        batch, cotangents, groups, outputs, inputs = shape
        numbers = batch * groups * (2 * inputs + 3 * cotangents * outputs)
        makers = [partial(part, box) for box in boxes(grid, limit // max(1, numbers))]
        return cls(makers, (batch, cotangents, prod(grid), groups, outputs, inputs), dtype)

    @classmethod
    def cat(cls, several: Sequence[Strips]) -> Strips:
        """Joins the positions of several uses of a layer, in one strip if each use has one."""
        if all(len(strips) == 1 for strips in several):
            pairs = [strip for strips in several for strip in strips]
            return cls.whole(torch.cat([a for a, _ in pairs], 1), torch.cat([g for _, g in pairs], 2))
        batch, cotangents, _, *rest = several[0].shape
        positions = sum(strips.shape[2] for strips in several)
        makers = [make for strips in several for make in strips._makers]
        return cls(makers, (batch, cotangents, positions, rest[0], rest[1], rest[2]), several[0].dtype)

    @property
    def device(self) -> torch.device:
        """Device of the strips. Computes the first strip if there are several."""
        return next(iter(self))[0].device

    def __len__(self) -> int:
        return len(self._makers)

    def __iter__(self) -> Iterator[Strip]:
        return (make() for make in self._makers)

    def finer(self, length: int) -> Iterator[Strip]:
        """Yields views of at most `length` positions."""
        for a, g in self:
            for start in range(0, a.shape[1], length):
                yield a[:, start : start + length], g[:, :, start : start + length]

    def rotated(self, inputs: Tensor | None, outputs: Tensor | None) -> Strips:
        """Returns a U_in and g U_out for U_in (G, I, I) and U_out (G, O, O); None is the identity."""

        def turn(make: Callable[[], Strip]) -> Strip:
            a, g = make()
            return _by_group(a, inputs), _by_group(g, outputs)

        return Strips([partial(turn, make) for make in self._makers], self.shape, self.dtype)


def _by_group(values: Tensor, basis: Tensor | None) -> Tensor:
    """Multiplies (..., T, G, I) by (G, I, I) group by group, in the layout of the values in memory."""
    if basis is None:
        return values
    if basis.shape[0] > 1:
        return torch.einsum("...gi,gij->...gj", values, basis)
    if values.stride(-1) == 1 or values.stride(-3) != 1:
        return values @ basis[0]
    columns = values.squeeze(-2).movedim(-1, 0)  # patches and feature maps: T is contiguous
    if columns.is_contiguous():  # patches of all samples
        product = basis[0].T @ columns.flatten(1)
        return product.unflatten(1, columns.shape[1:]).movedim(0, -1).unsqueeze(-2)
    return (basis[0].T @ values.squeeze(-2).mT).mT.unsqueeze(-2)
