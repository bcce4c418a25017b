"""Full Laplace: the dense GGN posterior, computed in weight space or in function space (dual)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..covariance import DenseCovariance, ExplicitBasis, LowRankWithResidual
from ..covariance.base import split_blocks
from ..errors import LapwingError
from ..likelihoods import Likelihood
from ..linalg import add_squares, mirrored
from ..tangent import MemoryNeed, Tangent
from .footprint import FitShape, Footprint, decompositions
from .passes import Batch, CurvaturePass, Method, Passes, SamplesSeen, run_curvature_pass
from .problem import Problem
from .state import TensorSum
from .subspace import orthonormal_span, stored_on_basis


@dataclass(frozen=True)
class Full(Method):
    """Full Laplace, `Ψ = (s G + Δ)⁻¹` over all treated weights, with s as in `KFAC`.

    The dual form uses the NC rows of `RᵀJ`. Their right singular vectors span G, so `V C Vᵀ + δ⁻¹(I - VVᵀ)` equals Ψ at
    every prior precision. It makes Full feasible for tens of thousands of weights and a few hundred samples.

    Both forms sum and decompose in float64, whatever the dtype of the model. If features are not scaled or the prior
    precision is small, sums in float32 would lose the directions of least curvature.

    Args:
        form: "auto" (dual if NC < .6 P: with more rows it needs more memory than the primal form), "primal" or "dual".

    Cost: one pass. Primal: time O(P³) once, memory 16 P² bytes, and twice that during the decomposition. Dual: memory
    O(NC P), time O((NC)² P) once.
    """

    accepts_further_data = True
    form: Literal["auto", "primal", "dual"] = "auto"

    def check(self, tangent: Tangent, likelihood: Likelihood) -> None:
        if self.form == "dual" and tangent.positions.several:
            raise LapwingError(
                "Full(form='dual') needs a fixed number of outputs, and these outputs have positions. Write "
                "lw.Full(form='primal')."
            )

    def passes(self, problem: Problem) -> Passes:
        rows = (yield SamplesSeen()).count * problem.root.columns
        problem.tangent.require(self.need(problem.tangent, rows))
        curvature = DenseCurvature(problem) if self._is_primal(problem.tangent, rows) else AllRows(problem, rows)
        return (yield from run_curvature_pass(curvature))

    def _is_primal(self, tangent: Tangent, rows: int) -> bool:
        """Whether the fit sums the GGN; otherwise it keeps all rows."""
        return tangent.positions.several or self.form == "primal" or (self.form == "auto" and rows > 0.6 * tangent.size)

    def need(self, tangent: Tangent, rows: int) -> MemoryNeed:
        """Returns the tensors of a fit to this number of rows of the Jacobian."""
        size = tangent.size
        if self._is_primal(tangent, rows):
            return MemoryNeed("Full", 24 * size**2, f"a dense covariance of {size} weights", "use lw.KFAC()")
        what = f"{rows} rows of {size} weights"
        return MemoryNeed("Full(form='dual')", 16 * rows * size, what, "use lw.KFAC() or fewer samples")

    def footprint(self, shape: FitShape) -> Footprint:
        size, rows = shape.tangent.size, shape.samples * shape.columns
        needs = (self.need(shape.tangent, rows),)
        if self._is_primal(shape.tangent, rows):
            chunk = shape.chunk(torch.float64, 2 * shape.columns * size)
            peak = 8 * size**2 + max(32 * size**2, chunk)  # the sum; its copies and LAPACK's workspace
            products = float(rows) * size**2 / 2 + decompositions(size)  # half of JᵀJ
            return Footprint(shape.stored(DenseCovariance, {}), peak, shape.pass_length, needs=needs, products=products)
        rank = min(rows, size)
        kept, _ = stored_on_basis(shape, "ExplicitBasis", {"rank": rank}, "prior")
        peak = kept + 20 * rows * size + 80 * rank**2 + shape.chunk(torch.float64)
        products = 2.0 * rows**2 * size + decompositions(rows)
        return Footprint(kept, peak, shape.pass_length, rank, needs, products)


class DenseCurvature(CurvaturePass[TensorSum]):
    """Sums the lower triangle of `G = Σ (RᵀJ)ᵀ(RᵀJ)` (P, P)."""

    label = "dense GGN"

    def init(self) -> TensorSum:
        size = self._problem.tangent.size
        return TensorSum(self._problem.zeros(size, size, dtype=torch.float64))

    def update(self, state: TensorSum, batch: Batch) -> None:
        scratch = 2 * self._problem.root.columns * self._problem.tangent.size
        for _, record in batch.records(self._problem.root, torch.float64, scratch):
            rows = record.rows().flatten(0, 1)
            add_squares(state.total[None], rows[None])

    def finish(self, state: TensorSum) -> DenseCovariance:
        problem = self._problem
        blocks, factor = problem.tangent.blocks, problem.scale.of_curvature
        return DenseCovariance(blocks, mirrored(state.total), problem.precision, factor)


class AllRows(CurvaturePass[TensorSum]):
    """Collects every row of `RᵀJ`, (N R, P)."""

    label = "rows of the Jacobian"

    def __init__(self, problem: Problem, rows: int) -> None:
        self._problem, self._rows = problem, rows

    def init(self) -> TensorSum:
        return TensorSum(self._problem.zeros(self._rows, self._problem.tangent.size, dtype=torch.float64))

    def update(self, state: TensorSum, batch: Batch) -> None:
        columns = self._problem.root.columns
        scratch = 2 * columns * self._problem.tangent.size
        for part, record in batch.records(self._problem.root, torch.float64, scratch):
            first = (batch.start + part.start) * columns
            rows = record.rows().flatten(0, 1)
            state.total[first : first + len(rows)] += rows

    def finish(self, state: TensorSum) -> LowRankWithResidual:
        problem, blocks = self._problem, self._problem.tangent.blocks
        basis = ExplicitBasis(split_blocks(blocks, orthonormal_span(state.total, problem.tangent.memory)))
        parts = split_blocks(blocks, state.total)
        projected = basis.inner(parts)  # (NC, K)
        traces = torch.stack([part.square().sum() for part in parts.values()])
        curvature = projected.T @ projected  # G = Uᵀ M U exactly, no second pass
        factor = problem.scale.of_curvature
        return LowRankWithResidual.from_rows(blocks, basis, curvature, traces, problem.precision, factor)
