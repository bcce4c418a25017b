"""Strong augmentation: its parts against hand computation, its determinism, and what it does to a trained network."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.errors import LapwingError
from papers.common import augmentation, data, networks
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

    def test_images_of_a_batch_are_treated_differently(self):
        same = torch.rand(1, 3, 32, 32).expand(20, -1, -1, -1)
        found = StrongAugmentation()(same)
        assert len({image.sum().item() for image in found}) == 20

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

    def test_harm_grows_with_the_strength(self):
        images = torch.rand(100, 3, 32, 32)
        distances = [
            float((StrongAugmentation(strength=s, flip=False)(images, seed=1) - images).abs().mean())
            for s in (0.0, 0.25, 0.5, 1.0, 2.0)
        ]
        assert distances == sorted(distances)
        assert distances[0] < 1e-5

    def test_an_empty_batch(self):
        assert StrongAugmentation()(torch.rand(0, 3, 32, 32)).shape == (0, 3, 32, 32)


class TestParts:
    def test_without_operations_it_is_a_crop_with_a_hole(self):
        images = torch.rand(60, 3, 32, 32, dtype=torch.float64)
        found = StrongAugmentation(strength=1.0, operations=0, flip=False)(images)
        padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
        shifts = set()
        for before, after in zip(padded, found, strict=True):
            matches = {
                (i, j): torch.isclose(before[:, i : i + 32, j : j + 32], after).all(0)
                for i in range(9)
                for j in range(9)
            }
            place = max(matches, key=lambda key: int(matches[key].sum()))
            shifts.add(place)
            rows, columns = (~matches[place]).nonzero().T
            height, width = (int(side.max() - side.min()) + 1 for side in (rows, columns))
            assert len(rows) == height * width  # a full rectangle
            assert min(height, width) >= 8
            assert max(height, width) <= 16
            assert after[:, rows, columns].std(1).max() < 1e-12  # one colour
        assert len(shifts) > 30
        assert {i for i, _ in shifts} == {j for _, j in shifts} == set(range(9))

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

    def test_a_flip_mirrors_whatever_else_is_done(self):
        images, one = torch.rand(5, 3, 20, 24, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
        shift, magnitudes = torch.tensor([[2.0, -1.0]]).expand(5, -1), torch.randn(5, 7, dtype=torch.float64)
        plain, flipped = (StrongAugmentation().placed(images, shift, sign * one, magnitudes) for sign in (1, -1))
        torch.testing.assert_close(flipped, plain.flip(3))


class TestNormalisation:
    def test_is_undone_and_done_again(self):
        images = torch.rand(8, 3, 32, 32, dtype=torch.float64)
        for constants in ((MEAN, STD), (torch.tensor(MEAN), torch.tensor(STD)[:, None, None])):
            found = StrongAugmentation(normalise=constants)(normalised(images), seed=5)
            torch.testing.assert_close(found, normalised(StrongAugmentation()(images, seed=5)), atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_rounding_is_accepted(self, dtype):
        images = torch.cat([torch.ones(2, 3, 8, 8), torch.zeros(2, 3, 8, 8)])
        assert StrongAugmentation(normalise=(MEAN, STD))(normalised(images).to(dtype)).dtype == dtype

    def test_refusals(self):
        images = torch.rand(2, 3, 32, 32)
        with pytest.raises(LapwingError, match=r"largest .*Pass normalise=\(mean, std\)"):
            StrongAugmentation()(normalised(images))
        for constants in (([0.5], [0.2]), (MEAN, [0.2, 0.2, 0.0]), (MEAN, [0.2, 0.2]), ([math.nan] * 3, STD)):
            with pytest.raises(LapwingError, match=r"normalise=.* does not fit .*\(2, 3, 32, 32\)"):
                StrongAugmentation(normalise=constants)(images)


class TestRefusals:
    def test_options(self):
        for strength in (-0.1, 2.1, math.nan, "1", True):
            with pytest.raises(LapwingError, match="strength="):
                StrongAugmentation(strength=strength)
        for flip in (None, 1, "no"):
            with pytest.raises(LapwingError, match=r"flip of .* Pass True or False"):
                StrongAugmentation(flip=flip)
        for normalise in (0.5, [0.5], "ab", torch.ones(2)):
            with pytest.raises(LapwingError, match=r"normalise of .* Pass a pair"):
                StrongAugmentation(normalise=normalise)
        for operations in (-1, 8, 1.5, True):
            with pytest.raises(LapwingError, match="operations="):
                StrongAugmentation(operations=operations)
        with pytest.raises(LapwingError, match="seed="):
            StrongAugmentation()(torch.rand(1, 1, 28, 28), seed=-1)

    def test_images(self):
        for images in (torch.rand(28, 28), torch.rand(2, 32, 32, 3), torch.zeros(1, 1, 9, 9, dtype=torch.uint8), None):
            with pytest.raises(LapwingError, match="StrongAugmentation takes"):
                StrongAugmentation()(images)


def test_augmented_images_tune_a_posterior():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 3)).eval()
    loader = [(torch.rand(10, 1, 28, 28), torch.arange(10) % 3)]
    augment = StrongAugmentation(flip=False)
    held_out = [(augment(x, seed=i), y) for i, (x, y) in enumerate(loader)]
    posterior = lw.fit(model, loader, lw.Diagonal(), tune=lw.Validation(held_out))
    again = lw.fit(model, loader, lw.Diagonal(), tune=lw.Validation(held_out))
    assert posterior.prior_precision == again.prior_precision


@pytest.mark.slow
def test_a_trained_network_is_less_right_on_augmented_training_images(data_folder: Path) -> None:
    """The stand-in for validation data: accuracy falls below that of test images, and not to chance."""
    found, model = data.images("mnist"), networks.mnist_cnn()

    def accuracy(x: Tensor, y: Tensor) -> float:
        with torch.no_grad():
            return float((model(x).argmax(1) == y).double().mean())

    x, y = found.x_train[:300], found.y_train[:300]
    augmented = accuracy(StrongAugmentation(flip=False)(x), y)
    assert 0.3 < augmented < accuracy(found.x_test[:300], found.y_test[:300]) - 0.05
