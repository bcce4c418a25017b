"""Safe and fast Cholesky, eigendecompositions and QR of plain tensors.

Begin with `values.py`, which chooses the device of float64 tensors.
"""

from __future__ import annotations

from .draws import check_draws, check_memory, generator_on, seeded, seeded_torch
from .eigen import condensed, eigen_in_place, symmetric_eigen
from .factorisations import RANK_CUT, cholesky, orthonormal_rows, psd_root
from .values import (
    RESOLVED,
    SLICE_NUMBERS,
    accumulation_dtype,
    add_squares,
    are_finite,
    at_least_float32,
    check_matrices,
    check_range,
    double_device,
    doubled,
    is_finite,
    joined,
    mirrored,
    nonnegative,
    placed,
    possible,
    row_products,
    total,
)

__all__ = [
    "RANK_CUT", "RESOLVED", "SLICE_NUMBERS", "accumulation_dtype", "add_squares", "are_finite", "at_least_float32",
    "check_draws", "check_matrices", "check_memory", "check_range", "cholesky", "condensed", "double_device", "doubled",
    "eigen_in_place", "generator_on", "is_finite", "joined", "mirrored", "nonnegative", "orthonormal_rows", "placed",
    "possible", "psd_root", "row_products", "seeded", "seeded_torch", "symmetric_eigen", "total",
]  # fmt: skip
