"""A yardstick for the width of a regression on a table: a Gaussian process that knows the inputs, not the network."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..linalg import doubled, symmetric_eigen
from .gaussian_process import Process

MIN_TABLE_ROWS, MAX_TABLE_ROWS = 100, 500  # number of samples below which there is no width; maximum in the kernel
LENGTH_ROWS, LENGTH_STEPS, LENGTH_RATE = 200, 40, 0.2  # for the length scales: rows, steps of Adam and their size
LEAST_NOISE = 1e-4  # minimum of the noise, as a part of the kernel's variance
MAX_TABLE_OUTPUTS = 16  # maximum number of outputs, which are evenly spaced


@torch.no_grad()
def width_by_inputs(x: Tensor, y: Tensor, weights: Tensor, size: float, least: float = 0.0) -> float | None:
    """Returns the leave-one-out width of a Gaussian process with a squared-exponential kernel on the inputs.

    The evidence chooses a length scale for each column. Inputs (N, D), targets and weights (N, C) come from
    `table_of`; weights above 0 count as 1. Returns None if there are too few rows, or if the width cannot exceed
    `least`, since the targets' variance does not. `size` is the number of all samples.

    Cost: `LENGTH_STEPS` Cholesky decompositions of `LENGTH_ROWS` rows, and an eigendecomposition of `MAX_TABLE_ROWS`.
    """
    # 1. some rows and outputs; y without its mean (n, C), columns of x (n, D) in units of their length scales
    known = (weights > 0).all(1)
    x, y = doubled(x[known]), y[known]
    if len(x) < MIN_TABLE_ROWS or float(y.var(0).mean()) <= least:
        return None
    x, y = _evenly_spaced(x, MAX_TABLE_ROWS), _evenly_spaced(y.T, MAX_TABLE_OUTPUTS).T
    y, spread = _evenly_spaced(y - y.mean(0), MAX_TABLE_ROWS), x.std(0)
    x = (x - x.mean(0)) / torch.where(spread > 0, spread, 1.0)
    x = x / _lengths(_evenly_spaced(x, LENGTH_ROWS), _evenly_spaced(y, LENGTH_ROWS))
    # 2. K = exp(-‖x - x'‖²/2) (n, n) and its eigenpairs
    kernel = (torch.cdist(x, x).square() / -2).exp()
    values, vectors = symmetric_eigen(kernel)
    # 3. copies: equal inputs and equal targets
    same = (kernel > 1 - 1e-9) & (y[:, None] == y).all(-1)
    process = Process(values, vectors, y[:, 0], y[:, :0], torch.ones_like(y[:, 0]), same, x.shape[1])
    # 4. the width of each output at its own best noise
    widths = []
    for labels in y.T:
        one = replace(process, labels=labels)
        widths.append(one.left_out(one.best(), size).width)
    return sum(widths) / len(widths)


def _evenly_spaced(values: Tensor, most: int) -> Tensor:
    """Returns at most `most` rows, evenly spaced."""
    count = min(len(values), most)
    return values[torch.arange(count, device=values.device) * len(values) // count]


def _lengths(x: Tensor, y: Tensor) -> Tensor:
    """Returns the length scale of each column (D,) by the evidence, by gradient steps from the median distance."""
    y = y / y.square().mean().sqrt().clamp_min(torch.finfo(y.dtype).tiny)
    distances = torch.pdist(x)
    median = float(distances[distances > 0].median()) if bool((distances > 0).any()) else 1.0
    start = x.new_tensor([-2.0, *[math.log(median)] * x.shape[1]])  # log of the noise, and of the lengths
    with torch.enable_grad():
        point = start.requires_grad_()
        optimiser = torch.optim.Adam([point], LENGTH_RATE)
        for _ in range(LENGTH_STEPS):
            # K = exp(-‖x - x'‖²/2) (n, n) from inner products, and K + noise = LLᵀ
            scaled = x / point[1:].exp()
            squares = scaled.square().sum(1)
            kernel = (scaled @ scaled.T - (squares[:, None] + squares) / 2).clamp_max(0).exp()
            root = torch.linalg.cholesky(kernel + (point[0].exp() + LEAST_NOISE) * torch.eye(len(x)).to(x))
            whitened = torch.linalg.solve_triangular(root, y, upper=False)
            # minus the log evidence, at the kernel's best scale
            fit = y.numel() / 2 * whitened.square().sum().log() + y.shape[1] * root.diagonal().log().sum()
            optimiser.zero_grad()
            fit.backward()
            optimiser.step()
    return point[1:].detach().exp()
