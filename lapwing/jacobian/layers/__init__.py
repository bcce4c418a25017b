"""The layer families, one file each: readers of function calls, and their Jacobians. Begin with `use.py`."""

from __future__ import annotations

from . import conv, embedding, linear, norm  # noqa: F401 (each registers its functions)
from .use import READERS, BatchAxis, Use, Watched, register_reader

__all__ = ["READERS", "BatchAxis", "Use", "Watched", "register_reader"]
