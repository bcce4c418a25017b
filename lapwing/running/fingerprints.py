"""Fingerprints of values as JSON, which two processes, or two calls one after another, compare."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from numbers import Integral, Real
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from .. import ranks
from ..errors import LapwingError
from ..network.stamp import fingerprint, state_of

FUNCTIONS = CellType, CodeType, FunctionType, MethodType, partial
DEEP = 50  # maximum number of values that hold one another, such as closures in closures
PARTS = (  # attributes of these types that decide what a function returns
    "co_code", "co_consts", "co_names", "cell_contents", "__code__", "__defaults__", "__kwdefaults__", "__closure__",
    "func", "args", "keywords",
)  # fmt: skip


def fingerprint_of(value: Any, functions: bool = True, above: tuple[int, ...] = ()) -> Any:
    """Returns a value as JSON: numbers and strings unchanged, tensors as sums, other objects by their type.

    It contains no address, so it is the same in another process. The field `loader` of a tuning, its held-out data, is
    left out. A function has its code, constants, names, defaults, closure values and the attributes of its object.
    Without `functions` it has only its name: closures of several processes may hold the rank. `above` are the ids of
    the values around this one.
    """
    inside = partial(fingerprint_of, functions=functions, above=(*above, id(value)))
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
        return [list(value.shape), str(value.dtype), *fingerprint(value).nan_to_num().tolist()]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return int(float(value)) if float(value).is_integer() else repr(float(value))
    if isinstance(value, (bytes, complex)):
        return repr(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return [list(value.shape), str(value.dtype), _digest(value.tobytes())]
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if id(value) in above or len(above) > DEEP:  # such as a function that calls itself
        return name
    if isinstance(value, Mapping):
        return {str(inside(key)): inside(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [inside(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(inside(item)) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value) if each.name != "loader"]
        return [name, {each: inside(getattr(value, each)) for each in names}]
    if not functions:
        return name
    parts = []  # the values that decide the results of a function, except its name
    for part in PARTS if isinstance(value, FUNCTIONS) else ():
        with suppress(AttributeError, ValueError):  # a cell is empty before its variable has a value
            parts.append(getattr(value, part))
    owner = getattr(value, "__self__", value)
    if callable(value) and not isinstance(owner, (type, ModuleType, FunctionType)):  # a method, or a callable object
        parts += [type(owner).__call__, getattr(owner, "__dict__", None)]
    return [name, _digest(json.dumps([*map(inside, parts)]).encode())] if parts else name


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the names under which two sets of fingerprints differ. Sums of tensors may differ by rounding."""
    return [name for name in {**one, **other} if not _same(one.get(name), other.get(name))]


def _same(one: Any, other: Any) -> bool:
    (first, nest), (second, other_nest) = tree_flatten(one), tree_flatten(other)
    return nest == other_nest and all(
        math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) if isinstance(a, float) and isinstance(b, float) else a == b
        for a, b in zip(first, second, strict=True)
    )


def check_same_network(model: nn.Module) -> None:
    """Raises if the weights differ between ranks, or if the network is a DistributedDataParallel."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise LapwingError(
            "The model is a DistributedDataParallel, whose calls wait for each other, but the processes of a fit make "
            "different numbers of calls. Pass the network inside: model.module."
        )
    every = ranks.gathered("the weights", fingerprint_of(state_of(model)))
    for other, prints in enumerate(every):
        for name in differences(every[0], prints)[:1]:
            raise LapwingError(
                f"The network of process {other} has other weights than the network of process 0: {name} differs. Load "
                "one state dict in all processes (parallel training lets the statistics of batch norm diverge)."
            )
