"""Checkpoints of a fit: how far the runner is, in a file, so that a fit that was killed goes on.

A method is a generator that gets the finished state of each pass. So a file holds these, and the unfinished state of
the pass that the fit was in. To go on, the generator runs again: finished passes are answered from the file, and the
unfinished one goes on after the batches that it had. What is between passes and after them, tuning included, is
computed again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from numbers import Integral, Real
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..errors import LapwingError, check_count, shown
from ..methods.state import DataSummary, State
from ..network import batches, ranks
from ..network.loaders import first_batch
from ..network.stamp import fingerprint
from ..posterior.storage import place_of, read, temporary_pattern, write

log = logging.getLogger("lapwing")

FORMAT = 1
"""The one format that is written and read."""

SECONDS = 60.0
"""A checkpoint is written at most so often where `every` is None."""

REST = 10
"""And then at most so many times as long apart as it takes to write one."""


@dataclass
class Standing(State):
    """Where a fit stands in a pass: what it needs to go on, beside the states of the passes before.

    Attributes:
        state: of the pass.
        summary: of the samples whose statistics are summed.
        prefixes: states of the first samples, by `number/path`.
        statistics: of the first samples, by `number/name`.
        generators: states of the random generators, by name.
        batches: how many batches of this round through the data are done.
        start: how many samples these had.
        taken: how many steps are done.
        rounds: how many rounds are done.
        expected: n, 0 before it is known.
        whole: whether the summary is of all samples.
        any_counted: whether any target counted.
        finished: whether the pass is.
    """

    state: State = field(default_factory=State)
    summary: DataSummary = field(default_factory=DataSummary)
    prefixes: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)
    generators: dict[str, Tensor] = field(default_factory=dict)
    batches: int = 0
    start: int = 0
    taken: int = 0
    rounds: int = 0
    expected: int = 0
    whole: bool = False
    any_counted: bool = False
    finished: bool = False


@dataclass(frozen=True)
class _Entry:
    """A standing as a file holds it.

    Attributes:
        label: of its pass.
        layouts: what a file does not say of a tensor that is not contiguous or not on the CPU, by path: whether it is
            on the device of the weights, and its strides.
        tensors: on the CPU; None where the file alone has them.
    """

    label: str
    layouts: dict[str, Any]
    tensors: dict[str, Tensor] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, label: str, standing: Standing, copy: bool) -> _Entry:
        flat = standing.tensors()
        layouts = {}
        for path, tensor in flat.items():
            strides = torch.empty_like(tensor, device="meta").stride()  # those of a tensor without gaps
            if not tensor.is_contiguous() or tensor.device.type != "cpu":
                layouts[path] = [tensor.device.type != "cpu", list(strides)]
        return cls(label, layouts, {path: _on_cpu(tensor, copy) for path, tensor in flat.items()})

    def standing(self, fresh: Standing, device: torch.device) -> Standing:
        """Returns the standing, from one of the same pass."""
        assert self.tensors is not None
        flat = {}
        for path, tensor in self.tensors.items():
            moved, strides = self.layouts.get(path, (False, tensor.stride()))
            place = device if moved else torch.device("cpu")
            flat[path] = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=place)
            flat[path].copy_(tensor)  # to where torch puts it: products may depend on how memory is aligned
        return fresh.with_tensors(flat)


def _on_cpu(tensor: Tensor, copy: bool) -> Tensor:
    moved = tensor.detach().cpu()
    return moved.clone() if copy and moved.data_ptr() == tensor.data_ptr() else moved


def checkpoint_of(path: Any, every: Any) -> Checkpoint | None:
    """Returns the checkpoint of `lw.fit`; None without a path.

    Raises:
        LapwingError: for what is no path or number of batches.
    """
    if path is None:
        if every is not None:
            raise LapwingError(
                f"every={shown(every)} says how often a checkpoint is written, and there is none. Write "
                "checkpoint='fit.safetensors', or leave every out."
            )
        return None
    return Checkpoint(path, every)


class Checkpoint:
    """The file of one fit. Entered, it is removed at the end, unless an exception ends the fit.

    Args:
        path: of the file.
        every: write after so many batches; None writes at most once a minute.

    Attributes:
        in_batch: whether a batch is half done.

    Raises:
        LapwingError: for a path or a number that is none.
    """

    def __init__(self, path: Any, every: int | None) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise LapwingError(f"checkpoint={shown(path)} is not a path. Write checkpoint='fit.safetensors'.")
        if every is not None:
            check_count("lw.fit", "every", every)
        try:
            self._target = place_of(path)[0]
        except LapwingError:
            raise
        except (OSError, ValueError) as error:  # a name that is too long, or with NUL in it
            raise LapwingError(
                f"checkpoint={shown(path)} is no path that can be written to. Write checkpoint='fit.safetensors'."
            ) from error
        self.path, self._every, self._option = os.fspath(path), every, os.fspath(path)
        if ranks.rank():  # each process has a file
            self.path = f"{self._option}.{ranks.rank()}"
            self._target = self._target.with_name(f"{self._target.name}.{ranks.rank()}")
        self._fit: Any = None
        self._entries: list[_Entry] = []  # of the finished passes
        self._former: list[_Entry] = []  # of the file, to go on from
        self._written = self._batches = 0
        self._time, self._pause = time.monotonic(), SECONDS
        self.in_batch = self._interrupted = self._handles = False

    def open(self, loader: Any, fit: Mapping[str, Any]) -> None:
        """Reads the file, if it is there.

        Args:
            loader: the training data.
            fit: what else the fit is of, by the names that a message shows.

        Raises:
            LapwingError: for a loader that shows other samples the second time, and for a file that is damaged, or of
                another fit.
        """
        fit = {**fit, "the first batch": _first(loader)}
        if ranks.several():
            fit["the number of processes"] = ranks.size()
        fit = {name: described(value) for name, value in fit.items()}
        self._fit = json.loads(json.dumps(fit))
        for left in self._target.parent.glob(temporary_pattern(self._target)):
            left.unlink(missing_ok=True)  # of a process that was killed while it wrote
        if not self._target.exists():
            return
        try:
            tensors, header = read(self._target)
            kept = header["checkpoint"]
            if kept["version"] != FORMAT:
                raise ValueError
            names = {*self._fit, *kept["fit"]}
            others = sorted(name for name in names if not _agree(self._fit.get(name), kept["fit"].get(name)))
            for number, (label, layouts) in enumerate(kept["passes"]):
                prefix = f"{number}/"
                parts = {path.removeprefix(prefix): t for path, t in tensors.items() if path.startswith(prefix)}
                self._former.append(_Entry(label, layouts, parts))
        except (LapwingError, KeyError, TypeError, ValueError) as error:
            raise self._damaged() from error
        if others:
            raise LapwingError(
                f"The checkpoint {self.path} is of another fit, which differs in {', '.join(others)}. Pass what was "
                "passed to that fit, or delete the file to begin anew."
            )

    def begin(self, label: str, fresh: Standing, device: torch.device) -> Standing:
        """Returns where to go on in the next pass: as the file says, or else at the fresh standing.

        Args:
            label: of the pass.
            fresh: where it begins.
            device: of the weights.
        """
        if not self._former:
            return fresh
        entry = self._former.pop(0)
        try:
            if entry.label != label:
                raise ValueError(entry.label)
            standing = entry.standing(fresh, device)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise self._damaged() from error
        if standing.finished:
            self._entries.append(dataclasses.replace(entry, tensors=None))
            self._written += 1
        else:
            log.info("The fit goes on from %s, after %d batches of '%s'.", self.path, standing.batches, label)
        return standing

    def _is_due(self) -> bool:
        """Whether to write the file after one more batch."""
        self._batches += 1
        if self._every is not None:
            return self._batches >= self._every
        return time.monotonic() - self._time >= self._pause

    def keep(self, label: str, standing: Standing, again: bool = False) -> None:
        """Keeps a finished pass for the next time that the file is written.

        Args:
            label: of the pass, or of a landmark.
            standing: at its end.
            again: whether this takes the place of the latest of this label and all that came after it, if there is one.
        """
        places = [number for number, entry in enumerate(self._entries) if again and entry.label == label]
        if places:
            del self._entries[places[-1] :]
            self._written = min(self._written, len(self._entries))
        self._entries.append(_Entry.of(label, standing, copy=True))
        self.in_batch = False
        self._raise()

    def save(self, label: str = "", standing: Standing | None = None) -> None:
        """Writes the file, unless it holds all of this: the finished passes, and where the next one stands."""
        entries = self._entries
        if standing is not None and standing.batches + standing.taken:
            entries = [*entries, _Entry.of(label, standing, copy=False)]
        if len(entries) > self._written:
            self._write(entries)

    def end_batch(self, label: str, standing: Callable[[], Standing]) -> None:
        """Writes the file after a batch, if it is time or Ctrl-C came during the batch, which then goes on."""
        self.in_batch = False
        if self._is_due() or self._interrupted:
            self.save(label, standing())
        self._raise()

    def _raise(self) -> None:
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Puts off the first Ctrl-C to the end of a batch, so that its work is kept."""
        if not self.in_batch or self._interrupted:
            signal.default_int_handler(number, frame)
        self._interrupted = True

    def __enter__(self) -> Checkpoint:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)
            self._handles = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Removes the file of a finished fit; of another it says where the file is."""
        if self._handles:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self._target.unlink(missing_ok=True)
            return
        self.save()
        if self._target.exists():
            log.warning("The fit has not ended. Call lw.fit again with checkpoint=%r to go on.", self._option)

    def _damaged(self) -> LapwingError:
        return LapwingError(
            f"The file {self.path} is no checkpoint of this version, or is damaged. Pass another path, or delete it "
            "to begin anew."
        )

    def _write(self, entries: list[_Entry]) -> None:
        """Writes passes to the file, those that are in it already by way of it; a failure does not end the fit."""
        start = time.monotonic()
        try:
            tensors: dict[str, Tensor] = {}
            if self._written:
                former = tuple(f"{number}/" for number in range(self._written))
                tensors = {path: value for path, value in read(self._target)[0].items() if path.startswith(former)}
            for number, entry in enumerate(entries):
                tensors |= {f"{number}/{path}": value for path, value in (entry.tensors or {}).items()}
            passes = [[entry.label, entry.layouts] for entry in entries]
            write(self._target, tensors, {"checkpoint": {"version": FORMAT, "fit": self._fit, "passes": passes}})
        except LapwingError as error:
            log.warning("The checkpoint was not written, and the fit goes on. %s", error)
        else:
            self._entries = [dataclasses.replace(entry, tensors=None) for entry in self._entries]
            self._written = len(self._entries)
        self._batches, self._time = 0, time.monotonic()
        self._pause = max(SECONDS, REST * (self._time - start))


def _first(loader: Any) -> list[Tensor]:
    """Returns the tensors of the first batch.

    Raises:
        LapwingError: for a loader whose first batch is another one the second time.
    """
    if ranks.several() and next(iter(loader), None) is None:
        return []
    once, again = (batches.tensors(first_batch(loader)) for _ in range(2))
    if len(again) != len(once) or not all(
        one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(once, again, strict=True)
    ):
        raise LapwingError(
            "The loader shows other samples the second time, and a checkpoint counts on their order. Pass "
            "shuffle=False; the fit does not depend on the order."
        )
    return once


def rest_of(loader: Any, count: int) -> Iterable[Any]:
    """Returns the batches of a loader after so many; without loading those, where the loader has a sampler."""
    if not count:
        return loader
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if not plain or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return islice(loader, count, None)
    return DataLoader(
        loader.dataset, batch_sampler=_Rest(loader.batch_sampler, count), collate_fn=loader.collate_fn,
        num_workers=loader.num_workers, pin_memory=loader.pin_memory, timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn, multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator, prefetch_factor=loader.prefetch_factor,
    )  # fmt: skip


class _Rest:
    """A sampler of batches without the first ones."""

    def __init__(self, sampler: Iterable[list[int]], count: int) -> None:
        self._sampler, self._count = sampler, count

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self._sampler), self._count, None)


def described(value: Any) -> Any:
    """Returns what an option is, as JSON: numbers and texts as they are, tensors by fingerprints, others by their type.

    No address is in it, so that it is the same in another process. Its floats are sums, and rounded.
    """
    if isinstance(value, Tensor):
        sums = fingerprint(value).nan_to_num().tolist()
        return [list(value.shape), str(value.dtype), *sums]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return int(float(value)) if float(value).is_integer() else repr(float(value))
    if isinstance(value, Mapping):
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [described(item) for item in value]
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [name, {each.name: described(getattr(value, each.name)) for each in dataclasses.fields(value)}]
    return name


def _agree(one: Any, other: Any) -> bool:
    """Whether two descriptions agree, sums of tensors up to rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_agree, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_agree(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)
