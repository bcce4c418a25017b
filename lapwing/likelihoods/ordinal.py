"""Ordered classes, such as grades: the cumulative logit model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributions as dist
from torch.nn import functional as F

from ..errors import LapwingError, plain_numbers
from ..options import Rule, number, option
from .categorical import ClassPrediction
from .from_distribution import FamilyLikelihood
from .registry import register_likelihood


def _rise(value: Any) -> bool:
    points = plain_numbers(value)
    numbers = isinstance(points, (list, tuple)) and len(points) > 0 and all(map(number(-torch.inf).accepts, points))
    return numbers and all(low < high for low, high in pairwise(points))


RISING_NUMBERS = Rule(_rise, "a list of rising numbers", lambda value: tuple(map(float, plain_numbers(value))))


@register_likelihood
@dataclass(frozen=True)
class Ordinal(FamilyLikelihood[ClassPrediction]):
    """Ordered classes 0 < 1 < ... < C - 1 by cumulative logits θ: `P(y > k) = σ(θ_k)`, with θ falling in k.

    Train the network with the loss `-likelihood.log_prob(model(x), y).mean()`. Targets are integers (B,). Predictions
    are class probabilities. Λ is exact. Source: McCullagh 1980, section 2.

    Args:
        thresholds: C - 1 rising cut points t, for a network with one output f: `θ_k = f - t_k`. With None the network
            has C - 1 outputs: `θ_0 = f_0` and `θ_k = θ_{k-1} - softplus(f_k)`, so that any outputs are in order.

    Example:
        >>> import torch
        >>> Ordinal().log_prob(torch.zeros(3, 2), torch.tensor([0, 2, 1])).shape  # three classes
        torch.Size([3])
    """

    thresholds: tuple[float, ...] | None = option(None, RISING_NUMBERS, write="[-1.0, 0.5, 2.0]")
    name: ClassVar[str] = "ordinal"

    def family(self, outputs: Tensor) -> dist.Categorical:
        """Returns the Categorical; `P(y = k) = σ(θ_{k-1}) σ(-θ_k) (1 - exp(-g_k))` for gaps `g_k = θ_{k-1} - θ_k`."""
        if self.thresholds is None:
            gaps = F.softplus(outputs[..., 1:])
            above = outputs[..., :1] - F.pad(gaps.cumsum(-1), (1, 0))
        elif outputs.shape[-1] == 1:
            cuts = outputs.new_tensor(self.thresholds)
            gaps, above = cuts.diff(), outputs - cuts
        else:
            raise LapwingError(
                f"Ordinal(thresholds=...) needs one output of the network, and the outputs have shape "
                f"{tuple(outputs.shape)}. Write lw.Ordinal() for {outputs.shape[-1] + 1} classes, or give the network "
                "one output: torch.nn.Linear(features, 1)."
            )
        middle = F.logsigmoid(above[..., :-1]) + F.logsigmoid(-above[..., 1:]) + (-torch.expm1(-gaps)).log()
        first, last = F.logsigmoid(-above[..., :1]), F.logsigmoid(above[..., -1:])
        return dist.Categorical(logits=torch.cat([first, middle, last], -1))
