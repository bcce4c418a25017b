"""Sums of tensors, of squares `xᵀ x` as one triangle, and of products in float64."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

from .values import SLICE_NUMBERS, double_device, doubled

TRIANGLE_COLUMNS = 96, 256
"""Minimum and maximum number of columns per block of a symmetric product. Between them a block has a third of all."""

STRIP = 256
"""Number of rows of a wide matrix per step."""


def total(terms: Iterable[Tensor]) -> Tensor:
    """Returns the sum of one or more tensors, added in order."""
    return reduce(torch.add, terms)


def joined(parts: Iterable[Tensor], dim: int = 0) -> Tensor:
    """Returns parts joined along a dimension, or a single part without a copy."""
    first, *others = parts
    return torch.cat([first, *others], dim) if others else first


def add_squares(sums: Tensor, values: Tensor) -> None:
    """Adds `xᵀ x` to the lower triangles of sums (G, n, n), for x (G, m, n). `mirrored` reads them."""
    size = sums.shape[-1]
    least, most = TRIANGLE_COLUMNS
    if 3 * size <= 4 * least:
        sums.baddbmm_(values.mT, values)
        return
    width = min(most, max(least, -(-size // 3)))
    for matrix, x in zip(sums, values.mT, strict=True):
        for start in range(0, size, width):
            part = slice(start, min(start + width, size))
            matrix[start:, part].addmm_(x[start:], x[part].mT)


def mirrored(lower: Tensor) -> Tensor:
    """Returns the symmetric matrices (..., n, n) with the given lower triangles."""
    return lower.tril() + lower.tril(-1).mT


def mirror(lower: Tensor) -> None:
    """Copies the lower triangle of a matrix (n, n) over the upper one."""
    for start in range(0, len(lower), STRIP):
        part = slice(start, start + STRIP)
        lower[part, part] = mirrored(lower[part, part])
        lower[:start, part] = lower[part, :start].T


def row_products(first: Tensor, second: Tensor) -> Tensor:
    """Returns `x yᵀ` (M, N) in float64 for x (M, P) and y (N, P), a slice of columns at a time to save memory."""
    device = double_device(first.device)
    products = torch.zeros(len(first), len(second), dtype=torch.float64, device=device)
    length = max(1, SLICE_NUMBERS // max(1, len(first), len(second)))
    for x, y in zip(first.split(length, -1), second.split(length, -1), strict=True):
        products.addmm_(doubled(x), doubled(y).T)
    return products
