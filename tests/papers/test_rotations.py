"""Rotations against pixels moved by hand and scipy."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import ndimage

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
