"""Overlapping windows of a series: rows that share values, and are left out together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..data.inputs import Inputs

SHORTEST = 4  # minimum length T of windows
MOST = 0.5  # rows are windows if more than this fraction of them share values with others
SOME = 0.05  # minimum fraction of the rows that have equal values at `PROBES` places, for a comparison of whole rows
PROBES = 8


def overlapping(inputs: Sequence[Inputs], chosen: Tensor) -> Tensor:
    """Returns whether chosen rows (n,) among all N rows share values with each other or are the same, (n, n).

    A tensor (N, T), (N, T, C) or (N, C, T) among the inputs holds windows if most rows are equal to others that have
    moved by at most T/2 steps, `x_i[k:] = x_j[:T - k]`, and half of their values differ: codes are no series. Rows may
    have any order. Cost: time O(n T) for a table without such rows, and O(n T² log n) for windows.
    """
    for place, first in inputs[0].per_sample.items():
        tensors = [part.per_sample.get(place) for part in inputs]
        alike = [one for one in tensors if one is not None and one.shape[1:] == first.shape[1:]]
        if len(alike) < len(tensors) or first.ndim not in (2, 3) or first.is_complex():
            continue
        x = torch.cat(alike)[chosen.to(first.device)].cpu()
        for windows in (x[..., None],) if x.ndim == 2 else (x, x.mT):
            shared = _shared(windows)
            if (shared.sum(1) > 1).float().mean() > MOST:
                return shared
    return torch.eye(len(chosen), dtype=torch.bool)


def _shared(x: Tensor) -> Tensor:
    """Returns whether rows (n, T, C) share values, (n, n)."""
    count, length = x.shape[:2]
    shared = torch.eye(count, dtype=torch.bool)
    several = (x.flatten(1).sort(1).values.diff(dim=1) != 0).sum(1) >= 0.5 * x[0].numel()
    if length < SHORTEST or several.float().mean() <= MOST:
        return shared
    factors = torch.rand(PROBES, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for k in range(1, length // 2 + 1):
        later, earlier = x[:, k:], x[:, : length - k]
        places = torch.linspace(0, length - k - 1, PROBES).long()
        sums = [(part[:, places] * factors).sum((1, 2)) for part in (later, earlier)]  # equal for equal rows
        if torch.isin(*sums).double().mean() >= SOME:
            ids = torch.cat([later, earlier]).flatten(1).unique(dim=0, return_inverse=True)[1]
            moved = (ids[:count, None] == ids[count:]) & several[:, None]
            shared |= moved | moved.T
    return shared
