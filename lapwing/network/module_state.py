"""Restores the attributes of a network's modules after our forward passes.

Networks store activations, weights made by hooks, tables and flags. These would keep the graph of a pass in memory, and
after a pass with drawn weights they would change the outputs. Hooks that a pass registers are removed, too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import chain
from operator import is_, methodcaller

from torch import nn

VALUES = methodcaller("values")  # of dicts, and of what a scripted module has instead


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


class PreservedState(AbstractContextManager["PreservedState", None]):
    """Restores the attributes of all modules after a block, and the entries of attributes that are dicts or lists.

    It looks no deeper. One object may serve several blocks, as long as `is_equal`.
    """

    trusts = False  # whether blocks are known to change nothing, unless they raise an exception
    restored = False  # whether a block changed something
    stamp: object = None  # the `Stamp` whose layers and tensors the modules have in this state

    def __init__(self, model: nn.Module) -> None:
        self.modules = [module for _, module in modules_of(model)]
        attributes = [*map(vars, self.modules)]
        inner = [value for held in attributes for value in held.values() if isinstance(value, (dict, list))]
        self._containers = [*attributes, *inner]
        self._former = [dict(each) if isinstance(each, dict) else list(each) for each in self._containers]
        self._empty = [each for each in self._containers if not each]  # most, such as dicts of hooks
        self._filled, self._before = ([each for each in held if each] for held in (self._containers, self._former))
        own = chain.from_iterable((one._parameters, one._buffers, one._modules) for one in self.modules)
        self._members = [each for each in own if each]
        self._tensors_and_children = [*chain.from_iterable(map(VALUES, self._members))]

    def is_equal(self) -> bool:
        """Whether the modules have the same tensors and children, and equal other attributes."""
        members = chain.from_iterable(map(VALUES, self._members))
        try:
            equal = self._filled == self._before  # identical values are equal, so this compares no tensors
        except Exception:  # but other tensors and arrays have no truth value
            return False
        return equal and not any(self._empty) and all(map(is_, members, self._tensors_and_children))

    def __exit__(self, error: object, *_: object) -> None:
        """Puts back all entries, unless all containers hold the same objects in the same order."""
        held = zip(self._filled, self._before, strict=True)
        pairs = ((VALUES(one), VALUES(other)) if isinstance(one, dict) else (one, other) for one, other in held)
        if (self.trusts and error is None) or (
            self.is_equal() and all(all(map(is_, one, other)) for one, other in pairs)
        ):
            return
        self.restored = True
        for container, entries in zip(self._containers, self._former, strict=True):
            if isinstance(container, list):
                container[:] = entries
                continue
            for name in [name for name in container if name not in entries]:
                del container[name]
            container.update(entries)  # without clear(), because other threads may read the other entries
