"""Diagonal Laplace: the exact diagonal of the GGN, in one pass."""

from __future__ import annotations

from dataclasses import dataclass

from ..covariance import Blockwise, DiagonalBlock
from .passes import Batch, CurvaturePass, Method, Passes, Problem, State, last


@dataclass(frozen=True)
class Diagonal(Method):
    """Diagonal Laplace, `Σ = (diag(G)/τ + δI)⁻¹` with the exact diagonal of the GGN.

    Cost: one pass of C backward passes of activations; memory O(P).

    Example:
        >>> import lapwing as lw
        >>> lw.Diagonal()
        Diagonal()
    """

    def passes(self, problem: Problem) -> Passes:
        """One sum pass."""
        return (yield from last(_SquaredSums(problem)))


class _SquaredSums(CurvaturePass):
    """`Σ_n,r (RᵀJ)²`, (P_block,) a block."""

    label = "diagonal of the GGN"

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def init(self) -> State:
        return {block.name: self._problem.zeros(block.size) for block in self._problem.tangent.blocks}

    def update(self, state: State, batch: Batch) -> None:
        for _, record in batch.records(self._problem.root):
            for name, total in state.items():
                total += record[name].squared_sum()

    def finish(self, state: State) -> Blockwise:
        structures = {name: DiagonalBlock(diagonal) for name, diagonal in state.items()}
        return Blockwise(self._problem.tangent.blocks, structures, self._problem.precision, self._problem.scale)
