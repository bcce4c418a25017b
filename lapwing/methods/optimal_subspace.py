"""Optimal subspaces: the directions with most influence on the predictive covariance, by an approximate posterior."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..covariance import Covariance, ExplicitBasis
from ..covariance.base import split_blocks
from ..data import batches
from ..data.inputs import Inputs
from ..errors import LapwingError
from ..likelihoods import Likelihood
from ..linalg import doubled, placed
from ..options import at_least, instance_of, option
from ..tangent import Anchors, MemoryNeed, Tangent, Vectors
from .footprint import DECOMPOSITION_BYTES, FitShape, Footprint, decompositions
from .kfac import KFAC
from .passes import Method, Passes, SamplesSeen, Step, check_within, prior_covariance, with_seen
from .problem import Problem
from .rows import anchors_at, choose
from .subspace import Residual, footprint_on_rows, leading_of, on_basis, record_dtype


@dataclass(frozen=True)
class OptimalSubspace(Method):
    """`Σ = P (Pᵀ Ψ⁻¹ P)⁻¹ Pᵀ` with `P = Ψ_approx J_X'ᵀ U_s` (Faller and Martin 2025, sections 4.1 and 4.2).

    U_s are the leading eigenvectors of `J_X' Ψ_approx J_X'ᵀ` on a subset X' of the inputs. If Ψ_approx is the exact
    posterior and X' are the test inputs, no other subspace of rank s has a predictive covariance closer to Full's at X'
    (Theorem 1). The covariance uses the precision `Ψ⁻¹ = s G + Δ` of the exact GGN (equation 19; s as in `KFAC`).

    Ψ_approx uses the prior precision of the fit, or 1 if that is open. Later priors keep the span.

    Args:
        rank: s, the maximum number of directions.
        curvature: Ψ_approx: a method such as `KFAC()`, `EKFAC()`, `Diagonal()` or `Full()`; or "prior" for `δ⁻¹I`,
            which gives the directions of ELLA.
        rows: approximate number of rows of J in the subset, which has all outputs of at least one input; "all" uses
            every input. If the outputs have positions, each position of an input counts as an input.
        residual: None, or "prior" to keep the prior in the directions outside.
        at: inputs X', instead of a subset of the training data.

    Cost: the passes of `curvature`; M rows of J and `Ψ_approx Jᵀ`; one pass for the curvature on the span. Memory
    O(K P), plus the memory of Ψ_approx, plus one memory budget for rows.
    """

    accepts_further_data = True
    rank: int = option(20, at_least(1))
    curvature: Method | Literal["prior"] = option(KFAC(), instance_of("a method", Method), write="lw.KFAC()")
    rows: int | Literal["all"] = option(1000, at_least(1))
    residual: Residual = None
    at: Any = field(default=None, repr=False, compare=False)

    def check(self, tangent: Tangent, likelihood: Likelihood) -> None:
        if isinstance(self.curvature, Method):
            check_within(self.curvature, "curvature", tangent, likelihood)
        if self.at is not None and (batches.is_loader(self.at) or not Inputs.of(self.at).samples):
            raise LapwingError(
                "OptimalSubspace(at=...) needs one batch of inputs, without targets and with at least one sample, "
                f"not {batches.describe(self.at)}. Write at=x."
            )

    def passes(self, problem: Problem) -> Passes:
        approximate = None
        if isinstance(self.curvature, Method):
            curvature = yield from prior_covariance(self.curvature, problem, "curvature")
            scale = (yield from with_seen(problem)).curvature_scale()
            approximate = curvature.with_prior(problem.precision, scale)
        anchors = yield from self._subset(problem)
        basis = ExplicitBasis(self.directions(problem, anchors, approximate))
        return (yield from on_basis(problem, basis, self.residual))

    def _needs(self, tangent: Tangent, count: int, dtype: torch.dtype) -> tuple[MemoryNeed, ...]:
        rank, name = self.rank, type(self).__name__
        size = min(rank, count) * tangent.size * dtype.itemsize
        return (
            MemoryNeed(f"{name}(rank={rank})", size, f"{rank} directions", "ask for a lower rank"),
            MemoryNeed(f"{name}(rows={count})", 16 * count**2, "the rows' Gram matrix", "ask for fewer rows"),
        )

    def _subset(self, problem: Problem) -> Generator[Step, Any, Anchors]:
        """Returns all outputs at the given inputs, or at random training inputs."""
        width = problem.tangent.outputs
        if self.at is not None:
            at = Inputs.of(self.at)
            every = problem.tangent.width_of(at)
            samples = torch.arange(at.samples).repeat_interleave(every)
            return Anchors(problem.tangent, (at,), samples, torch.arange(every).repeat(at.samples))
        places = problem.tangent.width // width  # number of positions of an input
        total = (yield SamplesSeen()).count * places
        count = total if self.rows == "all" else min(total, max(1, self.rows // width))
        chosen = choose(total, count, problem.generator()).sort().values
        outputs = (chosen % places * width)[:, None] + torch.arange(width)
        samples = (chosen // places).repeat_interleave(width)
        return (yield from anchors_at(problem, samples, outputs.flatten(), self.rows == "all"))

    def directions(self, problem: Problem, anchors: Anchors, approximate: Covariance | None) -> dict[str, Tensor]:
        """Returns s directions: `λ^(-1/2) U_sᵀ J Ψ_approx`, made orthonormal in float64 if all rows fit in memory.

        Eigenvalues span many decades, and Ψ may make directions near-dependent. The covariance accepts any directions.
        """
        tangent, blocks = problem.tangent, problem.tangent.blocks
        dtype = record_dtype(tangent, self.residual)
        for need in self._needs(tangent, len(anchors), dtype):
            problem.tangent.require(need)
        fits = 2 * len(anchors) * tangent.size * torch.float64.itemsize <= tangent.memory
        precise = torch.float64 if fits else dtype
        all_rows = [(torch.arange(len(anchors)), anchors.rows(precise))] if fits else None

        def gram(dtype: torch.dtype) -> Tensor:
            """Returns `J Ψ_approx Jᵀ` (M, M)."""
            total = problem.zeros(len(anchors), len(anchors), dtype=torch.float64)
            for slots, rows in all_rows or anchors.row_chunks(dtype):
                weighted = rows.clone() if all_rows else rows
                _weight(problem, approximate, split_blocks(blocks, weighted))
                for columns, unweighted in all_rows or anchors.row_chunks(dtype):
                    total[slots[:, None], columns] = doubled(weighted @ unweighted.T)
            return total

        # 1. λ^(-1/2) U_sᵀ (s, M) of J Ψ_approx Jᵀ
        coefficients = leading_of(gram, min(self.rank, len(anchors)), precise).to(precise)  # (s, M)
        # 2. times J Ψ_approx: the rows of Pᵀ (s, P), from all rows in memory or from chunks of them
        if all_rows is None:
            directions = anchors.combine(coefficients)
            _weight(problem, approximate, directions)
        else:  # orthonormalised before they become float32: Ψ may make them nearly dependent
            rows = coefficients @ all_rows[0][1]
            _weight(problem, approximate, split_blocks(blocks, rows))
            directions = split_blocks(blocks, torch.linalg.qr(rows.T)[0].T)
        return {name: placed(vectors.to(dtype), tangent.device) for name, vectors in directions.items()}

    def footprint(self, shape: FitShape) -> Footprint | None:
        tangent, outputs = shape.tangent, shape.tangent.outputs
        first = self.curvature.footprint(shape) if isinstance(self.curvature, Method) else Footprint(0, 0, 0.0)
        if first is None:
            return None
        count = tangent.width * (shape.samples if self.at is None else Inputs.of(self.at).samples)
        if self.at is None and self.rows != "all":
            count = min(count, outputs * max(1, self.rows // outputs))
        last = footprint_on_rows(shape, min(self.rank, count), self.rank, self.residual)
        rows, passes = 16 * count * tangent.size, first.passes + last.passes + 2 * count / shape.samples
        if rows > tangent.memory:  # they are recorded again for each chunk of them
            passes += 2 * count / shape.samples * count / tangent.chunk_length(1, tangent.dtype, 4 * tangent.size)
        gram = last.kept + min(2 * rows, tangent.memory) + DECOMPOSITION_BYTES * count**2
        needs = first.needs + self._needs(tangent, count, record_dtype(tangent, self.residual))
        turned = sum(block.size * sum(block.matrix_shape[1:]) for block in tangent.blocks if block.matrix is not None)
        products = first.products + last.products + decompositions(count)
        products += float(count) * (2 * turned + count * tangent.size)  # Ψ_approx Jᵀ by KFAC, and J Ψ_approx Jᵀ
        peak = max(first.peak, first.kept + max(gram, last.peak))
        return Footprint(last.kept, peak, passes, last.rank, needs, products)


def _weight(problem: Problem, approximate: Covariance | None, vectors: Vectors) -> None:
    """Multiplies rows (n, P_block) of each block by Ψ_approx in place; None means the covariance of the prior."""
    if approximate is None:
        for vector, delta in zip(vectors.values(), problem.precision.tolist(), strict=True):
            vector /= delta
        return
    for part, products in approximate.products(vectors, problem.tangent.memory):
        for name, vector in vectors.items():
            vector[part] = products[name].to(vector)
