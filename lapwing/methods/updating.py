"""Adds further data to a covariance, if its curvature is a sum over data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..covariance import Blockwise, Covariance, ExplicitBasis, LowRankWithResidual
from ..covariance.base import join_blocks
from ..errors import LapwingError
from ..linalg import doubled, symmetric_eigen
from ..tangent import MemoryNeed
from .full import AllRows, DenseCurvature
from .kfac import Factors, _FactorPass
from .passes import CurvaturePass, Method, Passes, SamplesSeen, run_curvature_pass
from .problem import Problem
from .state import State, TensorSum
from .subspace import ProjectedCurvature, ProjectionPass

if TYPE_CHECKING:
    from ..posterior import MethodInfo


@dataclass(frozen=True)
class Update(Method):
    """Adds the curvature of further data to the curvature of a covariance, on the same structure."""

    covariance: Covariance
    made_by: MethodInfo

    def passes(self, problem: Problem) -> Passes:
        covariance: Any = self.covariance
        way = covariance.continued_by if self.made_by.accepts_further_data else None
        step: CurvaturePass[Any]
        former: State  # sums of the former data
        if way == "blocks":
            reduce = self.made_by.options.get("weight_sharing") == "reduce"
            problem = problem.with_drawn_root() if self.made_by.options.get("fisher") == "sampled" else problem
            former, kinds = _former_factors(covariance, problem)
            step = _FactorPass(problem, kinds, reduce)
        elif way == "matrix":
            step, former = DenseCurvature(problem), TensorSum(covariance.curvature)
        elif way == "basis":
            step = ProjectionPass(problem, covariance.basis, "prior" if covariance.full_rank else None)
            former = ProjectedCurvature(covariance.curvature, covariance.traces)
        elif way == "rows":
            return (yield from run_curvature_pass(_MoreRows(problem, (yield SamplesSeen()).count, *covariance.rows)))
        else:
            raise _refusal(self.made_by.name)
        whole: Any = step.finish((yield step).added(former))
        return whole.with_rank(covariance.rank) if way == "basis" else whole


class _MoreRows(AllRows):
    """The rows of further data, together with rows U and M, for which `G = Uᵀ M U` is the curvature so far."""

    def __init__(self, problem: Problem, samples: int, rows: ExplicitBasis, curvature: torch.Tensor) -> None:
        count = samples * problem.root.columns
        needed = 16 * (count + rows.rank) * problem.tangent.size
        what, instead = f"{count + rows.rank} rows", "fit lw.Full(form='primal')"
        problem.tangent.require(MemoryNeed("The dual form of Full", needed, what, instead))
        super().__init__(problem, count)
        self._former, self._former_curvature = rows, curvature

    def finish(self, state: TensorSum) -> LowRankWithResidual:
        values, vectors = symmetric_eigen(self._former_curvature)
        former = (vectors * values.sqrt()).T @ join_blocks(self._problem.tangent.blocks, self._former.vectors).double()
        return super().finish(TensorSum(torch.cat([former, state.total])))


def _former_factors(covariance: Blockwise, problem: Problem) -> tuple[Factors, dict[str, str]]:
    """Returns the sums of KFAC's pass over the former data, computed from the structures, and the kind of each."""
    kinds, none = dict[str, str](), problem.zeros(0, dtype=torch.int64)
    every: Any = covariance.structures.values()
    kronecker = [one for one in every if one.kind == "kronecker"]
    former = Factors(torch.cat([none, *(one.count for one in kronecker)]))
    if former.count.is_floating_point():  # Σ w; the rank of A is a lower bound of the number of positions
        least = [(one.input_eigenvalues > 0).sum(-1).amax(keepdim=True) for one in kronecker]
        former.excess = former.count - torch.cat(least)
        former.count = torch.cat(least)
    structure: Any
    for name, structure in covariance.structures.items():
        kinds[name] = structure.kind
        if structure.kind == "kronecker":
            alpha, gamma, like = structure.input_eigenvalues, structure.output_eigenvalues, structure.eigenvalues
            outputs = doubled(structure.outputs)
            former.Gamma[name] = ((outputs * gamma[:, None]) @ outputs.mT).to(like)
            if structure.inputs is None:
                former.A[name] = alpha.to(like)
            else:
                inputs = doubled(structure.inputs)
                former.A[name] = ((inputs * alpha[:, None]) @ inputs.mT).to(like)
        elif structure.kind == "diagonal":
            former.diagonal[name] = structure.eigenvalues
        elif structure.kind == "dense":
            basis = doubled(structure.basis)
            former.dense[name] = (basis * doubled(structure.eigenvalues)) @ basis.T
        else:
            raise _refusal(type(structure).__name__)
    return former, kinds


def _refusal(name: str) -> LapwingError:
    return LapwingError(
        f"The curvature of {name} is not a sum over data, so further data cannot be added. Fit to all data, or use "
        "lw.KFAC(), lw.Diagonal(), lw.Full() or a subspace."
    )
