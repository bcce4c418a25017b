"""Code of all subspace methods: directions from rows of the Jacobian, and the pass for the curvature on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..covariance import Basis, ExplicitBasis, ImplicitBasis, LowRank, LowRankWithResidual
from ..covariance.base import split_blocks
from ..covariance.dense import expand
from ..linalg import RANK_CUT, check_matrices, doubled, eigen_in_place, orthonormal_rows, placed
from ..tangent import Anchors, MemoryNeed, Tangent
from .footprint import DECOMPOSITION_BYTES, FitShape, Footprint, decompositions
from .passes import Batch, CurvaturePass, Passes, run_curvature_pass
from .problem import Problem
from .state import State

log = logging.getLogger("lapwing")

Residual = Literal["prior"] | None

SVD_NUMBERS = 2**24  # maximum number of entries of rows that one SVD orthonormalises; larger matrices are sliced


@dataclass
class ProjectedCurvature(State):
    """Sums on a basis W."""

    H: Tensor  # `Σ (RᵀJWᵀ)ᵀ(RᵀJWᵀ)` (K, K)
    traces: Tensor  # the trace of G for each block (n_blocks,); zeros if the tuning does not read it

    @classmethod
    def zeros(cls, problem: Problem, rank: int) -> ProjectedCurvature:
        blocks = len(problem.tangent.blocks)
        return cls(problem.zeros(rank, rank, dtype=torch.float64), problem.zeros(blocks, dtype=torch.float64))

    def add(self, problem: Problem, basis: Basis, batch: Batch, factor: float = 1.0) -> None:
        for _, record in batch.records(problem.root, basis.dtype, problem.root.columns * basis.scratch_per_row):
            projected = doubled(basis.project(record).flatten(0, 1))  # (B R, K)
            self.H += (factor * projected.T) @ projected
            if problem.traces_wanted:
                traces = torch.stack([record[name].squared_norm() for name in record])
                self.traces += factor * doubled(traces)


class ProjectionPass(CurvaturePass[ProjectedCurvature]):
    """The curvature on a basis."""

    label = "curvature on the subspace"

    def __init__(self, problem: Problem, basis: Basis, residual: Residual) -> None:
        self._problem, self._basis, self._residual = problem, basis, residual

    def basis_tensors(self) -> Iterable[Tensor]:
        return self._basis.tensors().values()

    def init(self) -> ProjectedCurvature:
        return ProjectedCurvature.zeros(self._problem, self._basis.rank)

    def update(self, state: ProjectedCurvature, batch: Batch) -> None:
        state.add(self._problem, self._basis, batch)

    def finish(self, state: ProjectedCurvature) -> LowRank | LowRankWithResidual:
        structure = LowRank if self._residual is None else LowRankWithResidual
        problem, basis = self._problem, self._basis
        blocks = problem.tangent.blocks
        return structure(blocks, basis, state.H, state.traces, problem.precision, problem.scale.of_curvature)


def on_basis(problem: Problem, basis: Basis, residual: Residual) -> Passes:
    """Yields the pass for `H = W G Wᵀ`; returns the covariance on the basis W."""
    return (yield from run_curvature_pass(ProjectionPass(problem, basis, residual)))


def record_dtype(tangent: Tangent, residual: Residual) -> torch.dtype:
    """Returns the dtype of directions: float64 with a residual, which subtracts nearly equal numbers."""
    return tangent.dtype if residual is None else torch.float64


def span_of_anchors(problem: Problem, anchors: Anchors, rank: int, residual: Residual) -> Basis:
    """Returns the top right singular vectors of rows `J̃ (Δ/δ_1)^(-1/2)`, J̃ (M, P), as directions in weight space.

    They are computed from the rows if these fit the memory budget, else from the Gram matrix of the rows, summed layer
    by layer. In the second case the basis stays implicit if K directions do not fit.
    """
    tangent, dtype, rank = problem.tangent, record_dtype(problem.tangent, residual), min(rank, len(anchors))
    ratios = problem.precision / problem.precision[0]
    if _fit(len(anchors), tangent.size, dtype, tangent.memory):
        # 1a. rows J̃ (Δ/δ_1)^(-1/2) (M, P) fit: V (K, P) by their SVD, W = V (Δ/δ_1)^(-1/2)
        root = expand(tangent.blocks, ratios).rsqrt().to(dtype)
        root = placed(root, tangent.device)
        directions = orthonormal_span(anchors.rows(dtype).mul_(root), tangent.memory, rank)
        return ExplicitBasis(split_blocks(tangent.blocks, directions.mul_(root.to(directions.device)).to(root)))
    # 1b. otherwise from their Gram matrix J̃ (Δ/δ_1)⁻¹ J̃ᵀ = U diag(λ) Uᵀ: T = λ^(-1/2) Uᵀ (K, M)
    scales = {block.name: 1 / r for block, r in zip(tangent.blocks, ratios.tolist(), strict=True)}
    needed = rank * tangent.size * dtype.itemsize
    explicit = needed <= tangent.memory
    problem.tangent.require(_need(len(anchors)))
    precise = torch.float64 if not explicit else dtype
    coefficients = leading_of(lambda dtype: anchors.gram(scales, dtype), rank, precise)
    if not explicit:
        log.info(
            "%d directions of %s weights take %.3g GiB, and the memory budget is %.3g GiB. So they stay implicit: rows "
            "of J are computed again for each batch. Pass memory=%d if the machine has it, or a lower rank.",
            rank, f"{tangent.size:,}", needed / 2**30, tangent.memory / 2**30, 2 ** (needed - 1).bit_length(),
        )  # fmt: skip
        return ImplicitBasis(anchors, coefficients, scales)
    # 2b. W = T J̃ (Δ/δ_1)⁻¹ (K, P)
    fits = rank * tangent.size * torch.float64.itemsize <= tangent.memory
    combined = anchors.combine(coefficients if fits else coefficients.to(dtype))
    return ExplicitBasis({name: directions.mul_(scales[name]).to(dtype) for name, directions in combined.items()})


def orthonormal_span(rows: Tensor, memory: int, rank: int | None = None) -> Tensor:
    """Returns the top right singular vectors (K, P) of rows (M, P), whole if 16 bytes per entry fit the budget."""
    return orthonormal_rows(rows, rank, whole=rows.numel() <= min(SVD_NUMBERS, memory // 16))


def _fit(count: int, size: int, dtype: torch.dtype, memory: int) -> bool:
    """Whether rows (M, P) fit the budget, and the workspace of `orthonormal_span` fits twice the budget."""
    decomposed = 16 * count * size <= memory or 48 * min(count, size) ** 2 <= memory
    return decomposed and count * size * dtype.itemsize <= memory


def _need(count: int) -> MemoryNeed:
    return MemoryNeed(f"The span of {count} rows of J", 16 * count**2, "their Gram matrix", "ask for fewer rows")


def leading_of(gram: Callable[[torch.dtype], Tensor], rank: int, dtype: torch.dtype) -> Tensor:
    """Returns `λ^(-1/2) Uᵀ` (K, M) of the leading eigenpairs of a Gram matrix, largest first, without rounding noise.

    `gram` returns the matrix (M, M) float64, with products summed in the given dtype, and the matrix is overwritten. If
    the rounding noise of `dtype` hides some of the pairs, they are computed again in float64.
    """
    matrix = gram(dtype)
    check_matrices([matrix])
    values, vectors = eigen_in_place(matrix)
    # eigenvalues of a matrix summed in this dtype have errors of up to about M eps λ_max
    noise = max(RANK_CUT, len(values) * torch.finfo(dtype).eps) * values[-1:].sum()
    count = min(rank, int((values > noise).sum()))
    if count < rank and dtype != torch.float64:
        return leading_of(gram, rank, torch.float64)
    kept = torch.arange(len(values) - 1, len(values) - 1 - count, -1, device=values.device)
    return (vectors[:, kept] * values[kept].rsqrt()).T


def stored_on_basis(
    shape: FitShape, kind: str, extra: Mapping[str, Any], residual: Residual
) -> tuple[int, torch.dtype]:
    """Returns the bytes of a covariance on a basis of this class with these settings, and the dtype of directions."""
    dtype = record_dtype(shape.tangent, residual)
    return shape.stored(LowRank, {"basis": {"class": kind, "extra": extra}}, dtype), dtype


def footprint_on_rows(shape: FitShape, count: int, rank: int, residual: Residual) -> Footprint:
    """Returns the footprint of `span_of_anchors` for M rows of J, followed by `on_basis`."""
    tangent, size, rank = shape.tangent, shape.tangent.size, min(rank, count, shape.tangent.size)
    kept, dtype = stored_on_basis(shape, "ExplicitBasis", {"rank": rank}, residual)
    passes = shape.pass_length + 2 * count / shape.samples  # a forward and a backward pass for each row
    products = decompositions(min(count, size)) + float(count * size) * (2 * min(count, size))  # of the rows
    products += float(size * rank) * shape.samples  # `J Wᵀ` of all samples
    chunk = shape.chunk(dtype, shape.columns * 3 * rank)  # 3: `Basis.scratch_per_row`
    if _fit(count, size, dtype, tangent.memory):
        whole = count * size <= min(SVD_NUMBERS, tangent.memory // 16)
        svd = 24 * count * size if whole else rank * size * dtype.itemsize  # 24: QR in `orthonormal_rows`
        span = count * size * dtype.itemsize + svd + 56 * min(count, size) ** 2  # triangle, SVD: 7 float64
        peak = max(span, kept + max(chunk, 80 * rank**2))  # 10 float64 (K, K)
        return Footprint(kept, peak, passes, rank, products=products)
    passes += 2 * count / shape.samples * count / tangent.chunk_length(1, dtype)  # again for each pair of chunks
    if rank * size * dtype.itemsize > tangent.memory:  # and for each chunk of data
        passes += 2 * count / min(shape.batch, tangent.chunk_length(shape.columns, dtype))
        kept, _ = stored_on_basis(shape, "ImplicitBasis", {"rank": rank, "rows": count, "nests": []}, residual)
        kept += min(count, shape.samples) * shape.sample_bytes
    gram = DECOMPOSITION_BYTES * count**2 + min(tangent.memory, 2 * count * tangent.bytes_per_sample(1, dtype))
    return Footprint(kept, kept + max(gram, chunk), passes, rank, (_need(count),), products)
