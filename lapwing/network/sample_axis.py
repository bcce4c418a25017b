"""Checks, once for every new shape, that the layers of a recording hold the samples where the survey found them.

A network may sort its samples, leave out padded positions, or send some of them through a branch. A layer's rows then
depend on the batch, and the survey saw only a few samples of one batch. For each base-64 digit of the samples' numbers,
the check sends back two cotangents, whose ratio at a sample is 2^(digit - 32). The gradients at a layer must have the
same ratios. No two samples have the same digits. Tensors in float16 need digits in base 16.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import LapwingError
from .recording_plan import Uses
from .tracing import RecordedUse, Recording, output_gradients

log = logging.getLogger("lapwing")


class SampleAxisMoved(LapwingError):
    """A layer holds the samples in another place than on the first batch."""


@dataclass(eq=False, repr=False)
class SampleAxisCheck:
    """Checks the recordings of one network, and remembers the shapes that passed."""

    known: set[tuple[torch.Size, ...]] = field(default_factory=set)
    warned: bool = False

    def check(self, recording: Recording, uses: Uses, name: str) -> None:
        """Raises `SampleAxisMoved` if a layer holds the samples on another dimension or in another order."""
        outputs, noted, routed = recording.outputs, recording.noted, recording.routed
        shapes = outputs.shape, *[use.out.shape for use in noted]
        if shapes in self.known and not routed:
            return
        for block, block_uses in uses.items():
            for i, axis, _ in block_uses:
                if axis.axis >= noted[i].use.sample_dims:
                    raise _fewer_dimensions(f"{block} of {name}", axis.axis, noted[i].out.shape)
        layer, conclusive = moved_layer(outputs, noted, uses) if len(outputs) > 1 else ("", True)
        if layer:
            raise _moved(f"{name} at {len(outputs)} samples", layer)
        if conclusive and not routed:
            self.known.add(shapes)

    def warn_once(self, error: SampleAxisMoved) -> None:
        """Warns once that lapwing processes the samples one by one."""
        if not self.warned:
            self.warned = True
            log.warning("%s. They are taken one by one, which is slow.", str(error).partition(". ")[0])


def _moved(where: str, layer: str) -> SampleAxisMoved:
    return SampleAxisMoved(
        f"{where}: the layer of {layer} does not hold them as on the first batch, because forward() sorts, packs or "
        "leaves out parts of them. Joint covariances and inducing points need layers that always hold the samples in "
        "the same way. Leave this one out with params=lambda name, parameter: ..., or ask for single samples."
    )


def _fewer_dimensions(layer: str, axis: int, shape: torch.Size) -> LapwingError:
    return LapwingError(
        f"The layer {layer} held the samples on dimension {axis} in the fit, and now works on a tensor of shape "
        f"{tuple(shape)}. Give inputs of as many dimensions as in the fit, or fit again."
    )


def moved_layer(outputs: Tensor, noted: Sequence[RecordedUse], uses: Uses) -> tuple[str, bool]:
    """Returns a parameter of a layer that holds the samples elsewhere than in the survey, or "" if there is none.

    Also returns whether "" holds for all batches of these shapes. It does not if all gradients of a layer are 0,
    because they agree with any power. Cost: two backward passes through the activations per digit of B.
    """
    samples, generator = outputs.shape[0], torch.Generator().manual_seed(0)
    # the base bounds the powers of 2 in the gradients: float16 has a smaller range
    base = 16 if torch.float16 in (outputs.dtype, *(use.out.dtype for use in noted)) else 64
    places = torch.arange(max(1, math.ceil(math.log(samples, base) - 1e-9)))  # log of a power may come out above it
    digits = torch.arange(samples)[:, None] // base**places % base  # digits of the samples' numbers, (B, places)
    u = torch.randn(outputs.shape[1], generator=generator).to(outputs)
    layers = {i: axis for block_uses in uses.values() for i, axis, _ in block_uses}
    if not layers:
        return "", True
    names = [next(iter(noted[i].names.values())) for i in layers]
    moved, some = [], []  # for each digit: whether each layer moved, and whether some gradient of it is not 0
    for exponents in digits.T - base // 2:  # (B,), split into two halves, because the power could overflow
        halves = exponents // 2
        powers = torch.stack([-halves, exponents - halves, exponents], 1)
        factors = (2.0**powers).to(outputs)  # (B, 3)
        plains = scaleds = None  # frees the previous ones first
        plains, scaleds = (
            output_gradients(outputs, noted, (u * one)[..., None], False) for one in factors[:, :2].split(1, 1)
        )  # each (1, *out.shape)
        off, size, tolerances = [], [], []  # norms (B,) for each layer
        for (i, axis), name in zip(layers.items(), names, strict=True):
            g, h = plains[i], scaleds[i]
            assert g is not None  # cotangents were given
            assert h is not None
            if not axis.fits(g.shape[1:], samples):
                return name, False
            plain, scaled = (axis.front(one[0], samples).flatten(1) for one in (g, h))  # (B, rest)
            off.append(torch.addcmul(scaled, plain, factors[:, 2:].to(plain), value=-1).norm(dim=1).to(u.device))
            size.append(plain.norm(dim=1).to(u.device))
            tolerances.append(0.3 if g.dtype.itemsize < 4 else torch.finfo(g.dtype).eps ** 0.5)  # subnormal halves
        sizes = torch.stack(size) * factors[:, 2]  # of the gradients that are wanted (layers, B)
        moved.append((torch.stack(off) > sizes * sizes.new_tensor(tolerances)[:, None]).any(1))
        some.append(sizes.any(1))
    flags = torch.stack([*moved, *some]).tolist()  # one transfer from the device
    moves, sees = flags[: len(moved)], flags[len(moved) :]
    first = next((name for name, *each in zip(names, *moves, strict=True) if any(each)), "")
    return first, not first and all(map(all, sees))
