"""Calls the network with a batch's inputs: `model(x)`, `model(*x)`, `model(**x)`, or the user's `forward`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..data.batches import Forward
from ..errors import LapwingError, shown


def invoke(model: nn.Module, inputs: Any, forward: Forward | None) -> Any:
    """Calls the network on a batch's inputs and returns its result unchanged."""
    if forward is not None and not callable(forward):
        raise LapwingError(
            f"forward={shown(forward)} is not a function of the model and a batch's inputs. Write forward=lambda "
            "model, inputs: model(inputs)."
        )
    if forward is not None:
        return forward(model, inputs)
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        if not all(isinstance(name, str) for name in inputs):
            raise LapwingError(
                f"The inputs are a dict with the keys {shown(list(inputs))}, and {type(model).__name__} is called as "
                "model(**inputs). Name each input by a string: {'x': x}."
            )
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    raise LapwingError(
        f"The inputs have the type {type(inputs).__name__}, and {type(model).__name__} is called with a tensor, a "
        "tuple or a dict of tensors. Pass forward=lambda model, inputs: model(...) to say how it is called."
    )
