"""Subset of data: the exact posterior of some of the training points, found by another method on them alone."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..covariance import Covariance
from ..errors import LapwingError
from ..network import batches
from .ella import ELLA
from .full import Full
from .passes import (
    Batch,
    Found,
    Method,
    Pass,
    Passes,
    Problem,
    Seen,
    State,
    SumPass,
    check_choice,
    check_count,
    class_labels,
)
from .rows import choose


@dataclass(frozen=True)
class SubsetOfData(Method):
    """The full Laplace posterior of n random training points, `(Σ_{i in S} J_iᵀ Λ_i J_i/τ + δI)⁻¹`, exact Λ.

    In function space the exact Gaussian process of these points (Immer et al. 2021, section 3.3): all their rows of J
    are directions, and the rest of the weights keeps the prior. It is what `Full` fitted on the subset alone gives;
    it knows less than all of the data tell, so `Full ≼ SubsetOfData ≼ prior`. Evidence and noise variance are those of
    the subset too, and `posterior.samples` is n.

    Args:
        size: n, the most points taken.
        sampling: "uniform", or "balanced", as many points of each class.
        rescale: let the subset stand for all N points: curvature and likelihood are multiplied by N/n, which no longer
            errs on the side of too wide. Without it the subset stands for itself, as published.

    Raises:
        LapwingError: for a size below 1, another label, or a budget that does not hold the rows' Gram matrix.

    Cost: the loader is gone through to count its samples where it does not say, then once, as far as the last chosen
    point; C backward passes for each point; memory and time as for `Full` on n points, O(n C P) and O((n C)² P), or
    O(P²) and O(P³) where n C > P. Where that exceeds the budget the directions stay implicit: two passes, memory
    O((n C)²), every chunk of a prediction takes n C backward passes more, and a saved posterior holds the chosen
    points' inputs.

    Example:
        >>> import lapwing as lw
        >>> lw.SubsetOfData(size=500)
        SubsetOfData(size=500, sampling='uniform', rescale=False)
    """

    size: int = 500
    sampling: Literal["uniform", "balanced"] = "uniform"
    rescale: bool = False

    def __post_init__(self) -> None:
        """Checks number and labels."""
        check_count("SubsetOfData", "size", self.size)
        check_choice("SubsetOfData", "sampling", self.sampling, ("uniform", "balanced"))
        check_choice("SubsetOfData", "rescale", self.rescale, (False, True))

    def passes(self, problem: Problem) -> Passes:
        """Those of another method on the subset."""
        shown = problem.count()
        labels = _class_labels(problem) if self.sampling == "balanced" else None
        places = chosen_places(shown, min(self.size, shown), problem.generator(), labels)
        covariance, seen = yield from on_subset(problem, places, self._exact(problem, len(places)), labels)
        return Found(covariance, seen=seen, data_factor=shown / len(places) if self.rescale else 1.0)

    def _exact(self, problem: Problem, count: int) -> Method:
        """Returns the way to the exact posterior of so many points that fits the memory budget."""
        rows, size, budget = count * problem.root.columns, problem.tangent.size, problem.tangent.memory
        if rows >= size and 24 * size**2 <= budget:
            return Full(form="primal")
        if rows < size and 16 * rows * size <= budget:
            return Full(form="dual")
        anchors = count * problem.tangent.outputs
        what = f"the Gram matrix of {anchors} rows"
        problem.require(f"SubsetOfData(size={count})", 16 * anchors**2, what, "ask for a smaller size")
        return ELLA(rank=anchors, rows="all", residual="prior")


def chosen_places(total: int, count: int, generator: torch.Generator, labels: Tensor | None) -> Tensor:
    """Returns places of samples (count,), rising and without repetition; as many of each class where labels are given.

    Args:
        total: N.
        count: how many of them.
        generator: of the choice.
        labels: classes (N,), or None.
    """
    if labels is None:
        return choose(total, count, generator).sort().values
    order = choose(total, total, generator)
    by_class = labels[order].argsort(stable=True)
    counts = labels.unique(return_counts=True)[1]
    turn = torch.empty_like(order)  # how many of its class come before a sample
    turn[by_class] = torch.arange(total) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return order[turn.argsort(stable=True)[:count]].sort().values


def on_subset(
    problem: Problem, places: Tensor, method: Method, labels: Tensor | None = None
) -> Generator[Pass, State, tuple[Covariance, Seen]]:
    """Yields a method's sum passes, each shown the chosen samples alone; returns its covariance, and what it has seen.

    Args:
        problem: the fit.
        places: of the samples among those that the loader shows, rising.
        method: one of sum passes that returns a covariance.
        labels: the classes (N,) by which the samples were chosen, where they were.

    Raises:
        LapwingError: for a loader that shows others at these places from one pass to the next.
    """
    latest: list[Seen] = []
    small = replace(
        problem,
        labels=lambda: problem.labels()[places],
        count=lambda: len(places),
        seen=lambda: latest[-1],
    )
    passes = method.passes(small)
    state: State | None = None
    while True:
        try:
            step = next(passes) if state is None else passes.send(state)
        except StopIteration as stop:
            return stop.value, latest[-1]
        assert isinstance(step, SumPass)
        found = yield _OnSubset(step, places, problem)
        state, seen, shown = _parted(found, len(places))
        moved = latest and any(
            not _near(latest[-1].statistics[name], seen.statistics[name]) for name in seen.statistics
        )
        if moved or (labels is not None and not torch.equal(shown, labels[places])):
            raise LapwingError(
                "Asked for a subset of the data, found a loader that shows another order on each pass; one order is "
                "needed to find the chosen samples again: write DataLoader(..., shuffle=False)."
            )
        latest.append(seen)


class _OnSubset(SumPass):
    """Another pass on chosen samples: its state under `inner/`, the likelihood's sums under `sum/`, their labels.

    Args:
        inner: the pass.
        places: of the samples, rising.
        problem: for the likelihood.
    """

    def __init__(self, inner: SumPass, places: Tensor, problem: Problem) -> None:
        self._inner, self._places, self._likelihood = inner, places, problem.likelihood
        self.label, self.limit = inner.label, int(places[-1]) + 1

    def init(self) -> State:
        return {
            "labels": torch.zeros(len(self._places), dtype=torch.int64),
            **{f"inner/{name}": value for name, value in self._inner.init().items()},
        }

    def update(self, state: State, batch: Batch) -> None:
        ends = torch.tensor([batch.start, batch.start + batches.size(batch.inputs)])
        first, last = torch.searchsorted(self._places, ends).tolist()
        if first == last:
            return
        rows = self._places[first:last] - batch.start
        part = Batch(batch.tangent, batches.take(batch.inputs, rows), batch.targets[rows], first)
        inner = {name.removeprefix("inner/"): value for name, value in state.items() if name.startswith("inner/")}
        self._inner.update(inner, part)
        state.update({f"inner/{name}": value for name, value in inner.items()})
        state["labels"][first:last] = class_labels(part.inputs, part.targets)
        outputs = _outputs(part)
        self._likelihood.check(outputs, part.targets)
        for name, value in self._likelihood.statistics(outputs, part.targets).items():
            state[f"sum/{name}"] = state.get(f"sum/{name}", 0) + value


def _outputs(batch: Batch) -> Tensor:
    """Returns the outputs that a pass met on the way, or those of a forward pass."""
    if sum(part.stop - part.start for part, _ in batch.outputs) == batches.size(batch.inputs):
        return torch.cat([outputs for _, outputs in sorted(batch.outputs, key=lambda item: item[0].start)])
    outputs = batch.tangent.outputs_of(batch.inputs)
    batches.check_outputs(outputs, "these inputs")
    return outputs


def _parted(state: State, count: int) -> tuple[State, Seen, Tensor]:
    """Returns the inner pass's state, the likelihood's sums, and the labels shown."""

    def under(prefix: str) -> dict[str, Any]:
        return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}

    return under("inner/"), Seen(count, under("sum/")), state["labels"]


def _near(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-5, atol=1e-6)


def _class_labels(problem: Problem) -> Tensor:
    """Returns the class labels (N,), refusing targets that are none."""
    labels = problem.labels()
    if int(labels.min()) < 0:
        raise LapwingError(
            "Asked for SubsetOfData(sampling='balanced'), found targets that are no class labels; integer or bool "
            "labels (n,) are needed: write sampling='uniform'."
        )
    return labels
