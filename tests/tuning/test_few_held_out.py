"""Few held-out samples, most of them right: tuning on them never costs much, because losses count a pseudo-row."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from sklearn import datasets
from torch import nn

import lapwing as lw
from tests.quick import others_slow
from tests.trained import train

SETS = [
    ("iris", 20, 0), ("iris", 42, 2), ("wine", 42, 1), ("breast_cancer", 20, 0), ("breast_cancer", 42, 1),
    ("breast_cancer", 100, 2), ("digits", 20, 2), ("digits", 42, 1), ("digits", 100, 0), ("wine", 20, 2),
]  # fmt: skip
"""Name of the table, number of held-out samples, and seed; 0, 2, 0, 0, 1, 0, 1, 4, 5 and 1 of them are wrong."""


@cache
def trained(name: str, count: int, seed: int):
    """A trained network, and its training, held-out and test data."""
    table = getattr(datasets, f"load_{name}")()
    x, y = torch.tensor(table.data).float(), torch.tensor(table.target)
    x = (x - x.mean(0)) / (x.std(0) + 1e-9)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    first = min(300, (len(x) - count) // 2)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(x.shape[1], 30), nn.Tanh(), nn.Linear(30, int(y.max()) + 1))
    parts = [(x[rows], y[rows]) for rows in order.tensor_split([first, first + count])]
    return train(model, lambda: nn.functional.cross_entropy(model(parts[0][0]), parts[0][1]), rate=0.01), *parts


TUNINGS = {
    "validation": lambda model, data, held_out: lw.fit(model, data, validation=held_out),
    "all weights": lambda model, data, held_out: lw.fit(model, data, lw.KFAC(), validation=held_out),
    "matrix": lambda model, data, held_out: lw.fit(model, data, tune=lw.Validation(held_out, calibration="matrix")),
    "temperature": lambda model, data, held_out: lw.fit(model, held_out, lw.TemperatureScaling()),
    "early stopping": lambda model, data, held_out: lw.fit(model, data, lw.KFAC(), tune=lw.EarlyStopping(held_out)),
    "mixture": lambda model, data, held_out: lw.mixture([lw.fit(model, data)] * 2, held_out),
}  # fmt: skip


@pytest.mark.parametrize("tuning", others_slow(TUNINGS, ["validation", "temperature"]))
def test_ten_small_sets_lose_next_to_nothing(tuning):
    """Without the pseudo-row, held-out samples that are all right cost up to 16 nats."""
    found = []
    for case in SETS:
        model, data, held_out, (x, y) = trained(*case)
        posterior = TUNINGS[tuning](model, data, held_out)
        with torch.no_grad():
            alone = nn.functional.cross_entropy(model(x), y)
        found.append(-float(posterior.predict(x).log_prob(y).mean()) - float(alone))
    assert sum(found) / len(found) < 0.01
    assert max(found) < 0.05


REGRESSIONS = {
    "validation": lambda held_out: {"validation": held_out},
    "given prior": lambda held_out: {"validation": held_out, "prior_precision": 1.0},
    "draws": lambda held_out: {"tune": lw.Validation(held_out, via=lw.MonteCarlo(draws=8))},
    "streamlined": lambda held_out: {"tune": lw.Validation(held_out, via=lw.Streamlined())},
    "early stopping": lambda held_out: {"tune": lw.EarlyStopping(held_out, prefixes=2)},
    "early stopping by draws": lambda held_out: {
        "tune": lw.EarlyStopping(held_out, prefixes=1, via=lw.MonteCarlo(draws=8))
    },
}
"""Options of the fits that choose σ² by held-out data."""


@pytest.mark.parametrize("tuning", REGRESSIONS)
def test_few_residuals_that_are_small_by_chance_do_not_decide_the_noise(tuning):
    """The ten smallest residuals of a table are held out: log σ² is pulled to its value by the training data."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator)
    y = x[:, :1] + 0.5 * torch.randn(400, 1, generator=generator)
    model = nn.Linear(3, 1).eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0, 0.0]]))
        model.bias.zero_()
        picked = 200 + (y - model(x))[200:, 0].abs().argsort()[:10]
    posterior = lw.fit(model, (x[:200], y[:200]), lw.Full(), **REGRESSIONS[tuning]((x[picked], y[picked])))
    residuals = float((y - x[:, :1])[picked].square().mean())
    width = float(posterior.predict(x[picked]).variance.mean())  # draws choose another σ², with more spread
    assert width / residuals == pytest.approx((0.25 / residuals) ** (1 / 11), rel=0.2)
