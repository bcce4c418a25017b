"""Noise of a regression that depends on the input: the log variance is linear in features of the network."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..linalg import doubled

LARGEST_FEATURE = 6.0
"""Largest absolute value of a standardised feature; larger ones are clipped."""


@dataclass(frozen=True, eq=False)
class InputNoise:
    """Noise variance of C outputs, `log σ²_c(x) = b_c + clamp(w_cᵀ z(x), low_c, high_c)`, in squared units of y.

    `z = clip((φ - centre) · scale, ±6)` are standardised features (F,). Tensors are float64.

    Attributes:
        centre: mean (F,) of each feature on the training rows.
        scale: 1 / standard deviation (F,); 0 for a constant feature, which has no effect.
        weights: w, (C, F); zeros for noise that is equal at all inputs.
        low: lower ends (C,) of the range of wᵀz on the training rows.
        high: upper ends (C,) of this range.
        offset: b, (C,).
        floor: the plain law's noise variance (C,), a bound of σ² far from the data.
        whitening: matrix W (F, F') for the distance `‖Wᵀz‖²` of an input from the training rows.
        reach: distance () above which an input is far from the data.
        spread: factor s of the latent covariance that belongs to this noise.
        df: degrees of freedom ν > 2 of Student noise with scale² `σ² (ν - 2)/ν`; inf for normal noise.
        layer: the block whose last layer has the inputs φ; "" if φ are the outputs.
    """

    centre: Tensor
    scale: Tensor
    weights: Tensor
    low: Tensor
    high: Tensor
    offset: Tensor
    floor: Tensor
    whitening: Tensor
    reach: Tensor
    spread: float
    df: float
    layer: str = ""

    def __str__(self) -> str:
        low, high = ((self.offset + end).exp() for end in (self.low, self.high))
        of = f"the inputs of layer {self.layer}" if self.layer else "the outputs"
        by = f" by {of}" if bool(self.weights.any()) else ""
        tails = "" if math.isinf(self.df) else f"; Student t with {self.df:.2g} degrees of freedom"
        return f"noise variance from {low.min():.2g} to {high.max():.2g}{by}{tails}"

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All fields but the layer as tensors by name, for saving."""
        return {
            name: torch.as_tensor(value, dtype=torch.float64) for name, value in vars(self).items() if name != "layer"
        }

    def to(self, device: torch.device) -> InputNoise:
        moved: Any = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def times(self, factor: float) -> InputNoise:
        """Returns the noise with all variances multiplied by a factor."""
        return replace(self, offset=self.offset + math.log(factor), floor=self.floor * factor)

    def slope(self, features: Tensor) -> Tensor:
        """Returns `clamp(wᵀz, low, high)`, (B, C), for features (B, F). Time O(B C F)."""
        return (standardised(features, self.centre, self.scale) @ self.weights.T).clamp(self.low, self.high)

    def is_far(self, features: Tensor) -> Tensor:
        """Returns whether `‖Wᵀz‖²` exceeds `reach`, (B, 1), for features (B, F). Time O(B F F')."""
        distance = (standardised(features, self.centre, self.scale) @ self.whitening).square().sum(1, keepdim=True)
        return distance > self.reach

    def variance(self, features: Tensor, latent_variance: Tensor) -> Tensor:
        """Returns σ²(x), (B, C), at least `least_noise` far from the data.

        Args:
            features: φ(x), (B, F).
            latent_variance: variance of f(x), (B, C), with the factor s.
        """
        variance = (self.offset + self.slope(features)).exp()
        least = least_noise(self.floor, doubled(latent_variance), self.spread, self.df)
        return torch.where(self.is_far(features), variance.maximum(least), variance)


def standardised(features: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
    """Returns `clip((φ - centre) · scale, ±6)`, (B, F), in float64."""
    return ((doubled(features) - centre) * scale).clamp(-LARGEST_FEATURE, LARGEST_FEATURE)


def least_noise(floor: Tensor, latent: Tensor, spread: Tensor | float, df: Tensor | float) -> Tensor:
    """Returns the noise variance from which on no central interval of y is narrower than by the plain law.

    The plain law is `N(f, floor + latent/s)`. A Student t is less peaked than a normal with the same scale, also after
    a normal is added to both. So the scale² `floor + max(1/s - 1, 0) latent` suffices, and σ² is `scale² ν/(ν - 2)`.
    """
    return (floor + torch.as_tensor(1 / spread - 1).clamp_min(0.0) * latent) / (1 - 2 / df)
