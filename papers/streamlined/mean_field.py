"""MFVI-BF of ELLA's Table 1: mean field on the CIFAR-10 ResNet-20, with other ways through the same posterior."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.prediction import Way
from papers.common.cifar import Cifar
from papers.common.data import Batches, joined
from papers.common.results import Rows, once
from papers.common.scores import probabilities
from papers.common.tables import grid, shown
from papers.streamlined.setting import CORRELATED, PAPER, labels, outputs, scores

PUBLISHED = {"MFVI-BF": {"accuracy": 0.927, "nlpd": 0.231, "ece": 0.016}}
"""On another ResNet-20 (MAP 92.6 %)."""


def run(seeds: Sequence[int] = range(5), reported: int = 3000, draws: int = 10) -> dict[str, Any]:
    """Returns scores of the network, of its moved mean, and of every way."""
    rows = Rows(__file__, {"reported": reported, "draws": draws})
    for seed in seeds:
        _add(rows, seed, reported, draws)
    return rows.all()


def _add(rows: Rows, seed: int, reported: int, draws: int) -> None:
    run, setup = f"seed {seed}", once(lambda: Cifar.load(seed, 14_000, reported))
    posterior = once(lambda: resnet_variational(setup(), seed))
    rows.add(run, "MAP", lambda: outputs_row(setup().model, setup().test))
    rows.add(run, "one temperature", lambda: one_temperature(setup()))
    rows.add(run, "moved mean", lambda: outputs_row(posterior().model, setup().test))
    ways: dict[str, tuple[Way, int | None]] = {
        "sampling": (lw.MonteCarlo(draws), None), "streamlined": (PAPER, None),
        "streamlined, positions correlated": (CORRELATED, None),
        "sampling, first 500": (lw.MonteCarlo(draws), 5), "streamlined, first 500": (PAPER, 5),
        "streamlined, positions correlated, first 500": (CORRELATED, 5), "GLM, first 500": (lw.Linearized(), 5),
    }  # fmt: skip
    for label, chosen in ways.items():
        rows.add(run, label, lambda w, n: scaled_row(posterior(), w, setup().val[:4], setup().test[:n]), *chosen)


def resnet_variational(setup: Cifar, seed: int, steps: int = 300) -> lw.Posterior:
    """Fine-tunes the ResNet-20 on flipped and shifted training images, in batches of 64."""
    x, y = joined(setup.train)
    loader = [(shifted(a, seed + i), b) for i, (a, b) in enumerate(zip(x.split(64), y.split(64), strict=True))]
    return lw.fit(
        setup.model, loader, lw.MeanField(steps), params=lw.everything, data_size=50_000, seed=seed, progress=False
    )


def shifted(x: Tensor, seed: int, most: int = 4) -> Tensor:
    """Mirrors half of the images (B, channels, H, W) and shifts all by up to 4 pixels a side, zeros coming in."""
    generator = torch.Generator().manual_seed(seed)
    mirrored = (torch.rand(len(x), generator=generator) < 0.5).to(x.device)
    x = torch.where(mirrored[:, None, None, None], x.flip(3), x)
    wide, (height, width) = F.pad(x, (most,) * 4), x.shape[2:]
    places = torch.randint(0, 2 * most + 1, (len(x), 2), generator=generator).tolist()
    return torch.stack([one[:, a : a + height, b : b + width] for one, (a, b) in zip(wide, places, strict=True)])


def outputs_row(model: nn.Module, part: Batches) -> dict[str, float]:
    """Returns scores of a network whose outputs are logits."""
    with torch.no_grad():
        return scores(torch.cat([outputs(model, x).softmax(-1) for x, _ in part]), labels(part))


def one_temperature(setup: Cifar) -> dict[str, float]:
    """Returns scores of the network at one temperature, from the images that choose the factor of `scaled_row`."""
    posterior = lw.fit(setup.model, setup.val[:4], lw.TemperatureScaling())
    return scores(probabilities(posterior, posterior.latent(setup.test)), labels(setup.test))


def scaled_row(posterior: lw.Posterior, way: Way, val: Batches, test: Batches) -> dict[str, Any]:
    """Scores a way as it is, and with the factor of its covariance that validation data ask for."""
    factor = lw.scale_factor(posterior, val, way).factor
    latent = posterior.latent(test, way)
    found: dict[str, Any] = {"factor": factor}
    for name, multiple in (("plain", 1.0), ("scaled", factor)):
        found[name] = scores(probabilities(posterior, latent.scaled(multiple)), labels(test))
    return found


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the scores of every way, plain and with the factor of the validation images."""
    rows = {}
    for name, found in results["table"][""].items():
        plain, scaled = found.get("plain", found), found.get("scaled", {})
        cells = [shown(part.get(key)) for key in ("nlpd", "ece") for part in (plain, scaled)]
        rows[name] = [*cells, shown(found.get("factor"), 1)]
    return {"scores": grid(["NLPD", "NLPD x factor", "ECE", "ECE x factor", "factor"], rows)}
