"""Strong augmentation: its parts against hand computation, and its determinism."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lapwing.errors import LapwingError
from papers.common import augmentation
from papers.common.augmentation import StrongAugmentation

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def normalised(images: Tensor) -> Tensor:
    return (images - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


class TestForm:
    @pytest.mark.parametrize("shape", [(5, 1, 28, 28), (5, 3, 32, 32), (2, 3, 40, 48)])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_shape_dtype_range_and_seed(self, shape, dtype):
        images = torch.rand(shape).to(dtype)
        before, state = images.clone(), torch.random.get_rng_state()
        found = StrongAugmentation()(images, seed=2)
        assert found.shape == shape
        assert found.dtype == dtype
        assert float(found.min()) >= 0
        assert float(found.max()) <= 1
        assert torch.equal(images, before)
        assert torch.equal(state, torch.random.get_rng_state())
        assert torch.equal(found, StrongAugmentation()(images, seed=2))
        assert not torch.equal(found, StrongAugmentation()(images, seed=3))
        assert float((found - images).abs().flatten(1).mean(1).min()) > 0.01

    def test_nothing_is_done_at_strength_zero_without_flips(self):
        images = torch.rand(6, 3, 16, 20, dtype=torch.float64)
        found = StrongAugmentation(strength=0.0, flip=False)(images)
        torch.testing.assert_close(found, images)
        found += 1.0
        assert float(images.max()) <= 1.0

    def test_flips_mirror_about_half_of_the_images(self):
        images = torch.rand(200, 1, 9, 12, dtype=torch.float64)
        found = StrongAugmentation(strength=0.0)(images)
        mirrored = torch.isclose(found, images.flip(3)).flatten(1).all(1)
        as_they_were = torch.isclose(found, images).flatten(1).all(1)
        assert bool((mirrored ^ as_they_were).all())
        assert 70 < int(mirrored.sum()) < 130


class TestParts:
    def test_hole_is_filled_with_the_mean_colour(self):
        images = torch.rand(4, 3, 20, 30, dtype=torch.float64)
        centres = torch.tensor([[0.5, 0.5], [0.0, 0.0], [1.0, 1.0], [8 / 30, 0.5]], dtype=torch.float64)
        found = augmentation.holed(images, centres, 0.5)
        for image, hole, (y, x) in zip(
            images,
            found,
            [((5, 15), (10, 20)), ((0, 5), (0, 5)), ((15, 20), (25, 30)), ((5, 15), (3, 13))],
            strict=True,
        ):
            inside = torch.zeros(20, 30, dtype=torch.bool)
            inside[slice(*y), slice(*x)] = True
            expected = torch.where(inside, image.mean((1, 2), keepdim=True), image)
            torch.testing.assert_close(hole, expected)

    def test_operations_on_pixels_by_hand(self):
        x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
        up = torch.full((2, 1, 1, 1), math.log(2) / 0.7, dtype=torch.float64)
        torch.testing.assert_close(augmentation.brightened(x, up), 2 * x)
        mean = x.mean((1, 2, 3), keepdim=True)
        torch.testing.assert_close(augmentation.contrasted(x, -up), (x + mean) / 2)
        grey = x.mean(1, keepdim=True)
        torch.testing.assert_close(augmentation.saturated(x, up), 2 * x - grey)
        torch.testing.assert_close(augmentation.saturated(grey, up), grey)
        solarised = augmentation.solarised(x, torch.full_like(up, -1.0))
        torch.testing.assert_close(solarised, torch.where(x > 0.3, 1 - x, x))
        torch.testing.assert_close(augmentation.solarised(x, 0 * up), x)

    def test_geometry_by_hand(self):
        spot = torch.zeros(4, 1, 33, 33, dtype=torch.float64)
        spot[:, :, 16, 22] = 1.0  # six to the right of the centre
        augment, still = StrongAugmentation(), torch.zeros(4, 2, dtype=torch.float64)
        magnitudes = torch.zeros(4, 7, dtype=torch.float64)
        magnitudes[0, 0] = 3.0  # 90 degrees
        magnitudes[1, 2] = math.log(2) / 0.3
        magnitudes[3, 3:] = 5.0  # not geometry
        mirrored = torch.tensor([1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
        found = augment.placed(spot, still, mirrored, magnitudes)
        places = [tuple(image[0].nonzero()[0].tolist()) for image in found]
        assert places == [(10, 16), (16, 19), (16, 10), (16, 22)] or places == [(22, 16), (16, 19), (16, 10), (16, 22)]
        down = torch.zeros(1, 1, 33, 33, dtype=torch.float64)
        down[:, :, 22, 16] = 1.0
        magnitudes = torch.zeros(1, 7, dtype=torch.float64)
        magnitudes[0, 1] = 0.5 / 0.3  # leans by half: three pixels at six below the centre
        (row, column) = augment.placed(down, still[:1], mirrored[:1], magnitudes)[0, 0].nonzero()[0].tolist()
        assert row == 22
        assert abs(column - 16) == 3


class TestNormalisation:
    def test_is_undone_and_done_again(self):
        images = torch.rand(8, 3, 32, 32, dtype=torch.float64)
        for constants in ((MEAN, STD), (torch.tensor(MEAN), torch.tensor(STD)[:, None, None])):
            found = StrongAugmentation(normalise=constants)(normalised(images), seed=5)
            torch.testing.assert_close(found, normalised(StrongAugmentation()(images, seed=5)), atol=1e-6, rtol=1e-6)


class TestRefusals:
    def test_images(self):
        for images in (torch.rand(28, 28), torch.rand(2, 32, 32, 3), torch.zeros(1, 1, 9, 9, dtype=torch.uint8), None):
            with pytest.raises(LapwingError, match="StrongAugmentation takes"):
                StrongAugmentation()(images)
