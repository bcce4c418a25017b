"""Subset of data: the exact posterior of some of the training points, by another method on these alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..data import batches
from ..errors import LapwingError
from ..options import at_least, option
from ..tangent import Tangent
from .ella import ELLA
from .footprint import FitShape, Footprint
from .full import Full
from .passes import Batch, FitResult, Method, Passes, SumPass
from .problem import MemoryNeed, Problem
from .rows import choose, choose_balanced, class_labels
from .state import DataSummary, State


@dataclass(frozen=True)
class SubsetOfData(Method):
    """The full Laplace posterior of n random training points, `(Σ_{i in S} J_iᵀ Λ_i J_i/τ + δI)⁻¹`, exact Λ.

    In function space the exact Gaussian process of these points (Immer et al. 2021, section 3.3): all their rows of J
    are directions, and the rest of the weights keeps the prior. It is what `Full` fitted on the subset alone gives;
    it has less information than all of the data, so `Full ≼ SubsetOfData ≼ prior`. Evidence and noise variance are
    those of the subset too, and `posterior.samples` is n.

    Args:
        size: n, the most points taken.
        sampling: "uniform", or "balanced", as many points of each class.
        rescale: let the subset stand for all N points: curvature and likelihood are multiplied by N/n, which no longer
            errs on the side of too wide. Without it the subset counts as n points, as published.

    Raises:
        LapwingError: for a size below 1, another label, or a budget that does not hold the rows' Gram matrix.

    Cost: the loader is read to count its samples if it has no length, then once, up to the last chosen point; C
    backward passes for each point; memory and time as for `Full` on n points, O(n C P) and O((n C)² P), or O(P²) and
    O(P³) where n C > P. Where that exceeds the budget the directions stay implicit: two passes, memory O((n C)²), every
    chunk of a prediction takes n C backward passes more, and a saved posterior holds the chosen points' inputs.

    Example:
        >>> import lapwing as lw
        >>> lw.SubsetOfData(size=500)
        SubsetOfData(size=500, sampling='uniform', rescale=False)
    """

    accepts_further_data: ClassVar[bool] = False

    size: int = option(500, at_least(1))
    sampling: Literal["uniform", "balanced"] = "uniform"
    rescale: bool = False

    def allows_early_stopping(self) -> bool:
        """Returns False: the subset alone has a curvature."""
        return False

    def passes(self, problem: Problem) -> Passes:
        """Yields the passes of another method, each on the subset alone."""
        whole = problem.count()
        labels = problem.labels() if self.sampling == "balanced" else None
        if labels is not None and int(labels.min()) < 0:
            raise LapwingError(
                "SubsetOfData(sampling='balanced') needs targets that are class labels, integers or bools (n,), and "
                "these are no class labels. Write sampling='uniform'."
            )
        places = chosen_places(whole, min(self.size, whole), problem.generator(), labels)
        summary = DataSummary()
        small = replace(
            problem, labels=lambda: problem.labels()[places], count=lambda: len(places), summary=lambda: summary
        )
        method = self._exact(small.tangent, len(places), small.root.columns)
        if isinstance(method, ELLA):
            problem.require(_need(len(places), small.tangent.width))
        passes = method.passes(small)
        state: State | None = None
        while True:
            try:
                step = passes.send(state)
            except StopIteration as stop:
                return FitResult(stop.value, summary=summary, data_factor=whole / len(places) if self.rescale else 1.0)
            assert isinstance(step, SumPass)
            subset = yield _OnSubset(step, places, problem)
            state, before, summary = subset.inner, summary.statistics, subset.summary
            same = all(torch.allclose(before[name], summary.statistics[name], 1e-5, 1e-6) for name in before)
            if not same or (labels is not None and not torch.equal(subset.labels, labels[places])):
                raise LapwingError(
                    "The loader shows another order on each pass, and a subset of the data needs one order. Write "
                    "DataLoader(..., shuffle=False)."
                )

    def _exact(self, tangent: Tangent, points: int, columns: int) -> Full | ELLA:
        """Returns the method that gives the exact posterior of the points within the memory budget."""
        rows, size, at_positions = points * columns, tangent.size, tangent.positions is not None
        if (24 * size**2 if rows >= size or at_positions else 16 * rows * size) <= tangent.memory:
            return Full()
        rank = size if at_positions else points * tangent.outputs  # later inputs may have more positions
        return ELLA(rank=rank, rows="all", residual="prior")

    def footprint(self, shape: FitShape) -> Footprint:
        """Returns the footprint of the other method on the subset."""
        points = min(self.size, shape.samples)
        small = replace(shape, samples=points, batch=min(points, shape.batch))
        method = self._exact(small.tangent, points, small.columns)
        inner = method.footprint(small)
        needs = (_need(points, small.tangent.width),) if isinstance(method, ELLA) else inner.needs
        return replace(inner, passes=inner.passes * points / shape.samples, needs=needs)


def _need(points: int, width: int) -> MemoryNeed:
    rows = points * width
    what = f"the Gram matrix of {rows} rows"
    return MemoryNeed(f"SubsetOfData(size={points})", 16 * rows**2, what, "ask for a smaller size")


def chosen_places(total: int, count: int, generator: torch.Generator, labels: Tensor | None) -> Tensor:
    """Returns places of samples (count,), rising and without repetition; as many of each class where labels are given.

    Args:
        total: N.
        count: how many of them.
        generator: of the choice.
        labels: classes (N,), or None.
    """
    chosen = choose(total, count, generator) if labels is None else choose_balanced(labels, count, generator)
    return chosen.sort().values


@dataclass
class SubsetState(State):
    """The state of a pass over a subset.

    Attributes:
        inner: of the pass itself.
        labels: class labels of the samples (n,), -1 where targets are not labels.
        summary: of the samples.
    """

    inner: State
    labels: Tensor
    summary: DataSummary


class _OnSubset(SumPass[SubsetState]):
    """Another pass, over chosen samples.

    Args:
        inner: the pass.
        places: of the samples, rising.
        problem: for the likelihood.
    """

    def __init__(self, inner: SumPass[Any], places: Tensor, problem: Problem) -> None:
        self._inner, self._places, self._likelihood = inner, places, problem.likelihood
        self.label, self.limit = inner.label, int(places[-1]) + 1

    def init(self) -> SubsetState:
        return SubsetState(self._inner.init(), torch.zeros(len(self._places), dtype=torch.int64), DataSummary())

    def update(self, state: SubsetState, batch: Batch) -> None:
        ends = torch.tensor([batch.start, batch.start + batches.size(batch.inputs)])
        first, stop = torch.searchsorted(self._places, ends).tolist()
        if first == stop:
            return
        rows = self._places[first:stop] - batch.start
        part = batch.take(rows, first)
        self._inner.update(state.inner, part)
        state.labels[first:stop] = class_labels(part.inputs, part.targets)
        state.summary.add(self._likelihood, **part.rows())
