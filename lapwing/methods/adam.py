"""Adam as torch has it, on tensors that a state holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam

from .state import State


@dataclass
class AdamState(State):
    """The moments of `torch.optim.Adam`, by the name of a value.

    Attributes:
        means: of the gradients.
        squares: of the squared gradients.
        steps: how many steps, without dimensions.
    """

    means: dict[str, Tensor]
    squares: dict[str, Tensor]
    steps: dict[str, Tensor]

    @classmethod
    def of(cls, values: Mapping[str, Tensor]) -> AdamState:
        """Returns the moments before the first step."""
        means, squares = ({name: torch.zeros_like(value) for name, value in values.items()} for _ in range(2))
        return cls(means, squares, {name: torch.zeros(()) for name in values})

    @torch.no_grad()
    def step(self, name: str, value: Tensor, gradient: Tensor, rate: float, eps: float = 1e-8) -> None:
        """Takes a step down the gradient, in place."""
        adam(
            [value], [gradient], [self.means[name]], [self.squares[name]], [], [self.steps[name]], foreach=False,
            amsgrad=False, beta1=0.9, beta2=0.999, lr=rate, weight_decay=0.0, eps=eps, maximize=False,
        )  # fmt: skip
