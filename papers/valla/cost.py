"""What VaLLA costs: time and memory against the number of training points, and seconds on a ResNet-20."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

import lapwing as lw
from papers.common import drawing
from papers.common.data import Batches, batched
from papers.common.measure import LiveBytes, timed
from papers.common.networks import ResNet20
from papers.common.results import Rows, once
from papers.common.tables import grid, shown
from papers.common.training import seeded
from papers.valla.figure4 import table
from papers.valla.training import TABLE, trained

COUNTS = (1000, 10_000, 50_000, 200_000)


def run() -> dict[str, Any]:
    """Returns seconds and memory of one fit over N, and seconds on a ResNet-20."""
    rows = Rows(__file__, {"batch": 100, "network": "3 x 200 tanh MLP on taxi rows"})

    @once
    def setup() -> Any:
        data = table("nyc_green_taxi_2023q1", 0)
        model = trained((8, 200, 200, 200, 1), data.train, TABLE, 0, data.name)
        parts = (data.train, data.val, data.test)
        return model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def one_fit(method: Any, count: int) -> dict[str, float]:
        model, x, y = setup()
        loader = batched(x[:count], y[:count], 100)
        spent, _ = fit_seconds(model, loader, method, likelihood=lw.Gaussian(0.2))
        with LiveBytes() as live:
            fit_seconds(model, loader, method, likelihood=lw.Gaussian(0.2))
        return {"seconds": spent, "peak MiB": live.peak / 2**20}

    methods: dict[str, tuple[Any, int]] = {
        "VaLLA 100, natural gradient, 20 steps": (lw.VaLLA(100, lw.NaturalGradient(20)), 200_000),
        "VaLLA 100, α-divergence, 10 steps": (lw.VaLLA(100, lw.AlphaDivergence(steps=10)), 200_000),
        "VaLLA 100, closed form": (lw.VaLLA(100), 10_000),
        "KFAC": (lw.KFAC(), 50_000),
        "ELLA, K = 20, M = 100": (lw.ELLA(rank=20, rows=100), 10_000),
    }
    for name, (method, most) in methods.items():
        for count in COUNTS:
            if count <= most:
                rows.add("fit over N", f"{name}, N = {count}", one_fit, method, count)
    rows.add("networks", "ResNet-20, M = 100", _resnet)
    return rows.all()


def fit_seconds(model: nn.Module, loader: Batches, method: lw.Method, **options: Any) -> tuple[float, lw.Posterior]:
    """Returns the processor seconds of a fit at a given prior and noise, and the posterior."""
    fit = partial(lw.fit, model, loader, method, prior_precision=1.0, tune=None, progress=False, **options)
    posterior, seconds = timed(fit, time.process_time)
    return seconds, posterior


def _resnet(points: int = 100, samples: int = 200, batch: int = 20) -> dict[str, float]:
    """Returns the processor seconds of two fits of a ResNet-20 with random weights, and of a prediction."""
    with seeded(0):
        model, x, y = ResNet20().eval(), torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,))
    loader = batched(x, y, batch)
    natural, posterior = fit_seconds(model, loader, lw.VaLLA(points, lw.NaturalGradient(2)))
    _, predicted = timed(lambda: posterior.latent(loader[0][0]).variance, time.process_time)
    published, _ = fit_seconds(model, loader, lw.VaLLA(points, lw.AlphaDivergence(steps=1)))
    return {
        "weights": posterior.tangent.size, "natural gradient, 2 steps": natural, "prediction of a batch": predicted,
        "alpha-divergence, 1 step": published,
    }  # fmt: skip


def draw(results: Mapping[str, Any]) -> None:
    """Draws the seconds of one fit over the number of training points."""
    rows = results["runs"]["fit over N"]
    figure, ((axis,),) = drawing.panels(1, 1, (5, 4.2))
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, row in rows.items():
        method, _, count = name.rpartition(", N = ")
        curves.setdefault(method, []).append((int(count), row["seconds"]))
    for method, points in curves.items():
        axis.plot(*zip(*sorted(points), strict=True), ".-", label=method)
    axis.set(xscale="log", yscale="log", xlabel="N", ylabel="processor seconds of a fit", title="one fit each, seed 0")
    drawing.legend_below(figure, 2)
    drawing.save(figure, __file__)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns seconds of a fit over the number of training rows."""
    fits = (
        "VaLLA 100, natural gradient, 20 steps",
        "VaLLA 100, α-divergence, 10 steps",
        "VaLLA 100, closed form",
        "KFAC",
    )
    of = results["runs"]["fit over N"]
    rows = {fit: [shown(of.get(f"{fit}, N = {n}", {}).get("seconds"), 2) for n in COUNTS] for fit in fits}
    return {"seconds": grid([f"N = {n}" for n in COUNTS], rows)}
