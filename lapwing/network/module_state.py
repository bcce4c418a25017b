"""What modules hold beside the values of their tensors is put back after our forward passes.

Networks keep activations, weights made by hooks, tables that they derive from weights in eval mode, and flags that say
what was set up. Left behind, these would hold a pass's graph or, after a pass with drawn weights, change what the
network answers; half of them put back would be worse, so hooks that a pass registers go as well.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from operator import is_
from typing import Any

from torch import Tensor, nn

MANY = 1000
"""Entries above which containers within a container are not looked for: that would take longer than the pass."""

CONTAINERS = (dict, list, tuple, deque, set)

PLAIN = frozenset((bool, int, float, str, type(None), Tensor, nn.Parameter))
"""What most attributes are, and no container."""


_WALK: ContextVar[tuple[nn.Module | None, list[tuple[str, nn.Module]]]] = ContextVar("walk", default=(None, []))
"""The network that is in use, and its modules."""


@contextlib.contextmanager
def walked_once(model: nn.Module) -> Iterator[None]:
    """Walks over the network's modules; within the block `modules_of` returns what this walk met."""
    token = _WALK.set((model, _walk(model)))
    try:
        yield
    finally:
        _WALK.reset(token)


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the network's modules with what comes before the names of their tensors, "" or "path.".

    As `named_modules`, but without its generators, since every prediction asks; where a module has its own, by that.
    """
    walked, modules = _WALK.get()
    return modules if walked is model else _walk(model)


def _walk(model: nn.Module) -> list[tuple[str, nn.Module]]:
    found, met, left = [], set(), [("", model)]
    while left:
        prefix, module = left.pop()
        if type(module).named_modules is not nn.Module.named_modules:
            return [(path and f"{path}.", module) for path, module in model.named_modules()]
        if module in met:
            continue
        met.add(module)
        found.append((prefix, module))
        if module._modules:
            below = [(f"{prefix}{name}.", child) for name, child in module._modules.items() if child is not None]
            left += reversed(below)
    return found


@contextlib.contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Puts back what the network's modules hold: their attributes, and the entries of containers among these.

    Cost: some microseconds a module.
    """
    attributes = [(own, own.copy()) for own in [vars(module) for _, module in modules_of(model)]]
    empty: list[Any] = []  # nearly all are: hooks that nobody registered
    filled: list[tuple[Any, Any]] = []
    _look([own.values() for _, own in attributes], empty, filled)
    try:
        yield
    finally:
        for own, former in attributes:
            if not _same(own, former):
                _put(own, former)
        filled += [(container, []) for container in empty if len(container)]
        for container, former in filled:
            if not _same(container, former):
                with contextlib.suppress(Exception):  # of a class that refuses: the others are put back all the same
                    _refill(container, former)


def _look(left: list[Iterable[Any]], empty: list[Any], filled: list[tuple[Any, Any]]) -> None:
    """Finds the containers among some values and within them, the filled ones with copies of what they hold."""
    met: set[int] = set()
    while left:
        for value in left.pop():
            if value.__class__ in PLAIN or not isinstance(value, CONTAINERS):
                continue
            if isinstance(value, tuple):
                if 0 < tuple.__len__(value) <= MANY and id(value) not in met:  # a class of its own may refuse len()
                    met.add(id(value))
                    left.append(tuple.__iter__(value))
                continue
            if not len(value):
                empty.append(value)
                continue
            if id(value) in met:
                continue
            met.add(id(value))
            filled.append((value, dict(value) if isinstance(value, dict) else list(value)))
            if len(value) <= MANY:
                left.append(list(value.values()) if isinstance(value, dict) else value)


def _same(container: Any, former: Any) -> bool:
    """Whether a container holds the same objects in the same order."""
    if len(container) != len(former) or not all(map(is_, container, former)):
        return False
    return not isinstance(former, dict) or all(map(is_, container.values(), former.values()))


def _put(own: dict, former: dict) -> None:
    """Puts back what differs alone: other threads may read the rest."""
    for name in [name for name in own if name not in former]:
        del own[name]
    for name, value in former.items():
        if name not in own or own[name] is not value:
            own[name] = value


def _refill(container: Any, former: Any) -> None:
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
