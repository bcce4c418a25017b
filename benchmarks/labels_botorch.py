"""BoTorch's expected posterior variance (`qNegIntegratedPosteriorVariance`) next to `posterior.value`.

*agreement*: the linearised posterior of `lw.Full()` is the one of a Gaussian process whose inputs are the gradients of
the outputs, with a linear kernel. On this process BoTorch's score must have the same numbers as `value`.

*labels*: the experiment of `benchmarks.quantities`, with the same networks, tables, seeds and measure. BoTorch's
default `SingleTaskGP` chooses the rows, fitted again in each round. *process* has its own test RMSE.

Needs `pip install botorch`, and the data sets that LAPWING_DATA names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from benchmarks.quantities import POOL, RUNS, STARTED, TABLES, chosen, data, learned, rmse, summary, trained

PACKAGES = ("botorch", "gpytorch")
PRIOR, NOISE = 1.0, 0.1  # of the network in *agreement*


class Rival:
    """A Gaussian process with the method of a posterior that `benchmarks.quantities.chosen` calls."""

    def __init__(self, process: Any) -> None:
        self.process = process

    def value(self, pool: Tensor, targets: Tensor, given: Tensor | None = None) -> Tensor:
        """Returns the fall of the summed variance of the targets by a label of each row of the pool, (n,)."""
        from botorch.acquisition import qNegIntegratedPosteriorVariance

        pool, targets, given = (None if part is None else part.double() for part in (pool, targets, given))
        with torch.no_grad():
            before = self.process.posterior(targets).variance.sum()
            score = qNegIntegratedPosteriorVariance(self.process, mc_points=targets, X_pending=given)
            return before + len(targets) * score(pool[:, None])


def agreement(table: str) -> dict[str, Any]:
    """Returns how near BoTorch's score and `value` are on the same process, and the rows that each chooses."""
    from botorch.models import SingleTaskGP
    from gpytorch.kernels import LinearKernel

    x, y, *_ = (values.double() for values in data(TABLES[table], 0))
    known, pool, targets = x[:STARTED], x[STARTED:POOL], x[POOL : POOL + 100]
    model = trained(known.float(), y[:STARTED].float(), 0).double()
    posterior = lw.fit(model, (known, y[:STARTED]), lw.Full(), likelihood=lw.Gaussian(NOISE), prior_precision=PRIOR)

    def output(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, row[None])[0, 0]

    def gradients(rows: Tensor) -> Tensor:
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        found = torch.func.vmap(torch.func.grad(output), (None, 0))(weights, rows)
        return torch.cat([part.flatten(1) for part in found.values()], 1)

    kernel = LinearKernel().double()
    kernel.variance = 1 / PRIOR
    noise = torch.full_like(y[:STARTED], NOISE)
    rival: Any = Rival(SingleTaskGP(gradients(known), y[:STARTED], noise, covar_module=kernel, outcome_transform=None))
    rows, others = gradients(pool), gradients(targets)
    value, expected = posterior.value(pool, targets), rival.value(rows, others)
    choices = [chosen("value", *of, 0).tolist() for of in ((posterior, pool, targets), (rival, rows, others))]
    return {
        "largest difference / largest value": float((value - expected).abs().max() / value.max()),
        "same order": bool((value.argsort() == expected.argsort()).all()),
        "same ten rows": choices[0] == choices[1],
    }


def of_process(_: Any, known: tuple[Tensor, Tensor]) -> Rival:
    """Returns BoTorch's default process of the rows with labels."""
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.transforms import Normalize
    from gpytorch.mlls import ExactMarginalLogLikelihood

    x, y = (part.double() for part in known)
    process = SingleTaskGP(x, y, input_transform=Normalize(x.shape[1]))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(process.likelihood, process))
    return Rival(process)


def errors(table: str, seed: int) -> tuple[list[float], list[float]]:
    """Returns the test RMSE of the network before the first round and after each, and that of the process."""
    of_network, rivals = learned(table, "value", seed, of_process)
    *_, x, y = data(TABLES[table], seed)
    with torch.no_grad():
        return of_network, [rmse(rival.process.posterior(x.double()).mean, y) for rival in rivals]


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the tables."""

    def both(table: str) -> dict[str, Any]:
        logging.getLogger("lapwing").setLevel(logging.ERROR)
        network, process = torch.tensor([errors(table, seed) for seed in range(RUNS)]).unbind(1)
        return {"agreement": agreement(table), "network": summary(network), "process": summary(process)}

    return {table: lambda table=table: both(table) for table in ("concrete", "power plant", "kin40k")}
