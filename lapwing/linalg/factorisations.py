"""Cholesky factors and roots of PSD matrices, and orthonormal rows that span given rows."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ..errors import LapwingError
from .eigen import symmetric_eigen
from .values import SLICE_NUMBERS, check_matrices, doubled, row_products

log = logging.getLogger("lapwing")

RANK_CUT = 1e-11  # relative singular value below which a direction of explicit float64 rows is rounding noise


def cholesky(matrix: Tensor) -> Tensor:
    """Returns L (..., n, n), lower triangular, with `M = L Lᵀ`. Adds and logs jitter only if this fails.

    Raises if M is not finite, or not positive definite even with a relative jitter of 1e-4.
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    if not info.any():
        return factor
    check_matrices([matrix])
    scale = matrix.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(matrix.dtype).tiny)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    jitter, failed = 10 * torch.finfo(matrix.dtype).eps, torch.zeros_like(info, dtype=torch.bool)[..., None, None]
    while jitter < 1e-4:
        failed = failed | (info > 0)[..., None, None]  # a matrix that failed once gets jitter in every later attempt
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
    """Returns the top right singular vectors of rows (M, P), `rows = L diag(s) V`, as V (K, P) with `V Vᵀ = I`.

    V is ordered by falling singular value, with at most `rank` directions, without those with `s < 1e-11 s_max`. It is
    float64, or has the dtype of the rows if M <= P and `whole` is False. With `whole`, one QR decomposition of all rows
    needs 24 to 32 bytes per entry. Otherwise few directions come from the Gram matrix. If it cannot resolve them, QR
    decompositions of slices give a triangle with the same inner products, in three times the time.

    Cost: time O(M P min(M, P)), memory O(M P), or O(K P + min(M, P)²).
    """
    check_matrices([rows])
    if whole and len(rows) <= rows.shape[1]:  # with QR first the SVD needs a third of the time
        orthonormal, triangle = torch.linalg.qr(doubled(rows).T)
        _, values, basis = torch.linalg.svd(triangle.T)
        return basis[: _numerical_rank(values, rank)] @ orthonormal.T
    if len(rows) > rows.shape[1]:
        _, values, basis = torch.linalg.svd(_triangle(rows))
        return basis[: _numerical_rank(values, rank)]
    left, values = _left_vectors(rows, rank)
    count = _numerical_rank(values, rank)
    coefficients = (left[:, :count] / values[:count]).T
    basis = rows.new_empty(len(coefficients), rows.shape[1])
    length = max(1, SLICE_NUMBERS // max(1, len(rows)))
    for part, out in zip(rows.split(length, -1), basis.split(length, -1), strict=True):
        out.copy_(coefficients @ doubled(part))
    # they are nearly orthonormal: with V Vᵀ = L Lᵀ the rows of L⁻¹ V are orthonormal
    root = cholesky(row_products(basis, basis))
    for part in basis.split(max(1, SLICE_NUMBERS // max(1, len(basis))), -1):
        part.copy_(torch.linalg.solve_triangular(root, doubled(part), upper=False))
    return basis


def _left_vectors(rows: Tensor, rank: int | None) -> tuple[Tensor, Tensor]:
    """Returns the left singular vectors of rows (M, P), M <= P, and singular values (M,), of which `rank` are exact."""
    if rank is not None and rank < len(rows):
        squares, left = symmetric_eigen(row_products(rows, rows))
        values = squares.sqrt()
        if values[-rank] > 1e-3 * values[-1]:  # a Gram matrix in float64 gives such directions to 1e-6
            return left.flip(1), values.flip(0)
    return torch.linalg.svd(_triangle(rows.T).T)[:2]


def _numerical_rank(values: Tensor, rank: int | None) -> int:
    """Returns the number of singular values above rounding noise, at most `rank`."""
    tiny = torch.finfo(torch.float64).tiny
    keep = int((values > RANK_CUT * values[0].clamp_min(tiny)).sum()) if values.numel() else 0
    return keep if rank is None else min(rank, keep)


def _triangle(columns: Tensor) -> Tensor:
    """Returns R (n, n) with `RᵀR = XᵀX` for X (m, n), m >= n, by QR of each slice below the previous triangle."""
    count = columns.shape[1]
    triangle = doubled(columns[:0])
    for part in columns.split(max(1, count, SLICE_NUMBERS // (2 * max(1, count)))):
        triangle = torch.linalg.qr(torch.cat([triangle, doubled(part)]), mode="r")[1]
    return triangle
