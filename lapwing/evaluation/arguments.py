"""The one check of tensors that evaluation is called with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import LapwingError, shown


def real_tensor(asked: str, name: str, value: Any) -> Tensor:
    """Returns an argument as a tensor of real numbers, without its graph; numbers, lists and arrays become one.

    Args:
        asked: the function that the user called.
        name: the argument.
        value: what was given.

    Raises:
        LapwingError: for anything else: complex, sparse and nested tensors and those without data included.
    """
    try:
        found = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None or found.is_nested or found.layout != torch.strided or found.is_complex() or found.is_meta:
        raise LapwingError(f"{asked} takes a dense tensor of real numbers as {name}. {name} is {shown(value)}.")
    return found
