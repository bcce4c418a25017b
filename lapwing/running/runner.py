"""Runs the passes of a method over the data. Only this file holds the states of passes and counts batches.

A `RunnerState` holds everything that it needs to continue after an interruption; `checkpoint.py` writes it to a file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import length_hint
from typing import Any

import torch
from torch import Tensor

from .. import ranks
from ..covariance import Covariance
from ..data.data import Data, other_size
from ..data.progress import one_bar, tracked
from ..errors import LapwingError
from ..likelihoods.inferred import check_logits
from ..likelihoods.targets import no_targets_error
from ..methods.passes import (
    Batch,
    CurvaturePass,
    FitResult,
    IteratePass,
    LabelsOfData,
    LikelihoodPass,
    Method,
    Pass,
    SamplesSeen,
    SumPass,
)
from ..methods.problem import Problem, Seen
from ..methods.rows import class_labels
from ..methods.state import DataSummary, State
from ..tangent import Tangent
from ..tangent.retry import retried

FIRST_ROWS = 2**12  # maximum number of rows of the first batch that show whether outputs suit the likelihood

Advance = Callable[[], Any]  # counts one batch on the bar of a pass

Stop = Callable[[Covariance, DataSummary], bool]
"""Whether more samples would make a covariance worse: see `EarlyStopping(stop="first fall")`."""


@dataclass
class PassSums(State):
    """Sums of a pass over data. Over several ranks these are the sums of this rank until the pass ends."""

    state: State = field(default_factory=State)  # state of the pass
    summary: DataSummary = field(default_factory=DataSummary)  # likelihood statistics, if this pass collects them


@dataclass
class RunnerState(State):
    """State of the runner in one pass. Together with the states of earlier passes it determines the rest of the fit."""

    sums: PassSums = field(default_factory=PassSums)
    summary: DataSummary = field(default_factory=DataSummary)  # of the samples read so far
    generator: Tensor | None = None  # state of the random generator of the Fisher root; None before it is saved
    batches: int = 0  # number of batches of the pass that are done
    start: int = 0  # number of samples of these batches
    size: int = 0  # n, or 0 if it is unknown
    whole: bool = False  # whether `summary` covers all samples
    finished: bool = False  # whether the pass is finished


class NoCheckpoint:
    """The checkpoint of a fit that cannot be continued: it keeps nothing."""

    @contextmanager
    def opened(
        self, data: Data, describe: Callable[[], Mapping[str, Any]], tangent: Tangent, **more: Any
    ) -> Iterator[None]:
        """Holds the passes of the fit."""
        yield

    def resumed(self, label: str, fresh: RunnerState, generator: torch.Generator) -> RunnerState:
        """Returns the state at the start of a pass."""
        return fresh

    def keep(self, label: str, state: RunnerState, generator: torch.Generator) -> None:
        """Is called after each batch of a sum pass, and after each pass."""


class Runner:
    """Reads the data for each pass of a method. The first pass over all samples also sums likelihood statistics.

    `prefixes` is the number of first parts of the data (a half, a quarter, ...) whose covariances to compute. If N is
    given (`data_size`), n is the number of samples that the first pass reads; before it, `count` reads the data.
    """

    def __init__(
        self, data: Data, prefixes: int = 0, data_size: int | None = None, checkpoint: NoCheckpoint | None = None
    ) -> None:
        self.columns, self.weighted, self._data = data.columns, data.weighted, data
        self._parts, self._data_size, self._checkpoint = prefixes, data_size, checkpoint or NoCheckpoint()
        self._labels: Tensor | None = None
        self._at = RunnerState()
        self.first_rows: tuple[Tensor, Tensor] | None = None  # outputs and targets of the first batch that is summed
        self.first_parts: dict[int, tuple[Covariance, dict[str, Tensor]]] = {}  # n -> Σ and statistics of n samples

    def labels(self) -> Tensor:
        """Returns the n class labels, -1 for targets of other kinds. The first call reads the data."""
        if self._labels is None:
            parts = [class_labels(samples) for samples in tracked(self._data, "labels")]
            labels = torch.cat([torch.zeros(0, dtype=torch.int64), *parts])
            self._check_size(len(labels), "to the count")
            self._labels = torch.cat(ranks.gathered("labels", labels))
        return self._labels

    def count(self) -> int:
        """Returns n. If it is unknown, returns the number of samples read so far if N is given, or else counts them."""
        known = self._at.size or self._data.expected_size
        if known is None and self._data_size is not None and self._at.summary.samples:
            return self._at.summary.samples
        return len(self.labels()) if known is None else known

    def run(self, method: Method, problem: Problem, stop: Stop | None = None) -> FitResult:
        """Runs all passes; returns the method's result, of the first samples if `stop` returns True for them.

        The result has a summary. If the passes have read fewer samples than there are, the factor makes up for that.
        """
        passes = method.passes(problem)
        answers: list[Any] = [None]  # `pop` leaves the method the only reference to a state
        while True:
            try:
                step = passes.send(answers.pop())
            except StopIteration as end:
                result = end.value if isinstance(end.value, FitResult) else FitResult(end.value)
                break
            if isinstance(step, LabelsOfData):
                answers.append(self.labels())
            elif isinstance(step, SamplesSeen):
                answers.append(Seen(self.count(), self._at.summary))
            elif self._parts and isinstance(step, CurvaturePass) and step.is_final and step.limit is None:
                answers.append(self._with_first_parts(step, problem, stop))
            else:
                answers.append(self._sums(step, problem).state)
            del step
        if result.summary is not None:
            return result
        if not self._at.summary.samples:
            self._sums(LikelihoodPass(problem), problem)
        summary = self._at.summary
        return replace(result, summary=summary, data_factor=result.data_factor * (self.count() / summary.samples))

    def _with_first_parts(self, step: CurvaturePass[Any], problem: Problem, stop: Stop | None) -> State:
        """Runs a curvature pass, then again for the first samples.

        With `stop` these come first, and the whole pass runs only if `stop` never returns True.
        """
        generator = problem.root.generator
        state_before, state = generator.get_state(), None if stop else self._sums(step, problem).state
        state_after, count = generator.get_state(), self.count()
        for samples in sorted({max(1, count >> i) for i in range(1, self._parts + 1)} - {count}):
            part = copy.copy(step)
            part.limit = samples
            generator.set_state(state_before)  # the draws of these samples in the whole pass
            sums = self._sums(part, problem)
            last = sums.state.mapped(torch.clone) if stop else State()
            self.first_parts[samples] = part.finish(sums.state), sums.summary.statistics
            if stop and stop(self.first_parts[samples][0], sums.summary):
                self._at.summary, self._at.whole = sums.summary, False
                return last
        generator.set_state(state_after)
        return self._sums(step, problem).state if state is None else state

    def _sums(self, step: Pass, problem: Problem) -> PassSums:
        """Runs a pass over the data, or the rest of it."""
        if ranks.several():
            _prepare_on_ranks(step)
        if isinstance(step, SumPass) and step.in_iteration:
            self._checkpoint = NoCheckpoint()
        before, drawn = self._at, problem.root.generator.get_state()
        collects = not before.whole and step.limit is None  # the first pass that reads all samples

        def through() -> None:  # if the device runs out of memory, this is called again with shorter chunks
            problem.root.generator.set_state(drawn)
            fresh = replace(before, sums=PassSums(step.init()), generator=None, batches=0, start=0, finished=False)
            self._at = self._checkpoint.resumed(step.label, fresh, problem.root.generator)
            if not self._at.finished:
                if collects:
                    self._at.summary = self._at.sums.summary
                total = length_hint(self._data) or None if isinstance(step, SumPass) else step.steps
                with one_bar(step.label, total, self._at.batches) as advance:
                    if isinstance(step, SumPass):
                        self._sum(step, problem, collects, advance)
                    else:
                        self._iterate(step, problem, collects, advance)

        retried(problem.tangent, through)
        if not self._at.finished:
            self._end(step, problem, collects)
        sums, self._at.sums = self._at.sums, PassSums()
        return sums

    def _sum(self, step: SumPass[Any], problem: Problem, collects: bool, advance: Advance) -> None:
        """Adds all batches to the sums; with `collects` also the likelihood statistics that the fit needs."""
        at = self._at
        with torch.no_grad():
            for batch in self._batches(step, problem, advance):
                step.update(at.sums.state, batch)
                if collects or (self._parts and isinstance(step, CurvaturePass)):
                    self._add(batch, problem, at.sums.summary)

    def _iterate(self, step: IteratePass[Any], problem: Problem, collects: bool, advance: Advance) -> None:
        at, state, done, epochs = self._at, self._at.sums.state, 0, 0
        generator = torch.Generator(problem.tangent.device).manual_seed(problem.seed)
        while done < step.steps and not step.converged(state):
            at.batches = at.start = 0
            for batch in self._batches(step, problem, advance, epochs):
                step.step(state, batch, generator)
                done += 1
                if collects and not epochs:
                    self._add(batch, problem, at.summary)
                if done == step.steps or step.converged(state):
                    advance()
                    return
            at.whole, epochs = True, epochs + 1

    def _add(self, batch: Batch, problem: Problem, summary: DataSummary) -> None:
        """Adds the likelihood statistics of a batch. Raises if the first outputs are probabilities, not logits."""
        rows = batch.rows()
        summary.add(problem.likelihood, **rows)
        if self.first_rows is None:
            self.first_rows = rows["outputs"][:FIRST_ROWS].clone(), rows["targets"][:FIRST_ROWS].clone()
            check_logits(problem.likelihood, *self.first_rows, next(iter(problem.tangent.parameters.values())).dtype)

    def _end(self, step: Pass, problem: Problem, collects: bool) -> None:
        """Joins the sums of all ranks, and saves the finished pass."""
        at = self._at
        if isinstance(step, SumPass):
            if ranks.several():
                joined = ranks.joined(f"the pass '{step.label}'", at.sums.tensors(), problem.tangent.device)
                at.sums = at.sums.with_tensors(joined)
                at.summary = at.sums.summary if collects else at.summary
            if collects and not at.summary.statistics["weight"]:
                raise no_targets_error("labels")
            at.whole |= collects
        at.finished = True
        self._checkpoint.keep(step.label, at, problem.root.generator)

    def _batches(self, step: Pass, problem: Problem, advance: Advance, epochs: int = 0) -> Iterator[Batch]:
        """Yields the remaining batches that the pass needs; raises at the end of data that have changed."""
        at, device, before = self._at, problem.tangent.device, sum(self._data.before)  # samples of earlier ranks
        limit = None if step.limit is None else max(0, step.limit - before)
        if at.start == limit:
            return
        for raw in islice(self._data, at.batches, None):
            samples, where = raw.to(device), f"the inputs of batch number {at.batches + 1}"
            samples = replace(samples, inputs=problem.tangent.check(samples.inputs, where))
            stop = at.start + samples.count
            if at.size and not ranks.several() and stop > at.size:
                self._check_size(stop, f"to the pass '{step.label}'")
            if limit is not None and stop > limit:
                samples, stop = samples.take(slice(0, limit - at.start)), limit
            if stop > at.start:
                counted = problem.likelihood.labelled(samples.targets)
                yield Batch.of(
                    problem.tangent, replace(samples, start=before + at.start), counted, epoch=epochs,
                    likelihood=problem.likelihood if problem.likelihood.weighs(counted) else None,
                )  # fmt: skip
            at.start, at.batches = stop, at.batches + 1
            advance()
            if at.start == limit:
                return
            if isinstance(step, SumPass):
                self._checkpoint.keep(step.label, at, problem.root.generator)
        self._check_size(at.start, f"to the pass '{step.label}'")

    def _check_size(self, samples: int, to: str) -> None:
        """Sets n the first time; raises if the data have no sample, or another number. Shares of ranks may be empty."""
        at, several = self._at, ranks.several()
        expected = sum(self._data.sizes[ranks.rank()]) if several else at.size or samples
        if samples != expected or not (samples or several):
            raise other_size(samples, to, expected or None)
        at.size = sum(map(sum, self._data.sizes)) if several else samples


def _prepare_on_ranks(step: Pass) -> None:
    """Gives all ranks the basis of rank 0; raises if the steps of a pass are not summed over processes."""
    if isinstance(step, IteratePass) or step.in_iteration:
        raise LapwingError(
            f"The steps of '{step.label}' are not summed over processes. Call lw.fit in one process, or use lw.KFAC()."
        )
    ranks.overwrite(f"the basis of the pass '{step.label}'", step.basis_tensors())
