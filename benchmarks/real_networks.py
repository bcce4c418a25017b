"""Trained networks with error bars: the MNIST CNN and the CIFAR-10 ResNet-20 of the data folder.

Each posterior is fitted on 2 000 training images scaled to the whole training set, its prior precision chosen by the
evidence, by the bounded evidence, which is the default, and on the first 2 000 test images. The loss of each choice is
that on 500 of these, and MAP is the network itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import lapwing as lw
from papers.common.data import batched, images, joined, random_rows
from papers.common.networks import cifar_resnet20, mnist_cnn
from papers.common.tables import grid

SEED = 0
SHOWN, VALIDATION = 2000, 2000
LOSS = "nll_on_500_validation_images"
TUNINGS = ("evidence", "bounded evidence", "validation")
NETWORKS = {"mnist": (mnist_cnn, 60_000), "cifar10": (cifar_resnet20, 50_000)}
METHODS: dict[str, tuple[lw.Method | None, Any]] = {
    "last layer": (lw.KFAC(), lw.last_layer),
    "diagonal": (lw.Diagonal(), lw.everything),
    "KFAC": (lw.KFAC(), lw.everything),
    "ELLA": (lw.ELLA(rank=20, rows=500), lw.everything),
}


def study(name: str) -> dict[str, Any]:
    """Fits every method on one network, and returns the loss at each choice of the prior precision."""
    build, size = NETWORKS[name]
    model, data = build().eval(), images(name)
    picked = random_rows(data.x_train, SHOWN, SEED)
    train, validation = batched(*data.train(picked)), batched(*data.test(slice(VALIDATION)))
    some = validation[:5]
    with torch.no_grad():
        loss = nn.functional.cross_entropy(torch.cat([model(x) for x, _ in some]).double(), joined(some)[1])
    results: dict[str, Any] = {"MAP": {LOSS: float(loss)}}
    for label, (method, params) in METHODS.items():
        fit = partial(lw.fit, model, train, method, params=params, data_size=size, seed=SEED)
        fitted = fit(tune=lw.Evidence())
        validated = lw.Validation(validation, tempered=False, tolerance=0.0).tune(fitted)
        tuned = {"evidence": fitted, "bounded evidence": fit(), "validation": validated}
        results[label] = {}
        for tuning, posterior in tuned.items():
            scores = torch.cat([posterior.predict(x).log_prob(y).double() for x, y in some])
            results[label][tuning] = {"prior_precision": posterior.prior_precision, LOSS: -float(scores.mean())}
        print(label, results[label], flush=True)
    return results


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the networks."""
    return {name: partial(study, name) for name in NETWORKS}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Returns the loss of each posterior by the evidence, the bounded evidence and validation."""
    columns = {"mnist": "MNIST CNN", "cifar10": "CIFAR-10 ResNet-20"}
    rows = {label: [", ".join(f"{results[name][label][tuning][LOSS]:.3f}" for tuning in TUNINGS) for name in columns]
            for label in METHODS}  # fmt: skip
    headings = [f"{text}, network {results[name]['MAP'][LOSS]:.3f}" for name, text in columns.items()]
    return {"loss": grid(headings, rows, corner="posterior")}
