"""Classes that cannot be, such as masked actions and padding: their logits are -inf, or far below all others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import Forward
from ..linalg import possible
from .calling import output_tensor
from .invoke import invoke
from .positions import Positions

EXCLUDED = -3e4
"""Logit of a class that cannot be, relative to the mean of the others near 0. float16 can express it."""


@dataclass(frozen=True)
class PossibleClasses:
    """Calls a network, and puts the logits of classes that cannot be 30 000 and more below the mean of the others.

    Their probability stays 0. Their gradient is the mean gradient of the others. So the average over all classes, which
    links subtract, is the average over those that can be.

    Attributes:
        forward: the user's `forward(model, inputs)`, or None.
        axis: dimension of the classes; None if each output has its own sigmoid, where only -inf is replaced.
    """

    forward: Forward | None
    axis: int | None

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        outputs = output_tensor(invoke(model, inputs, self.forward))
        if self.axis is None:
            return torch.where(outputs == -torch.inf, EXCLUDED, outputs)
        mask = possible(outputs, self.axis)
        mean = torch.where(mask, outputs, 0.0).sum(self.axis, keepdim=True) / mask.sum(self.axis, keepdim=True)
        return torch.where(mask, outputs, mean + (EXCLUDED - mean.detach().abs()))  # far below the mean of any size


class ImpossibleClasses(Exception):
    """Raised if the first samples have classes that cannot be.

    Attributes:
        forward: the function that replaces their logits.
    """

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.forward = forward


def check_possible(outputs: Tensor, forward: Forward | None, activation: str | None) -> None:
    """Raises `ImpossibleClasses` if outputs are logits of classes that cannot be, unless `forward` replaces these."""
    if activation is None or excluded_by(forward) is not None:
        return
    axis = None if activation == "sigmoid" else forward.axis if isinstance(forward, Positions) else -1
    excluded = outputs == -torch.inf if axis is None else ~possible(outputs.detach(), axis)
    if bool(excluded.any()):
        positions = forward if isinstance(forward, Positions) else None
        inner = PossibleClasses(forward if positions is None else positions.forward, axis)
        raise ImpossibleClasses(inner if positions is None else replace(positions, forward=inner))


def excluded_by(forward: Forward | None) -> PossibleClasses | None:
    """Returns the part of a forward function that replaces logits of classes that cannot be, or None."""
    inner = forward.forward if isinstance(forward, Positions) else forward
    return inner if isinstance(inner, PossibleClasses) else None
