"""Random crops, and bilinear sampling, which corruptions and rotations share."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def warp(images: Tensor, places: Tensor, padding: str = "zeros") -> Tensor:
    """Samples images bilinearly at places (B, H, W, 2) or (H, W, 2), in pixels from the centre, x first."""
    half = places.new_tensor([images.shape[3] / 2, images.shape[2] / 2])
    grid = (places / half).expand(len(images), -1, -1, -1)
    return nn.functional.grid_sample(images, grid, padding_mode=padding, align_corners=False)


def pixels(images: Tensor) -> Tensor:
    """Returns the places (H, W, 2) of pixels from the centre, x first: what `warp` would leave in place."""
    across, down = (
        torch.arange(size, dtype=images.dtype, device=images.device) - (size - 1) / 2
        for size in (images.shape[3], images.shape[2])
    )
    return torch.stack(torch.meshgrid(across, down, indexing="xy"), -1)


@torch.no_grad()
def resized_crops(
    images: Tensor,
    seed: int,
    share: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    mirror: float = 0.5,
) -> Tensor:
    """Cuts a random rectangle out of each image and stretches it to the size of the image, sampled bilinearly.

    This is the augmentation of ELLA's early stopping without validation data. Rectangles lie inside the images.

    Args:
        images: floating-point (B, C, H, W), in any range.
        seed: of rectangles and mirrored images.
        share: range of the rectangle's area over the image's, uniform.
        ratio: range of its width over its height, uniform in the logarithm; a side is at most that of the image.
        mirror: probability that an image is mirrored from left to right.

    Returns:
        Images of the same shape.
    """
    generator, count = torch.Generator().manual_seed(seed), len(images)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    area, stretch = uniform(*share), uniform(*map(math.log, ratio)).exp()
    sides = torch.stack([(area * stretch).sqrt(), (area / stretch).sqrt()], -1).clamp_max(1.0)  # (B, 2), x first
    room = (1 - sides) * torch.tensor([images.shape[3], images.shape[2]])
    moved = room * (torch.stack([uniform(0, 1), uniform(0, 1)], -1) - 0.5)
    sides[:, 0] *= torch.where(uniform(0, 1) < mirror, -1.0, 1.0)
    places = pixels(images) * sides[:, None, None].to(images) + moved[:, None, None].to(images)
    return warp(images, places, "border")
