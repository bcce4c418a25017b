"""Strongly augmented training images in place of validation data, for early stopping and for tuning.

A network that has fitted its training images is right and sure on them, so they cannot tell how far to trust it; images
moved away from them can. ELLA (section 5.2) stops early on strongly augmented training images without saying how they
are made. Two recipes are common: a random crop after padding by 4 pixels, a random flip, and a hole of half the side
(cutout; DeVries and Taylor 2017), here `StrongAugmentation(strength=1.0, operations=0)`; and RandAugment with two
operations at magnitude 9 (Cubuk et al. 2020). ELLA's authors began with the first for CIFAR; their program now takes
random crops of half to all of the area, resized, which are not built here. The default does both at half the strength:
at full strength small networks lose so many training images (a fifth of CIFAR-10, a quarter of MNIST) that the prior
precision tuned on them is too small. The right strength is the one at which accuracy falls to what new images are
expected to give. All of it is torch, and runs where the images are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor, nn

from lapwing.data import batches
from lapwing.errors import LapwingError, is_whole, shown
from lapwing.evaluation.metrics import real_tensor

Normalisation = tuple[Sequence[float] | Tensor, Sequence[float] | Tensor]


def brightened(x: Tensor, magnitude: Tensor) -> Tensor:
    """Halves to doubles all values, by magnitudes of -1 to 1."""
    return x * (0.7 * magnitude).exp()


def contrasted(x: Tensor, magnitude: Tensor) -> Tensor:
    """Halves to doubles the distances to the mean of an image."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + (0.7 * magnitude).exp() * (x - mean)


def saturated(x: Tensor, magnitude: Tensor) -> Tensor:
    """Halves to doubles the distances to grey; grey images stay."""
    grey = x.mean(1, keepdim=True)
    return grey + (0.7 * magnitude).exp() * (x - grey)


def solarised(x: Tensor, magnitude: Tensor) -> Tensor:
    """Inverts what is brighter than a threshold that falls from 1 to 0.3."""
    return torch.where(x > 1 - 0.7 * magnitude.abs(), 1 - x, x)


def holed(x: Tensor, centres: Tensor, share: float) -> Tensor:
    """Fills a square of `share` times the side with the mean colour; centres (B, 2) in [0, 1], holes may leave."""
    sides = x.new_tensor([x.shape[3], x.shape[2]])
    places = pixels(x) - (centres[:, None, None] - 0.5) * sides  # (B, H, W, 2)
    hole = (places.abs() < share * min(x.shape[2:]) / 2).all(-1)[:, None]
    return torch.where(hole, x.mean((2, 3), keepdim=True), x)


_OPERATIONS: tuple[Callable[[Tensor, Tensor], Tensor] | None, ...] = (
    None, None, None, brightened, contrasted, saturated, solarised,
)  # fmt: skip
"""Operations on pixels; the first three, rotate, shear and zoom, are sampled in one step with the crop."""


@dataclass(frozen=True)
class StrongAugmentation:
    """Random crop and flip, a few random operations in random order, then a hole; called on a batch of images.

    For each image: a crop after padding by 1/8 of the side and a flip; `operations` of rotation (30°), shear (0.3),
    zoom (a third), brightness, contrast, saturation (each halved to doubled) and solarising (inverting what is above
    0.3); a hole of half the side, filled with the image's mean colour. In brackets are the limits at strength 1, up to
    which magnitudes are drawn uniformly. Geometry is sampled once, with the crop; the rest is in random order.

    Args:
        strength: multiplies every magnitude, from 0 (none but the flip) to 2.
        flip: mirror half of the images; False for digits and text.
        operations: how many random operations an image gets.
        normalise: `(mean, std)`, one number of each for each channel, of images normalised as `(pixels - mean) / std`;
            None for images in [0, 1].

    Raises:
        LapwingError: a strength, number or normalisation out of range.

    Example:
        >>> augment = StrongAugmentation(flip=False, normalise=([0.1307], [0.3081]))
        >>> loader = [((torch.rand(4, 1, 28, 28) - 0.1307) / 0.3081, torch.arange(4))]
        >>> held_out = [(augment(images, seed=i), labels) for i, (images, labels) in enumerate(loader)]
        >>> held_out[0][0].shape
        torch.Size([4, 1, 28, 28])
        >>> tuning = lw.Validation(held_out)
    """

    strength: float = 0.5
    flip: bool = True
    operations: int = 2
    normalise: Normalisation | None = None

    def __post_init__(self) -> None:
        """Checks the options."""
        strength, count = self.strength, self.operations
        if isinstance(strength, bool) or not isinstance(strength, Real) or not 0 <= strength <= 2:
            raise LapwingError(
                f"StrongAugmentation(strength={shown(strength)}) is out of range. Pass a number from 0 to 2."
            )
        if not is_whole(count, 0, len(_OPERATIONS) + 1):
            raise LapwingError(
                f"StrongAugmentation(operations={shown(count)}) is out of range. Pass a whole number from 0 to "
                f"{len(_OPERATIONS)}: operations=2."
            )
        if not isinstance(self.flip, bool):
            raise LapwingError(f"flip of StrongAugmentation is {shown(self.flip)}. Pass True or False.")
        if self.normalise is not None and not (isinstance(self.normalise, (tuple, list)) and len(self.normalise) == 2):
            raise LapwingError(
                f"normalise of StrongAugmentation is {shown(self.normalise)}. Pass a pair of mean and std, such as "
                "normalise=([0.5], [0.25]) for one channel."
            )

    @torch.no_grad()
    def __call__(self, images: Tensor, seed: int = 0) -> Tensor:
        """Augments images; the same seed gives the same result for the same batch, on every device.

        Args:
            images: floating-point (B, 1, H, W) or (B, 3, H, W), in [0, 1] before any normalisation, at least 8 x 8.
            seed: of every random choice.

        Returns:
            Images of the same shape, dtype and device; new ones, also at strength 0.

        Raises:
            LapwingError: other images, or a normalisation for another number of channels.

        Cost: time and memory a small multiple of the images'.
        """
        check_form(images, "StrongAugmentation")
        generator = seeded(seed)
        exact = images.detach().to(torch.float64 if images.dtype == torch.float64 else torch.float32)
        mean, std = self._normalisation(exact)
        eps = torch.finfo(images.dtype).eps
        x = in_range(exact * std + mean, "StrongAugmentation", eps, "Pass normalise=(mean, std)")
        count = len(x)

        def draw(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator).to(x)

        magnitudes = self.strength * (2 * draw(count, len(_OPERATIONS)) - 1)  # (B, operations), up to the strength
        order = torch.rand(count, len(_OPERATIONS), generator=generator).argsort(1)[:, : self.operations].to(x.device)
        chosen = (order[:, :, None] == torch.arange(len(_OPERATIONS), device=x.device)).any(1)  # (B, operations)
        shift = ((2 * draw(count, 2) - 1) * self.strength * min(x.shape[2:]) / 8).round()
        mirrored = torch.where((draw(count) < 0.5) & self.flip, -1.0, 1.0).to(x)
        x = self.placed(x, shift, mirrored, magnitudes * chosen)
        for place in range(self.operations):
            for number, operation in enumerate(_OPERATIONS):
                rows = order[:, place] == number
                if operation is not None and rows.any():
                    x[rows] = operation(x[rows], magnitudes[rows, number][:, None, None, None]).clamp(0.0, 1.0)
        x = holed(x, draw(count, 2), 0.5 * self.strength)
        return ((x - mean) / std).to(images.dtype)

    def placed(self, x: Tensor, shift: Tensor, mirrored: Tensor, magnitudes: Tensor) -> Tensor:
        """Crops, flips, rotates, shears and zooms in one sampling; magnitudes 0 do nothing."""
        angle, lean, zoom = math.radians(30) * magnitudes[:, 0], 0.3 * magnitudes[:, 1], (0.3 * magnitudes[:, 2]).exp()
        cos, sin = angle.cos() * zoom, angle.sin() * zoom
        rows = [cos * mirrored, sin * mirrored, lean * cos - sin, lean * sin + cos]
        matrix = torch.stack(rows, -1).reshape(-1, 1, 2, 2)
        return warp(x, pixels(x) @ matrix + shift[:, None, None])

    def _normalisation(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and std (channels, 1, 1)."""
        if self.normalise is None:
            return images.new_zeros(1, 1, 1), images.new_ones(1, 1, 1)
        parts = zip(("mean", "std"), self.normalise, strict=True)
        mean, std = (real_tensor("normalise", name, value).to(images).reshape(-1, 1, 1) for name, value in parts)
        right = len(mean) == len(std) == images.shape[1] and bool(mean.isfinite().all()) and bool((std > 0).all())
        if not right:
            raise LapwingError(
                f"normalise={shown(self.normalise)} does not fit images of shape {tuple(images.shape)}. Pass a finite "
                "mean and a positive std for each channel: normalise=([0.5], [0.25]) for one channel."
            )
        return mean, std


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
