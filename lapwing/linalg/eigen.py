"""Eigenpairs of PSD matrices in float64, of the whole matrix or, for a sum of few squares, of its range.

`condensed` replaces many eigenvalues by few.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .draws import seeded
from .values import SLICE_NUMBERS, STRIP, check_matrices, double_device, doubled, mirror, row_products

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


def eigen_in_place(lower: Tensor, rank: int | None = None, summed: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Decomposes finite PSD matrices (..., n, n), on the CPU in float64 in their own memory: `check_matrices` before.

    Returns λ in float64, and U. Only the lower triangle is read, and U may overwrite the matrix. Another device may
    fail, and then the matrix must still be intact.

    A sum of few squares `x xᵀ` (`rank`, summed in the dtype `summed`; None means its own) is reduced to its range, in
    its own dtype, if that is faster. Its product with a random matrix spans the range (Halko, Martinsson and Tropp
    2011). The other eigenvalues are rounding noise and become 0. If the given rank is too low, the whole matrix is
    decomposed instead.

    Cost: time O(n³), memory 16 n² bytes for LAPACK; if it is reduced, time O(n² rank) and memory O(n rank).
    """
    size, summed = lower.shape[-1], summed or lower.dtype
    rank, noise = size if rank is None else min(rank, size), 10 * math.sqrt(size) * torch.finfo(summed).eps
    if size >= MIN_REDUCED_WIDTH and 3 * (rank + 2 * SPARE) <= 2 * size:
        parts = [_reduced(matrix, rank, noise) for matrix in lower.reshape(-1, size, size)]
        return torch.stack(parts).reshape(lower.shape[:-1]), lower
    lower = doubled(lower)
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


PER_UNIT = 64
"""Number of bins per unit of log λ, for which two points per bin give `log(1 + t λ)` to a relative error of 1e-7."""

MANY = 100_000
"""Minimum number of eigenvalues that are condensed."""


def condensed(eigenvalues: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns points λ' (n,) and weights w (n,) in float64 such that `Σ_i log(1 + t λ_i) = Σ_k w_k log(1 + t λ'_k)`.

    The third derivative of `log(1 + exp u)` is smaller than the function. A third central moment in a bin of width h in
    u is at most `h³/10`, so the relative error is at most `h³/60`: 6e-8, or 1e-10 for evenly filled bins. Zeros are
    left out. Returns λ and None if λ has few entries, or only zeros, or entries that are not finite and >= 0. The sums
    are made on the CPU and do not depend on the order of threads.
    """
    values = eigenvalues.flatten()
    if len(values) >= MANY:
        low, high = values.aminmax()
        if 0 <= low <= high < math.inf and high > 0:  # aminmax returns NaN if there is one
            return _condensed(values, high)
    return doubled(values), None


def _condensed(values: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the points and weights of `condensed` for many λ, of which `high` is the largest."""
    # 1. bins of log λ, `PER_UNIT` of them per unit
    parts = values.split(SLICE_NUMBERS)
    smallest = torch.stack([torch.where(part > 0, part, math.inf).amin() for part in parts]).amin()
    lowest, highest = doubled(torch.stack([smallest, high])).cpu().log()
    sums = lowest.new_zeros(3, 1 + int(PER_UNIT * (highest - lowest)))  # sums of powers 0, 1 and 2
    # 2. number of λ in each bin, and sums of their places in it and of the squares of these
    for part in parts:
        places = PER_UNIT * (doubled(part[part > 0]).cpu().log() - lowest)
        bins = places.long()
        within = places - bins
        for power, added in enumerate((None, within, within.square())):
            sums[power] += torch.bincount(bins, added, minlength=sums.shape[1])
    # 3. mean and standard deviation of log λ in each bin
    filled = sums[0] > 0
    counts, means, spreads = sums[:, filled]
    means, spreads = means / counts, spreads / counts
    spreads = (spreads - means.square()).clamp_min(0.0).sqrt() / PER_UNIT
    means = lowest + (filled.nonzero().squeeze(1) + means) / PER_UNIT
    # 4. two points at mean ± deviation, with half the number each: they keep moments 0 to 2 of the bin
    points = torch.cat([means - spreads, means + spreads]).exp()
    return points.to(values.device), counts.repeat(2).to(values.device) / 2
