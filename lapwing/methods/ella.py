"""ELLA: the NTK's leading eigenfunctions by Nyström on sampled rows of the Jacobian, then the curvature on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .. import batches
from .passes import Batch, Method, Passes, Problem, State, SumPass, check_choice, check_count
from .subspace import Residual, basis_of_rows, on_basis


@dataclass(frozen=True)
class ELLA(Method):
    """Accelerated linearised Laplace, `Σ = V (VᵀGV/τ + δI)⁻¹ Vᵀ` (Deng et al. 2022, equations 6 to 13).

    V holds the top K right singular vectors of M sampled rows of J.

    With `residual="prior"` it adds `δ⁻¹(I - VVᵀ)`: directions the rows do not span keep the prior, and with every
    training row spanned the posterior is exactly Full's. Without it (as published) they have variance 0.

    Args:
        rank: K, the most directions kept.
        rows: M, sampled without repetition among all (input, output) pairs; "all" takes every one.
        residual: None or "prior".

    Raises:
        LapwingError: for numbers below 1, or another label.

    Cost: M rows (at most C backward passes for each sampled input), memory O(M P); then one pass of C backward passes
    and C + K products; memory O(K P).

    Example:
        >>> import lapwing as lw
        >>> lw.ELLA(rank=20, rows=200)
        ELLA(rank=20, rows=200, residual=None)
    """

    rank: int = 20
    rows: int | Literal["all"] = 200
    residual: Residual = None

    def __post_init__(self) -> None:
        """Checks numbers and labels."""
        check_count("ELLA", "rank", self.rank)
        if self.rows != "all":
            check_count("ELLA", "rows", self.rows)
        check_choice("ELLA", "residual", self.residual, (None, "prior"))

    def passes(self, problem: Problem) -> Passes:
        """Rows, then the curvature on their span."""
        tangent = problem.tangent
        total = problem.count() * tangent.outputs
        count = total if self.rows == "all" else min(self.rows, total)
        dtype = tangent.dtype if self.residual is None else torch.float64
        problem.require(
            f"ELLA(rows={self.rows!r})", count * tangent.size * dtype.itemsize, f"{count} rows of {tangent.size} "
            "weights",
            "ask for fewer rows",
        )  # fmt: skip
        picked = torch.randperm(total, generator=problem.generator())[:count]
        state = yield SampledRows(problem, picked, dtype)
        basis = basis_of_rows(problem, state["rows"], self.rank, dtype)
        return (yield from on_basis(problem, basis, self.residual))


class SampledRows(SumPass):
    """Rows of J at chosen (sample, output) pairs, each added to its own slot (M, P).

    Args:
        problem: the fit.
        picked: flat indices `sample * C + output` (M,).
        dtype: of the rows.
    """

    label = "sampled rows of the Jacobian"

    def __init__(self, problem: Problem, picked: torch.Tensor, dtype: torch.dtype) -> None:
        self._problem, self._dtype = problem, dtype
        self._sample, self._output = picked // problem.tangent.outputs, picked % problem.tangent.outputs

    def init(self) -> State:
        return {"rows": self._problem.zeros(len(self._sample), self._problem.tangent.size, dtype=self._dtype)}

    def update(self, state: State, batch: Batch) -> None:
        """Takes the first pick of every sample together, then the second picks, and so on: one cotangent a sample."""
        tangent, stop = self._problem.tangent, batch.start + batches.size(batch.inputs)
        slots = ((self._sample >= batch.start) & (self._sample < stop)).nonzero()[:, 0]
        slots = slots[self._sample[slots].argsort(stable=True)]
        samples = self._sample[slots] - batch.start
        first = torch.searchsorted(samples, samples)  # of each sample's run
        turn = torch.arange(len(slots)) - first
        length = tangent.chunk_length(1, self._dtype, 2 * tangent.size)
        for pick in range(int(turn.max()) + 1 if len(turn) else 0):
            for here in (turn == pick).nonzero()[:, 0].split(length):
                u = torch.zeros(len(here), tangent.outputs, 1)
                u[torch.arange(len(here)), self._output[slots[here]]] = 1
                chosen = batches.take(batch.inputs, samples[here])
                record = tangent.record(chosen, u.to(tangent.device), self._dtype)
                state["rows"][slots[here]] += record.rows()[:, 0]
