"""Runs the passes of a method over the data. Only this file holds the states of passes and counts batches.

A `RunnerState` holds everything that it needs to continue after an interruption; `checkpoint.py` writes it to a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from operator import length_hint
from typing import Any

import torch
from torch import Tensor

from .. import ranks
from ..covariance import Covariance
from ..data import batches
from ..data.data import Data
from ..data.loaders import other_size
from ..data.progress import one_bar, tracked
from ..errors import LapwingError
from ..methods.passes import Batch, CurvaturePass, FitResult, IteratePass, LikelihoodPass, Method, Pass, SumPass
from ..methods.problem import Problem
from ..methods.rows import class_labels
from ..methods.state import DataSummary, State
from ..tangent.retry import retried
from .checkpoint import Checkpoint
from .runner_state import PassSums, RunnerState

Advance = Callable[[], Any]
"""Counts one batch on the bar of a pass."""


class Runner:
    """Reads the data for each pass of a method. The first pass over all samples also sums likelihood statistics.

    Args:
        data: training data.
        prefixes: number of covariances of the first samples (a half, a quarter, ...) to keep.
        data_size: N, if the user gave it; then n is not counted, because a stream may be endless.
        checkpoint: checkpoint of the fit, or None.
    """

    def __init__(
        self, data: Data, prefixes: int = 0, data_size: int | None = None, checkpoint: Checkpoint | None = None
    ) -> None:
        self._data = data
        self._parts, self._data_size, self._checkpoint = prefixes, data_size, checkpoint
        self._labels: Tensor | None = None
        self._at = RunnerState()
        self._covariance_at: dict[int, Covariance] = {}

    @property
    def whole(self) -> bool:
        """Whether the summary covers all samples; False if the steps of a method ended before the data."""
        return self._at.whole

    def labels(self) -> Tensor:
        """Returns the n class labels, -1 for targets of other kinds. The first call reads the data."""
        if self._labels is None:
            parts = [torch.zeros(0, dtype=torch.int64)]
            for batch in tracked(self._data, "labels"):
                parts.append(class_labels(*batches.split(batch)))
            labels = torch.cat(parts)
            self._check_size(len(labels), "to the count")
            self._labels = torch.cat(ranks.gathered("labels", labels))
        return self._labels

    def shown(self) -> int | None:
        """Returns n, the number of samples, without reading the data; None if it is unknown."""
        return self._at.size or self._data.expected_size

    def count(self) -> int:
        """Returns n. If it is unknown, returns the number of samples read so far if N is given, or else counts them."""
        known = self.shown()
        if known is None and self._data_size is not None and self._at.summary.samples:
            return self._at.summary.samples
        return len(self.labels()) if known is None else known

    def summary(self) -> DataSummary:
        """Returns the likelihood statistics of the samples that the passes have read."""
        return self._at.summary

    def prefixes(self) -> dict[int, tuple[Covariance, dict[str, Tensor]]]:
        """Returns n -> covariance and likelihood statistics of the first n samples."""
        statistics = _by_number(self._at.statistics)
        return {n: (covariance, statistics[n]) for n, covariance in self._covariance_at.items() if n in statistics}

    def run(self, method: Method, problem: Problem) -> FitResult:
        """Runs all passes; returns the method's result."""
        passes = method.passes(problem)
        answers: list[State | None] = [None]  # `pop` leaves the method the only reference to a state
        while True:
            try:
                step = passes.send(answers.pop())
            except StopIteration as stop:
                result = stop.value if isinstance(stop.value, FitResult) else FitResult(stop.value)
                if not self._at.summary.samples and result.summary is None:
                    self._run(LikelihoodPass(problem), problem)
                return result
            answers.append(self._run(step, problem))
            del step

    def _run(self, step: Pass, problem: Problem) -> State:
        """Runs a pass, or the rest of it; returns its state."""
        if ranks.several() and (isinstance(step, IteratePass) or step.in_iteration):
            raise LapwingError(
                f"The steps of '{step.label}' are not summed over processes. Call lw.fit in one process, or use "
                "lw.KFAC()."
            )
        if isinstance(step, SumPass):
            ranks.overwrite(f"the basis of the pass '{step.label}'", step.basis_tensors())
            if step.in_iteration:
                self._checkpoint = None
        before, drawn = self._at, problem.root.generator.get_state()

        def through() -> None:  # if the device runs out of memory, this is called again with shorter chunks
            problem.root.generator.set_state(drawn)
            self._at = self._begin(step, before, problem)
            if not self._at.finished:
                total = length_hint(self._data) or None if isinstance(step, SumPass) else step.steps
                with one_bar(step.label, total, self._at.batches) as advance:
                    if isinstance(step, SumPass):
                        self._sum(step, problem, advance)
                    else:
                        self._iterate(step, problem, advance)

        retried(problem.tangent, through)
        if not self._at.finished:
            self._end(step, problem)
        return self._answer(step)

    def _begin(self, step: Pass, before: RunnerState, problem: Problem) -> RunnerState:
        """Returns the state at the start of a pass, or the state in the checkpoint."""
        at = replace(before, sums=PassSums(step.init()), generator=None, batches=0, start=0, finished=False)
        if self._checkpoint is None:
            return at
        at = self._checkpoint.resumed(step.label, at, problem.tangent.device)
        size, shown = at.size or at.start, self._data.known_size
        if shown is not None and size > shown:
            raise other_size(shown, "now", size)
        if at.generator is not None:
            problem.root.generator.set_state(at.generator)
        return at

    def _collects(self, step: Pass) -> bool:
        """Whether a pass sums the likelihood statistics: the first pass that reads all samples does."""
        return not self._at.whole and (isinstance(step, IteratePass) or step.limit is None)

    def _sum(self, step: SumPass[Any], problem: Problem, advance: Advance) -> None:
        at, stops, collects = self._at, self._stops(), self._collects(step)
        if collects:
            at.summary = at.sums.summary
        with torch.no_grad():
            for batch in self._batches(step, problem, advance, stops):
                step.update(at.sums.state, batch)
                if collects:
                    at.summary.add(problem.likelihood, **batch.rows())
                samples = batch.start + batch.count
                if samples in stops:
                    self._keep(samples, step, collects)
        if at.start != self._limit(step):
            self._check_size(at.start, f"to the pass '{step.label}'")

    def _iterate(self, step: IteratePass[Any], problem: Problem, advance: Advance) -> None:
        at, state, done, rounds, collects = self._at, self._at.sums.state, 0, 0, self._collects(step)
        if collects:
            at.summary = at.sums.summary
        generator = torch.Generator(problem.tangent.device).manual_seed(problem.seed)
        while done < step.steps and not step.converged(state):
            at.batches = at.start = 0
            for batch in self._batches(step, problem, advance, rounds=rounds):
                step.step(state, batch, generator)
                done += 1
                if collects and not rounds:
                    at.summary.add(problem.likelihood, **batch.rows())
                if done == step.steps or step.converged(state):
                    advance()
                    return
            self._check_size(at.start, f"to the pass '{step.label}'")
            at.whole, rounds = True, rounds + 1

    def _stops(self) -> list[int]:
        """Returns the numbers of samples after which sums are kept: n, n/2, n/4, ..."""
        return sorted({max(1, len(self.labels()) >> i) for i in range(self._parts + 1)}) if self._parts else []

    def _keep(self, samples: int, step: SumPass[Any], collects: bool) -> None:
        """Keeps the sums of this rank over the first samples."""
        sums = self._at.sums
        kept = {f"{samples}/{name}": value.clone() for name, value in sums.summary.statistics.items()}
        sums.statistics |= kept if collects else {}
        if isinstance(step, CurvaturePass):
            sums.prefixes |= {f"{samples}/{path}": value.clone() for path, value in sums.state.tensors().items()}

    def _end(self, step: Pass, problem: Problem) -> None:
        """Joins the sums of all ranks, and saves the finished pass."""
        at, collects = self._at, self._collects(step)
        if isinstance(step, SumPass):
            if ranks.several():
                self._join(step, problem, collects)
            if collects and not at.sums.any_counted:
                raise LapwingError(
                    "None of the labels counts: all of them are the ignore_index of the likelihood, or NaN. Pass "
                    "class labels, another likelihood=lw.Categorical(ignore_index=...), or targets of which some are "
                    "not NaN."
                )
            at.whole |= collects
            at.statistics |= at.sums.statistics
        at.sums = at.sums.mapped(Tensor.contiguous)  # as a checkpoint returns them
        at.finished = True
        if self._checkpoint is not None:
            at.generator = problem.root.generator.get_state()
            self._checkpoint.after_pass(step.label, at)

    def _join(self, step: SumPass[Any], problem: Problem, collects: bool) -> None:
        """Replaces the sums of this rank by the sums over all ranks."""
        at, stops = self._at, self._stops()
        for stop in stops:
            if stop > self._before + at.start:  # all samples of this rank are among the first ones
                self._keep(stop, step, collects)
        joins = at.sums.joins()
        joins |= {f"prefixes/{stop}/{path}": j for stop in stops for path, j in at.sums.state.joins().items()}
        sums = ranks.joined(f"the pass '{step.label}'", at.sums.tensors(), joins, problem.tangent.device)
        at.sums = at.sums.with_tensors(sums)
        if collects:
            at.summary = at.sums.summary

    def _answer(self, step: Pass) -> State:
        """Returns the finished state of a pass, and keeps the covariances of the first samples."""
        sums, self._at.sums = self._at.sums, PassSums()
        if isinstance(step, CurvaturePass):
            for samples, flat in _by_number(sums.prefixes).items():
                self._covariance_at[samples] = step.finish(step.init().with_tensors(flat))
        return sums.state

    @property
    def _before(self) -> int:
        """Number of samples of the ranks before this one."""
        return sum(self._data.before)

    def _limit(self, step: Pass) -> int | None:
        """Returns the number of samples of this rank that a pass needs; None for all."""
        limit = step.limit if isinstance(step, SumPass) else None
        return None if limit is None else max(0, limit - self._before)

    def _batches(
        self, step: Pass, problem: Problem, advance: Advance, stops: Iterable[int] = (), rounds: int = 0
    ) -> Iterator[Batch]:
        """Yields the remaining batches that the pass needs, cut at the stops."""
        at, device, before, limit = self._at, problem.tangent.device, self._before, self._limit(step)
        if at.start == limit:
            return
        for raw in islice(self._data, at.batches, None):
            inputs, targets = batches.split(raw, device)
            weights, samples = batches.weights_of(raw, device), batches.size(inputs)
            problem.tangent.check(inputs, f"the inputs of batch number {at.batches + 1}")
            if at.size and not ranks.several() and at.start + samples > at.size:
                self._check_size(at.start + samples, f"to the pass '{step.label}'")
            start = at.start
            end = samples if limit is None else min(samples, limit - start)
            cuts = sorted({0, end, *(stop - before - start for stop in stops if 0 < stop - before - start < end)})
            for low, high in pairwise(cuts):
                rows = slice(low, high)
                part = inputs if high - low == samples else batches.take(inputs, rows)
                some = None if weights is None else weights[rows]
                counted = self._counted(targets[rows], problem)
                yield Batch(
                    problem.tangent, part, targets[rows], before + start + low,
                    None if problem.tangent.positions is None else counted, weights=some,
                    likelihood=problem.likelihood if problem.likelihood.weighs(counted) else None, round=rounds,
                )  # fmt: skip
            at.start, at.batches = start + end, at.batches + 1
            advance()
            if at.start == limit:
                return
            if self._checkpoint is not None and isinstance(step, SumPass):
                at.generator = problem.root.generator.get_state()
                self._checkpoint.after_batch(step.label, at)

    def _counted(self, targets: Tensor, problem: Problem) -> Tensor | None:
        """Returns which targets count, None for all; sets `any_counted`."""
        counted, sums = problem.likelihood.labelled(targets), self._at.sums
        if not sums.any_counted:
            sums.any_counted = bool((~targets.isnan() if counted is None else counted).any())
        return counted

    def _check_size(self, samples: int, to: str) -> None:
        """Sets n the first time; raises if the data have no sample, or another number. Shares of ranks may be empty."""
        at, several = self._at, ranks.several()
        expected = sum(self._data.sizes[ranks.rank()]) if several else at.size or samples
        if samples != expected or not (samples or several):
            raise other_size(samples, to, expected or None)
        at.size = sum(map(sum, self._data.sizes)) if several else samples


def _by_number(flat: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Returns number -> name -> tensor, of tensors by `number/name`."""
    every: dict[int, dict[str, Tensor]] = {}
    for path, tensor in flat.items():
        number, _, name = path.partition("/")
        every.setdefault(int(number), {})[name] = tensor
    return every
