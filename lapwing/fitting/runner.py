"""Runs a method's passes over a loader: the one place that holds states and counts batches. `fit` calls it.

So checkpoints and several processes belong here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from ..covariance import Covariance
from ..errors import LapwingError
from ..methods.passes import Batch, CurvaturePass, FitResult, IteratePass, LikelihoodPass, Method, Pass, SumPass
from ..methods.problem import Problem
from ..methods.rows import class_labels
from ..methods.state import DataSummary, State
from ..network import batches
from ..network.loaders import WeightedLoader, other_size, sampler_size, shows_bar


class Runner:
    """Goes through the data for each pass of a method, and sums the likelihood's statistics once on the way.

    Args:
        loader: the training data.
        progress: show a bar; None shows one on a terminal.
        prefixes: how many covariances of first parts of the data (a half, a quarter, ...) are kept.
        data_size: N, where the user gave it; then n is not counted, since a stream may have no end.

    Attributes:
        whole: whether the summary is of all samples; not so if a method's steps ended before the data did.
    """

    def __init__(
        self, loader: Iterable[Any], progress: bool | None, prefixes: int = 0, data_size: int | None = None
    ) -> None:
        self._loader = loader
        self._bar = shows_bar(progress)
        self._parts, self._data_size = prefixes, data_size
        self._expected: int | None = None
        self._labels: Tensor | None = None
        self._summary = DataSummary()
        self._statistics_at: dict[int, dict[str, Tensor]] = {}
        self._covariance_at: dict[int, Covariance] = {}
        self._any_counted = False
        self.whole = False

    def labels(self) -> Tensor:
        """Returns the n class labels, -1 where targets are none; goes through the loader the first time."""
        if self._labels is None:
            parts = [torch.zeros(0, dtype=torch.int64)]
            for batch in self._loader:
                parts.append(class_labels(*batches.split(batch)))
            self._labels = torch.cat(parts)
            self._check_size(len(self._labels), "to the count")
        return self._labels

    def shown(self) -> int | None:
        """Returns n, how many samples the loader shows, without going through it; None where that is not known."""
        loader = self._loader.loader if isinstance(self._loader, WeightedLoader) else self._loader
        if self._expected is None and isinstance(loader, DataLoader):
            return sampler_size(loader)
        return self._expected

    def count(self) -> int:
        """Returns n: as the loader says, else the samples so far where N is given, else by going through the loader."""
        known = self.shown()
        if known is None and self._data_size is not None and self._summary.samples:
            return self._summary.samples
        return len(self.labels()) if known is None else known

    def summary(self) -> DataSummary:
        """Returns the sums over the samples that the passes have gone through."""
        return self._summary

    def prefixes(self) -> dict[int, tuple[Covariance, dict[str, Tensor]]]:
        """Returns covariance and statistics of the first samples alone, by their number."""
        kept = self._covariance_at.items()
        return {n: (covariance, self._statistics_at[n]) for n, covariance in kept if n in self._statistics_at}

    def run(self, method: Method, problem: Problem) -> FitResult:
        """Runs all passes; returns the method's result."""
        passes = method.passes(problem)
        state: State | None = None
        while True:
            try:
                step = passes.send(state)
            except StopIteration as stop:
                result = stop.value if isinstance(stop.value, FitResult) else FitResult(stop.value)
                if not self._summary.samples and result.summary is None:
                    self._through(LikelihoodPass(problem), problem)
                return result
            state = self._through(step, problem)

    def _through(self, step: Pass, problem: Problem) -> State:
        """Returns the state of a pass: from its beginning, with shorter chunks, where the device runs out of memory."""
        generator = problem.root.generator
        drawn = generator.get_state()

        def through() -> State:
            generator.set_state(drawn)
            return self._sum(step, problem) if isinstance(step, SumPass) else self._iterate(step, problem)

        return problem.tangent.retried(through)

    def _sum(self, step: SumPass[Any], problem: Problem) -> State:
        state = step.init()
        start, notes = 0, not self.whole and step.limit is None
        if notes:
            self._summary = DataSummary()
        with torch.no_grad():
            for batch in self._batches(step, problem):
                step.update(state, batch)
                start += batches.size(batch.inputs)
                if notes:
                    self._summary.add(problem.likelihood, **batch.rows())
                if start in self._stops():
                    self._keep(start, step, state, notes)
        if step.limit is None or start < step.limit:
            self._check_size(start, f"to the pass '{step.label}'")
        if notes and not self._any_counted:
            raise LapwingError(
                "None of the labels counts: all of them are the ignore_index of the likelihood, or NaN. Pass labels of "
                "classes, or another likelihood=lw.Categorical(ignore_index=...); of targets some that are not NaN."
            )
        self.whole = self.whole or step.limit is None
        return state

    def _iterate(self, step: IteratePass[Any], problem: Problem) -> State:
        state, generator = step.init(), torch.Generator(problem.tangent.device).manual_seed(problem.seed)
        taken, epoch = 0, 0
        bar = tqdm(desc=step.label, total=step.steps, disable=not self._bar, leave=False)
        with bar:
            while taken < step.steps and not step.converged(state):
                start, notes = 0, not self.whole and not epoch
                if notes:
                    self._summary = DataSummary()
                for batch in self._batches(step, problem):
                    step.step(state, batch, generator)
                    start, taken = start + batches.size(batch.inputs), taken + 1
                    bar.update()
                    if notes:
                        self._summary.add(problem.likelihood, **batch.rows())
                    if taken == step.steps or step.converged(state):
                        return state
                self._check_size(start, f"to the pass '{step.label}'")
                self.whole, epoch = True, epoch + 1
        return state

    def _stops(self) -> frozenset[int]:
        """Numbers of samples after which sums are kept: n, a half, a quarter, ... of them."""
        if not self._parts:
            return frozenset()
        return frozenset(max(1, len(self.labels()) >> i) for i in range(self._parts + 1))

    def _keep(self, samples: int, step: SumPass[Any], state: State, notes: bool) -> None:
        if notes:
            self._statistics_at[samples] = self._summary.mapped(torch.clone).statistics
        if isinstance(step, CurvaturePass):
            self._covariance_at[samples] = step.finish(state.mapped(torch.clone))

    def _batches(self, step: Pass, problem: Problem) -> Iterator[Batch]:
        """Goes through the loader once, or as far as the pass needs."""
        summing = isinstance(step, SumPass)
        try:
            total = len(self._loader)  # type: ignore[arg-type]
        except TypeError:  # none, or a DataLoader over an iterable data set
            total = None
        start, device = 0, problem.tangent.device
        stops, limit = (self._stops(), step.limit) if isinstance(step, SumPass) else (frozenset(), None)
        disable = not (self._bar and summing)
        for number, raw in enumerate(tqdm(self._loader, step.label, total, disable=disable, leave=False), 1):
            inputs, targets = batches.split(raw, device)
            weights, samples = batches.weights_of(raw, device), batches.size(inputs)
            problem.tangent.check(inputs, f"the inputs of batch number {number}")
            if self._expected is not None and start + samples > self._expected:
                self._check_size(start + samples, f"to the pass '{step.label}'")
            end = samples if limit is None else min(samples, limit - start)
            cuts = sorted({0, end, *(stop - start for stop in stops if start < stop < start + end)})
            for first, last in pairwise(cuts):
                rows = slice(first, last)
                part = inputs if last - first == samples else batches.take(inputs, rows)
                some = None if weights is None else weights[rows]
                counted = self._counted(targets[rows], problem)
                yield Batch(
                    problem.tangent, part, targets[rows], start + first,
                    None if problem.tangent.positions is None else counted, weights=some,
                    likelihood=problem.likelihood if problem.likelihood.weighs(counted) else None,
                )  # fmt: skip
            start += end
            if start == limit:
                return

    def _counted(self, targets: Tensor, problem: Problem) -> Tensor | None:
        """Returns which targets count, None where all do; notes whether any counts."""
        counted = problem.likelihood.labelled(targets)
        self._any_counted = self._any_counted or bool((~targets.isnan() if counted is None else counted).any())
        return counted

    def _check_size(self, samples: int, to: str) -> None:
        """Notes n the first time; raises when the loader shows nothing, or another number."""
        if not samples or samples != (self._expected or samples):
            raise other_size(samples, to, self._expected)
        self._expected = samples
