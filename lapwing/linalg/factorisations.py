"""Roots of PSD matrices, and the orthonormal rows that span given ones."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ..errors import LapwingError
from .eigen import symmetric_eigen
from .sums import row_products
from .values import SLICE_NUMBERS, check_finite, doubled

log = logging.getLogger("lapwing")

RANK_CUT = 1e-11  # relative singular value below which a direction of explicit float64 rows is rounding noise


def cholesky(matrix: Tensor) -> Tensor:
    """Factorises a positive definite matrix `M = L Lᵀ`, adding jitter only where that fails, and saying so.

    Args:
        matrix: (..., n, n).

    Returns:
        L (..., n, n), lower triangular.

    Raises:
        LapwingError: if M holds NaN or infinite entries, or is not positive definite even with a relative jitter of
            1e-4.
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    if not info.any():
        return factor
    check_finite(matrix)
    scale = matrix.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(matrix.dtype).tiny)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    jitter, failed = 10 * torch.finfo(matrix.dtype).eps, torch.zeros_like(info, dtype=torch.bool)[..., None, None]
    while jitter < 1e-4:
        failed = failed | (info > 0)[..., None, None]  # what a smaller jitter repaired keeps needing one
        factor, info = torch.linalg.cholesky_ex(matrix + failed * jitter * scale[..., None, None] * eye)
        if not info.any():
            log.info("Cholesky needed a jitter of %.1e times the mean diagonal", jitter)
            return factor
        jitter *= 10
    raise LapwingError(
        f"A matrix of shape {tuple(matrix.shape)} is not positive definite, even with a relative jitter of 1e-4. Pass "
        "a larger prior precision: prior_precision=1.0."
    )


def psd_root(matrix: Tensor) -> Tensor:
    """Returns a root `R` with `R Rᵀ = M` of a possibly singular PSD matrix (..., n, n), by eigendecomposition."""
    values, vectors = symmetric_eigen(matrix)
    return (vectors * values.sqrt()[..., None, :]).to(matrix)


def orthonormal_rows(rows: Tensor, rank: int | None = None, whole: bool = True) -> Tensor:
    """Returns the top right singular vectors of explicit rows, `rows = L diag(s) V`, as V (K, P) with `V Vᵀ = I`.

    Directions with `s < 1e-11 s_max` are cut.

    Args:
        rows: (M, P), taken to float64.
        rank: keep at most this many directions; all of them when None.
        whole: by a QR decomposition of all rows, memory 24 to 32 bytes a number; else by those of slices, which leave a
            triangle with their inner products, as a Gram matrix would only give them down to 1e-8 s_max.

    Returns:
        V, by falling singular value; float64, but in the dtype of the rows where M <= P and they are not taken whole.

    Raises:
        LapwingError: if the rows hold NaN or infinite entries.

    Cost: time O(M P min(M, P)), memory O(M P), or O(K P + min(M, P)²).
    """
    check_finite(rows)
    if whole and len(rows) <= rows.shape[1]:  # QR before the SVD takes a third of the time
        orthonormal, triangle = torch.linalg.qr(doubled(rows).T)
        _, values, basis = torch.linalg.svd(triangle.T)
        return basis[: _kept(values, rank)] @ orthonormal.T
    if len(rows) > rows.shape[1]:
        _, values, basis = torch.linalg.svd(_triangle(rows))
        return basis[: _kept(values, rank)]
    left, values = torch.linalg.svd(_triangle(rows.T).T)[:2]
    kept = _kept(values, rank)
    coefficients = (left[:, :kept] / values[:kept]).T
    basis = rows.new_empty(len(coefficients), rows.shape[1])
    length = max(1, SLICE_NUMBERS // max(1, len(rows)))
    for part, out in zip(rows.split(length, -1), basis.split(length, -1), strict=True):
        out.copy_(coefficients @ doubled(part))
    return _orthonormalised(basis)


def _kept(values: Tensor, rank: int | None) -> int:
    """Returns how many singular values are above rounding, at most `rank`."""
    tiny = torch.finfo(torch.float64).tiny
    keep = int((values > RANK_CUT * values[0].clamp_min(tiny)).sum()) if values.numel() else 0
    return keep if rank is None else min(rank, keep)


def _triangle(columns: Tensor) -> Tensor:
    """Returns R (n, n) with `RᵀR = XᵀX` for X (m, n), m >= n, by QR of slices of rows with what those before left."""
    count = columns.shape[1]
    triangle = doubled(columns[:0])
    for part in columns.split(max(1, count, SLICE_NUMBERS // (2 * max(1, count)))):
        triangle = torch.linalg.qr(torch.cat([triangle, doubled(part)]), mode="r")[1]
    return triangle


def _orthonormalised(rows: Tensor) -> Tensor:
    """Makes rows (K, P) that nearly are orthonormal exactly so, in place: `L⁻¹ X` with `X Xᵀ = L Lᵀ`; returns them."""
    root = cholesky(row_products(rows, rows))
    for part in rows.split(max(1, SLICE_NUMBERS // max(1, len(rows))), -1):
        part.copy_(torch.linalg.solve_triangular(root, doubled(part), upper=False))
    return rows
