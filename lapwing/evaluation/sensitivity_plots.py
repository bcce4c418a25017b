"""Pictures of sensitivities: maps over images, bars over features. Needs matplotlib, `pip install lapwing[eval]`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from ..data import batches
from ..errors import LapwingError, extra, shown


def maps(
    values: Tensor,
    inputs: Tensor,
    axes: Any = None,
    shape: tuple[int, ...] | None = None,
    low: float = 0.0,
    labels: Sequence[str] | None = None,
) -> Any:
    """Draws each image in grey under its sensitivities in colour, from `low` to 1: see `Sensitivities.plot`."""
    plt = extra("matplotlib.pyplot")
    if isinstance(low, bool) or not isinstance(low, Real) or not 0 <= low < 1:
        raise LapwingError(f"plot(low={shown(low)}) is out of range. Pass a number from 0 to below 1: low=0.5.")
    maps, images = (_images(part, shape) for part in (values, inputs))
    flat = _axes(axes, len(maps), lambda: plt.subplots(1, len(maps), figsize=(1.6 * len(maps), 1.8), squeeze=False)[1])
    titles = None if labels is None else _names(labels, len(maps), "labels")
    for i, axis in enumerate(flat):
        axis.imshow(images[i], cmap="gray_r", alpha=0.35)
        drawn = axis.imshow(maps[i], cmap="inferno_r", vmin=low, vmax=1.0)
        drawn.set_alpha((maps[i] > low).astype(float) * 0.85)
        axis.set_axis_off()
        if titles is not None:
            axis.set_title(titles[i], fontsize=8)
    return flat[0].figure


def bars(values: Tensor, axes: Any = None, features: Sequence[str] | None = None) -> Any:
    """Draws the mean sensitivity of each feature, largest on top, with the quartiles over samples as lines."""
    plt = extra("matplotlib.pyplot")
    count = values.shape[1]
    names = [f"x{i}" for i in range(count)] if features is None else _names(features, count, "features")
    (axis,) = _axes(axes, 1, lambda: plt.subplots(figsize=(5, 0.3 * count + 0.8), layout="constrained")[1])
    table = values.detach().double()
    order = table.mean(0).argsort()
    parts = (table.mean(0), table.quantile(0.25, 0), table.quantile(0.75, 0))
    mean, low, high = (part[order].tolist() for part in parts)
    axis.barh(range(count), mean, color="#1f77b4", alpha=0.7)
    axis.hlines(range(count), low, high, color="#222222", linewidth=1.5)
    axis.set_yticks(range(count), [names[i] for i in order.tolist()])
    axis.set(xlim=(0, 1), xlabel="sensitivity")
    return axis.figure


def _images(values: Tensor, shape: tuple[int, ...] | None) -> Any:
    """Returns (B, height, width) as an array, channels averaged."""
    images = values.detach().float()
    if shape is not None:
        whole = isinstance(shape, (tuple, list)) and all(isinstance(side, int) for side in shape)
        if not whole or math.prod(shape) != images[0].numel():
            raise LapwingError(
                f"A sample has {images[0].numel()} numbers, and shape is {shown(shape)}. Pass a tuple of whole numbers "
                "whose product is that, such as plot(shape=(28, 28))."
            )
        images = images.reshape(len(values), *shape)
    if images.ndim == 4:
        images = images.mean(1)
    if images.ndim != 3:
        raise LapwingError(
            f"The inputs {batches.describe(values)} are no images (B, height, width) or (B, channels, height, width). "
            "Write plot(shape=(28, 28)) for flat ones."
        )
    return images.cpu().numpy()


def _names(names: Any, count: int, kind: str) -> list[Any]:
    """Returns names as a list, one for each thing that is drawn."""
    listed = list(names) if isinstance(names, Iterable) else None
    if listed is None or len(listed) != count:
        raise LapwingError(
            f"The plot needs {count} {kind}, and {shown(names) if listed is None else len(listed)} were passed. Pass "
            f"{kind} as a list with one each."
        )
    return listed


def _axes(axes: Any, count: int, make: Any) -> list[Any]:
    """Returns the axes as a list, new ones for None."""
    flat = list(np.ravel(make() if axes is None else axes))
    if len(flat) != count or not all(hasattr(axis, "imshow") for axis in flat):
        raise LapwingError(
            f"There are {count} pictures and {len(flat)} axes of the types {sorted({type(x).__name__ for x in flat})}. "
            "Pass one axis of matplotlib for each: plt.subplots(1, count)[1]."
        )
    return flat


__all__ = ["bars", "maps"]
