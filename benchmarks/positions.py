"""What a last layer over positions costs, in plain forward passes of the same batch.

A transformer that tags tokens, and convolutional networks that segment pixels, below a 1x1 and a 3x3 head. Random
weights and inputs: cost does not depend on them. CPU time on one thread; the fastest of several runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from papers.common.measure import ratio

TOKENS, CLASSES, PIXELS = (16, 64), 9, (2, 3, 224, 224)
LABELS = 21
SEED = 0


class Tagger(nn.Module):
    """Four transformer layers of width 256, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
        self.embedding, self.encoder = nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits (B, T, C)."""
        return self.head(self.encoder(self.embedding(tokens)))


def segmentation(kernel: int) -> nn.Module:
    """Returns six convolutions of 64 channels, and a head."""
    layers: list[nn.Module] = []
    for channels in (3, 64, 64, 64, 64, 64):
        layers += [nn.Conv2d(channels, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(64, LABELS, kernel, padding=kernel // 2))


def row(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Returns a fit, variances and probabilities of a batch, in forward passes."""
    forward = partial(model, x)
    posterior = lw.fit(model, [(x, y)])
    calls: dict[str, Callable[[], object]] = {
        "fit": lambda: lw.fit(model, [(x, y)], prior_precision=1.0),
        "tuned fit": lambda: lw.fit(model, [(x, y)]),
        "variance": lambda: posterior.latent(x).variance,
        "probabilities": lambda: posterior.predict(x).probs,
    }
    with torch.no_grad():
        costs = {name: ratio(call, forward, 1 if "fit" in name else 5, process_time) for name, call in calls.items()}
    ratios = {name: cost["ratio"] for name, cost in costs.items()}
    return {"forward milliseconds": costs["variance"]["reference_milliseconds"], **ratios}


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the networks."""

    def tags() -> dict[str, float]:
        return row(Tagger().eval(), torch.randint(1000, TOKENS), torch.randint(CLASSES, TOKENS))

    def maps(kernel: int) -> dict[str, float]:
        images, pixels = torch.randn(PIXELS), torch.randint(LABELS, (PIXELS[0], *PIXELS[2:]))
        return row(segmentation(kernel).eval(), images, pixels)

    name = "convolutions, 2 images of 224 x 224 pixels, 21 labels"
    heads = {f"{name}, {kernel}x{kernel} head": partial(maps, kernel) for kernel in (1, 3)}
    return {"transformer, 16 texts of 64 tokens, 9 labels": tags, **heads}
