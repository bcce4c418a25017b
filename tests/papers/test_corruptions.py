"""Corruptions: form, determinism and growing harm on drawn images, and each definition against scipy or by hand."""

from __future__ import annotations

import io
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from papers.common.corruptions import CORRUPTIONS, corrupt

SEVERITIES = (1, 2, 3, 4, 5)


def drawings(count: int, channels: int, side: int) -> Tensor:
    """Returns strokes on black (one channel) or coloured discs over a gradient (three channels)."""
    generator = torch.Generator().manual_seed(7)
    down, across = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    images = torch.zeros(count, channels, side, side)
    for n in range(count):
        if channels == 3:
            images[n] = torch.rand(3, 1, 1, generator=generator) * (0.3 + 0.7 * across / side)
        for _ in range(3):
            x, y, dx, dy, radius = torch.rand(5, generator=generator).tolist()
            colour = torch.rand(3, 1, 1, generator=generator) if channels == 3 else torch.ones(1, 1, 1)
            for t in torch.linspace(-1, 1, 15).tolist():
                row, column = (0.3 + 0.4 * y + 0.2 * t * dy) * side, (0.3 + 0.4 * x + 0.2 * t * dx) * side
                ink = (1.3 + 2 * radius * (channels == 3) - torch.hypot(down - row, across - column)).clamp(0, 1)
                images[n] = images[n] + ink * (colour - images[n])
    return images


GREY, COLOUR = drawings(40, 1, 28), drawings(40, 3, 32)


class TestEveryCorruption:
    @pytest.mark.quick(6)
    @pytest.mark.parametrize("name", CORRUPTIONS)
    def test_form_and_growth_with_severity(self, name):
        for images in [COLOUR] if CORRUPTIONS[name].colour else [GREY, COLOUR]:
            before, distances = images.clone(), []
            for severity in SEVERITIES:
                found = corrupt(images, name, severity, seed=3)
                assert found.shape == images.shape
                assert found.dtype == images.dtype
                assert found.device == images.device
                assert float(found.min()) >= 0
                assert float(found.max()) <= 1
                away = (found - images).abs().flatten(1).mean(1)
                share = 0.9 if name == "impulse_noise" else 1.0  # pepper on black is none
                assert float((away > 1e-4).double().mean()) >= share
                distances.append(float(away.mean()))
            assert torch.equal(found, corrupt(images, name, severity, seed=3))
            assert torch.equal(images, before)
            for weaker, stronger in pairwise(distances):
                assert stronger > 0.97 * weaker, distances
            assert distances[4] > 1.3 * distances[0], distances


class TestDefinitions:
    def test_gaussian_blur_is_scipys(self):
        found = corrupt(COLOUR[:2, :, :, :].double(), "gaussian_blur", 4).numpy()
        expected = ndimage.gaussian_filter(COLOUR[:2].double().numpy(), (0, 0, 1.2, 1.2), mode="nearest", radius=4)
        np.testing.assert_allclose(found, expected, atol=1e-12)

    def test_contrast_saturate_brightness_by_hand(self):
        mean = COLOUR.mean((2, 3), keepdim=True)
        torch.testing.assert_close(corrupt(COLOUR, "contrast", 5), mean + 0.2 * (COLOUR - mean))
        grey = COLOUR.mean(1, keepdim=True)
        torch.testing.assert_close(corrupt(COLOUR, "saturate", 2), (2 * COLOUR - grey).clamp(0, 1))
        torch.testing.assert_close(corrupt(COLOUR, "brightness", 3), (COLOUR + 0.2).clamp(0, 1))

    def test_rotation_is_scipys_up_to_its_sign(self):
        images = corrupt(GREY[:6, :, :, :].double(), "gaussian_blur", 5)
        found = corrupt(images, "rotate", 3)
        signs = set()
        for before, after in zip(images[:, 0], found[:, 0], strict=True):
            errors = {}
            for sign in (-1, 1):
                turned = ndimage.rotate(before.numpy(), sign * 25, reshape=False, order=1, mode="grid-constant")
                errors[sign] = float(np.abs(turned - after.numpy()).max())
            sign = min(errors, key=lambda s: errors[s])
            signs.add(sign)
            assert errors[sign] < 1e-9
        assert signs == {-1, 1}

    def test_jpeg_is_the_codecs(self):
        found = corrupt(COLOUR[:3], "jpeg", 5)
        for before, after in zip(COLOUR, found, strict=False):
            file = io.BytesIO()
            array = np.round(before.movedim(0, -1).numpy() * 255).astype(np.uint8)
            Image.fromarray(array).save(file, "JPEG", quality=10, subsampling=0)
            np.testing.assert_allclose(after.movedim(0, -1), np.asarray(Image.open(file)) / 255, atol=1e-6)
