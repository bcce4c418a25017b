"""What a file must hold, written as data, and the check of it: anybody may have written the file.

A checksum shows damage, not intent. So nothing in a file is used before it has passed this check: JSON against a
pattern, and tensors against a list of entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Pattern = Any
"""What a JSON value must be: a type (`str` accepts one line of at most `TEXT` characters), a set of accepted texts, a
function that returns True for an accepted value, `[pattern]` for a list, a tuple of patterns for a list of that length,
or `{key: pattern}` for a dict of exactly these keys."""

TEXT = 1000
"""Texts in a file have at most so many characters, so that messages can show them."""

FLOATS = torch.float32, torch.float64
"""The dtypes that sums and directions are kept in."""


class Mismatch(ValueError):
    """Says which part of a file is wrong; `posterior/loading.py` makes a `LapwingError` of it."""


@dataclass(frozen=True)
class Entry:
    """What one tensor must be. Its numbers must be finite in any case.

    Attributes:
        shape: its shape, any when None.
        dtypes: its dtype is one of these, any when there are none.
        minimum: the smallest number it may hold.
        maximum: the largest one.
        orthonormal: its matrices (..., n, n) are.
    """

    shape: tuple[int, ...] | None = None
    dtypes: tuple[torch.dtype, ...] = ()
    minimum: float = -math.inf
    maximum: float = math.inf
    orthonormal: bool = False


def largest(dtype: torch.dtype, power: float = 1.0) -> float:
    """Returns the largest number of a dtype to a power: numbers below `largest(dtype, 1/2)` have finite squares."""
    return torch.finfo(dtype).max ** power


def is_positive(value: Any) -> bool:
    """Whether float32 can hold a number and its inverse; torch takes no integers of more than 64 bits."""
    return (type(value) is float or is_count(value)) and 1e-37 <= value <= 1e37


def is_positive_or_none(value: Any) -> bool:
    """Whether a value is such a number, or null."""
    return value is None or is_positive(value)


def is_count(value: Any) -> bool:
    """Whether a value is a count, 0 included."""
    return type(value) is int and 0 <= value < 2**48


def check_json(value: Any, pattern: Pattern, where: str) -> None:
    """Compares JSON with a pattern.

    Args:
        value: of the file.
        pattern: what it must be.
        where: its name, for the message.

    Raises:
        Mismatch: where they differ.
    """
    if isinstance(pattern, dict):
        if type(value) is not dict or value.keys() - pattern.keys():
            raise Mismatch(f"{where} contains something other than {', '.join(list(pattern)[:10]) or 'nothing'}")
        if missing := [key for key in pattern if key not in value]:
            raise Mismatch(f"{where} lacks {', '.join(missing[:10])}")
        for key, inner in pattern.items():
            check_json(value[key], inner, f"{where}/{key}")
    elif isinstance(pattern, (list, tuple)):
        if type(value) is not list or (isinstance(pattern, tuple) and len(value) != len(pattern)):
            raise Mismatch(f"{where} is not a list" + (f" of {len(pattern)}" if isinstance(pattern, tuple) else ""))
        for i, one in enumerate(value):
            check_json(one, pattern[i if isinstance(pattern, tuple) else 0], where)
    elif isinstance(pattern, type):
        if type(value) is not pattern:  # True is not a number here
            raise Mismatch(f"{where} is not of type {pattern.__name__}")
        if isinstance(value, str) and not (len(value) <= TEXT and value.isprintable()):
            raise Mismatch(f"{where} is not a text of one line and at most {TEXT} characters")
    elif isinstance(pattern, frozenset):
        if type(value) is not str or value not in pattern:
            raise Mismatch(f"{where} is not one of {', '.join(sorted(pattern)[:10])}")
    elif not pattern(value):
        raise Mismatch(f"{where} is out of range")


def check_tensors(tensors: Mapping[str, Tensor], entries: Mapping[str, Entry]) -> None:
    """Compares tensors with what they must be: exactly these names, and each as its entry says.

    Raises:
        Mismatch: where they differ.

    Cost: one pass over the numbers, and two products of each orthonormal matrix with a vector.
    """
    if missing := [name for name in entries if name not in tensors]:
        raise Mismatch(f"the tensor {missing[0]} is missing")
    if len(tensors) > len(entries):
        raise Mismatch(f"it contains {len(tensors) - len(entries)} tensors too many")
    for name, entry in entries.items():
        _check_tensor(name, tensors[name], entry)


def _check_tensor(name: str, value: Tensor, entry: Entry) -> None:
    if entry.shape is not None and value.shape != entry.shape:
        raise Mismatch(f"the tensor {name} has shape {tuple(value.shape)} in place of {entry.shape}")
    if entry.dtypes and value.dtype not in entry.dtypes:
        raise Mismatch(f"the tensor {name} is of {value.dtype} in place of {' or '.join(map(str, entry.dtypes))}")
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if value.numel() and (value.is_floating_point() or not math.isinf(entry.maximum)):
        low, high = (float(number) for number in value.aminmax())  # both NaN where one number is
        finite = math.isfinite(low) and math.isfinite(high)
        if not (finite and entry.minimum <= low and high <= entry.maximum):
            raise Mismatch(f"the tensor {name} contains numbers out of range")
    if entry.orthonormal:
        vector = torch.randn(value.shape[-1], 1, generator=torch.Generator().manual_seed(0)).to(value)
        if not ((value.mT @ (value @ vector) - vector).norm(dim=-2) <= 1e-3 * vector.norm()).all():
            raise Mismatch(f"the tensor {name} is not an orthonormal matrix")
