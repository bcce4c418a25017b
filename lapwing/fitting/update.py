"""What `Posterior.update` does: the curvature and statistics of further data, at the same weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..errors import LapwingError, shown
from ..methods import DataSummary, FisherRoot, Problem
from ..methods.further import Further
from ..network.data import as_loader
from ..network.eager import outside_modes
from ..network.loaders import check_progress, first_batch
from ..posterior import Posterior
from ..tuning import Evidence, Training, Tuning, Validation
from .fit import _checked
from .runner import Runner


@outside_modes
def updated(posterior: Posterior, loader: Any, tune: Tuning | None, progress: bool | None) -> Posterior:
    """Returns the posterior of the data so far and of those in a loader: see `Posterior.update`."""
    if tune is not None and not isinstance(tune, (Evidence, Validation)):
        raise LapwingError(
            f"update(tune={shown(tune)}) is not an option, since the former data are not there. Write "
            "tune=lw.Evidence() or tune=lw.Validation(loader), or leave it out to keep the prior and the noise."
        )
    check_progress(progress)
    if posterior.data_factor != 1:
        raise LapwingError(
            f"The posterior stands for {posterior.data_factor:g} times the data of its fit, and further data have no "
            "place in that. Fit to all data at once, with data_size=."
        )
    tangent, likelihood = posterior.tangent, posterior.likelihood
    loader = as_loader(loader, posterior.model)
    first_batch(loader)
    runner = Runner(loader, progress)
    seed = posterior.samples  # draws for the further data are not those for the data so far
    traces = bool(getattr(posterior.covariance, "traces", torch.zeros(1)).any())
    problem = Problem(
        tangent, likelihood, FisherRoot(likelihood, tangent.outputs, torch.Generator(tangent.device).manual_seed(seed)),
        posterior.prior, traces, seed, runner.labels, runner.count, runner.summary, posterior.temperature,
    )  # fmt: skip
    result = runner.run(Further(posterior.covariance, posterior.method), problem)
    summary = DataSummary(posterior.samples, posterior.statistics).added(runner.summary())
    whole = replace(
        posterior, covariance=result.covariance, samples=summary.samples, statistics=summary.statistics
    ).at(posterior.prior.precision, posterior.noise_variance)  # fmt: skip
    return _checked(whole if tune is None else tune.tune(whole, Training(loader, (), runner.count())))


Posterior.updating = staticmethod(updated)
