"""Overlapping windows of a series: rows that share values, and are left out together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..data.inputs import Inputs

GRAIN = 1e-3  # steps are rounded to this fraction of their standard deviation, because means were taken off in float32
PLACES = 16  # maximum number of steps of a row that are compared
DIGITS = 12.0  # the compared steps must be able to tell 10^DIGITS rows apart
MOST_ROWS = 0.5  # rows are windows if more than this fraction of them share values with others


def overlapping(inputs: Sequence[Inputs], chosen: Tensor, most: int) -> Tensor:
    """Returns whether chosen rows (n,) among all N rows share values with each other or are the same, (n, n).

    A tensor (N, T), (N, T, C) or (N, C, T) among the inputs holds windows if most rows have the steps of other rows,
    moved by k <= T/2 places, `x_i[t + k + 1] - x_i[t + k] = x_j[t + 1] - x_j[t]`: a window may have lost its own mean.
    Rows may have any order, and are related to at most about `most` rows, those that share most. Codes and rounded
    tables do not count, because few different steps are equal by chance.
    Cost: time O(n T²), and O(n² T) for windows.
    """
    for place, first in inputs[0].per_sample.items():
        tensors = [part.per_sample.get(place) for part in inputs]
        alike = [one for one in tensors if one is not None and one.shape[1:] == first.shape[1:]]
        if len(alike) < len(tensors) or first.ndim not in (2, 3) or first.is_complex():
            continue
        x = torch.cat(alike)[chosen.to(first.device)].cpu()
        for windows in (x[..., None],) if x.ndim == 2 else (x, x.mT):
            shared = _shared(windows, most)
            if (shared.sum(1) > 1).float().mean() > MOST_ROWS:
                return shared
    return torch.eye(len(chosen), dtype=torch.bool)


def _shared(x: Tensor, most: int) -> Tensor:
    """Returns whether rows (n, T, C) share steps, (n, n)."""
    count, length, channels = x.shape
    shared = torch.eye(count, dtype=torch.bool)
    # 1. the steps as whole numbers (n, T - 1, C), and the number of them that must be equal
    steps = x.double().nan_to_num(0.0, 0.0, 0.0).diff(dim=1)
    deviation = float(steps.std(correction=0)) if steps.numel() else 0.0
    if not deviation:
        return shared
    codes = (steps / (GRAIN * deviation)).round().long()
    least = DIGITS / math.log10(max(2, len(codes.unique())))
    random = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (PLACES, channels), generator=random)
    # 2. for each k the rows that have the steps of another row, k places later: equal steps have equal sums
    for k in range(1, min(length // 2, length - 2) + 1):
        places = torch.linspace(0, length - 2 - k, PLACES).long().unique()
        if len(places) * channels < least:
            break
        later, earlier = codes[:, k:][:, places], codes[:, places]
        sums = [(part * factors[: len(places)]).sum((1, 2)) for part in (later, earlier)]
        if torch.isin(*sums).any():
            several = (later.flatten(1).sort(1).values.diff(dim=1) != 0).double().mean(1) >= 0.5  # constants are equal
            moved = (sums[0][:, None] == sums[1]) & several[:, None]
            shared |= moved | moved.T
            if shared.sum() >= most * count:
                break
    return shared
