"""Rotations against pixels moved by hand and scipy."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import ndimage

from lapwing.errors import LapwingError
from papers.common.rotations import rotate


def some_images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("degrees", [-450, -180, -90, 0, 90, 180, 270, 360, 810, 90.0])
@pytest.mark.parametrize("side", [7, 8])
def test_quarter_turns_only_move_pixels(degrees, side):
    x = some_images(2, 3, side, side)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = rotate(x.to(dtype), degrees, fill=5.0)
        assert found.dtype == dtype
        assert torch.equal(found, torch.rot90(x.to(dtype), int(degrees) // 90, (2, 3)))


def test_a_quarter_turn_is_counter_clockwise():
    """What was at the right end of the top row is at its left end."""
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 0, 4] = 1
    assert rotate(x, 90)[0, 0, 0, 0] == 1


@pytest.mark.parametrize("shape", [(9, 9), (8, 8), (6, 11)])
@pytest.mark.parametrize("degrees", [10, -35, 44.9, 46, 89, 91, 133.0, 179.5, 200, 270])
def test_against_scipy(shape, degrees):
    """Where four pixels inside the image surround a place; scipy turns the other way, and has its own edges."""
    x = some_images(2, 2, *shape)
    found = rotate(x, degrees)
    wanted = torch.from_numpy(
        ndimage.rotate(x.numpy(), degrees, axes=(3, 2), reshape=False, order=1, mode="constant", cval=math.nan)
    )
    wanted_other = torch.from_numpy(
        ndimage.rotate(x.numpy(), degrees, axes=(2, 3), reshape=False, order=1, mode="constant", cval=math.nan)
    )
    matches = []
    for candidate in (wanted, wanted_other):
        inside = candidate.isfinite()
        assert inside.double().mean() > 0.3
        matches.append(bool((found - candidate)[inside].abs().max() < 1e-9))
    assert any(matches)


def test_continuous_in_the_angle():
    x = some_images(1, 1, 9, 9)
    for degrees in (0, 45, 90, 135, 180, -90):
        before, at, after = (rotate(x, degrees + h) for h in (-1e-7, 0, 1e-7))
        torch.testing.assert_close(before, at, rtol=0, atol=1e-6)
        torch.testing.assert_close(after, at, rtol=0, atol=1e-6)


def test_what_comes_in_is_the_fill():
    x = torch.ones(1, 2, 21, 21)
    found = rotate(x, 45, fill=[-3.0, 2.0])
    assert found[0, 0, 0, 0] == -3
    assert found[0, 1, 0, 0] == 2
    torch.testing.assert_close(found[:, :, 10, 10], torch.ones(1, 2))
    torch.testing.assert_close(rotate(x, 45, fill=1.0), x)  # what is one outside too stays one
    assert torch.equal(rotate(x, 45, torch.tensor([-3.0, 2.0])), found)


def test_there_and_back_keeps_a_smooth_image():
    across = torch.linspace(-2, 2, 64, dtype=torch.float64)
    x = torch.exp(-(across[:, None] - 0.5).square() - 2 * across.square())[None, None]
    torch.testing.assert_close(rotate(rotate(x, 33), -33)[..., 16:48, 16:48], x[..., 16:48, 16:48], rtol=0, atol=5e-3)


@pytest.mark.parametrize("degrees", [0, 30, 90, 117])
def test_differentiable(degrees):
    x = some_images(1, 2, 5, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, degrees, fill=0.5), (x,))


def test_the_images_are_left_alone():
    x = some_images(1, 1, 8, 8)
    before = x.clone()
    for degrees in (0, 90, 30):
        rotate(x, degrees).add_(1.0) if degrees != 90 else rotate(x, degrees)
    assert torch.equal(x, before)
    assert rotate(x[:0], 30).shape == (0, 1, 8, 8)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.zeros(3, 8, 8), 30), "x[None]"),
        ((torch.zeros(1, 3, 8, 8, dtype=torch.uint8), 30), "x.float() / 255"),
        (([1, 2], 30), "list"),
        ((torch.zeros(1, 1, 8, 8).to_sparse(), 30), "to_dense"),
        ((torch.zeros(1, 1, 8, 8), 30, "black"), "fill is 'black'"),
        ((torch.zeros(1, 3, 8, 8), math.nan), "degrees=nan"),
        ((torch.zeros(1, 3, 8, 8), "30"), "degrees='30'"),
        ((torch.zeros(1, 3, 8, 8), 30, [0.0, 1.0]), "fill has shape (2,), and the images have 3 channels"),
    ],
)
def test_bad_arguments(arguments, said):
    with pytest.raises(LapwingError) as caught:
        rotate(*arguments)
    assert said in str(caught.value)
