"""How fits and predictions grow: a ladder of weights, one of outputs, one of samples, and the exponents of each.

MLPs with two hidden layers and random weights, since cost does not depend on them. Seconds are CPU time on one thread,
the fastest of three where they are short. An exponent is the slope of log seconds over log size, by least squares over
the last three rungs; below, a call costs more than its products. Beside it stands the exponent of the count's largest
term.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import lapwing as lw
from papers.common.measure import least

SEED = 0
BATCH = 64

METHODS: dict[str, tuple[lw.Method, Any]] = {
    "last layer": (lw.KFAC(), lw.last_layer),
    "Diagonal": (lw.Diagonal(), lw.everything),
    "KFAC": (lw.KFAC(), lw.everything),
    "ELLA": (lw.ELLA(rank=10, rows=50), lw.everything),
}


WHAT = ("fit", "predict")


class Rung(NamedTuple):
    """One size: the width of the hidden layers, how many outputs, and how many samples in batches of 64 or 1 000."""

    inputs: int
    width: int
    outputs: int
    samples: int

    def network(self) -> nn.Module:
        """Returns an MLP in evaluation mode."""
        torch.manual_seed(SEED)
        first, last = nn.Linear(self.inputs, self.width), nn.Linear(self.width, self.outputs)
        return nn.Sequential(first, nn.ReLU(), nn.Linear(self.width, self.width), nn.ReLU(), last).eval()

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the data: different ones up to 1 000 samples, then the same batch of 1 000 again and again."""
        size = 1000 if self.samples >= 1000 else min(BATCH, self.samples)
        x, y = torch.randn(min(self.samples, 1000), self.inputs), torch.arange(min(self.samples, 1000)) % self.outputs
        batches = list(zip(x.split(size), y.split(size), strict=True))
        return list(repeat(batches[0], self.samples // size)) if self.samples >= 1000 else batches


LADDERS: dict[str, dict[int, Rung]] = {
    "weights": {10**k: Rung(100, width, 2, 256) for k, width in enumerate((61, 267, 950, 3112, 9950), 4)},
    "outputs": {outputs: Rung(100, 256, outputs, 256) for outputs in (2, 10, 100, 1000)},
    "samples": {10**k: Rung(20, 64, 10, 10**k) for k in range(2, 7)},
}
"""What grows -> its size -> the network and the data."""

AT_MOST: dict[str, dict[str, tuple[float, float]]] = {
    "weights": {name: (1, 1) for name in METHODS},
    "outputs": {"last layer": (3, 2), "Diagonal": (2, 2), "KFAC": (3, 2), "ELLA": (2, 2)},
    "samples": {name: (1, 0) for name in METHODS},
}
"""Exponents of a fit and of a prediction, by the largest term of the count. Where the weights grow,
factors are wider than the samples are many, so that decompositions take the range of these. Where the outputs grow, the
factor of the last layer's outputs is decomposed (3), a Fisher root has C² numbers (2), and so has the covariance of an
input. At sizes where other terms are larger the exponent is less."""


def climb(name: str) -> dict[str, Any]:
    """Returns the seconds of each method at each rung, and the exponents."""
    rows: dict[str, Any] = {method: {} for method in METHODS}
    rows["forward pass"] = {}
    for size, rung in LADDERS[name].items():
        model, batches = rung.network(), rung.batches()
        x = batches[0][0][:BATCH]
        with torch.no_grad():
            rows["forward pass"][size] = {"predict": least(lambda model=model, x=x: model(x))[1]}
        for label, (method, params) in METHODS.items():
            rows[label][size] = row = _measured(model, batches, method, params, x)
            print(name, size, label, row, flush=True)
    exponents = {label: _exponents(values) for label, values in rows.items()}
    at_most = {label: dict(zip(WHAT, AT_MOST[name][label], strict=True)) for label in METHODS}
    return {"rows": rows, "exponents": exponents, "at_most": at_most}


def _measured(model: nn.Module, batches: list, method: lw.Method, params: Any, x: Tensor) -> dict[str, Any]:
    try:
        posterior, fit = least(lambda: lw.fit(model, batches, method, params=params, progress=False))
    except lw.LapwingError as error:
        return {"refused": str(error)}
    _, predict = least(lambda: posterior.predict(x).probs)
    return {"fit": fit, "predict": predict}


def _exponents(rungs: dict[int, dict[str, Any]]) -> dict[str, float]:
    exponents = {}
    for what in WHAT:
        points = [(math.log(size), math.log(max(row[what], 1e-6))) for size, row in rungs.items() if what in row][-3:]
        if len(points) == 3:
            x, y = torch.tensor(points, dtype=torch.float64).T
            exponents[what] = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    return exponents


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the ladders."""
    return {name: partial(climb, name) for name in LADDERS}
