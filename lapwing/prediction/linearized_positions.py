"""Latents of outputs with positions: each position is predicted as a sample with C outputs."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..covariance import Covariance, Latent, LatentDraws, LinearDraws
from ..covariance.latent_at_positions import LatentAtPositions
from ..errors import LapwingError
from ..network.gate import Checked
from ..tangent import Tangent


def at_positions(tangent: Tangent, covariance: Covariance, checked: Checked, joint: bool) -> LatentAtPositions:
    """Returns `N(f_t(x), J_t Σ J_tᵀ)` for each position t of each input.

    It costs a forward pass and contractions of B T samples for a last layer, and otherwise T C backward passes.
    """
    if joint:
        raise refused_joint()
    parts: list[tuple[slice, Latent]] = []
    sizes: tuple[int, ...] = ()
    scratch = tangent.outputs * covariance.scratch_per_row
    for rows, record in tangent.records(checked, dtype=covariance.record_dtype, scratch_per_sample=scratch):
        terms = tuple(term.to(record.outputs) for term in covariance.output_covariance(record))
        parts.append((rows, Latent(record.outputs, terms)))
        sizes = record.sizes
    latent = parts[0][1] if len(parts) == 1 else Latent.concatenate([part for _, part in parts])
    if any(rows.step is not None for rows, _ in parts):
        order = torch.cat([torch.arange(rows.start, rows.stop, rows.step or 1) for rows, _ in parts])
        latent = latent.taken(order.argsort().to(latent.mean.device))
    return LatentAtPositions(latent, tangent.positions.places(checked.samples, sizes))


AnyDraws = TypeVar("AnyDraws", LinearDraws, LatentDraws)


def draws_at_positions(tangent: Tangent, latent: AnyDraws, inputs: Any) -> AnyDraws | LatentAtPositions:
    """Returns a latent of draws (S, B, T C), with one row per position if the outputs have positions."""
    places = tangent.places_of(inputs)
    if not places.sizes:
        return latent
    if latent.joint:
        raise refused_joint()
    tensors = {f.name: getattr(latent, f.name) for f in fields(latent)}
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            tensors[name] = value.unflatten(-1, (places.count, -1)).flatten(-3, -2)
    return LatentAtPositions(replace(latent, **tensors), places)


def refused_joint() -> LapwingError:
    """Returns the error for a joint latent of outputs with positions."""
    return LapwingError(
        "The outputs have positions, and a joint latent of all positions is not supported. Leave out joint=True: the "
        "latent has a covariance for each position."
    )
