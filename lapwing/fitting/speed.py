"""How fast the machine is: of a few forward passes, one product and one decomposition the fastest runs are timed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..linalg import seeded
from ..methods.cost import EIGEN
from ..network import batches
from ..tangent import Tangent

PROBE_SECONDS, PROBE_SIDE = 0.1, 512
"""How long forward passes are timed, and the side of the matrices that time the machine."""

clock = time.perf_counter


@dataclass(frozen=True)
class Speed:
    """How fast the machine is.

    Attributes:
        forward: seconds of a forward pass of one sample.
        product: seconds of a multiply-add of a large product.
        decomposition: seconds of a multiply-add as `EIGEN` counts them.
    """

    forward: float
    product: float
    decomposition: float

    @classmethod
    def of(cls, tangent: Tangent, data: Iterable[Any]) -> Speed:
        """Returns the fastest of some runs: others may use the machine too."""
        spent, samples = 0.0, 0
        for batch in data:
            inputs, _ = batches.split(batch, tangent.device)
            if not batches.size(inputs):
                continue
            spent += _fastest(partial(tangent.outputs_of, inputs), tangent.device, PROBE_SECONDS / 2)
            samples += batches.size(inputs)
        device, side = tangent.device, PROBE_SIDE
        x = torch.randn(side, side, device=device, dtype=tangent.dtype, generator=seeded(None, device))
        gram = x.double() @ x.double().T
        product = _fastest(lambda: x @ x.T, device)
        decomposition = _fastest(lambda: torch.linalg.eigh(gram), device)
        return cls(spent / samples, product / side**3, decomposition / (EIGEN * side**3))


def _fastest(run: Callable[[], Any], device: torch.device, seconds: float = 0.0) -> float:
    """Returns the seconds of the fastest of two runs, and of as many more as take so long."""
    best, end = math.inf, clock() + seconds
    for number in range(100):
        start = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, clock() - start)
        if number and clock() > end:
            break
    return best
