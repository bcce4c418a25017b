"""Corruptions: form, determinism and growing harm on drawn images, and on trained networks where data are at hand."""

from __future__ import annotations

import io
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from lapwing.errors import LapwingError
from papers.common import data, networks
from papers.common.augmentation import pixels, warp
from papers.common.corruptions import COMMON, CORRUPTIONS, DIGITS, checked, corrupt

SEVERITIES = (1, 2, 3, 4, 5)


def drawings(count: int, channels: int, side: int) -> Tensor:
    """Strokes on black where grey; coloured discs over a gradient where RGB."""
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


def accepted(name: str) -> list[Tensor]:
    return [COLOUR] if CORRUPTIONS[name].colour else [GREY, COLOUR]


class TestEveryCorruption:
    @pytest.mark.parametrize("name", CORRUPTIONS)
    def test_form_and_growth_with_severity(self, name):
        for images in accepted(name):
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

    @pytest.mark.parametrize("name", CORRUPTIONS)
    def test_larger_oblong_images_and_other_dtypes(self, name):
        channels = 3 if CORRUPTIONS[name].colour else 1
        images = torch.rand(2, channels, 48, 40, dtype=torch.float64)
        found = corrupt(images, name, 3)
        assert found.dtype == torch.float64
        assert found.shape == images.shape
        if name != "jpeg":  # which rounds to bytes: half a step may become a whole one
            torch.testing.assert_close(corrupt(images.float(), name, 3).double(), found, atol=1e-3, rtol=0.0)
        half = corrupt(images.bfloat16(), name, 3)
        assert half.dtype == torch.bfloat16
        apart = float((half.double() - found).abs().mean())
        assert apart < (0.15 if name == "shot_noise" else 0.02)  # other counts draw another stream
        assert corrupt(images[:0], name, 3).shape == (0, channels, 48, 40)

    @pytest.mark.parametrize(
        "name",
        ["gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "glass_blur", "motion_blur", "snow", "frost",
         "fog", "spatter", "elastic", "shear", "rotate", "translate", "stripe", "dotted_line", "zigzag"],
    )  # fmt: skip
    def test_random_ones_follow_the_seed_and_differ_between_images(self, name):
        same = GREY[:1].expand(6, -1, -1, -1)
        first, second = corrupt(same, name, 4, seed=0), corrupt(same, name, 4, seed=1)
        assert not torch.equal(first, second)
        assert not torch.equal(first[0], first[1]) or not torch.equal(first[0], first[2])

    def test_the_global_generator_is_left_alone(self):
        state = torch.random.get_rng_state()
        for name in CORRUPTIONS:
            corrupt(COLOUR[:2], name, 2)
        assert torch.equal(state, torch.random.get_rng_state())


class TestDefinitions:
    def test_noise_has_the_strength_it_says(self):
        grey = torch.full((4, 3, 64, 64), 0.5)
        for name, deviation in (
            ("gaussian_noise", 0.07),
            ("speckle_noise", 0.17 * 0.5),
            ("shot_noise", 0.1 * 0.5**0.5),
        ):
            found = corrupt(grey, name, 3)
            assert float((found - grey).std()) == pytest.approx(deviation, rel=0.05)
            assert float(found.mean()) == pytest.approx(0.5, abs=3e-3)
        salted = corrupt(grey, "impulse_noise", 5)
        for value in (0.0, 1.0):
            assert float((salted == value).double().mean()) == pytest.approx(0.09, abs=0.01)

    def test_gaussian_blur_is_scipys(self):
        found = corrupt(COLOUR[:2, :, :, :].double(), "gaussian_blur", 4).numpy()
        expected = ndimage.gaussian_filter(COLOUR[:2].double().numpy(), (0, 0, 1.2, 1.2), mode="nearest", radius=4)
        np.testing.assert_allclose(found, expected, atol=1e-12)

    def test_defocus_keeps_the_mean_of_a_spot_within_its_disc(self):
        spot = torch.zeros(1, 1, 33, 33)
        spot[0, 0, 16, 16] = 1.0
        found = corrupt(spot, "defocus_blur", 5)[0, 0]
        assert float(found.sum()) == pytest.approx(1.0, abs=1e-5)
        rows, columns = found.nonzero().T
        assert float(torch.hypot(rows - 16.0, columns - 16.0).max()) <= 2.6 * 33 / 32 + 0.5

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

    def test_translation_moves_the_centre_of_mass_by_the_length(self):
        spot = torch.zeros(8, 1, 32, 32)
        spot[:, :, 15:17, 15:17] = 1.0
        found = corrupt(spot, "translate", 4)[:, 0]
        mass = found.sum((1, 2))
        centre = torch.stack([(found * pixels(spot)[..., i]).sum((1, 2)) / mass for i in (0, 1)], -1)
        torch.testing.assert_close(centre.norm(dim=-1), torch.full((8,), 5.0))

    def test_scale_shrinks_about_the_centre(self):
        square = torch.zeros(1, 1, 32, 32)
        square[:, :, 8:24, 8:24] = 1.0
        found = corrupt(square, "scale", 5)
        assert float(found.sum()) == pytest.approx(256 / 2.1**2, rel=0.15)  # sampled, not averaged
        torch.testing.assert_close(found, found.flip(2).flip(3))

    def test_stripe_inverts_a_band_and_nothing_else(self):
        found = corrupt(COLOUR, "stripe", 4)
        changed = (found - COLOUR).abs().amax((1, 2)) > 1e-6  # (B, W)
        share = changed.double().mean(1)
        assert float((share - 0.24).abs().max()) < 0.06
        wide = changed[:, None, None].expand_as(COLOUR)
        torch.testing.assert_close(found[wide], 1 - COLOUR[wide])

    def test_jpeg_is_the_codecs(self):
        found = corrupt(COLOUR[:3], "jpeg", 5)
        for before, after in zip(COLOUR, found, strict=False):
            file = io.BytesIO()
            array = np.round(before.movedim(0, -1).numpy() * 255).astype(np.uint8)
            Image.fromarray(array).save(file, "JPEG", quality=10, subsampling=0)
            np.testing.assert_allclose(after.movedim(0, -1), np.asarray(Image.open(file)) / 255, atol=1e-6)

    def test_elastic_moves_by_the_length_it_says(self):
        ramp = (pixels(COLOUR)[..., 0] / 64 + 0.5)[None, None].expand(20, 1, -1, -1)
        moved = (corrupt(ramp, "elastic", 2) - ramp)[:, :, 4:-4, 4:-4] * 64
        assert float(moved.square().mean().sqrt()) == pytest.approx(
            0.9, rel=0.3
        )  # less in the middle than at the border

    def test_warp_at_the_pixels_themselves_is_the_identity(self):
        images = torch.rand(3, 3, 9, 14, dtype=torch.float64)
        torch.testing.assert_close(warp(images, pixels(images)), images)
        shifted = warp(images, pixels(images) + torch.tensor([2.0, 1.0]))
        torch.testing.assert_close(shifted[:, :, :-1, :-2], images[:, :, 1:, 2:])


class TestNames:
    def test_the_two_collections(self):
        assert len(COMMON) == 19
        assert len(DIGITS) == 15
        assert {*COMMON, *DIGITS} == set(CORRUPTIONS)
        assert not any(CORRUPTIONS[name].colour for name in DIGITS)

    def test_strengths_are_five_and_rise(self):
        for corruption in CORRUPTIONS.values():
            assert len(corruption.strengths) == 5
            assert list(corruption.strengths) == sorted(set(corruption.strengths))


class TestRefusals:
    @pytest.mark.parametrize(
        ("images", "message"),
        [
            (torch.rand(28, 28), r"not \(28, 28\)\. Write x\[None\] for a single image"),
            (torch.rand(4, 28, 28, 3), r"not \(4, 28, 28, 3\).*movedim"),
            (torch.rand(4, 2, 28, 28), r"not \(4, 2, 28, 28\)"),
            (torch.rand(4, 1, 7, 28), "at least 8"),
            ([1.0], "not list"),
            (torch.zeros(1, 1, 8, 8, device="meta"), "images for corrupt.*meta device"),
            (torch.zeros(1, 1, 9, 9, dtype=torch.uint8), r"not torch.uint8\. .*/ 255"),
            (torch.full((1, 1, 9, 9), 1.1), r"81 of 81 values .*largest 1.1.*std \+ mean"),
            (torch.full((1, 1, 9, 9), -0.1), "81 of 81"),
            (torch.full((1, 1, 9, 9), math.nan), "81 of 81"),
        ],
    )
    def test_other_images(self, images, message):
        with pytest.raises(LapwingError, match=message):
            corrupt(images, "fog", 1)

    def test_other_names_severities_and_seeds(self):
        with pytest.raises(LapwingError, match=r"corruption 'rain' is unknown\. Choose one of gaussian_noise.*edges"):
            corrupt(GREY, "rain", 1)
        with pytest.raises(LapwingError, match="The corruption .'fog"):
            corrupt(GREY, ["fog"], 1)
        with pytest.raises(LapwingError, match="one channel"):
            corrupt(GREY, "saturate", 1)
        for severity in (0, 6, 2.5, True, "3"):
            with pytest.raises(LapwingError, match="severity="):
                corrupt(GREY, "fog", severity)
        for seed in (-1, 0.5, None, True):
            with pytest.raises(LapwingError, match="seed="):
                corrupt(GREY, "fog", 1, seed=seed)

    def test_rounding_outside_is_accepted(self):
        images = COLOUR / 0.229 * 0.229 + 1e-7
        assert float(checked(images, "corrupt").max()) <= 1.0
        assert not checked(images.requires_grad_(), "corrupt").requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("network", ["mnist", "cifar10"])
def test_accuracy_of_a_trained_network_falls_from_severity_one_to_five(data_folder: Path, network: str) -> None:
    found = data.images(network)
    centre, scale = (torch.tensor(value)[:, None, None] for value in data.CENTRE_AND_SCALE[network])
    model = (networks.mnist_cnn if network == "mnist" else networks.cifar_resnet20)()
    images, labels = (found.x_test[:200] * scale + centre).clamp(0, 1), found.y_test[:200]
    falls = {}
    with torch.no_grad():
        for name in DIGITS if network == "mnist" else COMMON:
            mild, strong = (
                (model((corrupt(images, name, severity) - centre) / scale).argmax(1) == labels).double().mean()
                for severity in (1, 5)
            )
            falls[name] = float(mild - strong)
    assert sum(fall > 0.05 for fall in falls.values()) >= len(falls) - 2, falls
    assert all(fall > -0.01 for fall in falls.values()), falls
