"""What users see: public names in tab completion, results in notebooks, and each warning once for a network."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from html import escape
from typing import ClassVar, ParamSpec, TypeVar

from torch import nn

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Displayed:
    """Base of results. Notebooks show their `repr`, and tab completion leaves out what only lapwing calls."""

    _internal: ClassVar[frozenset[str]] = frozenset()

    def __dir__(self) -> list[str]:
        """Lists the public names."""
        return sorted(set(super().__dir__()) - self._internal)

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre-wrap">{escape(str(self))}</pre>'


_SAID: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, int]]] = weakref.WeakKeyDictionary()
"""Network -> its warnings, each with a count of the writes to the weights."""
_CURRENT_NETWORK: ContextVar[nn.Module | None] = ContextVar("network", default=None)


def warns_once(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Logs each warning of a function once for a network, until its weights change.

    The first argument is the network, or has it as `model`. A warning with other numbers is another one.
    """

    @functools.wraps(function)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        first = args[0] if args else kwargs.get("model", kwargs.get("posterior"))
        model = first if isinstance(first, nn.Module) else getattr(first, "model", None)
        token = _CURRENT_NETWORK.set(model)
        try:
            return function(*args, **kwargs)
        finally:
            _CURRENT_NETWORK.reset(token)

    return wrapped


def _is_new(record: logging.LogRecord) -> bool:
    """Whether a record is not a warning, or is a warning that was not yet logged for the network."""
    model = _CURRENT_NETWORK.get()
    if model is None or record.levelno != logging.WARNING:
        return True
    writes = sum(0 if weight.is_inference() else weight._version for weight in model.parameters())
    said, entry = _SAID.setdefault(model, set()), (record.getMessage(), writes)
    new = entry not in said
    said.add(entry)
    return new


logging.getLogger("lapwing").addFilter(_is_new)
