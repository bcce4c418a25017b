"""Rotated images, by which robustness curves of classifiers go up to 180 degrees (Ovadia et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from papers.common.images import pixels, warp

Fill = float | Sequence[float] | Tensor


def rotate(images: Tensor, degrees: float, fill: Fill = 0.0) -> Tensor:
    """Rotates images counter-clockwise around their centre, `y(p) = x(R(-φ) p)`, sampled bilinearly.

    Quarter turns of square images, and half turns of any, only move pixels and are exact; the rest of the angle is
    interpolated. The size stays as it is: corners leave the image, and what comes in is `fill`.

    Args:
        images: floating-point (B, C, H, W), in any range.
        degrees: φ, in degrees.
        fill: value outside the images, one number or one for each channel; for images normalised as `(x - mean) / std`
            black is `-mean / std`.

    Returns:
        Images of the same shape, dtype and device, differentiable in `images`.

    Cost: time and memory a small multiple of the images'.
    """
    value = torch.as_tensor(fill).to(images)
    turns = round(degrees / 90)
    rest = degrees - 90 * turns
    if images.shape[2] != images.shape[3] and turns % 2:
        turns, rest = turns - 1, rest + 90
    turned = torch.rot90(images, turns, (2, 3))
    if rest == 0 or not images.numel():
        return turned  # a copy in every case
    value = value.reshape(-1, 1, 1)
    angle = math.radians(rest)
    cos, sin = math.cos(angle), math.sin(angle)
    inside = (turned - value).to(torch.float64 if images.dtype == torch.float64 else torch.float32)
    places = pixels(inside) @ inside.new_tensor([[cos, sin], [-sin, cos]])  # rows down: clockwise places
    return warp(inside, places).to(images.dtype) + value
