"""Retries with shorter chunks if memory runs out, and the errors if shorter chunks cannot help."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from .. import ranks
from ..environment import memory_limit
from ..errors import LapwingError, is_out_of_memory, unknown_option
from ..network.entry import outside_modes

if TYPE_CHECKING:
    from .tangent import Tangent

log = logging.getLogger("lapwing")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass
class ChunkLimit:
    """What a call knows about the memory of its device."""

    samples: int = sys.maxsize  # maximum number in a chunk, set when memory has run out
    latest: int = 0  # number in the latest chunk; 0 before the first


_LIMIT: ContextVar[ChunkLimit | None] = ContextVar("chunk_limit", default=None)


def chunk_limit() -> ChunkLimit:
    """Returns the limit of the running fit, prediction or update; outside of these a new one, without a limit."""
    return _LIMIT.get() or ChunkLimit()


@dataclass(frozen=True)
class MemoryNeed:
    """Tensors that cannot be split into chunks, and that must fit the memory budget."""

    method: str  # or the call, with the option that causes the need
    bytes: int
    what: str  # the tensors, such as "their Gram matrix"
    instead: str  # advice to the user, such as "ask for fewer rows"

    def refusal(self, memory: int) -> str:
        """Returns the message of an error, if the tensors exceed this memory budget."""
        return (
            f"{self.method} needs {self.bytes / 2**20:,.0f} MiB for {self.what}, and the memory budget is "
            f"{memory / 2**20:,.0f} MiB. Pass memory={2 ** (self.bytes - 1).bit_length()} to lw.fit if the machine "
            f"has it, or {self.instead}."
        )


def retried(tangent: Tangent, compute: Callable[[], Result]) -> Result:
    """Returns `compute()`. If memory runs out with several samples, halves the chunk length and calls it again."""
    limit = chunk_limit()
    limit.latest, before = 0, limit.samples
    while True:
        try:
            return compute()
        except (MemoryError, RuntimeError) as error:
            length = min(limit.latest, limit.samples)  # some chunks ignore the limit
            if not is_out_of_memory(error) or length <= 1:
                limit.samples = before  # shorter chunks cannot help
                raise
        limit.samples = length // 2
        log.warning(
            "%s ran out of memory with %d samples of %s at once. lapwing begins again with %d.",
            tangent.device, length, type(tangent.model).__name__, limit.samples,
        )  # fmt: skip


def entry(what: str, instead: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Returns a decorator of fits: it joins the ranks, leaves the caller's modes, and explains memory errors.

    Warnings come once for a network, the caller's modes do not reach the fit, and a failure ends it on all ranks. An
    unknown keyword is refused with the option that it resembles.
    """

    def decorated(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        known = inspect.signature(function).parameters
        run = outside_modes(ranks.across_ranks()(memory_errors(what, instead)(function)))

        @functools.wraps(function)
        def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if not kwargs.keys() <= known.keys():
                raise unknown_option(function.__name__, next(name for name in kwargs if name not in known), known)
            return run(*args, **kwargs)

        return wrapped

    return decorated


@contextlib.contextmanager
def memory_errors(what: str, instead: str) -> Iterator[None]:
    """Raises a LapwingError that names the step and a remedy if memory runs out; also a decorator.

    Chunks that `retried` has made shorter stay short until the end of the block.
    """
    token = _LIMIT.set(chunk_limit())
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise _out_of_memory(error, what, instead) from error
    finally:
        _LIMIT.reset(token)


def _out_of_memory(error: BaseException, what: str, instead: str) -> LapwingError:
    """Returns the error that names the step that ran out of memory, the tensor that did not fit, and a remedy."""
    asked = re.search(r"allocate ([\d.]+) (\w+)", str(error))
    amount = "" if asked is None else f" of {asked[0].removeprefix('allocate ')}"
    limit = f"the {memory_limit() / 2**30:.3g} GiB that this process may use"
    if re.search("CUDA|HIP|XPU|GPU", str(error)):  # torch has one class for all devices
        limit = "the GPU"
    return LapwingError(
        f"{what} ran out of memory: a tensor{amount} did not fit into {limit}, in addition to the memory in use. "
        f"{instead}"
    )
