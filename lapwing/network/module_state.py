"""Restores the attributes of a network's modules after our forward passes.

Networks store activations, weights made by hooks, tables and flags. These would keep the graph of a pass in memory, and
after a pass with drawn weights they would change the outputs. Hooks that a pass registers are removed, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from operator import is_
from typing import Any

from torch import nn


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the modules, each once, with the prefix of the names of its tensors; faster than `named_modules`."""
    modules, met, left = [], set(), [("", model)]
    while left:
        prefix, module = left.pop()
        if module in met:
            continue
        met.add(module)
        modules.append((prefix, module))
        if module._modules:
            below = [(f"{prefix}{name}.", child) for name, child in module._modules.items() if child is not None]
            left += reversed(below)
    return modules


@contextlib.contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Restores the attributes of all modules, and the entries of attributes that are dicts or lists, but no deeper."""
    attributes = [vars(module) for _, module in modules_of(model)]
    containers = [value for held in attributes for value in held.values() if isinstance(value, (dict, list))]
    former: list[tuple[Any, Any]] = [(held, held.copy()) for held in attributes]
    former += [(value, dict(value) if isinstance(value, dict) else list(value)) for value in containers]
    try:
        yield
    finally:
        for container, entries in former:
            if not _same(container, entries):
                _restore(container, entries)


def _same(container: Any, entries: Any) -> bool:
    """Whether a container holds the same objects in the same order."""
    if len(container) != len(entries) or not all(map(is_, container, entries)):
        return False
    return isinstance(container, list) or all(map(is_, container.values(), entries.values()))


def _restore(container: Any, entries: Any) -> None:
    if isinstance(container, list):
        container[:] = entries
        return
    for name in [name for name in container if name not in entries]:
        del container[name]
    container.update(entries)  # without clear(), because other threads may read the other entries
