"""Progress: one bar for each pass over data, or a line in the log for each long pass."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import length_hint
from typing import Any, ParamSpec, TypeVar

from .. import ranks
from ..errors import LapwingError, shown

log = logging.getLogger("lapwing")

LOGGED_SECONDS = 10.0
"""Minimum duration, in seconds, of a pass without a bar that is logged."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_SHOWN: ContextVar[bool | None] = ContextVar("shown", default=None)
"""Whether the passes of the running call show bars; None outside of calls."""


@contextmanager
def show_progress(progress: bool | None) -> Iterator[None]:
    """Lets passes inside the block show bars, as the user's `progress` says. A block inside another changes nothing.

    None shows them on a terminal and in a notebook. Only the first rank shows any, and only if stderr can be written.
    """
    if progress is not None and not isinstance(progress, bool):
        raise LapwingError(
            f"progress={shown(progress)} is not True, False, or None, for a bar only on a terminal. Write "
            "progress=False."
        )
    if ranks.rank() or sys.stderr is None or getattr(sys.stderr, "closed", False):  # stderr is None in services
        progress = False
    elif progress is None:
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        in_notebook = "IPKernelApp" in getattr(shell, "config", {})
        progress = in_notebook or getattr(sys.stderr, "isatty", bool)()  # a replacement of stderr may lack `isatty`
    token = _SHOWN.set(progress) if _SHOWN.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _SHOWN.reset(token)


def with_progress(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Runs a function inside `show_progress`, with its keyword argument `progress`."""

    @functools.wraps(function)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with show_progress(kwargs.get("progress")):  # type: ignore[arg-type]
            return function(*args, **kwargs)

    return wrapped


@contextmanager
def one_bar(label: str, total: int | None, done: int = 0) -> Iterator[Callable[[], Any]]:
    """Shows the bar of one pass inside the block; yields a function that counts a batch; `done` of `total` are done."""
    start = time.perf_counter()
    if _SHOWN.get():
        from tqdm.auto import tqdm  # chooses the notebook's bar in a notebook; slow to import

        with tqdm(desc=label, total=total, initial=done, leave=False) as bar:
            yield bar.update
        return
    yield lambda: None
    seconds = time.perf_counter() - start
    if seconds >= LOGGED_SECONDS:
        log.info("%s took %.0f s.", label[:1].upper() + label[1:], seconds)


def tracked(loader: Iterable[Any], label: str) -> Iterator[Any]:
    """Yields the batches of a loader and counts them on a bar."""
    with one_bar(label, length_hint(loader) or None) as advance:
        for batch in loader:
            yield batch
            advance()
