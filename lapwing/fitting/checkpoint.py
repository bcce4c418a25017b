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
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from numbers import Integral
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ..errors import LapwingError, check_count, shown
from ..network import ranks
from ..posterior.files import check_writable, place_of, read_safetensors, remove_temporaries, write_safetensors
from .same_fit import agree, described, repeated_first_batch
from .standing import Entry, Standing

log = logging.getLogger("lapwing")

FORMAT = 1
"""The one format that is written and read."""

SECONDS = 60.0
"""A checkpoint is written at most so often where `every` is None."""

REST = 10
"""And then at most so many times as long apart as it takes to write one."""


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

    def __init__(self, path: Any, every: Any) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise LapwingError(f"checkpoint={shown(path)} is not a path. Write checkpoint='fit.safetensors'.")
        if isinstance(every, Integral) and not isinstance(every, bool):
            every = int(every)
        if every is not None:
            check_count("lw.fit", "every", every)
        if os.path.isdir(path or "."):
            what = "is a folder" if path else "names no file"
            raise LapwingError(
                f"checkpoint={shown(path)} {what}. Write checkpoint={os.path.join(path, 'fit.safetensors')!r}."
            )
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
        self._entries: list[Entry] = []  # of the finished passes
        self._former: list[Entry] = []  # of the file, to go on from
        self._written = self._batches = 0
        self._time, self._pause = time.monotonic(), SECONDS
        self.in_batch = self._interrupted = self._handles = False

    def open(self, loader: Any, fit: Mapping[str, Any]) -> None:
        """Reads the file, if it is there.

        Args:
            loader: the training data.
            fit: what else the fit is of, by the names that a message shows.

        Raises:
            LapwingError: for a folder that cannot be written to, a loader that shows other samples the second time, and
                a file that is damaged, or of another fit.
        """
        check_writable(self._target)
        fit = {**fit, "the first batch": repeated_first_batch(loader)}
        if ranks.several():
            fit["the number of processes"] = ranks.size()
        fit = {name: described(value) for name, value in fit.items()}
        self._fit = json.loads(json.dumps(fit))
        remove_temporaries(self._target)
        if not self._target.exists():
            return
        try:
            tensors, header = read_safetensors(self._target)
            kept = header["checkpoint"]
            if kept["version"] != FORMAT:
                raise ValueError
            others = self._differences(kept["fit"])
            for number, (label, layouts) in enumerate(kept["passes"]):
                prefix = f"{number}/"
                parts = {path.removeprefix(prefix): t for path, t in tensors.items() if path.startswith(prefix)}
                self._former.append(Entry(label, layouts, parts))
        except (LapwingError, KeyError, TypeError, ValueError) as error:
            raise self._damaged() from error
        if others:
            raise LapwingError(
                f"The checkpoint {self.path} is of another fit, which differs in {', '.join(others)}. Pass what was "
                "passed to that fit, or delete the file to begin anew."
            )

    def _differences(self, fit: Mapping[str, Any]) -> list[str]:
        """Lists in what the fit of a file is another one."""
        return sorted(name for name in {*self._fit, *fit} if not agree(self._fit.get(name), fit.get(name)))

    def begin(self, label: str, fresh: Standing, device: torch.device, joint: bool = False) -> Standing:
        """Returns where to go on in the next pass: as the file says, or else at the fresh standing.

        Args:
            label: of the pass.
            fresh: where it begins.
            device: of the weights.
            joint: whether all ranks go through the pass together. They go on from the file that is furthest.
        """
        mine = self._former.pop(0) if self._former else None
        if mine is not None and mine.label != label:
            raise self._damaged()
        entry = self._furthest(mine) if joint else mine
        if entry is None:
            return fresh
        try:
            standing = (entry.of_rank(ranks.rank()) if joint else entry).standing(fresh, device)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise self._damaged() from error
        if not standing.finished:
            log.info("The fit goes on from %s, after %d batches of '%s'.", self.path, standing.batches, label)
        elif entry is mine:
            self._entries.append(dataclasses.replace(entry, tensors=None))
            self._written += 1
        else:
            self._entries.append(entry)
        return standing

    def _furthest(self, mine: Entry | None) -> Entry | None:
        """Returns the entry of the rank that is furthest in a pass. A rank behind forgets the rest of its file."""
        places = ranks.gathered("where the checkpoints are", None if mine is None else mine.place)
        furthest = max(places, key=lambda place: place or (False, -1))
        if all(place == furthest for place in places):
            return mine
        entry = ranks.decided("the furthest checkpoint", mine, places.index(furthest))
        if places[ranks.rank()] == furthest:
            return mine
        self._former.clear()
        return entry

    def _is_due(self) -> bool:
        """Whether to write the file after one more batch."""
        self._batches += 1
        if self._every is not None:
            return self._batches >= self._every
        return time.monotonic() - self._time >= self._pause

    def keep(self, label: str, standing: Standing, again: bool = False, joint: bool = False) -> None:
        """Keeps a finished pass for the next time that the file is written.

        Args:
            label: of the pass, or of a landmark.
            standing: at its end.
            again: whether this takes the place of the latest of this label and all that came after it, if there is one.
            joint: whether all ranks go through the pass together.
        """
        places = [number for number, entry in enumerate(self._entries) if again and entry.label == label]
        if places:
            del self._entries[places[-1] :]
            self._written = min(self._written, len(self._entries))
        self._entries.append(Entry.of(label, standing, copy=True, joint=joint))
        self.in_batch = False
        self._raise()

    def save(self, label: str = "", standing: Standing | None = None, joint: bool = False) -> None:
        """Writes the file, unless it holds all of this: the finished passes, and where the next one stands."""
        entries = self._entries
        if standing is not None and standing.batches + standing.taken:
            entries = [*entries, Entry.of(label, standing, copy=False, joint=joint)]
        if len(entries) > self._written:
            self._write(entries)

    def end_batch(self, label: str, standing: Callable[[], Standing], joint: bool = False) -> None:
        """Writes the file after a batch, if it is time or Ctrl-C came during the batch, which then goes on.

        Where all ranks go through the pass together, it is time for all where it is for one.
        """
        self.in_batch = joint  # Ctrl-C must not end what all ranks do together
        due = self._is_due() or self._interrupted
        if any(ranks.gathered("the time of a checkpoint", due)) if joint else due:
            self.save(label, standing(), joint)
        self.in_batch = False
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
            try:
                self._target.unlink(missing_ok=True)
            except OSError as error:
                log.warning("The fit has ended, and its checkpoint cannot be removed: %s. Delete it.", error)
            return
        self.save()
        if self._target.exists():
            log.warning("The fit has not ended. Call lw.fit again with checkpoint=%r to go on.", self._option)

    def _damaged(self) -> LapwingError:
        return LapwingError(
            f"The file {self.path} is no checkpoint of this version, or is damaged. Pass another path, or delete it "
            "to begin anew."
        )

    def _write(self, entries: list[Entry]) -> None:
        """Writes passes to the file, those that are in it already by way of it; a failure does not end the fit."""
        start = time.monotonic()
        try:
            tensors: dict[str, Tensor] = {}
            if self._written:
                present, header = read_safetensors(self._target)
                if self._differences(header.get("checkpoint", {}).get("fit", {})):
                    raise LapwingError(f"{self.path} is of another fit by now. Give each fit a path of its own.")
                former = tuple(f"{number}/" for number in range(self._written))
                tensors = {path: value for path, value in present.items() if path.startswith(former)}
            for number, entry in enumerate(entries):
                tensors |= {f"{number}/{path}": value for path, value in (entry.tensors or {}).items()}
            passes = [[entry.label, entry.layouts] for entry in entries]
            kept = {"version": FORMAT, "fit": self._fit, "passes": passes}
            write_safetensors(self._target, tensors, {"checkpoint": kept})
        except LapwingError as error:
            log.warning("The checkpoint was not written, and the fit goes on. %s", error)
        else:
            self._entries = [dataclasses.replace(entry, tensors=None) for entry in self._entries]
            self._written = len(self._entries)
        self._batches, self._time = 0, time.monotonic()
        self._pause = max(SECONDS, REST * (self._time - start))
