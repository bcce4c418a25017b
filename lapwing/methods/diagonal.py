"""Diagonal Laplace: the exact diagonal of the GGN, in one pass."""

from __future__ import annotations

from dataclasses import dataclass

from ..covariance import Blockwise, DiagonalBlock
from .footprint import FitShape, Footprint
from .passes import Batch, CurvaturePass, Method, Passes, run_curvature_pass
from .problem import Problem
from .state import BlockSums


@dataclass(frozen=True)
class Diagonal(Method):
    """Diagonal Laplace, `Σ = (s diag(G) + Δ)⁻¹` with the exact diagonal of the GGN, and s as in `lw.fit`.

    Cost: one pass of C backward passes of activations; memory O(P).
    """

    accepts_further_data = True

    def passes(self, problem: Problem) -> Passes:
        return (yield from run_curvature_pass(SquaredSums(problem)))

    def footprint(self, shape: FitShape) -> Footprint:
        kept = shape.stored(Blockwise, {"kinds": {block.name: "diagonal" for block in shape.tangent.blocks}})
        return Footprint(kept=kept, peak=kept + shape.chunk(), passes=shape.pass_length)


class SquaredSums(CurvaturePass[BlockSums]):
    """Sums `Σ_n,r (RᵀJ)²`, (P_block,) for each block."""

    label = "diagonal of the GGN"

    def init(self) -> BlockSums:
        return BlockSums(self._problem.block_zeros())

    def update(self, state: BlockSums, batch: Batch) -> None:
        for _, record in batch.records(self._problem.summed_root):
            for name, total in state.blocks.items():
                total += record.sums(name).squared_sum()

    def finish(self, state: BlockSums) -> Blockwise:
        problem, structures = self._problem, {name: DiagonalBlock(total) for name, total in state.blocks.items()}
        return Blockwise(problem.tangent.blocks, structures, problem.precision, problem.scale.of_curvature)
