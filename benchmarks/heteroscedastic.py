"""Noise that depends on the input: networks that predict it against one noise variance for all, on three tables.

Two networks of two hidden layers a table: one output, trained on squared errors, with constant noise; and a mean and a
log variance, trained on the Gaussian NLL, with `lw.HeteroscedasticGaussian()`. 70 % of the rows to train with, half of
the others to stop by, half to report on: NLL in standardised units, how much a 90 % interval covers, its mean width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from papers.common.data import Part, batched, some_rows
from papers.common.networks import mlp
from papers.common.scores import interval_scores
from papers.common.training import Loss, of_best_epoch, shuffled, train

SEED = 0
ROWS = 6000
TABLES = ("uci_bike", "california_housing", "uci_naval")


def loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Returns squared errors, or the Gaussian NLL of two outputs."""
    if outputs.shape[1] == 1:
        return (outputs - y).square().mean()
    mean, log_variance = outputs.chunk(2, -1)
    return F.gaussian_nll_loss(mean, y, log_variance.exp(), eps=1e-6)


def trained(data: Part, held_out: Part, outputs: int, loss: Loss = loss, epochs: int = 100) -> nn.Module:
    """Trains D-50-50-C; returns it after the epoch of least held-out loss."""
    torch.manual_seed(SEED)
    model = mlp(data[0].shape[1], 50, 50, outputs)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)

    def epoch() -> None:
        train(model, data, shuffled(len(data[0]), 128, epochs=1), optimiser, loss, clip=5.0)
        schedule.step()

    return of_best_epoch(model, epoch, lambda: loss(model(held_out[0]), held_out[1]), epochs)


def scores(prediction: Any, y: Tensor) -> dict[str, float]:
    """Returns the numbers of one posterior."""
    return {**interval_scores(prediction, y), "rmse": float((prediction.mean - y).double().square().mean().sqrt())}


def study(name: str) -> dict[str, Any]:
    """Trains and fits on one table."""
    data = some_rows(name, ROWS, SEED)
    train, held_out, test = batched(*data.train, 500), data.val, data.test
    one, two = (trained(data.train, held_out, outputs) for outputs in (1, 2))
    constant, both = lw.Gaussian(noise="constant"), lw.HeteroscedasticGaussian()
    fits = {
        "one noise": lw.fit(one, train, likelihood=constant),
        "one noise, validation": lw.fit(one, train, likelihood=constant, validation=[held_out]),
        "predicted noise": lw.fit(two, train, lw.KFAC(), params=lw.last_layer, likelihood=both),
        "predicted noise, KFAC of all": lw.fit(two, train, lw.KFAC(), likelihood=both),
        "predicted noise, validation": lw.fit(two, train, lw.KFAC(), likelihood=both, validation=[held_out]),
    }
    result = {key: scores(fit.predict(test[0]), test[1]) for key, fit in fits.items()}
    with torch.no_grad():
        residual = float(torch.cat([(one(a) - b).square() for a, b in train]).mean())
        alone = lw.Gaussian(residual).log_prob(one(test[0]), test[1]), both.log_prob(two(test[0]), test[1])
    result["networks alone"] = dict(
        zip(("one noise", "predicted noise"), (-float(v.mean()) for v in alone), strict=True)
    )
    return result


def parts() -> dict[str, Callable[[], Any]]:
    """Returns a study of each table."""
    return {name: partial(study, name) for name in TABLES}
