"""Image corruptions with five severities, for measuring how error bars behave as inputs drift from the training data.

`COMMON` names the nineteen kinds of CIFAR-10-C (Hendrycks and Dietterich 2019), ELLA's figures 3 and 8 to 10; `DIGITS`
the fifteen kinds of MNIST-C (Mu and Gilmer 2019), the optimal subspace's figure 3. The strengths are chosen here, for
small images, and grow with the severity; so results compare posteriors with each other, not with published tables.
Lengths are in pixels of an image of 32 and grow with larger ones. Frost and snow are drawn, not photographed, and
`edges` is a gradient magnitude in place of Canny's.

Written in torch, so that they run where the images are: of the packages that offer such corruptions, imagecorruptions
refuses images below 32 pixels, takes one uint8 image at a time and needs OpenCV, scikit-image and numba; kornia and
albumentations draw their own strengths, know no severities, lack half of the kinds, and are large. Only `jpeg` calls
Pillow (which matplotlib brings), since the codec itself is the point.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from papers.common.images import pixels, warp

_Apply = Callable[[Tensor, float, Generator], Tensor]


@dataclass(frozen=True)
class Corruption:
    """One kind of harm; called as `corruption(images, severity, generator)` on images (B, C, H, W) in [0, 1].

    Attributes:
        apply: `apply(images, strength, generator)`; may leave [0, 1].
        strengths: what severities 1 to 5 mean.
        colour: whether it needs three channels.
    """

    apply: _Apply
    strengths: tuple[float, float, float, float, float]
    colour: bool = False

    def __call__(self, images: Tensor, severity: int, generator: Generator) -> Tensor:
        """Returns corrupted images, values clamped to [0, 1]; random numbers come from a generator on the CPU."""
        return self.apply(images, self.strengths[severity - 1], generator).clamp(0.0, 1.0)


@torch.no_grad()
def corrupt(images: Tensor, name: str, severity: int, seed: int = 0) -> Tensor:
    """Corrupts images, `x → clamp(c_name(x; strength(severity), seed))`.

    Random choices are made for each image, and are the same on every device and, shot noise apart, at every severity.
    They depend on the place in the batch: corrupt a whole test set at once, or give each batch another seed.

    Args:
        images: floating-point (B, 1, H, W) or (B, 3, H, W) in [0, 1], at least 8 x 8. Undo a normalisation first.
        name: one of `CORRUPTIONS`.
        severity: 1 (mild) to 5 (strong).
        seed: of every random choice.

    Returns:
        Images of the same shape, dtype and device, in [0, 1].

    Cost: time and memory a small multiple of the images'; blurs and `elastic` sample every image up to 15 times.
    """
    assert not ((images < -1e-4) | (images > 1 + 1e-4)).any(), "undo the normalisation first"
    exact = images.detach().to(torch.promote_types(images.dtype, torch.float32)).clamp(0.0, 1.0)
    return CORRUPTIONS[name](exact, severity, torch.Generator().manual_seed(seed)).to(images.dtype)


def _unit(images: Tensor) -> float:
    return min(images.shape[2:]) / 32


def _uniform(g: Generator, like: Tensor, *shape: int) -> Tensor:
    return torch.rand(shape, generator=g).to(like)


def _normal(g: Generator, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=g).to(like)


def _sign(g: Generator, like: Tensor) -> Tensor:
    """Returns 1 or -1 for each image (B,)."""
    return (torch.randint(2, (len(like),), generator=g) * 2 - 1).to(like)


def _directions(g: Generator, like: Tensor) -> Tensor:
    """Returns a random unit vector for each image (B, 2)."""
    angle = 2 * math.pi * _uniform(g, like, len(like))
    return torch.stack([angle.cos(), angle.sin()], -1)


def _matrices(*entries: Tensor) -> Tensor:
    """Returns matrices (B, 1, 2, 2) from their entries (B,), row by row."""
    return torch.stack(entries, -1).reshape(-1, 1, 2, 2)


def _smooth(images: Tensor, sigma: float) -> Tensor:
    """Convolves with a Gaussian of width sigma, in pixels."""
    reach = max(1, math.ceil(3 * sigma))
    offsets = torch.arange(-reach, reach + 1, dtype=images.dtype, device=images.device)
    kernel = torch.softmax(-offsets.square() / (2 * sigma**2), 0)
    return _convolve(_convolve(images, kernel[None]), kernel[:, None])


def _convolve(images: Tensor, kernel: Tensor) -> Tensor:
    """Convolves every channel with one kernel (h, w), the border repeated."""
    down, across = (size // 2 for size in kernel.shape)
    padded = F.pad(images, (across, across, down, down), mode="replicate").flatten(0, 1)[:, None]
    return F.conv2d(padded, kernel[None, None])[:, 0].unflatten(0, images.shape[:2])


def _plasma(g: Generator, like: Tensor, roughness: float) -> Tensor:
    """Returns a fractal (B, 1, H, W) from 0 to 1: random grids, each twice as fine and `roughness` times as high."""
    size, total, height = 2, torch.zeros_like(like[:, :1]), 1.0
    while size <= max(like.shape[2:]):
        grid = _uniform(g, like, len(like), 1, size, size)
        total = total + height * F.interpolate(grid, like.shape[2:], mode="bilinear", align_corners=True)
        size, height = 2 * size, height * roughness
    low, high = total.amin((2, 3), keepdim=True), total.amax((2, 3), keepdim=True)
    return (total - low) / (high - low)


def _gaussian_noise(x: Tensor, s: float, g: Generator) -> Tensor:
    return x + s * _normal(g, x)


def _shot_noise(x: Tensor, s: float, g: Generator) -> Tensor:
    """`s` is the standard deviation at full brightness."""
    return torch.poisson(x.float().cpu() / s**2, generator=g).to(x) * s**2


def _impulse_noise(x: Tensor, s: float, g: Generator) -> Tensor:
    chance = _uniform(g, x, *x.shape)
    return torch.where(chance < s / 2, 0.0, torch.where(chance > 1 - s / 2, 1.0, x))


def _speckle_noise(x: Tensor, s: float, g: Generator) -> Tensor:
    return x + x * s * _normal(g, x)


def _gaussian_blur(x: Tensor, s: float, g: Generator) -> Tensor:
    return _smooth(x, s * _unit(x))


def _defocus_blur(x: Tensor, s: float, g: Generator) -> Tensor:
    radius = s * _unit(x)
    reach = math.ceil(radius)
    offsets = torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device)
    disc = (radius + 0.5 - torch.hypot(offsets[:, None], offsets)).clamp(0.0, 1.0)  # soft edge
    return _convolve(x, disc / disc.sum())


def _glass_blur(x: Tensor, s: float, g: Generator) -> Tensor:
    jitter = 2 * _uniform(g, x, len(x), *x.shape[2:], 2) - 1
    return _smooth(warp(x, pixels(x) + s * _unit(x) * jitter, "border"), 0.4 * _unit(x))


def _motion_blur(x: Tensor, s: float, g: Generator) -> Tensor:
    way = s * _unit(x) * _directions(g, x)[:, None, None]
    steps = [warp(x, pixels(x) + way * (i / 14 - 0.5), "border") for i in range(15)]
    return torch.stack(steps).mean(0)


def _zoom_blur(x: Tensor, s: float, g: Generator) -> Tensor:
    steps = [warp(x, pixels(x) / (1 + s * i / 14), "border") for i in range(15)]
    return torch.stack(steps).mean(0)


def _fog(x: Tensor, s: float, g: Generator) -> Tensor:
    return (x + s * _plasma(g, x, 0.55)) / (1 + s)


def _frost(x: Tensor, s: float, g: Generator) -> Tensor:
    ridges = 1 - (2 * _plasma(g, x, 0.75) - 1).abs()  # bright veins
    return x * (1 - 0.5 * s) + s * ridges.square()


def _snow(x: Tensor, s: float, g: Generator) -> Tensor:
    flakes = (_uniform(g, x, len(x), 1, *x.shape[2:]) > 1 - 0.3 * s).to(x)
    falling = (_motion_blur(flakes, 4.0, g) * 3).clamp_max(1.0)
    return x + (1 - x) * (0.25 * s + falling * (1 - 0.25 * s))


def _brightness(x: Tensor, s: float, g: Generator) -> Tensor:
    return x + s


def _spatter(x: Tensor, s: float, g: Generator) -> Tensor:
    drops = _smooth(_normal(g, x[:, :1]), 1.2 * _unit(x))
    drops = drops / drops.std((2, 3), keepdim=True)
    mask = torch.sigmoid(8 * (drops - 1.9 + s))
    colour = x.new_tensor([0.6, 0.8, 0.85] if x.shape[1] == 3 else [0.75])[:, None, None]
    return x + mask * (colour - x)


def _contrast(x: Tensor, s: float, g: Generator) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return mean + (1 - s) * (x - mean)


def _elastic(x: Tensor, s: float, g: Generator) -> Tensor:
    field = _smooth(torch.randn(len(x), 2, *x.shape[2:], generator=g).to(x), 3.0 * _unit(x))
    field = field / field.square().mean((1, 2, 3), keepdim=True).sqrt()
    return warp(x, pixels(x) + s * _unit(x) * field.movedim(1, -1), "border")


def _pixelate(x: Tensor, s: float, g: Generator) -> Tensor:
    size = [max(1, round(side / (s * max(1.0, _unit(x))))) for side in x.shape[2:]]
    return F.interpolate(F.interpolate(x, size, mode="area"), x.shape[2:], mode="area")


def _jpeg(x: Tensor, s: float, g: Generator) -> Tensor:
    """`s` is 100 minus the codec's quality; colour is not subsampled."""
    from PIL import Image

    decoded = []
    for image in (x * 255).round().byte().movedim(1, -1).cpu().numpy():
        file = io.BytesIO()
        Image.fromarray(image.squeeze()).save(file, "JPEG", quality=int(100 - s), subsampling=0)
        decoded.append(np.asarray(Image.open(file)).reshape(image.shape))
    return torch.from_numpy(np.stack(decoded)).movedim(-1, 1).to(x) / 255


def _saturate(x: Tensor, s: float, g: Generator) -> Tensor:
    grey = x.mean(1, keepdim=True)
    return grey + (1 + s) * (x - grey)


def _shear(x: Tensor, s: float, g: Generator) -> Tensor:
    lean = s * _sign(g, x)
    one, zero = torch.ones_like(lean), torch.zeros_like(lean)
    return warp(x, pixels(x) @ _matrices(one, zero, lean, one))


def _scale(x: Tensor, s: float, g: Generator) -> Tensor:
    return warp(x, pixels(x) * s)


def _rotate(x: Tensor, s: float, g: Generator) -> Tensor:
    """`s` in degrees."""
    angle = math.radians(s) * _sign(g, x)
    cos, sin = angle.cos(), angle.sin()
    return warp(x, pixels(x) @ _matrices(cos, -sin, sin, cos))


def _translate(x: Tensor, s: float, g: Generator) -> Tensor:
    return warp(x, pixels(x) + s * _unit(x) * _directions(g, x)[:, None, None])


def _stripe(x: Tensor, s: float, g: Generator) -> Tensor:
    """Inverts a band of `s` times the width."""
    middle = (_uniform(g, x, len(x), 1, 1, 1) - 0.5) * 0.5 * x.shape[3]
    return torch.where((pixels(x)[..., 0] - middle).abs() < s * x.shape[3] / 2, 1 - x, x)


def _line(x: Tensor, s: float, g: Generator, dotted: bool) -> Tensor:
    """Draws `s` white lines across the image, dotted or zigzag."""
    unit = _unit(x)
    for _ in range(int(s)):
        way, offset = _directions(g, x), (_uniform(g, x, len(x), 1, 1) - 0.5) * 20 * unit
        along = (pixels(x) * way[:, None, None]).sum(-1) / unit  # (B, H, W)
        beside = (pixels(x) * way.flip(-1)[:, None, None] * x.new_tensor([-1.0, 1.0])).sum(-1) - offset
        if not dotted:
            beside = beside - 2.5 * unit * ((along / 4) % 2 - 1).abs() * 2
        ink = (1.2 * max(unit, 0.7) - beside.abs()).clamp(0.0, 1.0)
        ink = torch.where(along % 4 < 2, ink, 0.0) if dotted else ink
        x = torch.maximum(x, ink[:, None])
    return x


def _edges(x: Tensor, s: float, g: Generator) -> Tensor:
    """Moves by `s` towards the magnitude of Sobel's gradient."""
    sobel = x.new_tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / 4
    magnitude = torch.hypot(_convolve(x, sobel), _convolve(x, sobel.T))
    return x + s * (magnitude.clamp_max(1.0) - x)


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": Corruption(_gaussian_noise, (0.02, 0.04, 0.07, 0.12, 0.2)),
    "shot_noise": Corruption(_shot_noise, (0.03, 0.06, 0.1, 0.17, 0.28)),
    "impulse_noise": Corruption(_impulse_noise, (0.01, 0.03, 0.06, 0.1, 0.18)),
    "speckle_noise": Corruption(_speckle_noise, (0.06, 0.1, 0.17, 0.28, 0.45)),
    "gaussian_blur": Corruption(_gaussian_blur, (0.45, 0.65, 0.9, 1.2, 1.7)),
    "defocus_blur": Corruption(_defocus_blur, (0.7, 1.0, 1.4, 1.9, 2.6)),
    "glass_blur": Corruption(_glass_blur, (0.5, 0.9, 1.3, 1.8, 2.5)),
    "motion_blur": Corruption(_motion_blur, (1.5, 2.5, 4.0, 6.0, 8.5)),
    "zoom_blur": Corruption(_zoom_blur, (0.1, 0.2, 0.3, 0.45, 0.65)),
    "snow": Corruption(_snow, (0.04, 0.08, 0.15, 0.25, 0.4)),
    "frost": Corruption(_frost, (0.1, 0.2, 0.3, 0.42, 0.6)),
    "fog": Corruption(_fog, (0.15, 0.3, 0.55, 0.9, 1.5)),
    "brightness": Corruption(_brightness, (0.06, 0.12, 0.2, 0.3, 0.45)),
    "spatter": Corruption(_spatter, (0.1, 0.4, 0.7, 1.0, 1.4)),
    "contrast": Corruption(_contrast, (0.2, 0.35, 0.5, 0.65, 0.8)),
    "elastic": Corruption(_elastic, (0.5, 0.9, 1.4, 2.0, 2.8)),
    "pixelate": Corruption(_pixelate, (1.05, 1.3, 1.5, 2.3, 3.2)),
    "jpeg": Corruption(_jpeg, (20.0, 45.0, 65.0, 80.0, 90.0)),
    "saturate": Corruption(_saturate, (0.5, 1.0, 2.0, 4.0, 8.0), colour=True),
    "shear": Corruption(_shear, (0.15, 0.3, 0.45, 0.6, 0.8)),
    "scale": Corruption(_scale, (1.1, 1.25, 1.45, 1.7, 2.1)),
    "rotate": Corruption(_rotate, (8.0, 16.0, 25.0, 36.0, 50.0)),
    "translate": Corruption(_translate, (1.0, 2.0, 3.5, 5.0, 7.0)),
    "stripe": Corruption(_stripe, (0.05, 0.1, 0.16, 0.24, 0.34)),
    "dotted_line": Corruption(partial(_line, dotted=True), (1, 2, 3, 4, 5)),
    "zigzag": Corruption(partial(_line, dotted=False), (1, 2, 3, 4, 5)),
    "edges": Corruption(_edges, (0.2, 0.4, 0.6, 0.8, 1.0)),
}
"""Names -> corruption."""

COMMON: tuple[str, ...] = tuple(CORRUPTIONS)[:19]
"""The kinds of CIFAR-10-C; `saturate` takes colour images only."""

DIGITS: tuple[str, ...] = (
    "shot_noise", "impulse_noise", "glass_blur", "motion_blur", "shear", "scale", "rotate", "brightness", "translate",
    "stripe", "fog", "spatter", "dotted_line", "zigzag", "edges",
)  # fmt: skip
"""The kinds of MNIST-C."""
