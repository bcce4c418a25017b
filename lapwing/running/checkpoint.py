"""Checkpoints of a fit: the states of its passes in a file, so that a killed fit can continue.

A method is a generator that receives the finished state of each pass. A checkpoint holds these states, and the state of
an unfinished sum pass. To continue, the generator runs again: finished passes are answered from the file, and the
unfinished pass skips the batches that its state contains. Everything between and after passes is computed again,
including the tuning.

The file is written only between batches and after passes, and never after an exception. Over several processes rank 0
writes it, only after passes, because then the state is the same on all ranks.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import ranks
from ..data.data import Data, other_size
from ..errors import LapwingError, shown
from ..files import check_writable, place_of, read_safetensors, remove_temporaries, write_safetensors
from ..tangent import Tangent
from .fingerprints import differences, fingerprint_of
from .runner import NoCheckpoint, RunnerState

log = logging.getLogger("lapwing")

CONTENTS = 7  # version of the contents of a checkpoint
SECONDS = 60.0  # minimum time between two writes of the file within a pass, if `every` is None

Saved = tuple[str, dict[str, Tensor]]  # label of a pass, and copies of the tensors of its state


class Checkpoint(NoCheckpoint):
    """The checkpoint of one fit."""

    def __init__(self, path: str | os.PathLike[str], every: int | None) -> None:
        if os.path.isdir(path or "."):
            wrong = "is a folder" if path else "names no file"
            raise LapwingError(
                f"checkpoint={shown(path)} {wrong}. Write checkpoint={os.path.join(path, 'fit.safetensors')!r}."
            )
        self._target = place_of(path)[0]
        self.path, self._every = os.fspath(path), every
        self._fit: dict[str, Any] = {}
        self._passes: list[Saved] = []  # finished in this call or an earlier one
        self._left: list[Saved] = []  # from the file, not yet used
        self._known: int | None = None  # number of samples, if the data need not be read for it
        self._batches, self._time = 0, time.monotonic()

    @contextmanager
    def opened(
        self, data: Data, describe: Callable[[], Mapping[str, Any]], tangent: Tangent, **more: Any
    ) -> Iterator[None]:
        """Reads the file if it exists, and removes it at the end, unless an exception is raised: then it logs its path.

        What `describe` returns, and `more`, decide the states of passes, by name.
        """
        surveyed = {"the network": tangent.state(), "the parameters": tangent.blocks, "memory": tangent.memory, **more}
        own = fingerprint_of(data.first_of_rank())
        size = {} if data.expected_size is None else {"the number of samples": data.expected_size}
        self._fit = {**describe(), **fingerprint_of(surveyed), **size}
        self._fit["the first batch"] = ranks.gathered("the first batches", own)
        self._known = data.known_size
        self._left = ranks.on_first("the checkpoint", self._read)
        try:
            yield
        except BaseException:
            if not ranks.rank() and self._target.exists():
                log.warning("The fit has not ended. Call lw.fit again with checkpoint=%r to continue.", self.path)
            raise
        if not ranks.rank():
            try:
                self._target.unlink(missing_ok=True)
            except OSError as error:
                log.warning("The fit has ended, and its checkpoint cannot be removed: %s. Delete it.", error)

    def _read(self) -> list[Saved]:
        """Returns the passes of the file, or an empty list if it does not exist."""
        check_writable(self._target)
        remove_temporaries(self._target)
        if not self._target.exists():
            return []
        try:
            tensors, header = read_safetensors(self._target)
            kept = header["checkpoint"]
            if kept["version"] != CONTENTS:
                raise ValueError
            known = self._fit.keys() & kept["fit"].keys()  # one of the two may not know its number of samples
            different = known.intersection(differences(self._fit, kept["fit"]))
            passes: list[Saved] = [(label, {}) for label in kept["passes"]]
            for path, tensor in tensors.items():
                number, _, name = path.partition("/")
                passes[int(number)][1][name] = tensor
        except (LapwingError, KeyError, TypeError, ValueError) as error:
            raise self._damaged() from error
        if different:
            raise LapwingError(
                f"The checkpoint {self.path} is of another fit, which differs in {', '.join(sorted(different))}. Pass "
                "what was passed to that fit, or delete the file to begin again."
            )
        return passes

    def resumed(self, label: str, fresh: RunnerState, generator: torch.Generator) -> RunnerState:
        """Returns the saved state of the next pass, or `fresh`, its state at the start, if the file has no more.

        The generator gets the state that it had when the file was written.
        """
        if not self._left:
            return fresh
        saved = self._left.pop(0)
        if saved[0] != label:
            raise self._damaged()
        tensors = {}
        for key, tensor in saved[1].items():
            place, _, path = key.partition("/")
            tensors[path] = tensor.to("cpu" if place == "cpu" else generator.device, copy=True)
        state = fresh.with_tensors(tensors)
        size = state.size or state.start
        if self._known is not None and size > self._known:
            raise other_size(self._known, "now", size)
        assert state.generator is not None  # `keep` saves it
        generator.set_state(state.generator)
        if state.finished:
            self._passes.append(saved)
        log.info("The fit continues from %s, after %d batches of '%s'.", self.path, state.batches, label)
        return state

    def keep(self, label: str, state: RunnerState, generator: torch.Generator) -> None:
        """Writes the file after a pass, and within a pass if it is due; there not over several processes."""
        self._batches += 1
        due = self._batches >= self._every if self._every is not None else time.monotonic() - self._time >= SECONDS
        if not state.finished and (ranks.several() or not due):
            return
        if state.finished:
            state.sums = state.sums.mapped(Tensor.contiguous)  # as the file returns them
        state.generator = generator.get_state()
        copies = {  # on the CPU; `cpu/` marks tensors that were there already
            f"{'cpu' if tensor.device.type == 'cpu' else 'device'}/{path}": tensor.detach().to("cpu", copy=True)
            for path, tensor in state.tensors().items()
        }
        passes = [*self._passes, (label, copies)]
        if state.finished:
            self._passes = passes
        if ranks.rank() == 0:
            self._write(passes)

    def _damaged(self) -> LapwingError:
        return LapwingError(
            f"The file {self.path} is not a checkpoint of this version, or is damaged. Pass another path, or delete "
            "it to begin again."
        )

    def _write(self, passes: list[Saved]) -> None:
        """Writes the file. The fit continues if that fails."""
        tensors = {f"{i}/{path}": tensor for i, (_, flat) in enumerate(passes) for path, tensor in flat.items()}
        kept = {"version": CONTENTS, "fit": self._fit, "passes": [label for label, _ in passes]}
        try:
            write_safetensors(self._target, tensors, {"checkpoint": kept})
        except LapwingError as error:
            log.warning("The checkpoint was not written, and the fit continues. %s", error)
        self._batches, self._time = 0, time.monotonic()
