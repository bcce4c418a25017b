"""Logits of impossible classes, such as masked actions and padding: -inf, or far below all others.

Masks may differ between samples and batches. Outputs that a treated layer gives directly stay: nothing masks them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import Forward
from ..linalg import possible
from .invoke import invoke
from .positions import Positions

EXCLUDED = -3e4
"""Logit of an impossible class, relative to the mean of the possible ones near 0. float16 can express it."""


@dataclass(frozen=True)
class Logits:
    """Calls a network whose outputs are logits."""

    forward: Forward | None  # the user's `forward(model, inputs)`, or None
    activation: str  # from outputs to probabilities: "softmax", or "sigmoid" for each output on its own
    looks: bool = True  # outputs without impossible classes stay the same object, which waits for the device

    def __call__(self, model: nn.Module, inputs: Any) -> Any:
        return invoke(model, inputs, self.forward)

    def finite(self, outputs: Tensor, axis: int = -1) -> Tensor:
        """Returns outputs with other logits of impossible classes. Before a sigmoid only -inf is replaced.

        Before a softmax they become the mean of the possible logits minus 30 000 or more. So their probability stays 0,
        and their gradient is the mean gradient of the possible ones. Links subtract the average over all classes, which
        then equals the average over the possible ones.
        """
        softmax = self.activation == "softmax"
        mask = possible(outputs.detach(), axis) if softmax else outputs != -torch.inf
        if self.looks and bool(mask.all()):
            return outputs
        if not softmax:
            return torch.where(mask, outputs, EXCLUDED)
        mean = torch.where(mask, outputs, 0.0).sum(axis, keepdim=True) / mask.sum(axis, keepdim=True)
        return torch.where(mask, outputs, mean + (EXCLUDED - mean.detach().abs()))  # far below the mean of any size


def as_logits(forward: Forward | None, activation: str | None, looks: bool = True) -> Forward | None:
    """Returns a forward function, within `Positions` if it has them, as `Logits`; without `Logits` if that is None."""
    if isinstance(forward, Positions):
        return replace(forward, forward=as_logits(forward.forward, activation, looks))
    forward = forward.forward if isinstance(forward, Logits) else forward
    return forward if activation is None else Logits(forward, activation, looks)


def logits_of(forward: Forward | None) -> Logits | None:
    """Returns the `Logits` within a forward function, or None."""
    inner = forward.forward if isinstance(forward, Positions) else forward
    return inner if isinstance(inner, Logits) else None


def users(forward: Forward | None) -> Forward | None:
    """Returns the function that the user passed, or None."""
    forward = as_logits(forward, None)
    return forward.forward if isinstance(forward, Positions) else forward
