"""Refuses fits that exceed the memory of the machine or the budget, and names a method that needs less."""

from __future__ import annotations

import torch

from ..environment import memory_limit
from ..errors import LapwingError, shown
from ..methods import KFAC, Diagonal, FitShape, Footprint, Method


def check_memory(method: Method, shape: FitShape) -> None:
    """Raises if a fit exceeds the memory of its device or its budget. A method without a footprint is not checked."""
    footprint = method.footprint(shape)
    advice = None if footprint is None else advice_on_memory(method, footprint, shape)
    if advice is not None:
        raise LapwingError(advice)


def advice_on_memory(method: Method, footprint: Footprint, shape: FitShape) -> str | None:
    """Returns what does not fit into memory and what to use instead, or None if everything fits.

    On a CPU all memory that this process may use counts, since other processes may give theirs back. On a GPU the free
    memory counts.
    """
    tangent = shape.tangent
    available, where = _available(tangent.device) if footprint.peak > tangent.memory else (tangent.memory, "")
    if footprint.peak <= available:
        refusals = [need.refusal(tangent.memory) for need in footprint.needs]
        return next((refusal for refusal in refusals if refusal is not None), None)
    instead = "Treat fewer weights: write params=lw.last_layer."
    for other in (Diagonal(), KFAC()):
        peak = other.footprint(shape).peak
        if peak <= available:
            line = f"lw.{type(other).__name__}(){', params=lw.last_layer' * tangent.treats_output_alone}"
            instead = f"Use {line}, which needs {peak / 2**30:.3g} GiB."
    return (
        f"{shown(method)} needs {footprint.peak / 2**30:.3g} GiB for {tangent.size} weights, and {where} "
        f"{available / 2**30:.3g} GiB. {instead}"
    )


def _available(device: torch.device) -> tuple[int, str]:
    """Returns the memory of a device in bytes, and its subject in a message."""
    if device.type != "cuda":
        return memory_limit(), "this process may use"
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached, "the GPU has free"
