"""Small networks of tests, and their training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


def small_network(width: int = 6, outputs: int = 3) -> nn.Sequential:
    """Returns a network of four inputs, which has the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, outputs)).eval()


def overconfident(
    inputs: int, outputs: int, samples: int, slope: float, factor: float, answers: bool = False
) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Returns a network whose logits have a factor, inputs, and labels or answers by its logits times a slope."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double().eval()
    x = torch.randn(samples, inputs, dtype=torch.float64)
    with torch.no_grad():
        logits = slope * model(x)
        y = logits.sigmoid().bernoulli() > 0 if answers else torch.distributions.Categorical(logits=logits).sample()
        model[2].weight.mul_(factor)
        model[2].bias.mul_(factor)
    return model, x, y


def train(
    model: nn.Module, loss: Callable[[], Tensor], steps: int = 150, rate: float = 0.02, decay: float = 0.0
) -> nn.Module:
    """Takes steps of Adam down a loss; returns the network in eval mode."""
    optimiser = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=decay)
    for _ in range(steps):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()
    return model.eval()


def minimised(model: nn.Module, loss: Callable[[], Tensor]) -> nn.Module:
    """Takes a network in float64 to the minimum of a convex loss, up to rounding; returns it in eval mode."""
    options = {"max_iter": 200, "tolerance_grad": 1e-14, "tolerance_change": 0.0, "history_size": 50}
    ways = [torch.optim.LBFGS(model.parameters(), line_search_fn=way, **options) for way in ("strong_wolfe", None)]

    def closure() -> Tensor:
        model.zero_grad()
        value = loss()
        value.backward()
        return value

    for optimiser in ways:  # a line search ends where losses differ by rounding
        optimiser.step(closure)
    return model.eval()


def made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose results are made once for all tests and copied for each."""

    @cache
    def made(**options: Any) -> Any:
        torch.manual_seed(0)
        return make(**options)

    def copied(**options: Any) -> Any:
        found = copy.deepcopy(made(**options))
        torch.manual_seed(0)
        return found

    return copied
