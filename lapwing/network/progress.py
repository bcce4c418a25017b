"""The progress of a call: one bar over all batches that it goes through, or a line in the log for each long pass."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from . import ranks

log = logging.getLogger("lapwing")

LOGGED_SECONDS = 10.0
"""A pass of at least so many seconds has a line in the log, where no bar shows it."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Bar:
    """The bar: its total is what is done, what is left of the present pass, and what is expected after it."""

    def __init__(self) -> None:
        from tqdm.auto import tqdm  # a notebook's bar in a notebook; it takes time to import

        self._shown = tqdm(total=0, leave=False)
        self._left = self._expected = 0

    def expect(self, count: int) -> None:
        self._expected += count
        self._set_total()

    def begin(self, label: str, count: int) -> None:
        self._left, self._expected = count, max(0, self._expected - count)
        self._shown.set_description(label, refresh=False)
        self._set_total()

    def advance(self) -> None:
        self._left -= 1
        if self._left < 0:
            self._shown.total = self._shown.n + 1 + self._expected
        self._shown.update()

    def skip(self, count: int) -> None:
        self._left = max(0, self._left - count)
        self._shown.n += count
        self._shown.initial += count
        self._set_total()

    def end(self) -> None:
        self._left = 0
        self._set_total()

    def close(self) -> None:
        self._shown.close()

    def _set_total(self) -> None:
        self._shown.total = self._shown.n + max(0, self._left) + self._expected
        self._shown.refresh()


_BAR: ContextVar[_Bar | None] = ContextVar("bar", default=None)


@contextmanager
def progress_bar(progress: bool | None) -> Iterator[None]:
    """Shows one bar while it is entered: where asked for, or for None on a terminal and in a notebook.

    Within another one it changes nothing.
    """
    if _BAR.get() is not None or not _shows_bar(progress):
        yield
        return
    bar = _Bar()
    token = _BAR.set(bar)
    try:
        yield
    finally:
        _BAR.reset(token)
        bar.close()


def with_progress(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Shows one bar while a function runs, as its keyword argument `progress` says."""

    @functools.wraps(function)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with progress_bar(kwargs.get("progress")):  # type: ignore[arg-type]
            return function(*args, **kwargs)

    return wrapped


class Stage:
    """One pass over batches, on the bar of the call where there is one."""

    def __init__(self, bar: _Bar | None) -> None:
        self._bar, self.batches = bar, 0

    def advance(self) -> None:
        """Counts a batch."""
        self.batches += 1
        if self._bar is not None:
            self._bar.advance()

    def skip(self, count: int) -> None:
        """Counts batches that took no time, since they were done before."""
        if self._bar is not None and count:
            self._bar.skip(count)


@contextmanager
def stage(label: str, count: int | None = None) -> Iterator[Stage]:
    """Counts the batches of a pass while it is entered.

    Args:
        label: what the bar or the log calls it.
        count: of batches, at most; None where it is not known.
    """
    bar, start = _BAR.get(), time.perf_counter()
    here = Stage(bar)
    if bar is not None:
        bar.begin(label, count or 0)
    try:
        yield here
    finally:
        if bar is not None:
            bar.end()
    seconds = time.perf_counter() - start
    if bar is None and seconds >= LOGGED_SECONDS:
        log.info("%s: %d batches in %.0f s.", label[:1].upper() + label[1:], here.batches, seconds)


def tracked(loader: Iterable[Any], label: str) -> Iterator[Any]:
    """Yields the batches of a loader, and counts them."""
    with stage(label, length_of(loader)) as here:
        for batch in loader:
            yield batch
            here.advance()


def expect(batches: int) -> None:
    """Adds batches that are to come to the total of the bar."""
    bar = _BAR.get()
    if bar is not None:
        bar.expect(batches)


def length_of(loader: Any) -> int | None:
    """Returns how many batches a loader has; None where it does not say."""
    try:
        return len(loader)
    except TypeError:  # none, or a DataLoader over an iterable data set
        return None


def _shows_bar(progress: Any) -> bool:
    """Whether to show a bar: where asked for, on a terminal or in a notebook, and never without a place to write.

    Of several processes the first shows it.
    """
    if ranks.rank() or sys.stderr is None or getattr(sys.stderr, "closed", False):  # in services, and under pythonw
        return False
    terminal = getattr(sys.stderr, "isatty", bool)()  # what stands in for it may have `write` alone
    return terminal or _in_notebook() if progress is None else progress is True


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "IPKernelApp" in getattr(shell, "config", {})
