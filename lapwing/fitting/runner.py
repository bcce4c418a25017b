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
from ..methods.state import DataSummary, S, State
from ..network import batches, ranks
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
        self._loader, self._share = loader, ranks.share_of(loader)
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
            own = torch.cat(parts)
            self._check_size(len(own), "to the count")
            self._labels = torch.cat(ranks.gathered("labels", own))
        return self._labels

    def shown(self) -> int | None:
        """Returns n, how many samples the loader shows, without going through it; None where that is not known."""
        if self._share is not None:
            return self._share.total
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
                    self._sum(LikelihoodPass(problem), problem)
                return result
            state = self._sum(step, problem) if isinstance(step, SumPass) else self._iterate(step, problem)

    def _sum(self, step: SumPass[Any], problem: Problem) -> State:
        state = step.init()
        start, notes = self._before, not self.whole and step.limit is None
        if notes:
            self._summary = DataSummary()
        kept: dict[int, tuple[State, DataSummary]] = {}
        with torch.no_grad():
            for batch in self._batches(step, problem):
                step.update(state, batch)
                start += batches.size(batch.inputs)
                if notes:
                    self._summary.add(problem.likelihood, **batch.rows())
                if start in self._stops():
                    kept[start] = state.mapped(torch.clone), self._summary.mapped(torch.clone)
                    if self._share is None:
                        self._keep(start, step, *kept.pop(start), notes)
        if step.limit is None or start < step.limit:
            self._check_size(start - self._before, f"to the pass '{step.label}'")
        if self._share is not None:
            state = self._over_ranks(step, state, notes, kept, problem.tangent.device)
        if notes and not self._any_counted:
            raise LapwingError(
                "None of the labels counts: all of them are the ignore_index of the likelihood, or NaN. Pass labels of "
                "classes, or another likelihood=lw.Categorical(ignore_index=...); of targets some that are not NaN."
            )
        self.whole = self.whole or step.limit is None
        return state

    def _over_ranks(
        self, step: SumPass[Any], state: State, notes: bool, kept: dict[int, tuple[State, DataSummary]],
        device: torch.device,
    ) -> State:  # fmt: skip
        """Returns the state of all ranks; the summary becomes that of all, where the pass has noted it.

        Args:
            step: the pass.
            state: of this rank.
            notes: whether the pass has noted the summary.
            kept: state and summary of this rank after some numbers of the joined samples.
            device: the network's.
        """

        def whole(one: S) -> S:
            return one.with_tensors(ranks.summed(f"the pass '{step.label}'", one.tensors(), device))

        for stop in sorted(self._stops()):
            if stop <= self._before:  # samples of the ranks before this one
                part: tuple[State, DataSummary] = step.init(), DataSummary()
            else:
                part = kept.get(stop) or (state.mapped(torch.clone), self._summary.mapped(torch.clone))
            self._keep(stop, step, whole(part[0]), whole(part[1]), notes)
        if notes:
            self._summary = whole(self._summary)
            self._any_counted = any(ranks.gathered("labels that count", self._any_counted))
        return whole(state)

    def _iterate(self, step: IteratePass[Any], problem: Problem) -> State:
        if self._share is not None:
            raise LapwingError(
                f"The pass '{step.label}' takes steps, which do not work over several processes yet. Call lw.fit in "
                "one process, or use lw.KFAC()."
            )
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

    @property
    def _before(self) -> int:
        """How many samples the ranks before this one have; 0 in one process."""
        return 0 if self._share is None else sum(self._share.before)

    def _stops(self) -> frozenset[int]:
        """Numbers of samples after which sums are kept: n, a half, a quarter, ... of them."""
        if not self._parts:
            return frozenset()
        return frozenset(max(1, len(self.labels()) >> i) for i in range(self._parts + 1))

    def _keep(self, samples: int, step: SumPass[Any], state: State, summary: DataSummary, notes: bool) -> None:
        """Keeps covariance and statistics of the first samples, from copies of their sums."""
        if notes:
            self._statistics_at[samples] = summary.statistics
        if isinstance(step, CurvaturePass):
            self._covariance_at[samples] = step.finish(state)

    def _batches(self, step: Pass, problem: Problem) -> Iterator[Batch]:
        """Goes through the loader once, or as far as the pass needs."""
        summing = isinstance(step, SumPass)
        try:
            total = len(self._loader)  # type: ignore[arg-type]
        except TypeError:  # none, or a DataLoader over an iterable data set
            total = None
        start = before = self._before
        device = problem.tangent.device
        stops, limit = (self._stops(), step.limit) if isinstance(step, SumPass) else (frozenset(), None)
        if limit is not None and start >= limit:  # the ranks before this one have enough
            return
        disable = not (self._bar and summing)
        for number, raw in enumerate(tqdm(self._loader, step.label, total, disable=disable, leave=False), 1):
            inputs, targets = batches.split(raw, device)
            weights, samples = batches.weights_of(raw, device), batches.size(inputs)
            problem.tangent.check(inputs, f"the inputs of batch number {number}")
            if self._expected is not None and start - before + samples > self._expected:
                self._check_size(start - before + samples, f"to the pass '{step.label}'")
            end = samples if limit is None else min(samples, limit - start)
            cuts = sorted({0, end, *(stop - start for stop in stops if start < stop < start + end)})
            for first, last in pairwise(cuts):
                rows = slice(first, last)
                part = inputs if last - first == samples else batches.take(inputs, rows)
                some = None if weights is None else weights[rows]
                yield Batch(
                    problem.tangent, part, targets[rows], start + first, self._counted(targets[rows], problem),
                    weights=some, likelihood=problem.likelihood,
                )  # fmt: skip
            start += end
            if start == limit:
                return

    def _counted(self, targets: Tensor, problem: Problem) -> Tensor | None:
        """Returns which targets count where some do not and outputs have positions; notes whether any counts."""
        counted = problem.likelihood.labelled(targets)
        self._any_counted = self._any_counted or bool((~targets.isnan() if counted is None else counted).any())
        return None if problem.tangent.positions is None else counted

    def _check_size(self, samples: int, to: str) -> None:
        """Notes n the first time; raises when the loader shows nothing, or another number. Of a share n is its own."""
        if self._share is not None:
            self._expected = self._share.own
        empty = not samples and self._share is None
        if empty or (self._expected is not None and samples != self._expected):
            raise other_size(samples, to, self._expected)
        self._expected = samples
