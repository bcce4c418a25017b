"""Training of the small networks of tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def train(model: nn.Module, loss: Callable[[], Tensor], steps: int = 150, rate: float = 0.02) -> nn.Module:
    """Takes steps of Adam down a loss; returns the network in eval mode."""
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()
    return model.eval()
