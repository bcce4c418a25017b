"""The memory of a fit: what its allocator keeps, whether the machine has it, and what to use instead if it has not."""

from __future__ import annotations

import torch

from ..environment import memory_limit
from ..errors import LapwingError, shown
from ..methods import KFAC, Diagonal, Method, Outline
from ..methods.cost import Cost

HOLES, HEAP = 0.5, 2**26
"""What the allocator of a CPU keeps beside live tensors: so much of their bytes, up to so many bytes. glibc gives back
blocks above 2²⁵ bytes when they are freed; smaller ones leave holes in its heap. Measured by `benchmarks/plan.py`."""


def check_room(method: Method, outline: Outline) -> None:
    """Raises where a fit exceeds the memory of its device, and names a method that does not, or its budget."""
    cost = method.cost(outline)
    advice = None if cost is None else advice_on_memory(method, cost, outline)
    if advice is not None:
        raise LapwingError(advice)


def advice_on_memory(method: Method, cost: Cost, outline: Outline) -> str | None:
    """Returns what is wrong where a fit exceeds the memory of its device or its budget, and what to use instead."""
    beyond = _beyond_machine(method, cost, outline)
    refusals = [beyond, *(need.refusal(outline.tangent.memory) for need in cost.needs)]
    return next((refusal for refusal in refusals if refusal is not None), None)


def _beyond_machine(method: Method, cost: Cost, outline: Outline) -> str | None:
    """Returns what is wrong where the peak exceeds what the device has.

    All memory that this process may use counts, since what others hold of it may be given back; of a GPU what is free.
    """
    device = outline.tangent.device
    if cost.peak <= outline.tangent.memory:
        return None
    available, where = memory_limit(), "this process may use"
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        available, where = torch.cuda.mem_get_info(device)[0] + cached, "the GPU has free"
    if cost.peak <= available:
        return None
    instead = "Treat fewer weights: write params=lw.last_layer."
    for other in (Diagonal(), KFAC()):
        peak = other.cost(outline).peak
        if peak <= available:
            line = f"lw.{type(other).__name__}(){', params=lw.last_layer' * outline.tangent.treats_output_alone}"
            instead = f"Use {line}, which needs {peak / 2**30:.3g} GiB."
    return (
        f"{shown(method)} needs {cost.peak / 2**30:.3g} GiB for {outline.tangent.size} weights, and {where} "
        f"{available / 2**30:.3g} GiB. {instead}"
    )


def with_holes(peak: int, device: torch.device) -> int:
    """Returns the peak of live tensors with what the allocator keeps beside them."""
    return peak + min(int(HOLES * peak), HEAP) if device.type == "cpu" else peak
