"""Inputs as a flat list of tensors and a JSON string, so that a file can store both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import LapwingError
from .inputs import Inputs


def flatten(inputs: Inputs) -> tuple[list[Tensor], str]:
    """Separates inputs into their tensors and a JSON string with their nesting and their other values.

    Every part of the JSON is a list that begins with its kind: `["tensor"]`, `["value", 3]`, `["tuple", part, ...]`,
    `["list", part, ...]` and `["dict", [key, part], ...]`.
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
            f"A {type(value).__name__} within {inputs} cannot be kept with the posterior. Pass tensors, "
            "numbers and strings, in tuples, lists and dicts, and let forward=lambda model, inputs: model(...) turn "
            "them into the arguments of the network."
        )

    return leaves, json.dumps(part(inputs.value))


def count_tensors(nest: str) -> int:
    """Returns the number of tensors of a JSON string from `flatten`. Values cannot match: their quotes are escaped."""
    return nest.count('["tensor"]')


def unflatten(leaves: Iterable[Tensor], nest: str) -> Inputs:
    """Rebuilds inputs from the results of `flatten`."""
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

    return Inputs(whole(json.loads(nest)))
