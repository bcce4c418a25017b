"""Every feature has the numbers of the CPU where the network is on a GPU: a pretended one, or by `make test-gpu` a GPU.

What only a real GPU can show is its own arithmetic; a pretended one shows tensors, generators and indices that are left
on the CPU.
"""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.prediction.way import Way
from tests.conformance import on_device
from tests.pretended_device import Device
from tests.quick import others_slow
from tests.test_half_precision import FEATURES, novelty

REAL = os.environ.get("LAPWING_DEVICE")
WAYS: list[Way] = [
    lw.Linearized(),
    lw.Streamlined(),
    lw.Streamlined(positions="independent"),
    lw.Scaled(lw.Linearized(), 2.0),
]


def classes(model: nn.Module, x: Tensor, outputs: int) -> tuple[lw.Posterior, list[tuple[Tensor, Tensor]]]:
    data = [(x[:5], torch.arange(5) % outputs), (x[5:], torch.arange(5, len(x)) % outputs)]
    return lw.fit(model, data, lw.KFAC(), params=lw.everything, prior_precision=2.0), data


def ways(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    posterior, _ = classes(model, x, outputs)
    return [part for way in WAYS for part in (posterior.latent(x, way).variance, posterior.predict(x, way).probs)]


def joint_latents(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    posterior, _ = classes(model, x, outputs)
    return [posterior.latent(x, joint=True).covariance, posterior.latent(lw.Uncertain(x, 0.1)).variance]


def inputs(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    return [lw.propagate(model, lw.Uncertain(x, 0.1)).covariance]


def deployed(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    posterior, data = classes(model, x, outputs)
    detector = lw.novelty(model, data)
    return [part for way in WAYS[1:3] for part in lw.deploy(posterior, x, way, novelty=detector)(x)]


def detector(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    posterior, data = classes(model, x, outputs)
    held_out = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    found = lw.novelty(posterior, data, held_out=(held_out, torch.arange(60) % outputs))
    path = Path(os.environ["PYTEST_TMP"]) / "detector.safetensors"
    found.save(path)
    return [found(3 * x), found.p_value(3 * x), lw.Novelty.load(path, posterior).p_value(3 * x)]


def saved(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    posterior, data = classes(model, x, outputs)
    path = Path(os.environ["PYTEST_TMP"]) / "posterior.safetensors"
    posterior.save(path)
    loaded = lw.load(path, model)
    return [loaded.predict(x).probs, loaded.update(data).predict(x).probs]


def tuned(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    _, data = classes(model, x, outputs)
    found = []
    for tune in (lw.Evidence(), lw.BoundedEvidence(), lw.Validation(data), lw.EarlyStopping(data), None):
        found.append(lw.fit(model, data, lw.KFAC(), tune=tune, params=lw.everything).predict(x).probs)
    return found


def regression(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    y = torch.linspace(-1, 1, outputs * len(x)).reshape(len(x), outputs).to(x)
    found = []
    for tune in (lw.Evidence(), lw.BoundedEvidence(), lw.Validation((x, y)), None):
        prediction = lw.fit(model, (x, y), lw.KFAC(), likelihood="gaussian", tune=tune).predict(x)
        found += [prediction.std, *prediction.interval(0.9), prediction.log_prob(y)]
    return found


def positions(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    rows, y = x.reshape(4, 3, -1), torch.arange(12).reshape(4, 3) % outputs
    posterior = lw.fit(model, [(rows, y)], lw.KFAC(), params=lw.everything, prior_precision=2.0)
    return [posterior.latent(rows).variance, posterior.predict(rows).probs]


def scaled(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    posterior, _ = classes(model, x, outputs)
    way = lw.scale_factor(posterior, x, via=lw.Streamlined(), to=lw.Linearized())
    return [posterior.latent(x, way).variance]


def together(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    posterior, data = classes(model, x, outputs)
    other, _ = classes(copy.deepcopy(model), x, outputs)
    mixed = lw.mixture([posterior, other])
    detector = lw.novelty(model, data)
    table = lw.compare({"KFAC": posterior, "both": mixed}, data, {"far": 3 * x}, score=detector, repeats=1)
    return [mixed.predict(x).probs, torch.tensor([row["NLL"] for row in table.rows.values()])]


def quantities(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    posterior, data = classes(model, x, outputs)
    return [posterior.of(lambda f, batch: f(batch[0]).sum(0), data).covariance, posterior.of(lambda f: f(x)[:2]).std]


def matrix(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    held_out = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    labels = torch.arange(60) % outputs
    _, data = classes(model, x, outputs)
    tune = lw.Validation((held_out, labels), calibration="matrix")
    return [lw.fit(model, data, tune=tune).predict(x).probs]


MORE = [
    matrix, ways, joint_latents, inputs, deployed, detector, saved, tuned, regression, positions, scaled, together,
    quantities,
]  # fmt: skip

DRAWN = {"distribution": 0.05, "scaled": 0.05, "sampled": 0.3}
"""Relative tolerance of features with random draws, which differ on a GPU; of "sampled" there are few."""

ALL = [*(each for each in FEATURES if each.__name__ != "matrix"), *MORE]


@pytest.mark.parametrize("feature", others_slow(ALL, [quantities, novelty]), ids=lambda feature: feature.__name__)
def test_a_network_on_a_gpu_has_the_numbers_of_the_cpu(
    feature: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if feature is deployed and REAL != "cuda":
        pytest.skip("torch.export takes no pretended tensors")
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double().eval()
    x = torch.randn(12, 4, dtype=torch.float64)
    wanted = feature(model, x, 3)
    with nullcontext() if REAL else Device("cuda") as device:
        there = device.module(model) if device else on_device(model)
        found = feature(there, device.put(x) if device else x.to(next(there.parameters()).device), 3)
        found = [part.cpu() for part in found]
    for one, other in zip(found, wanted, strict=True):
        tolerance = DRAWN.get(feature.__name__, 1e-7)
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))
