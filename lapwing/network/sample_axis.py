"""Checks, once for every new shape, that the layers of a recording hold the samples where the survey found them.

A network may sort its samples, leave out padded positions, or send some of them through a branch. A layer's rows then
depend on the batch, and the survey saw only a few samples of one batch. For each base-16 digit of the samples' numbers,
the check sends back two cotangents, whose ratio at a sample is 2^(digit - 8). The gradients at a layer must have the
same ratios. No two samples have the same digits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import LapwingError
from .recording_plan import Uses
from .tracing import RecordedUse, Recording, output_gradients

log = logging.getLogger("lapwing")


class SampleAxisMoved(LapwingError):
    """A layer holds the samples in another place than on the first batch."""


class SampleAxisCheck:
    """Checks the recordings of one network, and remembers the shapes that passed."""

    def __init__(self) -> None:
        self._known: set[tuple[torch.Size, ...]] = set()
        self._warned = False

    def check(self, recording: Recording, uses: Uses, name: str) -> None:
        """Raises `SampleAxisMoved` if a layer holds the samples on another dimension or in another order."""
        outputs, noted, routed = recording.outputs, recording.noted, recording.routed
        shapes = outputs.shape, *[use.out.shape for use in noted]
        if shapes in self._known and not routed:
            return
        for block, block_uses in uses.items():
            for i, axis, _ in block_uses:
                if axis.axis >= noted[i].use.sample_dims:
                    raise LapwingError(
                        f"The layer {block} of {name} held the samples on dimension {axis.axis} in the fit, and now "
                        f"works on a tensor of shape {tuple(noted[i].out.shape)}. Give inputs of as many dimensions as "
                        "in the fit, or fit again."
                    )
        if len(outputs) < 2:
            self._known.add(shapes)
            return
        layer, conclusive = moved_layer(outputs, noted, uses)
        if layer:
            raise SampleAxisMoved(
                f"{name} at {len(outputs)} samples: the layer of {layer} does not hold them as on the first batch, "
                "because forward() sorts, packs or leaves out parts of them. Joint covariances and inducing points "
                "need layers that always hold the samples in the same way. Leave this one out with params=lambda name, "
                "parameter: ..., or ask for single samples."
            )
        if conclusive and not routed:
            self._known.add(shapes)

    def warn_once(self, error: SampleAxisMoved) -> None:
        """Warns once that lapwing processes the samples one by one."""
        if not self._warned:
            self._warned = True
            log.warning("%s. They are taken one by one, which is slow.", str(error).partition(". ")[0])


def moved_layer(outputs: Tensor, noted: Sequence[RecordedUse], uses: Uses) -> tuple[str, bool]:
    """Returns a parameter of a layer that holds the samples elsewhere than in the survey, or "" if there is none.

    Also returns whether "" holds for all batches of these shapes. It does not if all gradients of a layer are 0,
    because they agree with any power. Cost: two backward passes through the activations per digit of B in base 16.
    """
    samples, generator = outputs.shape[0], torch.Generator().manual_seed(0)
    places = torch.arange(max(1, math.ceil(math.log(samples, 16) - 1e-9)))  # log 256 may come out above 2
    digits = torch.arange(samples)[:, None] // 16**places % 16  # digits of the samples' numbers, (B, places)
    u = torch.randn(outputs.shape[1], generator=generator).to(outputs)
    names, moved, some = [], [], []  # for each layer and digit: whether it moved, whether some gradient is not 0
    for exponents in digits.T - 8:  # (B,), split into two halves, because 2⁸ could overflow in float16
        halves = exponents // 2
        powers = torch.stack([-halves, exponents - halves, exponents], 1)
        factors = (2.0**powers).to(outputs)  # (B, 3), products with them are exact
        gradients = None  # frees the previous ones first
        gradients = output_gradients(outputs, noted, u[None, :, None] * factors[:, None, :2], False, batched=False)
        for i, axis in {i: axis for block_uses in uses.values() for i, axis, _ in block_uses}.items():
            g, name = gradients[i], next(iter(noted[i].names.values()))
            assert g is not None  # cotangents were given
            if not axis.fits(g.shape[1:], samples):
                return name, False
            plain, scaled = axis.front(g, samples, 1).flatten(2)  # (B, rest)
            wanted = plain * factors[:, 2:].to(plain)
            off, size = (scaled - wanted).norm(dim=1), torch.maximum(wanted.norm(dim=1), scaled.norm(dim=1))
            tolerance = 0.3 if g.dtype.itemsize < 4 else torch.finfo(g.dtype).eps ** 0.5  # subnormal halves are inexact
            names.append(name)
            moved.append((off > tolerance * size).any())
            some.append(size.any())
    if not names:
        return "", True
    flags = torch.stack([*moved, *some]).tolist()  # one transfer from the device for all layers
    first = next((name for name, flag in zip(names, flags, strict=False) if flag), "")
    return first, not first and all(flags[len(names) :])
