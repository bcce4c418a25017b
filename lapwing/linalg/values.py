"""Sums and products of tensors, their dtypes and devices, and checks that values are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from ..errors import LapwingError

SLICE_NUMBERS = 2**19  # maximum number of entries of a tensor that is copied or converted at once

RESOLVED = 1e14  # curvature over prior precision above which float64 sums of float32 Jacobians lose small curvatures

STRIP = 256
"""Number of rows of a wide matrix per step."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums: float64 if the model is float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def at_least_float32(values: Tensor) -> Tensor:
    """Returns half precision as float32, and wider dtypes unchanged: the log of a sum needs at least float32."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def double_device(device: torch.device) -> torch.device:
    """Returns the device for float64 tensors: the CPU for Apple's mps, which has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def placed(values: Tensor, device: torch.device) -> Tensor:
    """Moves values to the device, or float64 values to its `double_device`."""
    return values.to(double_device(device) if values.dtype == torch.float64 else device)


def doubled(values: Tensor) -> Tensor:
    """Converts values to float64, on the `double_device` of their device."""
    device = double_device(values.device)
    return (values if device == values.device else values.to(device)).double()


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
    least, most = 96, 256  # columns per block; between these limits a block has a third of all columns
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


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite. Checks one fast sum first, and each value only if the sum is not finite."""
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values of all tensors are finite. Waits once for each device."""
    parts: dict[torch.device, list[Tensor]] = {}
    for values in tensors:
        if values.is_floating_point() and values.numel():
            parts.setdefault(values.device, []).append(values)
    return all(math.isfinite(get_total_norm(part, math.inf)) for part in parts.values())


def check_matrices(matrices: Sequence[Tensor]) -> None:
    """Raises if one of some matrices holds NaN or infinite entries."""
    if are_finite(matrices):
        return
    matrix = next(each for each in matrices if not is_finite(each))
    bad = int((~torch.isfinite(matrix)).sum())
    raise LapwingError(
        f"A matrix of gradients of shape {tuple(matrix.shape)} has {bad} NaN or infinite entries. Scale "
        "the inputs and the targets to about 1, check the weights for overflow, or use model.float() or model.double()."
    )


def check_range(what: str, values: Tensor | float | None, dtype: torch.dtype) -> None:
    """Raises if precisions or a variance, or their inverses, are 0 or infinite in a dtype; None is accepted."""
    if values is None:
        return
    values = torch.as_tensor(values, dtype=torch.float64)
    rounded = torch.stack([values, 1 / values]).to(dtype)
    if not ((rounded > 0) & (rounded < math.inf)).all():
        low, high = values.min().item(), values.max().item()
        numbers = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        raise LapwingError(
            f"A {what} of {numbers} or its inverse is 0 or infinite in {dtype}. Use a value between 1e-30 and 1e30, "
            "and scale the inputs and the targets to about 1."
        )


def possible(logits: Tensor, dim: int = -1) -> Tensor:
    """Returns a mask of the possible classes.

    A class is impossible if its logit is below the largest one of its row by more than 500 and by more than 20 times
    the size of the largest: a mask adds a far larger number, while a confident network has large logits everywhere.
    """
    largest = logits.amax(dim, keepdim=True)
    return ~(largest - logits > (20.0 * largest.abs()).clamp_min(500.0))  # NaN counts as possible


def nonnegative(values: Tensor) -> Tensor:
    """Sets values below 0 to 0. The derivative at 0 is 1; the derivative of `clamp_min` may be 0."""
    return torch.where(values < 0, 0.0, values) if values.requires_grad else values.clamp_min(0.0)
