"""What modules hold as attributes beside parameters and buffers is put back after every forward pass of ours.

Networks keep activations, weights made by hooks, and tables that they derive from weights in eval mode. Left behind,
these would hold a pass's graph or, after a pass with drawn weights, change what the network answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

STANDARD = frozenset(vars(nn.Module()))
"""What every module has."""

Place = tuple[nn.Module, str]

_places: WeakKeyDictionary[nn.Module, list[tuple[ref[nn.Module], str]]] = WeakKeyDictionary()
"""Network -> the attributes that its first whole pass changed, which later ones are taken to change too."""

_ABSENT = object()


def put_back(model: nn.Module, looked_for: bool = False) -> contextlib.AbstractContextManager[None]:
    """Puts attributes of a network's modules back after a pass: those that a first pass changed, or all of them.

    Args:
        model: the network.
        looked_for: compare all attributes also where the first pass is known.
    """
    known = None if looked_for else _places.get(model)
    if known is None:
        return _looked_for(model)
    return _known(known) if known else contextlib.nullcontext()


@contextlib.contextmanager
def _known(places: list[tuple[ref[nn.Module], str]]) -> Iterator[None]:
    before = _read((module, name) for place, name in places if (module := place()) is not None)
    try:
        yield
    finally:
        _restore(before)


@contextlib.contextmanager
def _looked_for(model: nn.Module) -> Iterator[None]:
    before, whole = _read(_all(model)), False
    try:
        yield
        whole = True
    finally:
        changed = _restore({**dict.fromkeys(_all(model), (_ABSENT, None)), **before})
        if whole and model not in _places:
            _places[model] = [(ref(module), name) for module, name in changed]


def _all(model: nn.Module) -> list[Place]:
    return [(module, name) for module in model.modules() for name in vars(module) if name not in STANDARD]


def _read(places: Iterable[Place]) -> dict[Place, tuple[Any, Any]]:
    """Returns the value at each place, and a copy of what it holds if it is a list or a dict."""
    found = {}
    for module, name in places:
        value = vars(module).get(name, _ABSENT)
        found[module, name] = value, value.copy() if type(value) in (list, dict) else None
    return found


def _restore(before: dict[Place, tuple[Any, Any]]) -> list[Place]:
    """Puts values back; returns the places where others were."""
    changed = []
    for (module, name), (value, copy) in before.items():
        own = vars(module)
        if own.get(name, _ABSENT) is not value:
            changed.append((module, name))
            if value is _ABSENT:
                del own[name]
            else:
                own[name] = value
        if copy is not None and not _same(value, copy):
            changed.append((module, name))
            value.clear()
            value.update(copy) if isinstance(value, dict) else value.extend(copy)
    return changed


def _same(now: Any, before: Any) -> bool:
    """Whether two lists or dicts hold the same objects."""
    if isinstance(now, dict):
        return list(now) == list(before) and all(value is before[key] for key, value in now.items())
    return len(now) == len(before) and all(one is other for one, other in zip(now, before, strict=True))
