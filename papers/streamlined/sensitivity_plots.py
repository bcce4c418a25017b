"""Pictures of sensitivities: maps over images, bars over the features of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def maps(values: Tensor, inputs: Tensor, axes: Sequence[Any], shape: tuple[int, int], low: float) -> None:
    """Draws flat images (B, n) in grey, one per axis, under their sensitivities in colour, from `low` to 1."""
    for value, image, axis in zip(values, inputs, axes, strict=True):
        axis.imshow(image.reshape(shape).float().cpu().numpy(), cmap="gray_r", alpha=0.35)
        found = value.detach().reshape(shape).float().cpu().numpy()
        drawn = axis.imshow(found, cmap="inferno_r", vmin=low, vmax=1.0)
        drawn.set_alpha((found > low).astype(float) * 0.85)
        axis.set_axis_off()


def bars(values: Tensor, axis: Any, features: Sequence[str]) -> None:
    """Draws the mean sensitivity of each feature, the largest on top, with the quartiles over samples as lines."""
    table = values.detach().double()
    order = table.mean(0).argsort()
    parts = (table.mean(0), table.quantile(0.25, 0), table.quantile(0.75, 0))
    mean, low, high = (part[order].tolist() for part in parts)
    count = len(features)
    axis.barh(range(count), mean, color="#1f77b4", alpha=0.7)
    axis.hlines(range(count), low, high, color="#222222", linewidth=1.5)
    axis.set_yticks(range(count), [features[i] for i in order.tolist()])
    axis.set(xlim=(0, 1), xlabel="sensitivity")
