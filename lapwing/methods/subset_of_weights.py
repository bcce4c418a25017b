"""Subset of weights: the GGN posterior of a few weights; the other weights are certain or keep the prior."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..covariance import Covariance
from ..covariance.basis import CoordinateBasis
from ..errors import LapwingError, shown
from ..likelihoods import Likelihood
from ..linalg import doubled
from ..options import Rule, at_least, option, required
from ..tangent import MemoryNeed, Tangent
from .diagonal import SquaredSums
from .footprint import FitShape, Footprint
from .passes import Method, Passes, Step, with_seen
from .problem import Problem
from .subspace import Residual, on_basis, record_dtype, stored_on_basis


@dataclass(frozen=True)
class SubsetOfWeights(Method):
    """The exact GGN posterior of K weights, `Σ = V (VᵀGV/τ + δI)⁻¹ Vᵀ`; V holds columns of the identity.

    The weights are chosen by one of

    - `"diagonal"`: the largest variance under the diagonal posterior, `1/(s G_ii + δ_i)`, at the initial prior of the
      fit. These are the weights of least curvature. A weight without curvature (behind a dead unit) comes first, and
      contributes nothing to predictions;
    - `"magnitude"`: the largest `|θ̂_i|`;
    - `"random"`: K random weights, from the seed of the fit;
    - a posterior over the same weights, such as SWAG's: the largest marginal variance under it.

    By the same rule a larger K contains the weights of a smaller K. With `residual="prior"` the method adds
    `δ⁻¹(I - VVᵀ)`, so the other weights keep the prior; by default they have variance 0. δ does not depend on K. Other
    work scales it, `δ_K = (K/P) δ` (appendix F): pass `prior_precision=K / P * delta` for that.

    Args:
        size: K, the number of weights; at most P.
        by: the rule that chooses the weights.
        residual: None or "prior".

    Raises:
        LapwingError: if an option is invalid, if `size` exceeds P, or if the posterior is over other weights.

    Cost: one pass of C backward passes and, for layers with several positions, their rows; `by="diagonal"` needs one
    more pass. Time O(N C K²) for `VᵀGV` and O(K³) for each prior, memory O(K²). Only `covariance.diagonal()` and
    streamlined prediction need P x K entries.

    Source: Faller and Martin, Optimal Subspace Inference for the Laplace Approximation of Bayesian Neural Networks,
    equations 13, 16 and 19 with unit vectors for P; the subset methods of its section 5.
    """

    accepts_further_data = True
    size: int = field(metadata=required(at_least(1), "100"))
    by: Literal["diagonal", "magnitude", "random"] | Any = option(
        "diagonal",
        Rule(lambda by: isinstance(getattr(by, "covariance", None), Covariance), "a posterior over the same weights"),
    )
    residual: Residual = None

    def __repr__(self) -> str:
        by = repr(self.by) if isinstance(self.by, str) else f"<{getattr(self.by, 'method', type(self.by).__name__)}>"
        return f"SubsetOfWeights(size={self.size}, by={by}, residual={self.residual!r})"

    def check(self, tangent: Tangent, likelihood: Likelihood) -> None:
        if self.size > tangent.size:
            raise LapwingError(
                f"{shown(self)} asks for more weights than the {tangent.size} treated ones of "
                f"{type(tangent.model).__name__}. Write SubsetOfWeights(size={tangent.size}), or lw.Full() for all of "
                "them."
            )
        if isinstance(self.by, str):
            return
        mine, theirs = tangent.blocks, self.by.covariance.blocks
        expected, other = (
            {block.name: (block.parameters, block.shapes, block.matrix, block.bias) for block in blocks}
            for blocks in (mine, theirs)
        )
        odd = [name for name in {**expected, **other} if expected.get(name) != other.get(name)]
        if odd:
            raise LapwingError(
                f"SubsetOfWeights(by=posterior) needs a posterior over the {sum(block.size for block in mine)} weights "
                f"of this fit. This one is over {sum(block.size for block in theirs)} weights and differs in "
                f"{', '.join(odd[:4])}: make it with the params= of this fit."
            )

    def passes(self, problem: Problem) -> Passes:
        scores = yield from self._scores(problem)
        picked = scores.argsort(descending=True, stable=True)[: self.size]
        basis = CoordinateBasis(problem.tangent.blocks, picked, record_dtype(problem.tangent, self.residual))
        return (yield from on_basis(problem, basis, self.residual))

    def _scores(self, problem: Problem) -> Generator[Step, Any, Tensor]:
        """Returns a score per weight (P,). The largest scores are chosen; among equal ones the first."""
        tangent = problem.tangent
        if self.by == "diagonal":
            sums = (yield SquaredSums(problem)).blocks
            scale = (yield from with_seen(problem)).curvature_scale()
            deltas = zip(tangent.blocks, problem.precision, strict=True)  # float64, or δ would hide tiny curvatures
            return -torch.cat([scale * doubled(sums[block.name]) + delta for block, delta in deltas])
        if self.by == "magnitude":
            mean = tangent.mean()
            return torch.cat([mean[block.name].abs() for block in tangent.blocks])
        if isinstance(self.by, str):
            return torch.randperm(tangent.size, generator=problem.generator()).to(tangent.device)
        variances = self.by.covariance.diagonal()
        return torch.cat([variances[block.name].to(tangent.device) for block in tangent.blocks])

    def footprint(self, shape: FitShape) -> Footprint:
        size = min(self.size, shape.tangent.size)
        kept, dtype = stored_on_basis(shape, "CoordinateBasis", {"rank": size}, self.residual)
        peak = kept + max(80 * size**2, shape.chunk(dtype, 3 * shape.columns * size))
        need = MemoryNeed(f"SubsetOfWeights(size={size})", 48 * size**2, f"{size} x {size} matrices", "choose fewer")
        return Footprint(kept, peak, shape.pass_length * (1 + (self.by == "diagonal")), size, (need,))
