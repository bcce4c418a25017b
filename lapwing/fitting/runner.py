"""Runs a method's passes over a loader: the one place that holds states and counts batches. `fit` calls it.

All that it must know to go on after an interruption is a `Standing`; `checkpoint.py` brings that into a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from operator import length_hint
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..covariance import Covariance
from ..errors import LapwingError
from ..methods.passes import (
    Batch,
    CurvaturePass,
    FitResult,
    IteratePass,
    Landmark,
    LikelihoodPass,
    Method,
    Pass,
    SumPass,
)
from ..methods.problem import Problem
from ..methods.rows import class_labels
from ..methods.state import DataSummary, S, State
from ..network import batches, ranks
from ..network.loaders import WeightedLoader, known_size, other_size, sampler_size
from ..network.progress import one_bar, tracked
from .checkpoint import Checkpoint
from .standing import Standing, rest_of

Advance = Callable[[], Any]
"""Counts one batch on the bar of a pass."""


class Runner:
    """Goes through the data for each pass of a method, and sums the likelihood's statistics once on the way.

    Args:
        loader: the training data.
        prefixes: how many covariances of first parts of the data (a half, a quarter, ...) are kept.
        data_size: N, where the user gave it; then n is not counted, since a stream may have no end.
        checkpoint: where the fit goes on after an interruption; None where it cannot.
    """

    def __init__(
        self, loader: Iterable[Any], prefixes: int = 0, data_size: int | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:  # fmt: skip
        self._loader, self._share = loader, ranks.share_of(loader)
        self._parts, self._data_size, self._checkpoint = prefixes, data_size, checkpoint
        self._labels: Tensor | None = None
        self._at = Standing()
        self._generators: dict[str, torch.Generator] = {}
        self._visits: dict[str, int] = {}  # of landmarks
        self._covariance_at: dict[int, Covariance] = {}

    @property
    def whole(self) -> bool:
        """Whether the summary is of all samples; not so if a method's steps ended before the data did."""
        return self._at.whole

    def labels(self) -> Tensor:
        """Returns the n class labels, -1 where targets are none; goes through the loader the first time."""
        if self._labels is None:
            parts = [torch.zeros(0, dtype=torch.int64)]
            for batch in tracked(self._loader, "labels"):
                parts.append(class_labels(*batches.split(batch)))
            labels = torch.cat(parts)
            self._check_size(len(labels), "to the count")
            self._labels = torch.cat(ranks.gathered("labels", labels))
        return self._labels

    def shown(self) -> int | None:
        """Returns n, how many samples the loader shows, without going through it; None where that is not known."""
        if self._share is not None:
            return self._share.total
        if not self._at.expected and isinstance(self._plain_loader, DataLoader):
            return sampler_size(self._plain_loader)
        return self._at.expected or None

    @property
    def _plain_loader(self) -> Any:
        return self._loader.loader if isinstance(self._loader, WeightedLoader) else self._loader

    def count(self) -> int:
        """Returns n: as the loader says, else the samples so far where N is given, else by going through the loader."""
        known = self.shown()
        if known is None and self._data_size is not None and self._at.summary.samples:
            return self._at.summary.samples
        return len(self.labels()) if known is None else known

    def summary(self) -> DataSummary:
        """Returns the sums over the samples that the passes have gone through."""
        return self._at.summary

    def prefixes(self) -> dict[int, tuple[Covariance, dict[str, Tensor]]]:
        """Returns covariance and statistics of the first samples alone, by their number."""
        statistics = _by_number(self._at.statistics)
        return {n: (covariance, statistics[n]) for n, covariance in self._covariance_at.items() if n in statistics}

    def run(self, method: Method, problem: Problem) -> FitResult:
        """Runs all passes; returns the method's result."""
        passes = method.passes(problem)
        answers: list[State | None] = [None]  # whose states live no longer than the method needs them
        while True:
            try:
                step = passes.send(answers.pop())
            except StopIteration as stop:
                result = stop.value if isinstance(stop.value, FitResult) else FitResult(stop.value)
                if not self._at.summary.samples and result.summary is None:
                    self._run(LikelihoodPass(problem), problem)
                if self._checkpoint is not None:
                    self._checkpoint.save()
                return result
            answers.append(self._run(step, problem))
            del step

    def _run(self, step: Pass, problem: Problem) -> State:
        """Runs a pass, or what is left of it; returns its state."""
        if self._checkpoint is None and isinstance(step, Landmark):
            return step.state
        drawn = problem.root.generator.get_state()

        def through() -> None:  # once more, with shorter chunks, where the device runs out of memory
            problem.root.generator.set_state(drawn)
            self._at = self._begin(step, problem)
            self._go_through(step, problem)

        problem.tangent.retried(through)
        state, self._at.state = self._at.state, State()  # the method may use it up
        return state

    def _go_through(self, step: Pass, problem: Problem) -> None:
        """Takes the pass from where it stands to its end.

        What a checkpoint keeps of sums over ranks is the part of this rank, which is joined with the others' again.
        """
        at, notes = self._at, not self._at.whole
        if not isinstance(step, Landmark):
            total = length_hint(self._loader) or None if isinstance(step, SumPass) else step.steps
            with one_bar(step.label, total, at.taken or at.batches) as advance:
                if not at.finished:
                    if isinstance(step, SumPass):
                        self._sum(step, problem, advance)
                    else:
                        self._iterate(step, problem, advance)
        if not at.finished:
            at.finished = True
            if self._checkpoint is not None:
                self._checkpoint.keep(step.label, self._standing(), isinstance(step, Landmark), self._is_joint(step))
        if isinstance(step, SumPass):
            self._end_sum(step, problem, notes and step.limit is None)

    def _begin(self, step: Pass, problem: Problem) -> Standing:
        """Returns where a pass begins: at no data, or where a checkpoint says."""
        self._generators = {"root": problem.root.generator}
        if isinstance(step, IteratePass):
            seed = (problem.seed + ranks.rank()) % 2**63  # each rank draws for its own samples
            self._generators["steps"] = torch.Generator(problem.tangent.device).manual_seed(seed)
        if isinstance(step, Landmark):
            state, taken = step.state, self._visits.get(step.label, 0) + 1
        else:
            state, taken = step.init(), 0
        at = replace(self._at, state=state, generators={}, batches=0, start=0, taken=taken, rounds=0, finished=False)
        if isinstance(step, CurvaturePass):
            at.prefixes = {}
        if self._checkpoint is None:
            return at
        at = self._checkpoint.begin(step.label, at, problem.tangent.device, self._is_joint(step))
        before, shown = at.expected or at.start, known_size(self._plain_loader)
        if shown is not None and before > shown:
            raise other_size(shown, "now", before)
        if isinstance(step, Landmark):
            self._visits[step.label] = at.taken
        for name, numbers in at.generators.items():
            self._generators[name].set_state(numbers)
        if isinstance(step, CurvaturePass) and self._share is None:
            for samples, flat in _by_number(at.prefixes).items():
                self._covariance_at[samples] = step.finish(step.init().with_tensors(flat).mapped(torch.clone))
        return at

    def _standing(self) -> Standing:
        """Returns where the fit stands now, its random generators included."""
        self._at.generators = {name: generator.get_state() for name, generator in self._generators.items()}
        return self._at

    def _sum(self, step: SumPass[Any], problem: Problem, advance: Advance) -> None:
        at, notes = self._at, not self._at.whole and step.limit is None
        if notes and not at.batches:
            at.summary = DataSummary()
        with torch.no_grad():
            for batch in self._batches(step, problem, advance):
                step.update(at.state, batch)
                samples = batch.start + batches.size(batch.inputs)
                if notes:
                    at.summary.add(problem.likelihood, **batch.rows())
                if samples in self._stops():
                    self._keep(samples, step, notes)
        if at.start != self._limit(step):
            self._check_size(at.start, f"to the pass '{step.label}'")

    def _end_sum(self, step: SumPass[Any], problem: Problem, notes: bool) -> None:
        """Joins the sums of all ranks, and notes what is whole now."""
        at = self._at
        if self._share is not None:
            self._join(step, problem, notes)
        if notes and not at.any_counted:
            raise LapwingError(
                "None of the labels counts: all of them are the ignore_index of the likelihood, or NaN. Pass labels of "
                "classes, or another likelihood=lw.Categorical(ignore_index=...); of targets some that are not NaN."
            )
        at.whole = at.whole or step.limit is None

    def _iterate(self, step: IteratePass[Any], problem: Problem, advance: Advance) -> None:
        if self._share is not None and not step.joins_processes:
            raise LapwingError(
                f"The steps of '{step.label}' are not summed over processes. Call lw.fit in one process, or use "
                "lw.KFAC()."
            )
        at, generator, ended = self._at, self._generators["steps"], False
        while at.taken < step.steps and not step.converged(at.state):
            notes = not at.whole and not at.rounds
            if notes and not at.batches:
                at.summary = DataSummary()
            for batch, counts in self._in_steps(step, problem, advance):
                step.step(at.state, batch, generator)
                at.taken += 1
                if notes and counts:
                    at.summary.add(problem.likelihood, **batch.rows())
                ended = at.taken == step.steps or step.converged(at.state)
                if ended:
                    break
            if notes and self._share is not None:
                at.summary = self._whole(step, at.summary, problem)
            if ended:
                advance()
                return
            self._check_size(at.start, f"to the pass '{step.label}'")
            at.whole, at.rounds, at.batches, at.start = True, at.rounds + 1, 0, 0

    def _stops(self) -> frozenset[int]:
        """Numbers of samples after which sums are kept: n, a half, a quarter, ... of them."""
        if not self._parts:
            return frozenset()
        return frozenset(max(1, len(self.labels()) >> i) for i in range(self._parts + 1))

    def _keep(self, samples: int, step: SumPass[Any], notes: bool) -> None:
        """Keeps what this rank has summed over the first samples."""
        at = self._at
        if notes:
            at.statistics |= {f"{samples}/{name}": value.clone() for name, value in at.summary.statistics.items()}
        if isinstance(step, CurvaturePass):
            if self._checkpoint is not None or self._share is not None:
                at.prefixes |= {f"{samples}/{path}": value.clone() for path, value in at.state.tensors().items()}
            if self._share is None:
                self._covariance_at[samples] = step.finish(at.state.mapped(torch.clone))

    @property
    def _before(self) -> int:
        """How many samples the ranks before this one have."""
        return 0 if self._share is None else sum(self._share.before)

    def _is_joint(self, step: Pass) -> bool:
        """Whether all ranks go through a pass together, step by step; through sums each goes at its own pace."""
        return self._share is not None and not isinstance(step, SumPass)

    def _limit(self, step: Pass) -> int | None:
        """Returns how many samples of this rank a pass needs; None for all."""
        limit = step.limit if isinstance(step, SumPass) else None
        return None if limit is None else max(0, limit - self._before)

    def _whole(self, step: Pass, part: S, problem: Problem) -> S:
        """Returns the sum of a state over all ranks."""
        return part.with_tensors(ranks.summed(f"the pass '{step.label}'", part.tensors(), problem.tangent.device))

    def _join(self, step: SumPass[Any], problem: Problem, notes: bool) -> None:
        """Puts the sums of all ranks in the place of those of this one."""
        at, stops = self._at, sorted(self._stops())
        prefixes, statistics = _by_number(at.prefixes), _by_number(at.statistics)
        for stop in stops:  # of the first samples this rank has none, some or all
            reached = stop > self._before
            if notes:
                sums = statistics.get(stop, at.summary.statistics if reached else {})
                summary = self._whole(step, DataSummary(statistics=dict(sums)).mapped(torch.clone), problem)
                at.statistics |= {f"{stop}/{name}": value for name, value in summary.statistics.items()}
            if isinstance(step, CurvaturePass):
                state = at.state.mapped(torch.clone) if reached and stop not in prefixes else step.init()
                state = state.with_tensors(prefixes[stop]) if stop in prefixes else state
                self._covariance_at[stop] = step.finish(self._whole(step, state, problem))
        at.prefixes = {}
        if notes:
            at.summary = self._whole(step, at.summary, problem)
            at.any_counted = any(ranks.gathered("labels that count", at.any_counted))
        at.state = self._whole(step, at.state, problem)

    def _in_steps(self, step: IteratePass[Any], problem: Problem, advance: Advance) -> Iterator[tuple[Batch, bool]]:
        """Yields the batch of each step, and whether it counts.

        Of several ranks each goes on while any of them has a batch: one without has a sample of weight 0.
        """
        if self._share is None:
            yield from ((batch, True) for batch in self._batches(step, problem, advance))
            return
        loaded, sizes, device = self._batches(step, problem, advance), self._share.sizes, problem.tangent.device
        at, checkpoint, longest = self._at, self._checkpoint, max(map(len, sizes))
        first = at.taken - at.rounds * longest
        inputs, targets = batches.split(self._share.first, device)
        nothing = Batch(
            problem.tangent, batches.take(inputs, slice(0, 1)), targets[:1], self._before, None,
            torch.zeros(1, device=device), problem.likelihood, at.rounds,
        )  # fmt: skip
        for number in range(first, longest + 1):
            batch = next(loaded, None)  # which counts the batch before it
            if checkpoint is not None and number > first:
                checkpoint.end_batch(step.label, self._standing, joint=True)
            if number == longest:
                return
            if checkpoint is not None:
                checkpoint.in_batch = True
            joined = sum(part[number] for part in sizes if number < len(part))
            yield replace(batch or nothing, joined=joined), batch is not None

    def _batches(self, step: SumPass[Any] | IteratePass[Any], problem: Problem, advance: Advance) -> Iterator[Batch]:
        """Goes through the loader once, or what is left of it, or as far as the pass needs."""
        at, device, before, limit = self._at, problem.tangent.device, self._before, self._limit(step)
        stops = [stop - before for stop in self._stops()] if isinstance(step, SumPass) else []
        if at.start == limit:
            return
        for raw in self._loaded(step):
            inputs, targets = batches.split(raw, device)
            weights, samples = batches.weights_of(raw, device), batches.size(inputs)
            problem.tangent.check(inputs, f"the inputs of batch number {at.batches + 1}")
            if at.expected and at.start + samples > at.expected:
                self._check_size(at.start + samples, f"to the pass '{step.label}'")
            start = at.start
            end = samples if limit is None else min(samples, limit - start)
            if self._checkpoint is not None:
                self._checkpoint.in_batch = True
            cuts = sorted({0, end, *(stop - start for stop in stops if start < stop < start + end)})
            for low, high in pairwise(cuts):
                rows = slice(low, high)
                part = inputs if high - low == samples else batches.take(inputs, rows)
                some = None if weights is None else weights[rows]
                counted = self._counted(targets[rows], problem)
                yield Batch(
                    problem.tangent, part, targets[rows], before + start + low,
                    None if problem.tangent.positions is None else counted, weights=some,
                    likelihood=problem.likelihood if problem.likelihood.weighs(counted) else None, round=at.rounds,
                )  # fmt: skip
            at.start, at.batches = start + end, at.batches + 1
            advance()
            if at.start == limit:
                return
            if self._checkpoint is not None and not self._is_joint(step):
                self._checkpoint.end_batch(step.label, self._standing)

    def _loaded(self, step: SumPass[Any] | IteratePass[Any]) -> Iterator[Any]:
        """Yields what the loader shows after the batches that are done; saves what is done if it raises."""
        loaded = iter(rest_of(self._loader, self._at.batches))
        while True:
            try:
                raw = next(loaded)
            except StopIteration:
                return
            except BaseException:
                if self._checkpoint is not None and not self._is_joint(step):  # no update is half done
                    self._checkpoint.save(step.label, self._standing())
                raise
            yield raw

    def _counted(self, targets: Tensor, problem: Problem) -> Tensor | None:
        """Returns which targets count, None where all do; notes whether any counts."""
        counted = problem.likelihood.labelled(targets)
        if not self._at.any_counted:
            self._at.any_counted = bool((~targets.isnan() if counted is None else counted).any())
        return counted

    def _check_size(self, samples: int, to: str) -> None:
        """Notes n the first time; raises when the loader shows nothing, or another number. A share may be empty."""
        at = self._at
        expected = (at.expected or samples) if self._share is None else self._share.count
        if samples != expected or not (samples or self._share is not None):
            raise other_size(samples, to, expected or None)
        at.expected = samples


def _by_number(flat: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Returns number -> name -> tensor, of tensors by `number/name`."""
    every: dict[int, dict[str, Tensor]] = {}
    for path, tensor in flat.items():
        number, _, name = path.partition("/")
        every.setdefault(int(number), {})[name] = tensor
    return every
