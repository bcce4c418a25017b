"""The one check of tensors that evaluation is called with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import LapwingError, shown
from ..network.batches import check_dense


def real_tensor(asked: str, name: str, value: Any) -> Tensor:
    """Returns an argument as a tensor of real numbers, without its graph; numbers, lists and arrays become one.

    Args:
        asked: the function that the user called.
        name: the argument.
        value: its value.

    Raises:
        LapwingError: for anything else: complex tensors and those that `check_dense` refuses included.
    """
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        tensor = None
    if tensor is not None:
        check_dense(tensor, f"The argument {name} of {asked}")
    if tensor is None or tensor.is_complex():
        raise LapwingError(f"{asked} takes a dense tensor of real numbers as {name}. {name} is {shown(value)}.")
    return tensor
