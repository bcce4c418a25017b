"""Whether two calls make the same fit, one after another or together: fingerprints of its options, as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from .. import ranks
from ..data import batches
from ..data.loaders import first_batch
from ..errors import LapwingError, shown
from ..network.stamp import fingerprint


def fingerprint_of_options(value: Any, with_data: bool = True) -> Any:
    """Returns an option as JSON: numbers and texts as they are, tensors by fingerprints, other objects by their type.

    It holds no address, so it is the same in another process. Its floats are rounded sums.

    Args:
        value: value of the option.
        with_data: whether fields of dataclasses count that `repr` leaves out, such as held-out batches.
    """
    if isinstance(value, Tensor):
        sums = fingerprint(value).nan_to_num().tolist()
        return [list(value.shape), str(value.dtype), *sums]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return int(float(value)) if float(value).is_integer() else repr(float(value))
    if isinstance(value, Mapping):
        return {str(key): fingerprint_of_options(item, with_data) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [fingerprint_of_options(item, with_data) for item in value]
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [each.name for each in dataclasses.fields(value) if with_data or each.repr]
        return [name, {field: fingerprint_of_options(getattr(value, field), with_data) for field in fields}]
    return name


def same_fingerprints(one: Any, other: Any) -> bool:
    """Whether two fingerprints are the same, sums of tensors up to rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_fingerprints, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_fingerprints(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


def check_same_options(options: Mapping[str, Any]) -> None:
    """Raises if the processes of a fit got different options. Their data may differ."""
    if not ranks.several():
        return
    mine = {name: (fingerprint_of_options(value, with_data=False), shown(value)) for name, value in options.items()}
    every = ranks.gathered("the options", mine)
    for name, (first, text) in every[0].items():
        for other, given in enumerate(every):
            if not same_fingerprints(first, given[name][0]):
                raise LapwingError(
                    f"The processes were given different options: {name} is {text} in process 0 and {given[name][1]} "
                    f"in process {other}. Call lw.fit with the same network, method and options in each of them."
                )


def repeated_first_batch(loader: Any) -> list[Tensor]:
    """Returns the tensors of the first batch.

    Raises:
        LapwingError: if the loader shows another first batch the second time.
    """
    if ranks.several() and next(iter(loader), None) is None:
        return []
    once, again = (batches.tensors(first_batch(loader)) for _ in range(2))
    if len(again) != len(once) or not all(
        one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(once, again, strict=True)
    ):
        raise LapwingError(
            "The loader shows other samples the second time, and a checkpoint counts on their order. Pass "
            "shuffle=False; the fit does not depend on the order."
        )
    return once


def check_same_network(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raises if the weights differ between ranks, or if every call of the network is collective."""
    if not ranks.several():
        return
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise LapwingError(
            "The model is a DistributedDataParallel, whose calls wait for one another, and each process calls it as "
            "often as its share needs. Pass the network inside: model.module."
        )
    every = ranks.gathered("the weights", {name: fingerprint(value) for name, value in state.items()})
    for other, prints in enumerate(every):
        odd = [
            name for name in {**every[0], **prints}
            if name not in prints or name not in every[0]
            or not torch.allclose(every[0][name], prints[name], rtol=1e-9, atol=0, equal_nan=True)
        ]  # fmt: skip
        if odd:
            raise LapwingError(
                f"The network of process {other} has other weights than that of process 0: {odd[0]} differs. Load the "
                "state dict of one process in all of them (training in parallel leaves batch norm's statistics apart)."
            )
