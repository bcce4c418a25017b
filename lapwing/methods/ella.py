"""ELLA: the NTK's leading eigenfunctions by Nyström on sampled rows of the Jacobian, then the curvature on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import LapwingError, shown
from ..options import at_least, option
from .footprint import FitShape, Footprint
from .passes import Method, Passes
from .problem import Problem
from .rows import Sampling, sampled_anchors
from .subspace import Residual, footprint_on_rows, on_basis, span_of_anchors


@dataclass(frozen=True)
class ELLA(Method):
    """Accelerated linearised Laplace, `Σ = V (VᵀGV/τ + δI)⁻¹ Vᵀ` (Deng et al. 2022, equations 6 to 17).

    V holds the top K right singular vectors of M sampled rows of J.

    With `residual="prior"` it adds `δ⁻¹(I - VVᵀ)`: directions the rows do not span keep the prior, and with every
    training row spanned the posterior is exactly Full's, at this prior and at any multiple of it. Without it (as
    published) they have variance 0.

    Args:
        rank: K, the most directions kept.
        rows: M, sampled without repetition among all (input, output) pairs; "all" takes every one.
        residual: None or "prior".
        sampling: "uniform" over all pairs (Algorithm 2); "balanced", as many inputs of each class, with outputs at
            random; "label", inputs with the output of their own class.

    Raises:
        LapwingError: for numbers below 1, or another label.

    Cost: M backward passes, memory O(M P); where that exceeds the budget, about M²/m more for chunks of m rows, memory
    O(M² + K P), and again in float64 where rounding hides some of the K directions; where K P exceeds it too, V stays
    implicit, memory O(M²), every chunk of the curvature's pass and of a prediction takes M backward passes more, and a
    saved posterior holds the sampled training inputs. The loader is read to count samples, to collect the rows'
    inputs, and to sum the curvature by C backward passes per sample.

    Example:
        >>> import lapwing as lw
        >>> lw.ELLA(rank=20, rows=200)
        ELLA(rank=20, rows=200, residual=None, sampling='uniform')
    """

    rank: int = option(20, at_least(1))
    rows: int | Literal["all"] = option(200, at_least(1))
    residual: Residual = None
    sampling: Sampling = "uniform"

    def __post_init__(self) -> None:
        """Checks that rows and sampling go together."""
        super().__post_init__()
        if self.rows == "all" and self.sampling != "uniform":
            raise LapwingError(
                f"ELLA(rows='all', sampling={shown(self.sampling)}) excludes itself: all rows leave nothing to sample. "
                "Write ELLA(rows=2000, sampling='balanced')."
            )

    def passes(self, problem: Problem) -> Passes:
        """Yields a pass for the inputs of the rows, then one for the curvature on their span."""
        anchors = yield from sampled_anchors(problem, self.rows, self.sampling)
        basis = span_of_anchors(problem, anchors, self.rank, self.residual)
        return (yield from on_basis(problem, basis, self.residual))

    def footprint(self, shape: FitShape) -> Footprint:
        """Returns the footprint of the rows' span and of the curvature on it."""
        pairs = shape.samples * (shape.tangent.width if self.sampling == "uniform" else 1)
        count = pairs if self.rows == "all" else min(self.rows, pairs)
        return footprint_on_rows(shape, count, self.rank, self.residual)
