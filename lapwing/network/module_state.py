"""Restores what modules hold beside the values of their tensors, after our forward passes.

Networks keep activations, weights made by hooks, tables that they derive from weights in eval mode, and flags that say
what was set up. If these stayed, they would hold a pass's graph or, after a pass with drawn weights, change the outputs
of the network. If only some were restored, the others would contradict them, so hooks that a pass registers go as well.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

from torch import Tensor, nn

CONTAINERS = (dict, list, tuple, deque, set)

PLAIN = frozenset((bool, int, float, str, type(None), Tensor, nn.Parameter))
"""What most attributes are, and no container."""


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the network's modules with what comes before the names of their tensors, "" or "path.".

    As `named_modules`, but without its generators, since every prediction asks; where a module has its own, by that.
    """
    modules, met, left = [], set(), [("", model)]
    while left:
        prefix, module = left.pop()
        if type(module).named_modules is not nn.Module.named_modules:
            return [(path and f"{path}.", module) for path, module in model.named_modules()]
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
    """Restores what the network's modules hold: their attributes, and the entries of containers among these.

    Cost: some microseconds a module.
    """
    attributes = [(current, current.copy()) for current in [vars(module) for _, module in modules_of(model)]]
    empty: list[Any] = []  # nearly all are: hooks that nobody registered
    filled: list[tuple[Any, Any]] = []
    _collect_containers([former.values() for _, former in attributes], empty, filled)
    try:
        yield
    finally:
        for current, former in attributes:
            if not _same(current, former):
                _restore_attributes(current, former)
        filled += [(container, []) for container in empty if len(container)]
        for container, former in filled:
            if not _same(container, former):
                with contextlib.suppress(Exception):  # of a class that refuses: the others are restored all the same
                    _restore_container(container, former)


def _collect_containers(left: list[Iterable[Any]], empty: list[Any], filled: list[tuple[Any, Any]]) -> None:
    """Finds the containers among some values and within them, the filled ones with copies of what they hold."""
    met: set[int] = set()
    while left:
        for value in left.pop():
            if value.__class__ in PLAIN or not isinstance(value, CONTAINERS):
                continue
            if not isinstance(value, tuple) and not len(value):
                empty.append(value)
            elif id(value) in met:
                continue
            elif isinstance(value, tuple):
                met.add(id(value))
                left.append(tuple.__iter__(value))  # a class of its own may refuse iter()
            else:
                met.add(id(value))
                copy = dict(value) if isinstance(value, dict) else list(value)
                filled.append((value, copy))
                entries = copy.values() if isinstance(copy, dict) else copy
                if not PLAIN.issuperset(map(type, entries)):  # such as a vocabulary, which is long
                    left.append(entries)


def _same(container: Any, former: Any) -> bool:
    """Whether a container holds the same objects in the same order."""
    if len(container) != len(former) or not all(map(is_, container, former)):
        return False
    return not isinstance(former, dict) or all(map(is_, container.values(), former.values()))


def _restore_attributes(current: dict, former: dict) -> None:
    """Writes only what differs: other threads may read the rest."""
    for name in [name for name in current if name not in former]:
        del current[name]
    for name, value in former.items():
        if name not in current or current[name] is not value:
            current[name] = value


def _restore_container(container: Any, former: Any) -> None:
    container.clear()
    if not former:
        return
    if isinstance(container, dict):
        for key, value in former.items():
            container[key] = value
    elif isinstance(container, set):
        container.update(former)
    else:
        container.extend(former)
