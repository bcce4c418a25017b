"""Subset of data: the exact posterior of some training points, by another method on these points only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import LapwingError
from ..options import at_least, option
from ..tangent import MemoryNeed, Tangent
from .ella import ELLA
from .footprint import FitShape, Footprint
from .full import Full
from .passes import Batch, FitResult, LabelsOfData, Method, Passes, SamplesSeen, SumPass
from .problem import Problem, Seen
from .rows import choose, choose_balanced, class_labels
from .state import DataSummary, State


@dataclass(frozen=True)
class SubsetOfData(Method):
    """The full Laplace posterior of n random training points, `(Σ_{i in S} J_iᵀ Λ_i J_i/τ + δI)⁻¹`, exact Λ.

    In function space it is the exact Gaussian process of these points (Immer et al. 2021, section 3.3): all their rows
    of J are directions, and directions outside keep the prior. The result equals `Full` fitted to the subset only. The
    subset has less information than all data, so `Full ≼ SubsetOfData ≼ prior`. Evidence and noise variance come from
    the subset too, and `posterior.samples` is n.

    Args:
        size: n, the maximum number of points.
        sampling: "uniform", or "balanced" for equally many points of each class.

    Raises:
        LapwingError: if an option is invalid, or if the Gram matrix of the rows exceeds the budget.

    Cost: the loader is read to count its samples if it has no length, then once, up to the last chosen point; C
    backward passes for each point; memory and time as for `Full` on n points, O(n C P) and O((n C)² P), or O(P²) and
    O(P³) if n C > P. If that exceeds the budget, the directions stay implicit: two passes, memory O((n C)²), n C more
    backward passes for each chunk of a prediction, and a saved posterior holds the inputs of the chosen points.
    """

    size: int = option(500, at_least(1))
    sampling: Literal["uniform", "balanced"] = "uniform"

    def allows_early_stopping(self) -> bool:
        return False  # no curvature of the other points is summed

    def passes(self, problem: Problem) -> Passes:
        whole = (yield SamplesSeen()).count
        labels = (yield LabelsOfData()) if self.sampling == "balanced" else None
        if labels is not None and int(labels.min()) < 0:
            raise LapwingError(
                "SubsetOfData(sampling='balanced') needs targets that are class labels, integers or bools (n,), and "
                "these are not. Write sampling='uniform'."
            )
        places = chosen_places(whole, min(self.size, whole), problem.generator(), labels)
        summary = DataSummary()
        method = self._exact(problem.tangent, len(places), problem.root.columns)
        if isinstance(method, ELLA):
            problem.tangent.require(_need(len(places), problem.tangent.width))
        passes, answer = method.passes(problem), None
        while True:
            try:
                step = passes.send(answer)
            except StopIteration as stop:
                return FitResult(stop.value, summary=summary)
            if isinstance(step, (LabelsOfData, SamplesSeen)):
                seen = isinstance(step, SamplesSeen)
                answer = Seen(len(places), summary) if seen else (yield step)[places]
                continue
            assert isinstance(step, SumPass)
            subset = yield _OnSubset(step, places, problem)
            answer, before, summary = subset.inner, summary.statistics, subset.summary
            same = all(torch.allclose(before[name], summary.statistics[name], 1e-5, 1e-6) for name in before)
            if not same or (labels is not None and not torch.equal(subset.labels, labels[places])):
                raise LapwingError(
                    "The loader shows another order on each pass, and a subset of the data needs one order. Write "
                    "DataLoader(..., shuffle=False)."
                )

    def _exact(self, tangent: Tangent, points: int, columns: int) -> Full | ELLA:
        """Returns the method that gives the exact posterior of the points within the memory budget."""
        if Full().need(tangent, points * columns).bytes <= tangent.memory:
            return Full()
        # at positions, later inputs may have more rows
        rank = tangent.size if tangent.positions.several else points * tangent.outputs
        return ELLA(rank=rank, rows="all", residual="prior")

    def footprint(self, shape: FitShape) -> Footprint:
        points = min(self.size, shape.samples)
        small = replace(shape, samples=points, batch=min(points, shape.batch))
        method = self._exact(small.tangent, points, small.columns)
        inner = method.footprint(small)
        needs = (_need(points, small.tangent.width),) if isinstance(method, ELLA) else inner.needs
        return replace(inner, passes=inner.passes * points / shape.samples, needs=needs)


@dataclass
class SubsetState(State):
    """The state of a pass over a subset."""

    inner: State
    labels: Tensor  # class labels of the samples (n,); -1 if the targets are not labels
    summary: DataSummary


class _OnSubset(SumPass[SubsetState]):
    """Runs another pass over chosen samples, given by their places in rising order."""

    def __init__(self, inner: SumPass[Any], places: Tensor, problem: Problem) -> None:
        self._inner, self._places, self._likelihood = inner, places, problem.likelihood
        self.label, self.limit = inner.label, int(places[-1]) + 1

    def init(self) -> SubsetState:
        return SubsetState(self._inner.init(), torch.zeros(len(self._places), dtype=torch.int64), DataSummary())

    def update(self, state: SubsetState, batch: Batch) -> None:
        ends = torch.tensor([batch.start, batch.start + batch.count])
        first, stop = torch.searchsorted(self._places, ends).tolist()
        if first == stop:
            return
        rows = self._places[first:stop] - batch.start
        part = batch.take(rows, first)
        self._inner.update(state.inner, part)
        state.labels[first:stop] = class_labels(part)
        state.summary.add(self._likelihood, **part.rows())


def _need(points: int, width: int) -> MemoryNeed:
    rows = points * width
    what = f"the Gram matrix of {rows} rows"
    return MemoryNeed(f"SubsetOfData(size={points})", 16 * rows**2, what, "ask for a smaller size")


def chosen_places(total: int, count: int, generator: torch.Generator, labels: Tensor | None) -> Tensor:
    """Returns places of samples (count,) in rising order; balanced over classes if labels (N,) are given."""
    chosen = choose(total, count, generator) if labels is None else choose_balanced(labels, count, generator)
    return chosen.sort().values
