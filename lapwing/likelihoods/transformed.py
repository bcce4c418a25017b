"""The prediction of a function of y, such as y = exp(z) for a network that was trained on z = log y."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch import distributions as dist
from torch.distributions import constraints

from ..data.frames import as_targets
from ..errors import LapwingError, shown
from ..linalg import doubled
from .mixtures import normal_nodes
from .predictions import RealPrediction
from .targets import check_target_shape

DOUBLINGS, HALVINGS = 60, 120
"""Number of steps that bracket an inverse, from ±1 up to ±2^60, and that then halve the bracket."""


@dataclass(frozen=True, eq=False, repr=False)
class TransformedPrediction(RealPrediction):
    """The distribution of g(y) for a monotone function g of each output.

    Args:
        prediction: the prediction of y.
        function: g.
        points: outputs f (S, B, C), noise variances (C,) or (B, C), and weights of the points (S, 1, 1).
    """

    prediction: RealPrediction
    function: Callable[[Tensor], Tensor]
    points: tuple[Tensor, Tensor, Tensor]

    def __post_init__(self) -> None:
        """Raises if g does not return the shape of y, or is not monotone within four standard deviations of y."""
        mean, std = doubled(self.prediction.mean).detach(), doubled(self.prediction.std).detach()
        values: Any = self.function(y := torch.stack([mean + 0.25 * step * std for step in range(-16, 17)]))
        rises = (
            values.diff(dim=0) if isinstance(values, Tensor) and values.shape == y.shape else y.new_full((), torch.nan)
        )
        if not (bool((rises >= 0).all()) or bool((rises <= 0).all())) or not bool(rises.any()):
            raise LapwingError(
                f"transformed({shown(self.function)}) is not monotone in each output within four standard deviations of "
                "the mean. Write prediction.transformed(torch.exp), or use draws: function(prediction.sample(4096))."
            )

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean of g(y), variance over f of its mean given f, and mean over f of its variance given f, (B, C)."""
        outputs, noise, weights = map(doubled, self.points)
        first, second = torch.zeros_like(outputs), torch.zeros_like(outputs)
        for node, chance in zip(*normal_nodes(outputs), strict=True):  # of the noise
            values = self.function(outputs + noise.sqrt() * node)
            first, second = first + chance * values, second + chance * values.square()
        mean = (weights * first).sum(0)
        epistemic, aleatoric = (first - mean).square(), (second - first.square()).clamp_min(0.0)
        moments = mean, (weights * epistemic).sum(0), (weights * aleatoric).sum(0)
        return tuple(moment.to(self.prediction.mean) for moment in moments)  # type: ignore[return-value]

    mean = property(lambda self: self._moments[0])
    epistemic_variance = property(lambda self: self._moments[1])
    aleatoric_variance = property(lambda self: self._moments[2])

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Returns the exact central interval: g of the ends of y's interval."""
        low, high = map(self.function, self.prediction.interval(level))
        return torch.minimum(low, high), torch.maximum(low, high)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns `log p(g⁻¹(t)) - Σ_c log |g'|` for targets t, (B,); -inf for a target beyond the range of g."""
        mean = self.prediction.mean
        targets = as_targets(targets, mean.device)
        check_target_shape("TransformedPrediction.log_prob", mean.shape, mean.device, targets)
        g, targets = _Monotone(self.function), doubled(targets).reshape(mean.shape)
        y, missing = g.inv(targets), targets.isnan()
        beyond = y.isnan() & ~missing
        logs = self.prediction.log_prob(torch.where(beyond, doubled(mean), y).to(mean))
        slopes = torch.where(missing, 0.0, g.log_abs_det_jacobian(y, targets)).sum(-1)
        return torch.where(beyond.any(-1), -torch.inf, logs - slopes.to(logs))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.function(self.prediction.sample(n, generator))

    def distribution(self) -> dist.Distribution:
        """Returns a `torch.distributions.TransformedDistribution` with the shapes of the prediction's distribution."""
        return dist.TransformedDistribution(self.prediction.distribution(), [_Monotone(self.function)])


class _Monotone(dist.Transform):
    """A monotone function of each entry, with its inverse by bisection in float64; NaN beyond the function's range."""

    bijective, domain, codomain = True, constraints.real, constraints.real

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._call = function

    @torch.no_grad()
    def _inverse(self, y: Tensor) -> Tensor:
        wide = doubled(y)
        low, high = torch.full_like(wide, -1.0), torch.ones_like(wide)
        sign = torch.where(self._call(high) > self._call(low), 1.0, -1.0)
        for _ in range(DOUBLINGS):
            low = torch.where(sign * self._call(low) < sign * wide, low, 2.0 * low)
            high = torch.where(sign * self._call(high) < sign * wide, 2.0 * high, high)
        found = (sign * self._call(low) < sign * wide) & (sign * self._call(high) >= sign * wide)
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            below = sign * self._call(middle) < sign * wide
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return torch.where(found, high, torch.nan).to(y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns `log |g'(x)|`, entry by entry."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(self._call(leaf).sum(), leaf)[0].abs().log()
