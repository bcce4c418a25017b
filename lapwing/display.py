"""What users see: public names in tab completion, results in notebooks, and each warning once for a network."""

from __future__ import annotations

import logging
import weakref
from contextvars import ContextVar
from html import escape
from typing import ClassVar

from torch import nn


class Displayed:
    """Base of results. Notebooks show their `repr`, and tab completion leaves out what only lapwing calls."""

    _internal: ClassVar[frozenset[str]] = frozenset()

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - self._internal)

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre-wrap">{escape(str(self))}</pre>'


_SAID: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, int]]] = weakref.WeakKeyDictionary()
"""Network -> its warnings, each with a count of the writes to the weights."""

CURRENT_NETWORK: ContextVar[nn.Module | None] = ContextVar("network", default=None)
"""The network of the running call, set by the decorators of `network/entry.py`."""


def _is_new(record: logging.LogRecord) -> bool:
    """Whether a record is not a warning, or was not yet logged for the network, or not since its weights changed.

    A warning with other numbers is another one.
    """
    model = CURRENT_NETWORK.get()
    if model is None or record.levelno != logging.WARNING:
        return True
    writes = sum(0 if weight.is_inference() else weight._version for weight in model.parameters())
    said, entry = _SAID.setdefault(model, set()), (record.getMessage(), writes)
    new = entry not in said
    said.add(entry)
    return new


logging.getLogger("lapwing").addFilter(_is_new)
