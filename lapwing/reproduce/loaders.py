"""Batches of tensors, as the experiments hand them to `lw.fit`."""

from __future__ import annotations

from torch import Tensor

Batches = list[tuple[Tensor, Tensor]]


def batched(x: Tensor, y: Tensor, size: int = 100) -> Batches:
    """Cuts data into batches."""
    return list(zip(x.split(size), y.split(size), strict=True))
