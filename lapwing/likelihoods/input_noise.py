"""Noise of a regression that depends on the input: the log variance is linear in features of the network."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..linalg import doubled

LARGEST_FEATURE = 6.0
"""Largest absolute value of a standardised feature; larger ones are clipped."""


@dataclass(frozen=True, eq=False)
class InputNoise:
    """Noise variance of C outputs, `log σ²_c(x) = b_c + clamp(w_cᵀ z(x), low_c, high_c)`, in squared units of y.

    `z = clip((φ - centre) · scale, ±6)` are standardised features (F,). All fields but `layer` are float64
    tensors.

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
        spread: factor s () of the latent covariance that belongs to this noise.
        df: degrees of freedom ν > 2, (), of Student noise with scale² `σ² (ν - 2)/ν`; inf for normal noise.
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
    spread: Tensor
    df: Tensor
    layer: str = ""

    def __str__(self) -> str:
        """Says what the noise depends on, and its tails."""
        low, high = ((self.offset + end).exp() for end in (self.low, self.high))
        of = f"the inputs of layer {self.layer}" if self.layer else "the outputs"
        parts = [f"noise variance from {low.min():.2g} to {high.max():.2g} by {of}"] if bool(self.weights.any()) else []
        parts += [] if self.tails is None else [f"Student t with {self.tails:.2g} degrees of freedom"]
        return "; ".join(parts)

    def __eq__(self, other: object) -> bool:
        """Whether all tensors and the layer are equal."""
        if not isinstance(other, InputNoise) or self.layer != other.layer:
            return False
        return all(torch.equal(value, other.tensors[name]) for name, value in self.tensors.items())

    def __hash__(self) -> int:
        return hash((self.layer, self.weights.shape))

    @cached_property
    def tails(self) -> float | None:
        """ν as a number; None for normal noise."""
        return None if bool(self.df.isinf()) else float(self.df)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, for saving."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> InputNoise:
        """Returns the noise on a device."""
        moved = InputNoise(**{name: value.to(device) for name, value in self.tensors.items()}, layer=self.layer)
        vars(moved)["tails"] = self.tails  # so that the host need not read a device, or a graph that is traced
        return moved

    def times(self, factor: float) -> InputNoise:
        """Returns the noise with all variances multiplied by a factor."""
        return replace(self, offset=self.offset + math.log(factor), floor=self.floor * factor)

    def slope(self, features: Tensor) -> Tensor:
        """Returns `clamp(wᵀz, low, high)`, (B, C), for features (B, F). Time O(B C F)."""
        return (standardised(features, self.centre, self.scale) @ self.weights.T).clamp(self.low, self.high)

    def log_variance(self, features: Tensor) -> Tensor:
        """Returns `log σ²(x)`, (B, C), for features (B, F), in float64, without the bound far from the data."""
        return self.offset + self.slope(features)

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
        variance = self.log_variance(features).exp()
        least = least_noise(self.floor, doubled(latent_variance), self.spread, self.df)
        return torch.where(self.is_far(features), variance.maximum(least), variance)


def standardised(features: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
    """Returns `clip((φ - centre) · scale, ±6)`, (B, F), in float64."""
    return ((doubled(features) - centre) * scale).clamp(-LARGEST_FEATURE, LARGEST_FEATURE)


def least_noise(floor: Tensor, latent: Tensor, spread: Tensor, df: Tensor) -> Tensor:
    """Returns the noise variance from which on no central interval of y is narrower than by the plain law.

    The plain law is `N(f, floor + latent/s)`. A Student t is less peaked than a normal with the same scale, also after
    a normal is added to both. So the scale² `floor + max(1/s - 1, 0) latent` suffices, and σ² is `scale² ν/(ν - 2)`.
    """
    return (floor + (1 / spread - 1).clamp_min(0.0) * latent) / (1 - 2 / df)
