"""Where memory runs out: once more, with shorter chunks; else an error that says what to do."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from ..environment import memory_limit
from ..errors import LapwingError, is_out_of_memory

if TYPE_CHECKING:
    from .tangent import Tangent

log = logging.getLogger("lapwing")

Result = TypeVar("Result")


@dataclass
class ChunkLimit:
    """How many samples a network takes at once where its device has run out of memory.

    Attributes:
        samples: at most so many; no limit at first.
        latest: how many the latest chunk has; 0 before the first.
    """

    samples: int = sys.maxsize
    latest: int = 0


def retried(tangent: Tangent, limit: ChunkLimit, compute: Callable[[], Result]) -> Result:
    """Returns what a function computes; where memory runs out, that of another call with chunks of half the length.

    Raises:
        LapwingError: where the memory does not suffice for one sample.
    """
    network = type(tangent.model).__name__
    limit.latest = 0
    while True:
        try:
            return compute()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            length = min(limit.latest, limit.samples)  # not all that runs out heeds the limit
            if not length:  # no chunk is to blame
                raise
            if length == 1:
                raise LapwingError(
                    f"The memory of {tangent.device} does not suffice for one sample of {network} at a time, with "
                    f"{tangent.size} treated weights and {tangent.outputs} outputs. Treat fewer weights, such as "
                    f"params=lw.last_layer, or pass a smaller memory=..., now {tangent.memory / 2**20:.0f} MiB. "
                    "lw.plan(model, loader, method) says what a method needs."
                ) from error
        limit.samples = length // 2
        log.warning(
            "%s ran out of memory with %d samples of %s at once. lapwing begins again with %d.",
            tangent.device, length, network, length // 2,
        )  # fmt: skip


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Raises a LapwingError where a fit runs out of memory; also a decorator."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        asked = re.search(r"allocate ([\d.]+) (\w+)", str(error))
        amount = "" if asked is None else f" of {asked[0].removeprefix('allocate ')}"
        limit = "the GPU"
        if not isinstance(error, torch.OutOfMemoryError):
            limit = f"the {memory_limit() / 2**30:.3g} GiB that this process may use"
        raise LapwingError(
            f"The fit ran out of memory: a tensor{amount} did not fit into {limit}, beside what is there. "
            "Pass a smaller memory=..., or a method that needs less, such as lw.Diagonal(), or params=lw.last_layer. "
            "lw.plan(model, loader, method) says what a method needs."
        ) from error
