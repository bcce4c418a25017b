"""What all subspace methods share: the pass that sums the curvature on a basis, and the covariance it gives."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..covariance import Basis, ExplicitBasis, LowRank, LowRankWithResidual
from ..covariance.dense import cut, expand
from ..numerics import RANK_CUT, orthonormal_rows, symmetric_eigen
from .passes import Batch, Passes, Problem, State, SumPass

Residual = Literal["prior"] | None

SVD_NUMBERS = 2**24
"""Rows of up to this many numbers are orthonormalised by SVD; larger ones by their Gram matrix and a QR."""


def on_basis(problem: Problem, basis: Basis, residual: Residual) -> Passes:
    """Yields the pass for `H = W G Wᵀ`; returns the covariance on the basis, with or without the prior outside it."""
    state = yield _Projection(problem, basis)
    structure = LowRank if residual is None else LowRankWithResidual
    blocks = problem.tangent.blocks
    return structure(blocks, basis, state["H"], state["traces"], problem.precision, problem.scale)


def basis_of_rows(problem: Problem, rows: Tensor, rank: int | None, dtype: torch.dtype) -> ExplicitBasis:
    """Returns the top right singular vectors of rows `J Δ^(-1/2)` as directions `V Δ^(-1/2)` in weight space.

    Args:
        problem: for the prior that whitens.
        rows: rows of J (M, P).
        rank: at most this many directions.
        dtype: of the directions.
    """
    blocks = problem.tangent.blocks
    root = expand(blocks, problem.precision / problem.precision[0]).rsqrt()
    directions = orthonormal_span(rows * root.to(rows.dtype), rank)
    return ExplicitBasis(cut(blocks, (directions * root).to(dtype)))


def orthonormal_span(rows: Tensor, rank: int | None = None) -> Tensor:
    """Returns the top right singular vectors of rows as (K, P), by SVD or, for many numbers, by Gram matrix and QR.

    Args:
        rows: (M, P).
        rank: at most this many directions.
    """
    if rows.numel() <= SVD_NUMBERS:
        return orthonormal_rows(rows, rank)
    gram = rows.double() @ rows.double().T if rows.numel() <= 2**27 else _gram(rows)
    values, vectors = symmetric_eigen(gram)
    keep = (values > max(RANK_CUT, len(values) * torch.finfo(rows.dtype).eps) * values[-1]).sum().item()
    keep = keep if rank is None else min(rank, keep)
    vectors = vectors[:, -keep:].flip(-1)
    return torch.linalg.qr((vectors.T.to(rows.dtype) @ rows).double().T)[0].T


def _gram(rows: Tensor) -> Tensor:
    """Returns `rows rowsᵀ` in float64, a slice of columns at a time."""
    step = max(1, 2**25 // len(rows))
    return sum(part.double() @ part.double().T for part in rows.split(step, -1))


class _Projection(SumPass):
    """`H = Σ (RᵀJWᵀ)ᵀ(RᵀJWᵀ)` (K, K), and the trace of G a block where the evidence asks for it."""

    label = "curvature on the subspace"

    def __init__(self, problem: Problem, basis: Basis) -> None:
        self._problem, self._basis = problem, basis
        self._dtype = basis.dtype

    def init(self) -> State:
        rank, blocks = self._basis.grams.shape[-1], len(self._problem.tangent.blocks)
        zeros = self._problem.zeros
        return {"H": zeros(rank, rank, dtype=torch.float64), "traces": zeros(blocks, dtype=torch.float64)}

    def update(self, state: State, batch: Batch) -> None:
        held = self._problem.root.columns * self._basis.grams.shape[-1]
        for _, record in batch.records(self._problem.root, self._dtype, held):
            projected = self._basis.project(record).flatten(0, 1).double()  # (B R, K)
            state["H"] += projected.T @ projected
            if self._problem.traces_wanted:
                state["traces"] += torch.stack([record[name].squared_norm() for name in record]).double()
