"""ELLA: leading eigenfunctions of the NTK by Nyström on sampled rows of the Jacobian, and the curvature on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import LapwingError, shown
from ..options import at_least, option
from .footprint import FitShape, Footprint
from .passes import LabelsOfData, Method, Passes
from .problem import Problem
from .rows import Sampling, anchors_at, choose_rows
from .subspace import Residual, footprint_on_rows, on_basis, span_of_anchors


@dataclass(frozen=True)
class ELLA(Method):
    """Accelerated linearised Laplace, `Σ = V (s VᵀGV + δI)⁻¹ Vᵀ`, s as in `KFAC` (Deng et al. 2022, eq. 6 to 17).

    V holds the top K right singular vectors of M sampled rows of J. With `residual="prior"` the method adds
    `δ⁻¹(I - VVᵀ)`, so directions outside the span of the rows keep the prior. If every training row is in the span, the
    posterior then equals Full's, at this prior and at any multiple of it. Without a residual, as published, the
    directions outside have variance 0.

    Args:
        rank: K, the maximum number of directions.
        rows: M, the number of rows, sampled without repetition among all (input, output) pairs; "all" uses every pair.
        residual: None or "prior".
        sampling: "uniform" samples all pairs alike (Algorithm 2). "balanced" samples equally many inputs of each class,
            with random outputs. "label" samples inputs and uses the output of their own class.

    Cost: M backward passes, memory O(M P). If that exceeds the budget, chunks of m rows cost about M²/m more backward
    passes, memory O(M² + K P), and the same again in float64 if rounding hides some of the K directions. If K P exceeds
    the budget too, V stays implicit: memory O(M²), M more backward passes for each chunk of the curvature's pass and of
    a prediction, and a saved posterior holds the sampled training inputs. The loader is read to count samples, to
    collect the inputs of the rows, and to sum the curvature by C backward passes per sample.
    """

    accepts_further_data = True
    rank: int = option(20, at_least(1))
    rows: int | Literal["all"] = option(200, at_least(1))
    residual: Residual = None
    sampling: Sampling = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows == "all" and self.sampling != "uniform":
            raise LapwingError(
                f"ELLA(rows='all', sampling={shown(self.sampling)}) excludes itself: all rows leave nothing to sample. "
                "Write ELLA(rows=2000, sampling='balanced')."
            )

    def passes(self, problem: Problem) -> Passes:
        samples, outputs = choose_rows(problem, (yield LabelsOfData()), self.rows, self.sampling)
        anchors = yield from anchors_at(problem, samples, outputs, self.rows == "all", self.sampling)
        basis = span_of_anchors(problem, anchors, self.rank, self.residual)
        return (yield from on_basis(problem, basis, self.residual))

    def footprint(self, shape: FitShape) -> Footprint:
        pairs = shape.samples * (shape.tangent.width if self.sampling == "uniform" else 1)
        count = pairs if self.rows == "all" else min(self.rows, pairs)
        return footprint_on_rows(shape, count, self.rank, self.residual)
