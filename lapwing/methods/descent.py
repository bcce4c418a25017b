"""What passes by Adam keep from step to step: VaLLA's moving points and mean-field fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .state import State


@dataclass
class Descent(State):
    """Values on their way down an objective by Adam.

    Attributes:
        values: what is open, by name.
        means: of the gradients, by value.
        squares: means of the squared gradients.
        history: numbers step by step, by name.
        kept: what else a pass keeps, by name.
        taken: how many steps.
    """

    values: dict[str, Tensor]
    means: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    history: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)
    taken: int = 0

    def move(self, name: str, gradient: Tensor, rate: float, unit: Tensor | float = 1.0, eps: float = 1e-8) -> None:
        """Moves a value down its gradient, in place, by Adam's step in units of `unit` (Kingma and Ba 2015)."""
        if name not in self.means:
            self.means[name], self.squares[name] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        mean = self.means[name].lerp_(gradient, 1 - 0.9)
        square = self.squares[name].mul_(0.999).addcmul_(gradient, gradient, value=1 - 0.999)
        steps = self.taken + 1
        root = (square / (1 - 0.999**steps)).sqrt_().add_(eps)
        self.values[name] -= mean / root * (rate / (1 - 0.9**steps)) * unit

    def note(self, **numbers: Tensor | float) -> None:
        """Adds numbers to the history."""
        for name, number in numbers.items():
            number = torch.as_tensor(number, dtype=torch.float64).detach().cpu()[None]
            self.history[name] = torch.cat([self.history[name], number]) if name in self.history else number
