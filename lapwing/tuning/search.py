"""Searches: maximisers by gradients and by values, and where a falling curve meets a bound."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class _LBFGS(torch.optim.LBFGS):
    """L-BFGS whose `add_param_group` is unwrapped: torch's wrapper imports the compiler, which needs a second."""

    add_param_group = inspect.unwrap(torch.optim.LBFGS.add_param_group)


def evenly(low: float, high: float, points: int) -> list[float]:
    """Returns evenly spaced points from `low` to `high`, ends included."""
    return [low + (high - low) * i / (points - 1) for i in range(points)]


def best_of_grid(function: Callable[[float], float], low: float, high: float, points: int) -> tuple[list[float], int]:
    """Returns a grid and the index of its best point; NaN is the lowest value."""
    grid = evenly(low, high, points)
    values = [function(x) for x in grid]
    return grid, max(range(points), key=lambda i: values[i] if not math.isnan(values[i]) else -math.inf)


def ascend(function: Callable[[Tensor], Tensor], start: Tensor, low: Sequence[float], high: Sequence[float]) -> Tensor:
    """Returns the maximiser (k,) of a smooth function in a box, or the start if it is better."""
    lower, upper = start.new_tensor(low), start.new_tensor(high)
    return descend(lambda point: -function(point.clamp(lower, upper)), start).clamp(lower, upper)


def descend(function: Callable[[Tensor], Tensor], start: Tensor, steps: int = 200, tolerance: float = 1e-10) -> Tensor:
    """Returns the minimiser of a smooth function by L-BFGS, in the shape of the start, or the start if it is better.

    It ends after `steps` steps, or if a step gains less than `tolerance`.
    """
    point = start.clone().requires_grad_()
    optimiser = _LBFGS(
        [point], max_iter=steps, tolerance_grad=1e-9, tolerance_change=tolerance, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        value = function(point)
        (point.grad,) = torch.autograd.grad(value, point)
        return value.detach()

    with torch.enable_grad():
        before = float(optimiser.step(loss))
    end = point.detach()
    with torch.no_grad():
        return end if float(function(end)) <= before else start


def golden_section(function: Callable[[float], float], low: float, high: float, points: int) -> float:
    """Returns the maximiser to 1e-6, by a grid and golden sections around its best point, or the end that is best."""
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


def pull(exponent: float, outputs: int) -> float:
    """Returns `-C/4 (log s)²` for a factor s = 10^exponent of a covariance of C outputs: it pulls log s towards 0.

    It weighs as much as one sample, because the Fisher information of a Gaussian sample about log s is C/2. Without it
    a few held-out samples with small residuals make s far too small.
    """
    return -outputs / 4 * (exponent * math.log(10)) ** 2


def crossing(points: Sequence[float], costs: Sequence[float], bound: float) -> float:
    """Returns the first of rising points from which on all costs are at most a positive bound, or the last point.

    NaN counts as above the bound. The crossing is interpolated geometrically, or linearly if a cost is not positive.
    """
    above = [i for i, cost in enumerate(costs) if not cost <= bound]
    if not above:
        return points[0]
    at = above[-1]
    if at == len(points) - 1 or not math.isfinite(costs[at]):
        return points[min(at + 1, len(points) - 1)]
    high, low = costs[at], costs[at + 1]
    part = math.log(high / bound) / math.log(high / low) if low > 0 else (high - bound) / (high - low)
    return points[at] + (points[at + 1] - points[at]) * part
