"""What modules hold as attributes beside parameters and buffers is put back after our forward passes.

Networks keep activations, weights made by hooks, and tables that they derive from weights in eval mode. Left behind,
these would hold a pass's graph or, after a pass with drawn weights, change what the network answers. What changes is
looked for in the first pass of a network (for each `forward=`), and in every pass with other weights than its own.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

STANDARD = frozenset(vars(nn.Module()))
"""What every module has."""

Place = tuple[nn.Module, str]
Known = list[tuple[ref[nn.Module], str]]
Held = tuple[Any, list[tuple[Any, list[Any]]]]
"""An attribute's value, and the lists, dicts and deques in it with copies of what they hold."""

_places: WeakKeyDictionary[nn.Module, WeakKeyDictionary[Callable, Known]] = WeakKeyDictionary()
"""Network -> its `forward=`, or `put_back` where it has none -> the attributes that the first whole pass changed."""

_ABSENT, _NONE = object(), WeakKeyDictionary[Callable, "Known"]()


def put_back(
    model: nn.Module, forward: Callable | None = None, looked_for: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Puts attributes of a network's modules back after a pass: those that a first pass changed, or all of them.

    Args:
        model: the network.
        forward: how it is called.
        looked_for: compare all attributes also where the first pass is known.
    """
    key = None if looked_for else _key(forward)
    known = None if key is None else _places.get(model, _NONE).get(key)
    if known is None:
        return _looked_for(model, forward)
    return _known(known) if known else contextlib.nullcontext()


def _key(forward: Callable | None) -> Callable | None:
    """Returns what a way of calling is known by; None for a callable that cannot be, so that every pass looks."""
    if forward is None:
        return put_back
    try:
        hash(forward), ref(forward)
    except TypeError:
        return None
    return forward


@contextlib.contextmanager
def _known(places: Known) -> Iterator[None]:
    before = _read((module, name) for place, name in places if (module := place()) is not None)
    try:
        yield
    finally:
        _restore(before)


@contextlib.contextmanager
def _looked_for(model: nn.Module, forward: Callable | None) -> Iterator[None]:
    before, whole = _read(_all(model)), False
    try:
        yield
        whole = True
    finally:
        changed = _restore({**dict.fromkeys(_all(model), (_ABSENT, [])), **before})
        if whole:
            found, key = [(ref(module), name) for module, name in changed], _key(forward)
            if key is not None:
                _places.setdefault(model, WeakKeyDictionary()).setdefault(key, found)


def _all(model: nn.Module) -> list[Place]:
    return [(module, name) for module in model.modules() for name in vars(module) if name not in STANDARD]


def _read(places: Iterable[Place]) -> dict[Place, Held]:
    found = {}
    for module, name in places:
        value = vars(module).get(name, _ABSENT)
        found[module, name] = value, list(_contents(value, set()))
    return found


def _contents(value: Any, met: set[int]) -> Iterator[tuple[Any, list[Any]]]:
    """Yields a list, dict or deque, and those within it, with copies of what they hold."""
    if not isinstance(value, (list, dict, deque)) or id(value) in met:
        return
    met.add(id(value))
    yield value, list(value.items() if isinstance(value, dict) else value)
    for one in value.values() if isinstance(value, dict) else value:
        yield from _contents(one, met)


def _restore(before: dict[Place, Held]) -> list[Place]:
    """Puts values back; returns the places where others were."""
    changed = []
    for (module, name), (value, contents) in before.items():
        own = vars(module)
        now = own.get(name, _ABSENT)
        if now is not value and value is _ABSENT:
            del own[name]
        elif now is not value:
            own[name] = value
        others = [(container, held) for container, held in contents if not _holds(container, held)]
        for container, held in others:
            container.clear()
            container.update(held) if isinstance(container, dict) else container.extend(held)
        if others or now is not value:
            changed.append((module, name))
    return changed


def _holds(container: Any, held: list[Any]) -> bool:
    """Whether a container holds the same objects in the same order."""
    if isinstance(container, dict):
        pairs = zip(container.items(), held, strict=False)
        return len(container) == len(held) and all(a[0] == b[0] and a[1] is b[1] for a, b in pairs)
    return len(container) == len(held) and all(one is other for one, other in zip(container, held, strict=True))
