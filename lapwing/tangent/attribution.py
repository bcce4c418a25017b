"""Whether the layers of a recording hold the samples where the survey found them; `network.py` asks it of new shapes.

A network may sort its samples, leave out padded positions, or send some of them through a branch. What is in a layer
then depends on the batch, and the survey saw but a few samples of one. Cotangents that are multiplied sample by sample
by powers of two tell: gradients at a layer must follow. The powers are the digits of the sample's number, so that no
two samples have the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import LapwingError
from .plan import Uses
from .record import Noted, output_gradients

HALF = (torch.float16, torch.bfloat16)


class Misplaced(LapwingError):
    """Raised where a layer holds the samples elsewhere than on the first batch."""


def shapes(outputs: Tensor, noted: Iterable[Noted]) -> tuple[torch.Size, ...]:
    """Returns what tells recordings apart where no value decides what lies where."""
    return outputs.shape, *[use.out.shape for use in noted]


def misplaced(outputs: Tensor, noted: Sequence[Noted], uses: Uses) -> tuple[str, bool]:
    """Looks for a layer that holds the samples elsewhere than the survey found.

    Args:
        outputs: f (B, C) with its graph.
        noted: the uses of the recording.
        uses: where each block's uses are said to hold the samples.

    Returns:
        The name of a parameter of such a layer, "" where there is none; and whether that holds for all batches of these
        shapes in which no value decides what lies where: not if a layer had no gradient to tell by.

    Cost: two backward passes of activations for each digit of B in base 8.
    """
    samples, generator = outputs.shape[0], torch.Generator().manual_seed(0)
    digits = torch.arange(samples)[:, None] // 8 ** torch.arange(max(1, math.ceil(math.log(samples, 8) - 1e-9))) % 8
    u, conclusive = torch.randn(outputs.shape[1], generator=generator).to(outputs), True
    for powers in (2.0 ** (digits.T - 3)).to(outputs):  # (B,); products with them are exact
        pair = torch.stack([torch.ones_like(powers), powers], 1)
        gradients = None  # the former ones are freed first
        gradients = output_gradients(outputs, noted, u[None, :, None] * pair[:, None], False, batched=False)
        for i, axis in {i: axis for found in uses.values() for i, axis, _ in found}.items():
            g, name = gradients[i], next(iter(noted[i].names.values()))
            assert g is not None  # cotangents were given
            if not axis.fits(g.shape[1:], samples):
                return name, False
            plain, scaled = axis.front(g, samples, 1).flatten(2)  # (B, rest)
            wanted = plain * powers[:, None].to(plain)
            off, size = (scaled - wanted).norm(dim=1), torch.maximum(wanted.norm(dim=1), scaled.norm(dim=1))
            tolerance = 0.3 if g.dtype in HALF else torch.finfo(g.dtype).eps ** 0.5  # subnormal halves are inexact
            if (off > tolerance * size).any():
                return name, False
            conclusive = conclusive and bool(size.any())
    return "", conclusive
