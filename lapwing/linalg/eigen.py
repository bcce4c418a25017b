"""Eigenpairs of PSD matrices in float64, of the whole matrix or, for a sum of few squares, of its range."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .draws import seeded
from .sums import STRIP, mirror, row_products
from .values import check_matrices, double_device, doubled

log = logging.getLogger("lapwing")

MIN_REDUCED_WIDTH = 256
"""Minimum width of a matrix of low rank that is reduced to its range."""

SPARE = 8
"""Columns of a random sketch beyond the rank. The same number again checks that the rank was high enough."""


def symmetric_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns λ (..., n) ascending and U of PSD matrices `M = U diag(λ) Uᵀ`, in float64. Raises if M is not finite.

    Negative eigenvalues are rounding noise and become 0. Time O(n³), memory O(n²).
    """
    check_matrices([matrix])
    matrix = doubled(matrix)
    values, vectors = _eigh((matrix + matrix.mT) / 2)
    return values.clamp_min(0.0), vectors


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Decomposes the lower triangles of symmetric matrices, on the CPU if the device fails."""
    try:
        return torch.linalg.eigh(matrix)
    except RuntimeError as error:  # it does not converge, or runs out of memory
        if matrix.device.type == "cpu":
            raise
        log.info("eigh of %s failed on %s, and continues on the CPU: %s", tuple(matrix.shape), matrix.device, error)
    values, vectors = torch.linalg.eigh(matrix.cpu())
    return values.to(matrix.device), vectors.to(matrix.device)


def eigen_in_place(
    lower: Tensor, rank: int | None = None, summed: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Decomposes finite PSD matrices (..., n, n), on the CPU in their own memory: `check_matrices` before.

    Only the lower triangle is read, and U may overwrite the matrix. Another device may fail, and then the matrix must
    still be intact. It is float64, or of any dtype if it is reduced (`is_reduced`); U has its dtype.

    A sum of few squares `x xᵀ` (`rank`, summed in the dtype `summed`) is reduced to its range, which its product with a
    random matrix spans (Halko, Martinsson and Tropp 2011). The other eigenvalues are rounding noise and become 0. If
    the given rank is too low, the whole matrix is decomposed instead.

    Cost: time O(n³), memory 16 n² bytes for LAPACK; if it is reduced, time O(n² rank) and memory O(n rank).
    """
    size = lower.shape[-1]
    rank, noise = size if rank is None else min(rank, size), 10 * math.sqrt(size) * torch.finfo(summed).eps
    if is_reduced(size, rank):
        parts = [_reduced(matrix, rank, noise) for matrix in lower.reshape(-1, size, size)]
        return torch.stack(parts).reshape(lower.shape[:-1]), lower
    if lower.device.type != "cpu":
        values, matrix = _eigh(lower)
    else:
        values, matrix = lower.new_empty(lower.shape[:-1]), lower.mT  # LAPACK needs columns contiguous in memory
        torch.linalg.eigh(matrix, "U", out=(values, matrix))
    return _without_noise(values, rank, noise), matrix


def _without_noise(values: Tensor, rank: int, noise: float) -> Tensor:
    """Sets eigenvalues beyond the rank to 0, in place, if they may be rounding noise; returns λ (..., n)."""
    beyond = values.clamp_min_(0.0)[..., : values.shape[-1] - rank]
    if beyond.numel():
        beyond.masked_fill_(beyond <= noise * values[..., -1:], 0.0)
    return values


def is_reduced(size: int, rank: int) -> bool:
    """Whether finding the range is faster than a full decomposition, for a matrix of this size and rank."""
    return size >= MIN_REDUCED_WIDTH and 3 * (rank + 2 * SPARE) <= 2 * size


def _reduced(matrix: Tensor, rank: int, noise: float) -> Tensor:
    """Returns λ (n,) and overwrites a matrix (n, n) by U. Its true rank may be higher than `rank`."""
    mirror(matrix)
    values = _range_in_place(matrix, rank, noise)
    if values is not None:
        return _without_noise(values, rank, noise)
    values, vectors = _eigh(doubled(matrix))
    matrix[:] = vectors.to(matrix)
    return values.clamp_min_(0.0)


def _range_in_place(matrix: Tensor, rank: int, noise: float) -> Tensor | None:
    """Returns λ (n,) and overwrites a symmetric matrix (n, n) by U; returns None if its rank is higher than `rank`.

    The first columns of a sketch `M Ω` span the range, and the last `SPARE` columns add only noise to it. The
    reflections `I - W Vᵀ` of the QR decomposition map unit vectors to an orthonormal basis that begins with the range.
    """
    size, count, within, device = len(matrix), rank + 2 * SPARE, rank + SPARE, double_device(matrix.device)
    # 1. QR of the sketch M Ω (n, r + 16), as Householder vectors v below the triangle
    random = torch.randn(size, count, generator=seeded(None, device), dtype=torch.float64, device=device)
    v, scales = torch.geqrf(row_products(matrix, random.T))
    del random
    # 2. columns beyond r + 8 must be noise, otherwise the rank is higher
    triangle = v[:count].triu()
    if torch.linalg.vector_norm(triangle[within:, within:]) > noise * torch.linalg.vector_norm(triangle[:, within:]):
        return None
    # 3. the reflections are I - W Vᵀ with W = V T; T⁻¹ has the upper triangle of VᵀV, and 1/τ on its diagonal
    used = scales != 0  # columns that are 0 already are not reflected
    v.tril_(-1).diagonal().copy_(used)
    inverse = (v.T @ v).triu_(1)
    inverse.diagonal().copy_(torch.where(used, 1 / scales, 1.0))
    w = torch.linalg.solve_triangular(inverse, v, upper=True, left=False)
    # 4. M in the range (r + 16, r + 16), and its eigenpairs
    inside = -w @ v[:count].T
    inside.diagonal().add_(1.0)
    values, vectors = _eigh(inside.T @ row_products(matrix, inside.T))
    # 5. U: first the orthogonal complement, with eigenvalues 0, then the range times its eigenvectors
    columns, (w, v) = size - count, (x.to(matrix) for x in (w, v[count:]))
    for part, rows in zip(matrix.split(STRIP), w.split(STRIP), strict=True):
        part[:, :columns] = -F.linear(rows, v)
    matrix.diagonal(-count).add_(1.0)
    matrix[:, columns:] = (inside @ vectors).to(matrix)
    return F.pad(values, (columns, 0))
