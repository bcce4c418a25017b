"""What error bars of very many outputs cost, as ratios to a plain forward pass of the same batch in the same run.

Variances by `lw.Linearized(draws=...)`, in total and for each draw, beside the exact ones where these can be waited
for; and ten of 1 000 classes by `lw.Linearized(outputs=10)`, beside all of them. Random weights and inputs: cost does
not depend on them. Costs of 10^5 outputs are of CPU time, on one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from papers.common.measure import ratio, timed

SEED = 0
DRAWS = 16


def dense(batch: int) -> tuple[nn.Module, Tensor]:
    """64-256-100 000."""
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 100_000)), torch.randn(batch, 64)


def decoder() -> tuple[nn.Module, Tensor]:
    """16-512-512-10 000, batch 100."""
    layers = [nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10_000)]
    return nn.Sequential(*layers), torch.randn(100, 16)


def denoiser(side: int = 64, batch: int = 8) -> tuple[nn.Module, Tensor]:
    """Three 3x3 convolutions of 32 channels, from pixels to as many."""
    convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Conv2d(32, 1, 3, padding=1), nn.Flatten()), torch.randn(batch, 1, side, side)


def classifier() -> tuple[nn.Module, Tensor]:
    """256-512-512-1 000, batch 50."""
    layers = [nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1000)]
    return nn.Sequential(*layers), torch.randn(50, 256)


def _cost(function: Callable[[], Any], model: nn.Module, x: Tensor, rounds: int) -> dict[str, float]:
    """Returns the cost of a function beside a forward pass."""

    @torch.no_grad()
    def forward() -> Tensor:
        return model(x)

    return ratio(function, forward, rounds)


def _draws(name: str, method: lw.Method, exact: bool = False) -> dict[str, Any]:
    """Returns the cost of variances by draws, and of the exact ones of one input."""
    model, x = globals()[name]()
    with torch.no_grad():
        y = model.eval()(x)
    posterior = lw.fit(model, [(x[:4], y[:4])], method, likelihood=lw.Gaussian(0.01), prior_precision=1.0)
    cost = _cost(lambda: posterior.latent(x, via=lw.Linearized(draws=DRAWS)).variance, model, x, 3)
    row = {"all in all": {**cost, "ratio_a_draw": cost["ratio"] / DRAWS}}
    if exact:
        variance, seconds = timed(lambda: posterior.latent(x[:1], via=lw.Linearized()).variance)
        milliseconds = 1e3 * seconds
        forward = _cost(lambda: variance, model, x[:1], 10)["reference_milliseconds"]
        row["exact, one input, one run"] = {"milliseconds": milliseconds, "ratio": milliseconds / forward}
    return row


def _hundred_thousand(model: nn.Module, x: Tensor, method: lw.Method, draws: int = 64) -> dict[str, float]:
    """Returns the CPU time of variances by draws, drawing the weights included, beside that of a forward pass."""
    with torch.no_grad():
        y = model.eval()(x[:1])
    posterior = lw.fit(model, [(x[:1], y)], method, likelihood=lw.Gaussian(0.01), prior_precision=1.0)
    posterior.latent(x[:1], via=lw.Linearized(draws=2))

    def milliseconds(function: Callable[[], Any]) -> float:
        return 1e3 * timed(function, time.process_time)[1]

    @torch.no_grad()
    def forward() -> Tensor:
        return model(x)

    forward()
    before = [milliseconds(forward) for _ in range(10)]
    call = milliseconds(lambda: posterior.latent(x, via=lw.Linearized(draws=draws)).variance)
    plain = mean(
        before + [milliseconds(forward) for _ in range(10)]
    )  # one long call sees the average of its neighbours
    return {"draws": draws, "milliseconds": call, "reference_milliseconds": plain, "ratio_a_draw": call / plain / draws}


def _classes(params: Any) -> dict[str, Any]:
    """Returns the costs of the variances of ten of 1 000 classes, and of all."""
    model, x = classifier()
    posterior = lw.fit(model.eval(), [(x, torch.arange(50))], lw.KFAC(), params=params, prior_precision=1.0)
    ways = {"outputs=10": lw.Linearized(outputs=10), "all": lw.Linearized()}
    rounds = {"all": 10 if params is lw.last_layer else 1}
    return {
        name: _cost(lambda way=way: posterior.latent(x, via=way).variance, model, x, rounds.get(name, 5))  # type: ignore[misc]
        for name, way in ways.items()
    }


def _fits() -> dict[str, Any]:
    """Returns the costs of fits of 1 000 classes over all weights, beside forward passes of their 400 samples."""
    model, x = classifier()
    x = x.repeat(8, 1)
    batches = [(part, torch.arange(50)) for part in x.split(50)]
    return {
        name: _cost(
            lambda method=method: lw.fit(model.eval(), batches, method, prior_precision=1.0, tune=None),
            model,
            x,
            rounds,
        )
        for name, method, rounds in (("sampled", lw.KFAC(fisher="sampled"), 3), ("exact", lw.KFAC(), 1))
    }


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the measurements."""
    return {
        "1 000 classes, KFAC of the last layer": lambda: _classes(lw.last_layer),
        "1 000 classes, KFAC": lambda: _classes(lw.everything),
        "1 000 classes, KFAC fits": _fits,
        "CNN of 64x64 outputs, batch 8, KFAC": lambda: _draws("denoiser", lw.KFAC(), exact=True),
        "CNN of 64x64 outputs, batch 8, diagonal": lambda: _draws("denoiser", lw.Diagonal()),
        "MLP 16-512-512-10 000, batch 100, diagonal": lambda: _draws("decoder", lw.Diagonal()),
        "10^5 outputs, MLP 64-256-100 000, batch 32, diagonal": lambda: _hundred_thousand(*dense(32), lw.Diagonal()),
        "10^5 outputs, MLP 64-256-100 000, batch 128, diagonal": lambda: _hundred_thousand(*dense(128), lw.Diagonal()),
        "10^5 outputs, CNN of 320x320, batch 2, KFAC": lambda: _hundred_thousand(*denoiser(320, 2), lw.KFAC()),
    }
