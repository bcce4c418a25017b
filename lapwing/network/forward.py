"""How a network is called, and what its outputs are: logits, and positions.

Logits of impossible classes, such as masked actions and padding, are -inf, or far below all others. Masks may differ
between samples and batches. Outputs that a treated layer gives directly stay: nothing masks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import Forward
from ..errors import LapwingError, shown
from ..linalg import possible
from .positions import Positions

EXCLUDED = -3e4
"""Logit of an impossible class, relative to the mean of the possible ones near 0. float16 can express it."""


@dataclass(frozen=True)
class NetworkForward:
    """Calls a network on a batch's inputs: `model(x)`, `model(*x)`, `model(**x)`, or the user's `forward`."""

    users: Forward | None = None  # the user's `forward(model, inputs)`, or None
    positions: Positions | None = None  # the layout of outputs with positions; None if they are not known to have any
    activation: str | None = None  # from logits to probabilities: "softmax", or "sigmoid" for each output on its own
    looks: bool = True  # outputs without impossible classes stay the same object, which waits for the device

    @classmethod
    def of(cls, forward: Forward | None) -> NetworkForward:
        """Returns a function of the user, or None, as a `NetworkForward`."""
        return forward if isinstance(forward, cls) else cls(forward)

    def __call__(self, model: nn.Module, inputs: Any) -> Any:
        """Calls the network on a batch's inputs and returns its result unchanged."""
        forward = self.users
        if callable(forward):
            return forward(model, inputs)
        if forward is not None:
            raise LapwingError(
                f"forward={shown(forward)} is not a function of the model and a batch's inputs. Write forward=lambda "
                "model, inputs: model(inputs)."
            )
        if isinstance(inputs, Tensor):
            return model(inputs)
        if isinstance(inputs, Mapping):
            if not all(isinstance(name, str) for name in inputs):
                raise LapwingError(
                    f"The inputs are a dict with the keys {shown(list(inputs))}, and {type(model).__name__} is called "
                    "as model(**inputs). Name each input by a string: {'x': x}."
                )
            return model(**inputs)
        if isinstance(inputs, (tuple, list)):
            return model(*inputs)
        raise LapwingError(
            f"The inputs have the type {type(inputs).__name__}, and {type(model).__name__} is called with a tensor, a "
            "tuple or a dict of tensors. Pass forward=lambda model, inputs: model(...) to say how it is called."
        )

    def matrix(self, outputs: Tensor) -> Tensor:
        """Returns outputs as a matrix (B, C), or (B, T C) with positions."""
        return outputs if self.positions is None else self.positions.matrix(outputs)

    def finite(self, outputs: Tensor, axis: int = -1) -> Tensor:
        """Returns outputs with other logits of impossible classes. Before a sigmoid only -inf is replaced.

        Before a softmax they become the mean of the possible logits minus 30 000 or more. So their probability stays 0,
        and their gradient is the mean gradient of the possible ones. Links subtract the average over all classes, which
        then equals the average over the possible ones. Outputs that are not logits stay.
        """
        if self.activation is None:
            return outputs
        softmax = self.activation == "softmax"
        mask = possible(outputs.detach(), axis) if softmax else outputs != -torch.inf
        if self.looks and bool(mask.all()):
            return outputs
        if not softmax:
            return torch.where(mask, outputs, EXCLUDED)
        mean = torch.where(mask, outputs, 0.0).sum(axis, keepdim=True) / mask.sum(axis, keepdim=True)
        return torch.where(mask, outputs, mean + (EXCLUDED - mean.detach().abs()))  # far below the mean of any size
