"""ELLA beside the other methods on the ResNet-20 (Deng et al. 2022): Table 1's column, Figures 3 and 4 (a, c)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw

from ..likelihoods import ClassPrediction
from ..tuning import Tuning
from .data import CENTRE_AND_SCALE, images
from .ella_cifar import Cifar


def cifar_posteriors(
    setup: Cifar, seed: int
) -> tuple[dict[str, Callable[[Tensor], Tensor]], dict[str, dict[str, Any]]]:
    """Fits every method of Table 1 to the ResNet-20, tuned on the validation images.

    ELLA chooses the number of its training images too (section 5.2); for the others, whose features cost more,
    the prior precision alone is chosen, on 500 of the validation images.

    Returns:
        method -> images to class probabilities, MAP among them; and method -> what was chosen.
    """
    methods: dict[str, tuple[lw.Method, Any, Tuning]] = {
        "ELLA": (lw.ELLA(rank=20, rows=2000), lw.everything, lw.EarlyStopping(setup.val)),
        "last layer, KFAC": (lw.KFAC(), lw.last_layer, lw.Validation(setup.val[:5])),
        "last layer, full, early stopping": (lw.Full(), lw.last_layer, lw.EarlyStopping(setup.val)),
        "diagonal": (lw.Diagonal(), lw.everything, lw.Validation(setup.val[:5])),
        "KFAC": (lw.KFAC(), lw.everything, lw.Validation(setup.val[:5])),
    }

    def plain(x: Tensor) -> Tensor:
        with torch.no_grad():
            return setup.model(x).softmax(-1)

    predict: dict[str, Callable[[Tensor], Tensor]] = {"MAP": plain}
    chosen: dict[str, dict[str, Any]] = {}
    for name, (method, params, tune) in methods.items():
        start = time.perf_counter()
        posterior = lw.fit(
            setup.model, setup.train, method, params=params, tune=tune, data_size=50_000, seed=seed, memory=2**32
        )
        chosen[name] = {
            "fit_seconds": time.perf_counter() - start, "prior_precision": posterior.prior_precision,
            "images": posterior.samples,
        }  # fmt: skip
        predict[name] = partial(_probabilities, posterior)
    return predict, chosen


def _probabilities(posterior: lw.Posterior, x: Tensor) -> Tensor:
    prediction = posterior.predict(x)
    assert isinstance(prediction, ClassPrediction)
    return prediction.probs


def error_against_confidence(probs: Tensor, labels: Tensor, foreign: Tensor) -> list[dict[str, float]]:
    """Returns the error of inputs predicted above each confidence, foreign ones always being errors (Figure 4 a)."""
    confidence = torch.cat([probs.amax(-1), foreign.amax(-1)])
    wrong = torch.cat([probs.argmax(-1) != labels, torch.ones(len(foreign), dtype=torch.bool)])
    rows = []
    for i in range(10):
        above = confidence >= i / 10
        rows.append(
            {"confidence": i / 10, "error": float(wrong[above].double().mean()), "kept": float(above.double().mean())}
        )
    return rows


def fashion_as_cifar(count: int) -> Tensor:
    """Returns Fashion-MNIST test images padded to 32 x 32, in three channels, normalised as the ResNet-20 expects."""
    x = images("fashion_mnist").x_test[:count]
    x = nn.functional.pad(x, (2, 2, 2, 2)).expand(-1, 3, -1, -1)
    return normalised(x)


CENTRE, SCALE = (torch.tensor(values)[:, None, None] for values in CENTRE_AND_SCALE["cifar10"])


def normalised(pixels: Tensor) -> Tensor:
    """Returns pixels of [0, 1] as the ResNet-20 expects them."""
    return (pixels - CENTRE) / SCALE


def pixels(x: Tensor) -> Tensor:
    """Returns normalised images as pixels of [0, 1]."""
    return (x * SCALE + CENTRE).clamp(0, 1)
