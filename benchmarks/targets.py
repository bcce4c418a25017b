"""Other distributions of the target, by `lw.FromDistribution`, against a Gaussian with one noise, on three tables.

Positive targets are the fares of taxi rides, counts are bikes hired within an hour, heavy-tailed targets are delays of
flights. Each network is D-50-50-C, trained on the negative log likelihood of its own likelihood. 70 % of 6 000 rows
train the network and the posterior, half of the others stop the training and tune by `validation=`, half are reported
on. Fares and delays are divided by the standard deviation of the training rows, and counts keep their unit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Gamma, NegativeBinomial, StudentT

import lapwing as lw
from benchmarks.heteroscedastic import trained
from papers.common.data import batched, random_rows, rows_and_targets
from papers.common.scores import interval_scores
from papers.common.training import ONE_NOISE

SEED = 0
ROWS = 6000
EPOCHS = 60

GAMMA = lw.FromDistribution(lambda f: Gamma(f[..., :1].exp(), f[..., 1:].exp()))
NEGATIVE_BINOMIAL = lw.FromDistribution(lambda f: NegativeBinomial(f[..., :1].exp(), logits=f[..., 1:]))
STUDENT = lw.FromDistribution(lambda f: StudentT(2 + f[..., 2:].exp(), f[..., :1], f[..., 1:2].exp()))
TABLES: dict[str, tuple[str, str, dict[str, lw.Likelihood]]] = {
    "nyc_green_taxi_2023q1": ("positive", "std", {"Gamma": GAMMA}),
    "uci_bike": ("counts", "one", {"Poisson": lw.Poisson(), "NegativeBinomial": NEGATIVE_BINOMIAL}),
    "us_flights_2015jan": ("heavy-tailed", "std", {"StudentT": STUDENT}),
}
OUTPUTS = {"Gamma": 2, "NegativeBinomial": 2, "StudentT": 3}
"""Name of a likelihood -> number of outputs of its network; 1 for others."""


def table(name: str) -> tuple[Tensor, Tensor, int, int]:
    """Returns x (N, D), standardised by the first rows, y (N, 1), and where the two held-out parts begin."""
    kind, unit, _ = TABLES[name]
    x, y = (values.double() for values in rows_and_targets(name))
    kept = y.flatten() > 0 if kind == "positive" else torch.ones(len(y), dtype=torch.bool)
    x, y = x[kept], y[kept].reshape(-1, 1)
    picked = random_rows(x, ROWS, SEED)
    x, y, count = x[picked], y[picked], int(0.7 * len(picked))
    x = (x - x[:count].mean(0)) / x[:count].std(0).clamp_min(1e-6)
    return x.float(), (y / y[:count].std() if unit == "std" else y).float(), count, (count + len(x)) // 2


def study(name: str) -> dict[str, Any]:
    """Trains and fits on one table."""
    x, y, count, middle = table(name)
    parts = [slice(0, count), slice(count, middle), slice(middle, None)]
    center, scale = y[:count].mean(), y[:count].std()
    rows: dict[str, Any] = {}

    def fitted(z: Tensor, likelihood: Any, outputs: int, loss: Callable[..., Tensor]) -> Any:
        train, held_out = ((x[part], z[part]) for part in parts[:2])
        model = trained(train, held_out, outputs, lambda f, z: loss(f, z).mean(), EPOCHS)
        posterior = lw.fit(model, batched(*train, 500), lw.KFAC(), likelihood=likelihood, validation=held_out)
        return posterior.predict(x[parts[2]])

    squares = lambda f, z: (f - z).square()  # noqa: E731
    test = y[parts[2]]
    rows["Gaussian"] = interval_scores(fitted((y - center) / scale, ONE_NOISE, 1, squares).scaled(center, scale), test)
    if TABLES[name][0] == "positive":
        logs = y.log()
        middle_log, width = logs[:count].mean(), logs[:count].std()
        prediction = fitted((logs - middle_log) / width, ONE_NOISE, 1, squares).scaled(middle_log, width)
        rows["Gaussian of logarithms"] = interval_scores(prediction.transformed(torch.exp), test)
    for key, likelihood in TABLES[name][2].items():
        negative = lambda f, z, likelihood=likelihood: -likelihood.log_prob(f, z)  # noqa: E731
        rows[key] = interval_scores(fitted(y, likelihood, OUTPUTS.get(key, 1), negative), test)
    return rows


def parts() -> dict[str, Callable[[], Any]]:
    """Returns a study of each table."""
    return {name: partial(study, name) for name in TABLES}
