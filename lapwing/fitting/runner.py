"""Drives a method's passes over a loader: the one place that knows batches consumed and states. `fit` runs it.

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
from ..methods.passes import (
    Batch,
    CurvaturePass,
    Found,
    IteratePass,
    Method,
    Pass,
    Problem,
    Seen,
    State,
    SumPass,
    class_labels,
)
from ..network import batches
from ..network.loaders import other_size, sampler_size, shows_bar


class Runner:
    """Goes through the data for each pass of a method, and sums the likelihood's statistics once on the way.

    Args:
        loader: the training data.
        progress: show a bar; None shows one on a terminal.
        prefixes: how many covariances of first parts of the data (a half, a quarter, ...) are kept.
        data_size: N, where the user gave it; then n is not counted, since a stream may have no end.

    Attributes:
        statistics: the likelihood's sums.
        samples: n, over how many samples.
        whole: whether these are all samples; not where a method's steps ended before the data did.
    """

    def __init__(
        self, loader: Iterable[Any], progress: bool | None, prefixes: int = 0, data_size: int | None = None
    ) -> None:
        self._loader = loader
        self._bar = shows_bar(progress)
        self._parts, self._data_size = prefixes, data_size
        self._expected: int | None = None
        self._labels: Tensor | None = None
        self._statistics_at: dict[int, dict[str, Tensor]] = {}
        self._covariance_at: dict[int, Covariance] = {}
        self.statistics: dict[str, Tensor] = {}
        self.samples = 0
        self.whole = False

    def labels(self) -> Tensor:
        """Returns the n class labels, -1 where targets are none; goes through the loader the first time."""
        if self._labels is None:
            found = [torch.zeros(0, dtype=torch.int64)]
            for batch in self._loader:
                found.append(class_labels(*batches.split(batch)))
            self._labels = torch.cat(found)
            self._check_size(len(self._labels), "to the count")
        return self._labels

    def shown(self) -> int | None:
        """Returns n, how many samples the loader shows, without going through it; None where that is not known."""
        if self._expected is None and isinstance(self._loader, DataLoader):
            return sampler_size(self._loader)
        return self._expected

    def count(self) -> int:
        """Returns n, going through the loader where nothing else tells; the samples seen so far where N is given."""
        known = self.shown()
        if known is None and self._data_size is not None and self.samples:
            return self.samples
        return len(self.labels()) if known is None else known

    def seen(self) -> Seen:
        """Returns what the passes so far have seen."""
        return Seen(self.samples, self.statistics)

    def prefixes(self) -> dict[int, tuple[Covariance, dict[str, Tensor]]]:
        """Returns covariance and statistics of the first samples alone, by their number."""
        kept = self._covariance_at.items()
        return {n: (covariance, self._statistics_at[n]) for n, covariance in kept if n in self._statistics_at}

    def run(self, method: Method, problem: Problem) -> Found:
        """Runs all passes; returns what the method makes of them."""
        passes = method.passes(problem)
        state: State | None = None
        while True:
            try:
                step = next(passes) if state is None else passes.send(state)
            except StopIteration as stop:
                found = stop.value if isinstance(stop.value, Found) else Found(stop.value)
                if not self.samples and found.seen is None:
                    self._sum(_NoPass(), problem)
                return found
            state = self._sum(step, problem) if isinstance(step, SumPass) else self._iterate(step, problem)

    def _sum(self, step: SumPass, problem: Problem) -> State:
        state = step.init()
        start, notes = 0, not self.whole and step.limit is None
        if notes:
            self._forget()
        with torch.no_grad():
            for batch in self._batches(step, problem):
                step.update(state, batch)
                start += batches.size(batch.inputs)
                if notes:
                    self._note(batch, problem)
                if start in self._stops():
                    self._keep(start, step, state, notes)
        if step.limit is None or start < step.limit:
            self._check_size(start, f"to the pass '{step.label}'")
        if step.limit is None:
            self.samples, self.whole = start, True
        return state

    def _iterate(self, step: IteratePass, problem: Problem) -> State:
        state, generator = step.init(), torch.Generator(problem.tangent.device).manual_seed(problem.seed)
        taken, epoch = 0, 0
        bar = tqdm(desc=step.label, total=step.steps, disable=not self._bar, leave=False)
        with bar:
            while taken < step.steps and not step.converged(state):
                start, notes = 0, not self.whole and not epoch
                if notes:
                    self._forget()
                for batch in self._batches(step, problem):
                    step.step(state, batch, generator)
                    start, taken = start + batches.size(batch.inputs), taken + 1
                    bar.update()
                    if notes:
                        self._note(batch, problem)
                        self.samples = start
                    if taken == step.steps or step.converged(state):
                        return state
                self._check_size(start, f"to the pass '{step.label}'")
                self.whole, epoch = True, epoch + 1
        return state

    def _forget(self) -> None:
        """Begins the statistics anew."""
        self.statistics, self.samples = {}, 0

    def _stops(self) -> frozenset[int]:
        """Numbers of samples after which sums are kept: n, a half, a quarter, ... of them."""
        if not self._parts:
            return frozenset()
        return frozenset(max(1, len(self.labels()) >> i) for i in range(self._parts + 1))

    def _keep(self, samples: int, step: SumPass, state: State, notes: bool) -> None:
        if notes:
            self._statistics_at[samples] = {name: value.clone() for name, value in self.statistics.items()}
        if isinstance(step, CurvaturePass):
            self._covariance_at[samples] = step.finish({name: value.clone() for name, value in state.items()})

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
            samples = batches.size(inputs)
            if isinstance(targets, Tensor) and not targets.ndim:
                raise LapwingError(
                    f"Asked to read batch number {number}, found a target without dimensions, {targets.item()}, beside "
                    f"{batches.describe(inputs)}; one row a sample is needed: give a single target as y[None]."
                )
            problem.tangent.check(inputs, f"the inputs of batch number {number}")
            if self._expected is not None and start + samples > self._expected:
                self._check_size(start + samples, f"to the pass '{step.label}'")
            end = samples if limit is None else min(samples, limit - start)
            cuts = sorted({0, end, *(stop - start for stop in stops if start < stop < start + end)})
            for first, last in pairwise(cuts):
                rows = slice(first, last)
                part = inputs if last - first == samples else batches.take(inputs, rows)
                yield Batch(problem.tangent, part, targets[rows], start + first)
            start += end
            if start == limit:
                return

    def _note(self, batch: Batch, problem: Problem) -> None:
        """Checks a batch's targets and adds its statistics, from outputs met on the way or a forward pass."""
        met = sum(part.stop - part.start for part, _ in batch.outputs)
        if met == batches.size(batch.inputs):
            outputs = torch.cat([outputs for _, outputs in sorted(batch.outputs, key=lambda item: item[0].start)])
        else:
            outputs = batch.tangent.outputs_of(batch.inputs)
            batches.check_outputs(outputs, "these inputs")
        likelihood = problem.likelihood
        likelihood.check(outputs, batch.targets)
        for name, value in likelihood.statistics(outputs.detach(), batch.targets).items():
            self.statistics[name] = self.statistics.get(name, 0) + value

    def _check_size(self, samples: int, to: str) -> None:
        """Notes n the first time; raises when the loader shows nothing, or another number (case 9)."""
        if not samples or samples != (self._expected or samples):
            raise other_size(samples, to, self._expected)
        self._expected = samples


class _NoPass(SumPass):
    """What a method that needs no pass still gets: the likelihood's statistics."""

    label = "likelihood"

    def init(self) -> State:
        return {}

    def update(self, state: State, batch: Batch) -> None:
        """Adds nothing."""
