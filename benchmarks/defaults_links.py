"""Links of classification on the grid's classifiers: one scale an input or one a class, each at its own best prior.

A last layer's posterior gives f and the variances of its contrasts once for each prior precision, of validation and
test rows; the links differ in nothing else. Validation rows choose the prior precision of each link by the NLL, alone
or together with a logit temperature, and test rows score it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import lapwing as lw
from benchmarks.grid import measures
from benchmarks.grid.networks import CELLS, Cell
from lapwing.covariance import Latent
from lapwing.covariance.terms import MarginalTerm
from papers.common.tables import grid

LINKS = {"mean": "one scale an input, mean variance", "weighted": "one scale an input, weighted by p",
         "class": "a scale for each class"}  # fmt: skip
PRECISIONS = [10 ** (exponent / 4) for exponent in range(-20, 29)]
TIED = 1e-4
"""Nats below which two links are alike."""
TEMPERATURES = {"prior": [1.0], "prior and temperature": [10 ** (exponent / 10) for exponent in range(16)]}


def split_at_last_layer(model: nn.Module, x: Tensor) -> tuple[nn.Linear, Tensor]:
    """Returns the last layer of a network, and what it gets for some inputs."""
    head = [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1]
    got: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, inputs: got.append(inputs[0].detach()))
    outputs = measures.outputs(model, x)
    hook.remove()
    assert torch.equal(head(got[-1]), outputs[-len(got[-1]) :])
    return head, torch.cat(got)


@torch.no_grad()
def latent(posterior: lw.Posterior, x: Tensor) -> Latent:
    """Returns mean and variances alone, in float64."""
    found = posterior.latent(x)
    term = MarginalTerm(found.variance.double(), found.centred_variance.double())
    return Latent(found.mean.double(), (term,))


def predicted(at: Latent, link: str, temperature: float) -> Categorical:
    """Returns class probabilities."""
    likelihood = lw.Categorical(logit_temperature=temperature)
    return likelihood.predict(at, link=lw.Probit(scale=link)).distribution()  # type: ignore[arg-type]


def rows_of(cell: Cell, seed: int = 0) -> list[dict[str, Any]]:
    """Returns a row for each link, and each choice on validation rows."""
    data = cell.data(seed)
    model = cell.trained(data, seed)
    parts = (data.train[0], data.val[0], data.test[0], data.foreign)
    (head, train), (_, val), (_, test), (_, foreign) = (split_at_last_layer(model, part) for part in parts)
    posterior = lw.fit(head, (train, data.train[1]), lw.KFAC(), tune=None, data_size=data.size, progress=False)
    at = [posterior.with_prior(precision) for precision in PRECISIONS]
    validating = [latent(one, val) for one in at]
    alone, rows, chosen = head(test).argmax(-1), [], {}
    for name, temperatures in TEMPERATURES.items():
        for link in LINKS:
            pairs = [(i, temperature) for i in range(len(at)) for temperature in temperatures]
            scores = [-predicted(validating[i], link, t).log_prob(data.val[1]).mean() for i, t in pairs]
            i, temperature = pairs[int(torch.stack(scores).nan_to_num(math.inf).argmin())]
            test_latent, foreign_latent = latent(at[i], test), latent(at[i], foreign)
            chosen[link] = prediction = predicted(test_latent, link, temperature)
            row = {"cell": cell.name, "family": cell.family, "seed": seed, "link": link, "chosen": name}
            row |= {"prior_precision": PRECISIONS[i], "logit_temperature": temperature}
            row |= measures.scores(prediction, data.test[1], predicted(foreign_latent, link, temperature))
            row |= measures.paired(prediction, chosen["mean"], data.test[1], "mean")
            rows.append({**row, "classes_changed": int((prediction.probs.argmax(-1) != alone).sum())})
    return rows


def tables(results: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Returns the table of benchmarks/README.md: means, and how many networks have a better or worse NLL than `mean`.

    By more than a standard error of the paired difference, and `TIED`.
    """
    rows = [row for some in results.values() for row in some]
    lines = []
    for name in TEMPERATURES:
        for link, words in LINKS.items():
            some = [row for row in rows if row["link"] == link and row["chosen"] == name]
            means = (statistics.fmean(row[k] for row in some) for k in ("nll", "ece", "accuracy", "auroc_entropy"))
            nll, ece, accuracy, auroc = means
            pairs = [(row["nll_minus_mean"], max(row["nll_minus_mean_error"], TIED)) for row in some]
            signs = [(worse > error) - (worse < -error) for worse, error in pairs]
            against = f"{signs.count(-1)}, {signs.count(1)}" if link != "mean" else ""
            cells = [f"{nll:.4f}", f"{ece:.4f}", f"{accuracy:.4f}", f"{auroc:.3f}", against]
            lines.append((name, [words, *cells]))
    columns = ["link", "NLL", "ECE", "accuracy", "AUROC", "networks better, worse"]
    return {"links": grid(columns, lines, corner="chosen on validation rows")}


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the classifiers of the grid."""
    return {cell.name: partial(rows_of, cell) for cell in CELLS if not cell.family.startswith("tables")}
