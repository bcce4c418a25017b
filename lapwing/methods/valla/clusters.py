"""Cluster centres of points: k-means by Lloyd's iteration."""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEPS = 100
AT_ONCE = 2**20
"""How many distances are kept at once."""


def cluster_centres(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Returns centres c that make `Σ_n min_k ‖x_n - c_k‖²` small, each the mean of the points nearest to it.

    Lloyd's iteration from a greedy k-means++ start (Arthur and Vassilvitskii 2007). A centre that no point is nearest
    to stays where it was.

    Args:
        points: x (n, D), floating-point.
        count: how many centres, at most n.
        generator: a CPU generator.

    Returns:
        Centres (count, D).

    Cost: time O(n D count) a step, at most 100 steps, and O(n D count log count) for the start; memory O(n D).
    """
    mean = points.mean(0)
    size = (points - mean).abs().max().clamp_min(torch.finfo(points.dtype).tiny)

    def moved(x: Tensor) -> Tensor:  # distances are differences of squares: offsets cost digits, large ones overflow
        return (x - mean) / size

    scaled = moved(points)
    centres = points[_spread_out(scaled, count, generator)]
    labels: Tensor | None = None
    for _ in range(STEPS):
        parts, ends = scaled.split(max(1, AT_ONCE // count)), moved(centres)
        nearest = torch.cat([_squared_distances(part, ends).argmin(1) for part in parts])
        if labels is not None and torch.equal(nearest, labels):
            break
        labels = nearest
        sizes = labels.bincount(minlength=count)[:, None]
        sums = torch.zeros_like(centres).index_add_(0, labels, points)
        centres = torch.where(sizes > 0, sums / sizes, centres)
    return centres


def _spread_out(points: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Returns which points to start from, each the best of a few drawn by their squared distance to those before it."""
    trials = 2 + int(math.log(count))
    chosen = [int(torch.randint(len(points), (), generator=generator))]
    distances = _squared_distances(points, points[chosen])[:, 0]
    for _ in range(count - 1):
        weights = distances if bool(distances.sum() > 0) else torch.ones_like(distances)  # all points are taken
        drawn = torch.multinomial(weights, trials, replacement=True, generator=generator)
        left = torch.minimum(distances[:, None], _squared_distances(points, points[drawn]))  # (n, trials)
        best = int(left.sum(0).argmin())
        chosen.append(int(drawn[best]))
        distances = left[:, best]
    return chosen


def _squared_distances(points: Tensor, centres: Tensor) -> Tensor:
    """Returns `‖x_n - c_k‖²`, (n, K), by one product of matrices."""
    squares = points.square().sum(1)[:, None] + centres.square().sum(1)
    return torch.addmm(squares, points, centres.T, alpha=-2.0).clamp_min_(0.0)
