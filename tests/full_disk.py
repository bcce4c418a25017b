"""A disk without room for more than a few bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def full_disk(room: int = 512) -> Iterator[None]:
    """Within it no file of this process can be longer than `room` bytes."""
    resource = pytest.importorskip("resource")  # of POSIX
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
