"""Tables 13 and 17: time of one prediction for one input, by every way, in milliseconds and in forward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.prediction import Way
from papers.common.measure import fastest
from papers.common.networks import logits_vit, mlp
from papers.common.tables import grid
from papers.streamlined.setting import PAPER

PUBLISHED = {
    "ViT, last layer": {"network": 3.732, "sampling": 188.732, "GLM": 5.517, "streamlined": 3.782},
    "ViT": {
        "network": 3.737, "sampling": 190.806, "GLM": 17.191, "streamlined, covariances": 14.728, "streamlined": 4.350,
    },
    "MLP": {"network": 0.069, "sampling": 98.584, "GLM": 1.656, "streamlined": 0.542},
}  # fmt: skip
"""Milliseconds on an NVIDIA H100; a ViT base, the MLP 784-128-64-10."""

COVARIANCES = lw.Streamlined(positions="independent", attention="features")
"""Covariances of the values, which the paper calls "+ Cov"."""

LAST: dict[str, Way] = {"sampling": lw.MonteCarlo(50), "GLM": lw.Linearized(), "streamlined": PAPER}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Any, dict[str, Way]]] = {
    "ViT, last layer": (logits_vit, (3, 32, 32), lw.last_layer, LAST),
    "ViT": (logits_vit, (3, 32, 32), lw.everything, {**LAST, "streamlined, covariances": COVARIANCES}),
    "MLP": (
        lambda: mlp(784, 128, 64, 10, activation=nn.ReLU).eval(), (784,), lw.everything,
        {**LAST, "sampling": lw.MonteCarlo(1000)},
    ),
}  # fmt: skip
"""Name -> what makes the network, the shape of an input, the uncertain weights, the ways with the paper's draws."""


def run(seconds: float = 3.0) -> dict[str, Any]:
    """Returns times of the network and of every way. The weights are random, since times do not depend on them."""
    found = {}
    for name, (make, shape, params, ways) in NETWORKS.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            found[name] = times(make(), torch.randn(20, *shape), params, ways, seconds)
        print(name, found[name], flush=True)
    return found


def times(
    model: nn.Module, x: Tensor, params: Any, ways: Mapping[str, Way], seconds: float
) -> dict[str, dict[str, float]]:
    """Returns way -> milliseconds of CPU time for the first input, the fastest of many calls, and forward passes.

    Args:
        model: a classifier of ten classes.
        x: inputs of the fit.
        params: selection of the uncertain weights.
        ways: ways to time; streamlined prediction is timed deployed, too.
        seconds: for all calls together.
    """
    data = [(x, torch.arange(len(x)) % 10)]
    posterior = lw.fit(model, data, lw.Diagonal(), params=params, prior_precision=100.0, progress=False)
    one = x[:1]
    deployed = lw.deploy(posterior, x, PAPER if params is lw.everything else lw.Linearized(), "latent")
    calls: dict[str, Callable[[], Any]] = {"network": lambda: model(one)}
    calls |= {name: partial(posterior.latent, one, via=way) for name, way in ways.items()}
    calls["streamlined, deployed"] = lambda: deployed(one)
    with torch.no_grad():
        found = dict(zip(calls, fastest(list(calls.values()), seconds), strict=True))
    return {name: {"milliseconds": ms, "passes": ms / found["network"]} for name, ms in found.items()}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns forward passes by network and way, the paper's and ours."""
    columns = ("sampling", "GLM", "streamlined, covariances", "streamlined", "streamlined, deployed")
    rows = {}
    for name, published in PUBLISHED.items():
        passes = {way: ms / published["network"] for way, ms in published.items()}
        rows[f"{name}, paper"] = [_short(passes.get(way)) for way in columns]
        rows[f"{name}, ours"] = [_short(results[name].get(way, {}).get("passes")) for way in columns]
    return {"passes": grid(columns, rows)}


def _short(number: float | None) -> str:
    return "" if number is None else f"{float(f'{number:.3g}'):g}"
