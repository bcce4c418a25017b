"""Memory of ELLA (K = 20) on a ResNet-18 of 11 million random weights."""

from __future__ import annotations

import resource
import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import lapwing as lw
from papers.common.data import batched
from papers.common.networks import stage
from papers.common.training import seeded


def resnet18() -> nn.Sequential:
    """Returns a ResNet-18 for 32 x 32 images: four stages of two blocks with 64 to 512 channels."""
    stages = [stage(a, b, 1 if a == b else 2, 2) for a, b in pairwise((64, 64, 128, 256, 512))]
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def run() -> dict[str, Any]:
    """Returns the peak memory of this process, which must do nothing else."""
    with seeded(0):
        model = resnet18().eval()
    x = torch.randn(200, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.arange(200) % 10
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    start = time.perf_counter()
    posterior = lw.fit(model, batched(x, y, 50), lw.ELLA(rank=20, rows=200), prior_precision=1.0, tune=None)
    seconds = time.perf_counter() - start
    variance = posterior.latent(x[:20]).variance
    assert bool((variance > 0).all())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"weights": posterior.tangent.size, "fit_seconds": seconds, "GiB before": before, "peak GiB": peak, "aim": 6}
