"""Whether a better covariance still pays once the noise is right: every Laplace method with three kinds of noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

import lapwing as lw
from lapwing.likelihoods import Likelihood
from papers.common.networks import mlp
from papers.common.results import Rows, once
from papers.common.scores import interval_scores, paired
from papers.common.tables import grid, shown
from papers.common.training import ONE_NOISE, kept, seeded
from papers.together import tasks
from papers.together.methods import POSTERIORS, TABLES_ONLY
from papers.together.tasks import Task

BASE = "no covariance"
"""The network with its noise: a diagonal posterior of a prior precision so large that its variances vanish."""
PRECISION = 1e12

OTHERS = (
    "recommended call", "VaLLA, natural gradients", "sampled LLA", "SWAG", "IVON", "mean field, fine-tuned",
    "VaLLA, α-divergence",
)  # fmt: skip
"""Methods that equal another row here, that train the network or the noise, or that take one noise variance."""
FITS: dict[str, Callable[[Task], lw.Posterior]] = {
    BASE: lambda task: lw.fit(
        task.model, task.loader, lw.Diagonal(), prior_precision=PRECISION, validation=task.val, **task.options
    ),
    **{name: fit for name, fit in POSTERIORS.items() if "no held-out data" not in name and name not in OTHERS},
    **TABLES_ONLY,
}
"""Name -> fit, tuned by held-out data."""

ONE, RESIDUALS, OUTPUT = "one noise variance", "noise of the residuals", "a second output for the variance"
LIKELIHOODS: dict[str, Likelihood] = {ONE: ONE_NOISE, RESIDUALS: lw.Gaussian(), OUTPUT: lw.HeteroscedasticGaussian()}


@dataclass(frozen=True)
class Noisy(Task):
    """A task whose fits have a likelihood of their own."""

    likelihood: Likelihood = ONE_NOISE

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "likelihood": self.likelihood}


def run(seeds: Sequence[int] = range(5), names: Sequence[str] = tuple(tasks.TABLES)) -> dict[str, Any]:
    """Returns the scores of each noise and method on each table, and the gains over two networks without covariance."""
    rows = Rows(__file__, {"held out": tasks.HELD_OUT, "tested": tasks.TESTED})
    for seed in seeds:
        for name in names:
            for noise in LIKELIHOODS:
                task = once(partial(noisy, name, seed, noise))
                for method in FITS:
                    rows.add(f"{name}, seed {seed}", label(noise, method), row, task, method)
    rows.facts["noise"] = gains(rows.runs, lambda noise: label(ONE, BASE))
    rows.facts["covariance"] = gains(rows.runs, lambda noise: label(noise, BASE))
    return rows.all()


def label(noise: str, method: str) -> str:
    """Returns the name of a row."""
    return f"{noise}, {method}"


def noisy(name: str, seed: int, noise: str) -> Noisy:
    """Returns a table and its network; with a second output the network is trained on the Gaussian NLL."""
    found = tasks.table(name, seed)
    if noise == OUTPUT:
        assert found.training is not None
        data, recipe = found.training.data, replace(found.training.recipe, loss=nll)
        with seeded(seed):
            model = mlp(data[0].shape[1], 50, 50, 2)
        made = kept(model, f"together_noise_{name}_{seed}", lambda: recipe.train(model, data, seed))
        found = replace(found, model=made)
    return Noisy(**vars(found), likelihood=LIKELIHOODS[noise])


def nll(outputs: Tensor, y: Tensor) -> Tensor:
    """Returns the Gaussian NLL of means and log variances."""
    return -lw.HeteroscedasticGaussian().log_prob(outputs, y).mean()


def row(task: Callable[[], Noisy], method: str) -> dict[str, float]:
    """Returns NLL, coverage, width and RMSE through linearised prediction, as fitted with held-out data."""
    x, y = task().test
    prediction: Any = FITS[method](task()).predict(x)
    error = (prediction.mean - y).double().square().mean().sqrt()
    return {**interval_scores(prediction, y), "rmse": float(error)}


def gains(runs: Mapping[str, Mapping[str, Any]], base: Callable[[str], str]) -> dict[str, Any]:
    """Returns by table and row how much lower its NLL is than that of the row `base(noise)`, paired by seed."""

    def gained(rows: Mapping[str, Any]) -> dict[str, float]:
        pairs = {label(noise, method): base(noise) for noise in LIKELIHOODS for method in FITS}
        return {name: rows[of]["nll"] - rows[name]["nll"] for name, of in pairs.items() if {name, of} <= rows.keys()}

    return paired(runs, gained)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns what the noise gains without a covariance, and by noise what each covariance adds."""
    names = list(results["table"])
    columns = [f"{name}: {what}" for name in names for what in ("gain", "coverage", "RMSE")]
    lines = {}
    for noise in LIKELIHOODS:
        cells = []
        for name in names:
            found, key = results["table"][name], label(noise, BASE)
            gain = "" if noise == ONE else shown(results["noise"][name].get(key))
            cells += [gain, shown(found[key]["coverage"]), shown(found[key]["rmse"])]
        lines[noise] = cells
    tables = {"noise": grid(columns, lines)}
    for noise in LIKELIHOODS:
        some = {
            method: [shown(results["covariance"][name].get(label(noise, method))) for name in names]
            for method in FITS
            if method != BASE
        }
        tables[noise] = grid(names, some)
    return tables
