"""Where memory runs out: once more, with shorter chunks; else an error that says what to do."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

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

    Where memory runs out with one sample at a time, or before any chunk, the error is torch's: see `memory_errors`.
    """
    network, before = type(tangent.model).__name__, limit.samples
    limit.latest = 0
    while True:
        try:
            return compute()
        except (MemoryError, RuntimeError) as error:
            length = min(limit.latest, limit.samples)  # not all that runs out heeds the limit
            if not is_out_of_memory(error) or length <= 1:
                limit.samples = before  # chunks were not to blame: those of other inputs stay as long
                raise
        limit.samples = length // 2
        log.warning(
            "%s ran out of memory with %d samples of %s at once. lapwing begins again with %d.",
            tangent.device, length, network, length // 2,
        )  # fmt: skip


@contextlib.contextmanager
def memory_errors(what: str, instead: str) -> Iterator[None]:
    """Raises a LapwingError where memory runs out; also a decorator.

    Args:
        what: what is done, such as "The fit".
        instead: the sentences that say what to do.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        asked = re.search(r"allocate ([\d.]+) (\w+)", str(error))
        amount = "" if asked is None else f" of {asked[0].removeprefix('allocate ')}"
        limit = f"the {memory_limit() / 2**30:.3g} GiB that this process may use"
        if re.search("CUDA|HIP|XPU|GPU", str(error)):  # torch has one class for all devices
            limit = "the GPU"
        raise LapwingError(
            f"{what} ran out of memory: a tensor{amount} did not fit into {limit}, beside what is there. {instead}"
        ) from error
