"""Checkpoints of a fit: the states of its passes in a file, so that a fit that was killed can go on.

A method is a generator that gets the finished state of each pass. A checkpoint holds these states, and the unfinished
state of a sum pass. To go on, the generator runs again: finished passes are answered from the file, and the unfinished
pass skips the batches that it has added. Everything between passes and after them, tuning included, is computed again.

The file is written only between batches and after passes, never after an exception. Of several processes rank 0 writes
it, after passes only, when the state is the same on all ranks.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from .. import ranks
from ..data.data import Data
from ..errors import LapwingError, shown
from ..posterior.files import check_writable, place_of, read_safetensors, remove_temporaries, write_safetensors
from .fingerprints import differences, fingerprint_of
from .runner_state import RunnerState, SavedPass

log = logging.getLogger("lapwing")

FORMAT = 3
"""Version of the contents of a checkpoint."""

SECONDS = 60.0
"""Time between two checkpoints of a pass, if `every` is None."""


class Checkpoint:
    """The checkpoint of one fit. As a context manager, it removes the file at the end unless an exception is raised.

    Args:
        path: path of the file.
        every: number of batches between two checkpoints of a pass; None writes one a minute.

    Raises:
        LapwingError: if the path or the number cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], every: int | None) -> None:
        if os.path.isdir(path or "."):
            wrong = "is a folder" if path else "names no file"
            raise LapwingError(
                f"checkpoint={shown(path)} {wrong}. Write checkpoint={os.path.join(path, 'fit.safetensors')!r}."
            )
        self._target = place_of(path)[0]
        self.path, self._every = os.fspath(path), every
        self._fit: dict[str, Any] = {}
        self._passes: list[SavedPass] = []  # finished in this call or an earlier one
        self._left: list[SavedPass] = []  # from the file, not yet used
        self._batches, self._time = 0, time.monotonic()

    def open(self, data: Data, described: Mapping[str, Any]) -> None:
        """Reads the file if it exists.

        Args:
            data: training data.
            described: fingerprints of the fit, by the names that a message shows.

        Raises:
            LapwingError: if the folder cannot be written to, the data do not repeat their first batch, or the file is
                damaged or belongs to another fit.
        """
        first = ranks.gathered("the first batches", fingerprint_of(data.first_of_rank()))
        self._fit = json.loads(json.dumps({**described, "the first batch": first}))
        self._left = ranks.on_first("the checkpoint", self._read)

    def _read(self) -> list[SavedPass]:
        """Returns the passes of the file, none if there is no file."""
        check_writable(self._target)
        remove_temporaries(self._target)
        if not self._target.exists():
            return []
        passes = []
        try:
            tensors, header = read_safetensors(self._target)
            kept = header["checkpoint"]
            if kept["version"] != FORMAT:
                raise ValueError
            different = differences(self._fit, kept["fit"])
            for number, (label, on_cpu) in enumerate(kept["passes"]):
                start = f"{number}/"
                parts = {path.removeprefix(start): t for path, t in tensors.items() if path.startswith(start)}
                passes.append(SavedPass(label, parts, on_cpu))
        except (LapwingError, KeyError, TypeError, ValueError) as error:
            raise self._damaged() from error
        if different:
            raise LapwingError(
                f"The checkpoint {self.path} is of another fit, which differs in {', '.join(sorted(different))}. Pass "
                "what was passed to that fit, or delete the file to begin anew."
            )
        return passes

    def resumed(self, label: str, fresh: RunnerState, device: torch.device) -> RunnerState:
        """Returns the saved state of the next pass, or `fresh` if the file has no further pass.

        Args:
            label: label of the pass.
            fresh: state at the start of the pass.
            device: device of the weights.
        """
        if not self._left:
            return fresh
        saved = self._left.pop(0)
        if saved.label != label:
            raise self._damaged()
        try:
            state = saved.restored(fresh, device)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise self._damaged() from error
        if state.finished:
            self._passes.append(saved)
        log.info("The fit goes on from %s, after %d batches of '%s'.", self.path, state.batches, label)
        return state

    def after_batch(self, label: str, state: RunnerState) -> None:
        """Writes the file if it is time. Several processes write it after passes only."""
        self._batches += 1
        due = self._batches >= self._every if self._every is not None else time.monotonic() - self._time >= SECONDS
        if due and not ranks.several():
            self._write([*self._passes, SavedPass.of(label, state)])

    def after_pass(self, label: str, state: RunnerState) -> None:
        """Writes the file."""
        self._passes.append(SavedPass.of(label, state))
        if ranks.rank() == 0:
            self._write(self._passes)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Removes the file of a fit that has ended, or else logs where it is."""
        if ranks.rank():
            return
        if kind is None:
            try:
                self._target.unlink(missing_ok=True)
            except OSError as error:
                log.warning("The fit has ended, and its checkpoint cannot be removed: %s. Delete it.", error)
        elif self._target.exists():
            log.warning("The fit has not ended. Call lw.fit again with checkpoint=%r to go on.", self.path)

    def _damaged(self) -> LapwingError:
        return LapwingError(
            f"The file {self.path} is no checkpoint of this version, or is damaged. Pass another path, or delete it "
            "to begin anew."
        )

    def _write(self, passes: list[SavedPass]) -> None:
        """Writes the file. The fit goes on if that fails."""
        tensors = {
            f"{number}/{path}": tensor for number, saved in enumerate(passes) for path, tensor in saved.tensors.items()
        }
        kept = {"version": FORMAT, "fit": self._fit, "passes": [[saved.label, saved.on_cpu] for saved in passes]}
        try:
            write_safetensors(self._target, tensors, {"checkpoint": kept})
        except LapwingError as error:
            log.warning("The checkpoint was not written, and the fit goes on. %s", error)
        self._batches, self._time = 0, time.monotonic()
