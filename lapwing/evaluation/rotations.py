"""Rotated images, and how metrics change with the angle: the robustness curves of classifiers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import LapwingError, shown
from ..network import batches
from .arguments import real_tensor
from .comparison import Candidate, compare
from .corruptions import pixels, warp

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


@dataclass(frozen=True)
class RotatedLoader:
    """A loader of (images, targets) batches with the images rotated.

    Args:
        loader: the batches.
        degrees: the angle, counter-clockwise.
        fill: the value outside the images, as in `rotate`.

    Raises:
        LapwingError: for what is not a loader; while iterating, what `rotate` refuses.
    """

    loader: Iterable[Any]
    degrees: float
    fill: Fill = 0.0

    def __post_init__(self) -> None:
        """Checks the loader."""
        batches.check_loader(self.loader, "RotatedLoader")

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.loader:
            images, targets = batches.split(batch)
            yield rotate(images, self.degrees, self.fill), targets


def rotation_curves(
    posteriors: Mapping[str, Candidate],
    loader: Iterable[Any],
    degrees: Iterable[float] = range(0, 181, 15),
    fill: Fill = 0.0,
) -> dict[str, dict[str, list[float]]]:
    """Measures every metric of `compare` on images rotated by each angle.

    VaLLA's Figure 6 (right) shows ECE and NLL so, up to 180 degrees, after Ovadia et al. 2019.

    Args:
        posteriors: name -> a posterior, a pair (posterior, way) or a network, as for `compare`.
        loader: held-out (images, targets) batches.
        degrees: the angles.
        fill: the value outside the images, as in `rotate`.

    Returns:
        name -> metric -> one number for each angle.

    Raises:
        LapwingError: for no angle, or what `compare` and `rotate` refuse.

    Cost: for each angle that of `compare` with one prediction of every batch.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.rand(16, 1, 8, 8), torch.arange(16) % 3
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)).eval()
        >>> curves = rotation_curves({"KFAC": lw.fit(model, [(x, y)])}, [(x, y)], degrees=(0, 90))
        >>> len(curves["KFAC"]["NLL"])
        2
    """
    batches.check_loader(loader, "rotation_curves")
    if isinstance(degrees, Tensor) or not isinstance(degrees, Iterable):
        raise LapwingError(f"rotation_curves takes angles as a list. degrees is {shown(degrees)}. Pass [0, 30, 60].")
    tables = [compare(posteriors, RotatedLoader(loader, angle, fill), repeats=1) for angle in degrees]
    if not tables:
        raise LapwingError(
            "There is no angle to rotate by. Pass at least one: rotation_curves(posteriors, loader, degrees=range(0, "
            "181, 15))."
        )
    columns = [column for column in tables[0].columns if column != "passes"]
    return {name: {column: [table[name][column] for table in tables] for column in columns} for name in tables[0].rows}
