"""Inputs as a flat list of tensors and a text, so that a file can keep both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import LapwingError
from .batches import describe


def flatten(inputs: Any) -> tuple[list[Tensor], str]:
    """Separates inputs into their tensors and a text: how they nest, and what is not a tensor, as JSON.

    Every part of it is a list that begins with its kind: `["tensor"]`, `["value", 3]`, `["tuple", part, ...]`,
    `["list", part, ...]` and `["dict", [key, part], ...]`.

    Raises:
        LapwingError: for anything but tensors, numbers, texts, booleans and None, in tuples, lists and dicts.
    """
    leaves: list[Tensor] = []

    def part(value: Any) -> list[Any]:
        if isinstance(value, Tensor):
            leaves.append(value)
            return ["tensor"]
        if value is None or isinstance(value, (str, int, float)):
            return ["value", value]
        if type(value) in (tuple, torch.Size):
            return ["tuple", *map(part, value)]
        if type(value) is list:
            return ["list", *map(part, value)]
        if isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
            return ["dict", *([key, part(inner)] for key, inner in value.items())]
        raise LapwingError(
            f"A {type(value).__name__} within {describe(inputs)} cannot be kept beside the posterior. Pass tensors, "
            "numbers and texts, in tuples, lists and dicts, and make what the network takes of them in "
            "forward=lambda model, inputs: model(...)."
        )

    return leaves, json.dumps(part(inputs))


def count_tensors(nest: str) -> int:
    """Returns how many tensors `flatten` separated from a text: quotation marks within values are escaped there."""
    return nest.count('["tensor"]')


def unflatten(leaves: Iterable[Tensor], nest: str) -> Any:
    """Puts together what `flatten` separated."""
    rest = iter(leaves)

    def whole(part: list[Any]) -> Any:
        kind, *parts = part
        if kind == "tensor":
            return next(rest)
        if kind == "value":
            return parts[0]
        if kind == "dict":
            return {key: whole(one) for key, one in parts}
        values = [whole(one) for one in parts]
        return tuple(values) if kind == "tuple" else values

    return whole(json.loads(nest))
