"""Maximisers: of the log evidence by its gradient, and of a function of one number by its values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class _LBFGS(torch.optim.LBFGS):
    """L-BFGS that does not import torch's compiler, which takes a second, to keep it from compiling `__init__`."""

    add_param_group = inspect.unwrap(torch.optim.LBFGS.add_param_group)


def evenly(low: float, high: float, points: int) -> list[float]:
    """Returns evenly spaced points from one end of a range to the other."""
    return [low + (high - low) * i / (points - 1) for i in range(points)]


def best_of_grid(function: Callable[[float], float], low: float, high: float, points: int) -> tuple[list[float], int]:
    """Returns a grid and the index of its best point, where NaN counts as worst."""
    grid = evenly(low, high, points)
    values = [function(x) for x in grid]
    return grid, max(range(points), key=lambda i: values[i] if not math.isnan(values[i]) else -math.inf)


def ascend(function: Callable[[Tensor], Tensor], start: Tensor, low: Sequence[float], high: Sequence[float]) -> Tensor:
    """Maximises a smooth function of k numbers within the box from `low` to `high`, by L-BFGS and autograd's gradients.

    Returns:
        The best point (k,); the start where the ascent does not improve on it.
    """
    lower, upper = start.new_tensor(low), start.new_tensor(high)
    point = start.clone().requires_grad_()
    optimiser = _LBFGS(
        [point], max_iter=200, tolerance_grad=1e-9, tolerance_change=1e-10, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        value = -function(point.clamp(lower, upper))
        (point.grad,) = torch.autograd.grad(value, point)
        return value.detach()

    with torch.enable_grad():
        before = float(optimiser.step(loss))
    end = point.detach().clamp(lower, upper)
    with torch.no_grad():
        return end if -float(function(end)) <= before else start


def golden_section(function: Callable[[float], float], low: float, high: float, points: int) -> float:
    """Maximises a function of one number: a grid, then golden sections around its best point to 1e-6.

    Returns:
        The best point; an end of the range if the function is best there.
    """
    grid, best = best_of_grid(function, low, high, points)
    if best in (0, points - 1):
        return grid[best]
    left, right = grid[best - 1], grid[best + 1]
    golden = (math.sqrt(5) - 1) / 2
    inner, outer = right - golden * (right - left), left + golden * (right - left)
    at_inner, at_outer = function(inner), function(outer)
    while right - left > 1e-6:
        if at_inner >= at_outer:
            right, outer, at_outer = outer, inner, at_inner
            inner = right - golden * (right - left)
            at_inner = function(inner)
        else:
            left, inner, at_inner = inner, outer, at_outer
            outer = left + golden * (right - left)
            at_outer = function(outer)
    return (left + right) / 2
