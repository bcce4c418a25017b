"""Restores the attributes of a network's modules after our forward passes.

Networks store activations, weights made by hooks, tables and flags. These would keep the graph of a pass in memory, and
after a pass with drawn weights they would change the outputs. Hooks that a pass registers are removed, too.
"""

from __future__ import annotations

from itertools import chain
from operator import is_

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


class PreservedState:
    """Restores the attributes of all modules after a block, and the entries of attributes that are dicts or lists.

    It looks no deeper. One object may serve several blocks, as long as `is_unchanged`.
    """

    trusts = False  # whether blocks are known to change nothing, unless they raise an exception
    restored = False  # whether a block changed something
    stamp: object = None  # the `Stamp` whose layers and tensors the modules have in this state

    def __init__(self, model: nn.Module) -> None:
        self.modules = [module for _, module in modules_of(model)]
        self._attributes = [*map(vars, self.modules)]
        inner = [value for held in self._attributes for value in held.values() if isinstance(value, (dict, list))]
        self._containers = [*self._attributes, *inner]
        self._former = [dict(each) if isinstance(each, dict) else list(each) for each in self._containers]
        self._empty = [each for each in inner if not each]  # most, such as dicts of hooks
        self._inner = [each for each in inner if each]
        self._dicts = [*self._attributes, *(each for each in self._inner if isinstance(each, dict))]
        self._names = [*chain.from_iterable(self._attributes)]
        self._lengths = [*map(len, self._attributes), *map(len, self._inner)]
        self._entries = [*chain.from_iterable(self._inner)]  # of lists, and keys of dicts
        self._values = [*chain.from_iterable(map(dict.values, self._dicts))]

    def is_unchanged(self) -> bool:
        """Whether all containers hold the same objects in the same order."""
        if any(self._empty) or [*map(len, self._attributes), *map(len, self._inner)] != self._lengths:
            return False
        values = chain.from_iterable(map(dict.values, self._dicts))
        entries = chain.from_iterable(self._inner)
        same = [*chain.from_iterable(self._attributes)] == self._names and all(map(is_, entries, self._entries))
        return same and all(map(is_, values, self._values))

    def __enter__(self) -> PreservedState:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Puts back all entries, unless nothing has changed."""
        if (self.trusts and error is None) or self.is_unchanged():
            return
        self.restored = True
        for container, entries in zip(self._containers, self._former, strict=True):
            if isinstance(container, list):
                container[:] = entries
                continue
            for name in [name for name in container if name not in entries]:
                del container[name]
            container.update(entries)  # without clear(), because other threads may read the other entries
