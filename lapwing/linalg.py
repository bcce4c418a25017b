"""Sums of squares, decompositions and large products of matrices, the dtypes that they take, and checks of draws."""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, reduce
from numbers import Integral
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from .environment import memory_limit
from .errors import LapwingError, shown

log = logging.getLogger("lapwing")

TRIANGLE_COLUMNS = 96, 256
"""Of a symmetric product at least and at most so many columns are taken at once, a third of all in between."""

SLICE_NUMBERS = 2**19  # of a tensor, taken at once where its copy in another form would be as large

RESOLVED = 1e14  # curvature over prior precision above which float64 sums of float32 Jacobians lose small curvatures

RANK_CUT = 1e-11  # relative singular value below which a direction of explicit float64 rows is rounding noise

STRIP = 256
"""Rows of a wide matrix that are taken at once."""

WIDE = 256
"""Matrices of low rank are reduced to their range from this width on."""

SPARE = 8
"""Columns of a random sketch beyond the rank; as many again check that they were enough."""

LARGE_PRODUCT = 2**22
"""Multiply-adds from which on a product goes to oneDNN: its first one of a shape takes half a millisecond more."""


def check_memory(what: str, count: int, numbers: int) -> None:
    """Raises where so many float32 tensors of so many numbers exceed the memory of this process."""
    needed, limit = 4 * int(count) * numbers, memory_limit()
    if needed > limit:
        raise LapwingError(
            f"{what} takes {min(needed, 2**99) / 2**30:.3g} GiB, and this process may use {limit / 2**30:.3g} GiB. Ask "
            "for fewer draws at a time."
        )


def check_draws(caller: str, name: str, count: int, numbers: int = 0) -> None:
    """Raises where a count is not a positive whole number, or where so many draws do not fit into memory."""
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
        raise LapwingError(
            f"{caller}({name}={shown(count)}) is not a number of draws. Pass a whole number of at least 1: "
            f"{caller}({name}=512)."
        )
    check_memory(f"{caller}({count})", int(count), numbers)


def seeded(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """Returns the generator, or a new one with seed 0 on `device`: the same call gives the same answer.

    Raises:
        LapwingError: for what is not a generator.
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        raise LapwingError(
            f"The generator is {shown(generator)}. Pass torch.Generator().manual_seed(0), or leave it out for seed 0."
        )
    return torch.Generator(device=device).manual_seed(0) if generator is None else generator


def generator_on(device: torch.device, generator: torch.Generator) -> torch.Generator:
    """Returns the generator, or one on another device that it seeds."""
    if generator.device.type == device.type:
        return generator
    seed = torch.randint(2**62, (), generator=generator, device=generator.device)
    return torch.Generator(device).manual_seed(int(seed))


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite: one fast sum, and a look at each where that overflows or is not finite."""
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def total(terms: Iterable[Tensor]) -> Tensor:
    """Returns the sum of one or more tensors, added in order."""
    return reduce(torch.add, terms)


def nonnegative(values: Tensor) -> Tensor:
    """Returns values with rounding below 0 cut off; the derivative at 0 is 1, where that of `clamp_min` may be 0."""
    return torch.where(values < 0, 0.0, values) if values.requires_grad else values.clamp_min(0.0)


def add_squares(sums: Tensor, values: Tensor) -> None:
    """Adds `xᵀ x` to sums (G, n, n) in place, for x (G, m, n): its lower triangle, all that `mirrored` reads.

    Cost: half the products of the whole matrix, by blocks of columns; memory of x once more.
    """
    size = sums.shape[-1]
    least, most = TRIANGLE_COLUMNS
    if 3 * size <= 4 * least:
        sums.baddbmm_(values.mT, values)
        return
    width = min(most, max(least, -(-size // 3)))
    for matrix, x in zip(sums, values.mT.contiguous(), strict=True):  # its rows are cut as products take them fastest
        for start in range(0, size, width):
            part = slice(start, min(start + width, size))
            matrix[start:, part] += linear(x[start:], x[part])


def mirrored(lower: Tensor) -> Tensor:
    """Returns the symmetric matrices whose lower triangles are those of (..., n, n)."""
    return lower.tril() + lower.tril(-1).mT


def mirror(lower: Tensor) -> None:
    """Copies the lower triangle of a matrix (n, n) over the upper one."""
    for start in range(0, len(lower), STRIP):
        part = slice(start, start + STRIP)
        lower[part, part] = mirrored(lower[part, part])
        lower[:start, part] = lower[part, :start].T


def row_products(first: Tensor, second: Tensor) -> Tensor:
    """Returns `x yᵀ` (M, N) in float64 for x (M, P) and y (N, P), a slice of columns at a time.

    Cost: time O(M N P), memory of 2¹⁹ numbers of each, or of one column, beside the result.
    """
    device = double_device(first.device)
    products = torch.zeros(len(first), len(second), dtype=torch.float64, device=device)
    length = max(1, SLICE_NUMBERS // max(1, len(first), len(second)))
    for x, y in zip(first.split(length, -1), second.split(length, -1), strict=True):
        products.addmm_(doubled(x), doubled(y).T)
    return products


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype sums are kept in: float32, or float64 where the model is float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def double_device(device: torch.device) -> torch.device:
    """Returns where float64 numbers of a device live: on the CPU for Apple's, which has none."""
    return torch.device("cpu") if device.type == "mps" else device


def placed(values: Tensor, device: torch.device) -> Tensor:
    """Returns values on a device, those in float64 where it has them."""
    return values.to(double_device(device) if values.dtype == torch.float64 else device)


def doubled(values: Tensor) -> Tensor:
    """Returns values in float64, on a device that has it."""
    device = double_device(values.device)
    return (values if device == values.device else values.to(device)).double()


def symmetric_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Decomposes a PSD matrix `M = U diag(λ) Uᵀ` in float64, rounding noise below zero clamped to 0.

    Args:
        matrix: (..., n, n), symmetric positive semi-definite up to rounding.

    Returns:
        λ (..., n) ascending and U (..., n, n), float64.

    Raises:
        LapwingError: if the matrix holds NaN or infinite entries.

    Cost: time O(n³), memory O(n²).
    """
    _check_finite(matrix)
    matrix = doubled(matrix)
    values, vectors = _eigh((matrix + matrix.mT) / 2)
    return values.clamp_min(0.0), vectors


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Decomposes the lower triangles of symmetric matrices, on the CPU where the device fails."""
    try:
        return torch.linalg.eigh(matrix)
    except RuntimeError as error:  # it does not converge, or runs out of memory
        if matrix.device.type == "cpu":
            raise
        log.info("eigh of %s failed on %s, and goes on on the CPU: %s", tuple(matrix.shape), matrix.device, error)
    values, vectors = torch.linalg.eigh(matrix.cpu())
    return values.to(matrix.device), vectors.to(matrix.device)


def eigen_in_place(
    lower: Tensor, rank: int | None = None, summed: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Decomposes PSD matrices as `symmetric_eigen`, in their own memory on the CPU.

    Another device may fail, and must not have overwritten the matrix then.

    A matrix that is a sum of few squares is reduced to its range, which its product with a random matrix spans (Halko,
    Martinsson and Tropp 2011). Where the rank was too low, all eigenpairs are taken, and are right.

    Args:
        lower: (..., n, n), contiguous, of which the lower triangle is read; may be overwritten by U. In float64, or in
            any dtype where it `is_reduced`.
        rank: how many squares `x xᵀ` a matrix is the sum of. Its other eigenvalues are rounding noise, and become 0.
        summed: the dtype that it was summed in.

    Returns:
        λ (..., n) ascending in float64, and U (..., n, n) in the dtype of the matrix.

    Raises:
        LapwingError: if it holds NaN or infinite entries.

    Cost: time O(n³), or O(n² rank) where n is large and the rank low; memory the workspace of LAPACK, 16 n² bytes, or
    O(n rank).
    """
    _check_finite(lower)
    size = lower.shape[-1]
    rank, noise = size if rank is None else min(rank, size), 10 * math.sqrt(size) * torch.finfo(summed).eps
    if is_reduced(size, rank):
        parts = [_reduced(matrix, rank, noise) for matrix in lower.reshape(-1, size, size)]
        return torch.stack(parts).reshape(lower.shape[:-1]), lower
    if lower.device.type != "cpu":
        values, matrix = _eigh(lower)
    else:
        values, matrix = lower.new_empty(lower.shape[:-1]), lower.mT  # columns lie in memory as LAPACK takes them
        torch.linalg.eigh(matrix, "U", out=(values, matrix))
    return _without_noise(values, rank, noise), matrix


def _without_noise(values: Tensor, rank: int, noise: float) -> Tensor:
    """Returns λ (..., n), changed in place, where those beyond the rank are 0 if they may be rounding noise."""
    others = values.clamp_min_(0.0)[..., : values.shape[-1] - rank]
    others.masked_fill_(others <= noise * values[..., -1:], 0.0)
    return values


def is_reduced(size: int, rank: int) -> bool:
    """Whether the range of a matrix of this size and rank is found faster than all its eigenpairs."""
    return size >= WIDE and 3 * (rank + 2 * SPARE) <= 2 * size


def _reduced(matrix: Tensor, rank: int, noise: float) -> Tensor:
    """Returns λ (n,), and writes U over one matrix (n, n), whose rank may be higher."""
    mirror(matrix)
    values = _range_in_place(matrix, rank, noise)
    if values is not None:
        return _without_noise(values, rank, noise)
    values, vectors = _eigh(doubled(matrix))
    matrix[:] = vectors.to(matrix)
    return values.clamp_min_(0.0)


def _range_in_place(matrix: Tensor, rank: int, noise: float) -> Tensor | None:
    """Returns λ (n,), and writes U over a symmetric matrix (n, n) of low rank; None where its rank is higher.

    All but the last columns of a sketch `M Ω` span the range, and these add to it no more than noise. The reflections
    `I - W Vᵀ` that make the sketch triangular turn unit vectors into an orthonormal basis, first of the sketch.
    """
    size, count, within, device = len(matrix), rank + 2 * SPARE, rank + SPARE, double_device(matrix.device)
    random = torch.randn(size, count, generator=seeded(None, device), dtype=torch.float64, device=device)
    v, scales = torch.geqrf(row_products(matrix, random.T))
    del random
    triangle = v[:count].triu()
    if torch.linalg.vector_norm(triangle[within:, within:]) > noise * torch.linalg.vector_norm(triangle[:, within:]):
        return None
    used = scales != 0  # what is 0 already is not reflected
    v.tril_(-1).diagonal().copy_(used)
    inverse = (v.T @ v).triu_(1)
    inverse.diagonal().copy_(torch.where(used, 1 / scales, 1.0))
    w = torch.linalg.solve_triangular(inverse, v, upper=True, left=False)
    inside = -w @ v[:count].T
    inside.diagonal().add_(1.0)
    values, vectors = _eigh(inside.T @ row_products(matrix, inside.T))
    columns, (w, v) = size - count, (x.to(matrix) for x in (w, v[count:]))
    for part, rows in zip(matrix.split(STRIP), w.split(STRIP), strict=True):
        part[:, :columns] = -linear(rows, v)
    matrix.diagonal(-count).add_(1.0)
    matrix[:, columns:] = (inside @ vectors).to(matrix)
    return F.pad(values, (columns, 0))


def _check_finite(matrix: Tensor) -> None:
    if not matrix.numel() or torch.stack(matrix.aminmax()).isfinite().all():  # NaN is the least and the largest
        return
    bad = int((~torch.isfinite(matrix)).sum())
    raise LapwingError(
        f"A matrix of shape {tuple(matrix.shape)} that is made of gradients has {bad} NaN or infinite entries. Scale "
        "the inputs and the targets to about 1, check the weights for overflow, or use model.float() or model.double()."
    )


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
    _check_finite(matrix)
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
    _check_finite(rows)
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


# Products with a large float32 matrix. On a CPU torch multiplies float32 matrices by Intel's MKL, which leaves half of
# the AVX-512 of other makers' processors unused. oneDNN, which torch carries for convolutions and half precision, does
# not. Its product is reached by an operator of torch's compiler that has no guarantee, so it is tried once; where it
# fails, products go to torch.


def matmul(x: Tensor, matrix: Tensor) -> Tensor:
    """Returns `x M` (..., O) for x (..., I) and M (I, O)."""
    return linear(x, matrix.mT)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `x Wᵀ + b` (..., O) for x (..., I), W (O, I) and b (O,).

    Cost: where either W or its transpose is contiguous, half of `F.linear`'s on some processors.
    """
    if x.numel() * weight.shape[0] >= LARGE_PRODUCT and suits_onednn(x, weight):
        product = onednn()
        if product is not None:
            return product(x, weight, bias if bias is None else bias.contiguous())  # it reads no strides of a bias
    return F.linear(x, weight, bias)


def suits_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN takes these: it has no derivatives, and is a thousand times slower for slices of rows.

    Code that is compiled or exported keeps to public operators.
    """
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or x.device.type != "cpu":
        return False
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return False
    return weight.is_contiguous() or weight.mT.is_contiguous()


@cache
def onednn() -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """Returns oneDNN's `F.linear`, or None where MKL is as fast or torch no longer has it."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or "GenuineIntel" in _maker():
        return None

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    try:
        right = torch.equal(product(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)), torch.full((2, 4), 4.0))
    except (AttributeError, RuntimeError, TypeError):
        return None
    return product if right else None


def _maker() -> str:
    """Returns text that names the processor's maker."""
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text(errors="replace")
    return platform.processor()
