"""Random crops, and what corruptions and rotations share: checks of images, a seed, and bilinear sampling."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lapwing.data import batches
from lapwing.errors import LapwingError, is_whole, shown


def check_form(images: Tensor, caller: str) -> None:
    """Raises for anything but floating-point images (B, 1 or 3, H, W)."""
    if isinstance(images, Tensor):
        batches.check_dense(images, f"The tensor of images for {caller}")
    if not isinstance(images, Tensor) or images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < 8:
        form = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise LapwingError(
            f"{caller} takes images as a tensor (B, 1, H, W) or (B, 3, H, W) with H and W at least 8, not {form}. "
            "Write x[None] for a single image, x.movedim(-1, 1) for channels last."
        )
    if not images.is_floating_point():
        raise LapwingError(
            f"{caller} takes floating-point images, not {images.dtype}. Write images.float() / 255 for bytes."
        )


def in_range(images: Tensor, caller: str, eps: float, remedy: str) -> Tensor:
    """Returns images clamped to [0, 1]; raises where they are further outside than rounding at `eps`."""
    wrong = ~((images >= -8 * eps) & (images <= 1 + 8 * eps))  # NaN is wrong too
    if wrong.any():
        raise LapwingError(
            f"{caller} takes images in [0, 1], and {int(wrong.sum())} of {images.numel()} values are outside or NaN "
            f"(smallest {float(images.min()):.4g}, largest {float(images.max()):.4g}). {remedy} for normalised images."
        )
    return images.clamp(0.0, 1.0)


def seeded(seed: int) -> torch.Generator:
    """Returns a generator on the CPU; raises for a seed that is none."""
    if not is_whole(seed, 0):
        raise LapwingError(f"seed={shown(seed)} is out of range. Pass a whole number from 0 to 2**63 - 1: seed=0.")
    return torch.Generator().manual_seed(seed)


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
    generator, count = seeded(seed), len(images)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    area, stretch = uniform(*share), uniform(*map(math.log, ratio)).exp()
    sides = torch.stack([(area * stretch).sqrt(), (area / stretch).sqrt()], -1).clamp_max(1.0)  # (B, 2), x first
    room = (1 - sides) * torch.tensor([images.shape[3], images.shape[2]])
    moved = room * (torch.stack([uniform(0, 1), uniform(0, 1)], -1) - 0.5)
    sides[:, 0] *= torch.where(uniform(0, 1) < mirror, -1.0, 1.0)
    places = pixels(images) * sides[:, None, None].to(images) + moved[:, None, None].to(images)
    return warp(images, places, "border")
