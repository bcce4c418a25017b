"""Rotated images, by which robustness curves of classifiers go up to 180 degrees (Ovadia et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lapwing import LapwingError
from lapwing.data import batches
from lapwing.errors import shown
from lapwing.evaluation.metrics import real_tensor
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

    Raises:
        LapwingError: for other images, an angle that is not a finite number, or a fill of another length.

    Cost: time and memory a small multiple of the images'.

    Example:
        >>> import torch
        >>> x = torch.arange(4.0).reshape(1, 1, 2, 2)
        >>> rotate(x, 90)[0, 0].tolist()
        [[1.0, 3.0], [0.0, 2.0]]
    """
    if isinstance(images, Tensor):
        batches.check_dense(images, "The tensor of images for rotate")
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
        raise LapwingError(
            f"rotate takes floating-point images (B, C, H, W), not {batches.describe(images)}. Write x[None] for a "
            "single image, x.float() / 255 for bytes, x.movedim(-1, 1) for channels last."
        )
    if isinstance(degrees, bool) or not isinstance(degrees, (int, float)) or not math.isfinite(degrees):
        raise LapwingError(f"The angle degrees={shown(degrees)} is not a finite number. Write rotate(x, 30).")
    value = real_tensor("rotate", "fill", fill).to(images)
    if value.shape not in ((), (1,), (images.shape[1],)):
        raise LapwingError(
            f"The fill has shape {tuple(value.shape)}, and the images have {images.shape[1]} channels. Pass one "
            "number, or one for each channel: fill=0.0."
        )
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
