"""Adds further data to a posterior: at the same weights (`Posterior.update`), or after further training (`prior=`)."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from .. import ranks
from ..covariance import has_rank
from ..data import batches
from ..data.data import Data
from ..display import warns_once
from ..errors import LapwingError, check_flag, shown
from ..methods import DataSummary, FisherRoot, Problem
from ..methods.updating import Update
from ..network.entry import outside_modes
from ..network.gate import checked_network
from ..network.stamp import Stamp
from ..posterior import Posterior
from ..posterior.former import precision_product
from ..posterior.prior import Prior
from ..tangent import Tangent
from ..tuning import Evidence, Training, Tuning, Validation
from .checkpoint import Checkpoint
from .fingerprints import check_same_network
from .fit_data import with_joined_data
from .options import FitOptions
from .result import checked, tuned
from .runner import Runner

log = logging.getLogger("lapwing")

FAR = 4.0  # mean squared residual of further data, in noise variances, above which a warning is logged


@warns_once
@outside_modes
@ranks.across_ranks()
def updated(
    posterior: Posterior, loader: Any, tune: Tuning | None, sample_weights: bool, progress: bool | None
) -> Posterior:
    """Returns the posterior of the former data plus the data of a loader: see `Posterior.update`."""
    if tune is not None and not isinstance(tune, (Evidence, Validation)):
        raise LapwingError(
            f"update(tune={shown(tune)}) is not an option, since it needs the former data. Write tune=lw.Evidence() or "
            "tune=lw.Validation(loader), or leave it out to keep the prior and the noise."
        )
    check_flag("posterior.update", "sample_weights", sample_weights)
    data = Data.of(loader, posterior, sample_weights)
    data.first  # noqa: B018 (checks the data)
    remedy = (
        "Pass tune=lw.Validation(newest) with held-out data like these, or train the network further and fit again."
    )
    whole = _with_data(posterior, posterior.tangent, data, remedy if tune is None else None)
    tune = with_joined_data(tune, data, posterior.model)
    return checked(whole if tune is None else tuned(tune, whole, Training()))


def continued(
    options: FitOptions, former: Posterior, model: Any, loader: Any, checkpoint: Checkpoint | None
) -> Posterior:
    """Returns the posterior of further data with a former posterior as the prior: see `lw.fit`."""
    former._check_network()
    _check_invertible(former)
    data = Data.of(loader, former, options.sample_weights)
    inputs, _ = batches.split(data.first)
    tangent = _surveyed(options, former.tangent, model, inputs, former.likelihood.activation)
    if checkpoint is not None:
        checkpoint.open(data, options, tangent)
    with checkpoint or nullcontext():
        remedy = "Train the network longer on them, or fit without prior=, which tunes the noise variance again."
        whole = _with_data(former, tangent, data, remedy, checkpoint)
    return replace(
        whole, prior=Prior(former.prior.precision, former.tangent.mean(), fixed=True), noise_fixed=True, history={},
        method=replace(whole.method, after_former=True), stamp=Stamp.of(tangent.state()),
    )  # fmt: skip


def _with_data(
    posterior: Posterior, tangent: Tangent, data: Data, remedy: str | None, checkpoint: Checkpoint | None = None
) -> Posterior:
    """Returns the posterior with the curvature, at the weights of `tangent`, and the statistics of further data added.

    With a `remedy`, a warning names it if the residuals of further data are far larger than the noise variance.
    """
    if posterior.data_factor != 1:
        raise LapwingError(
            f"The posterior counts each sample of its fit {posterior.data_factor:g} times, so further data cannot be "
            "added. Fit to all data at once, with data_size=."
        )
    likelihood = posterior.likelihood.of_statistics(posterior.statistics)
    runner = Runner(data, checkpoint=checkpoint)
    check_same_network(tangent.model, tangent.state())
    seed = posterior.samples  # differs from the default seed 0, and from the seed of an earlier update
    problem = Problem(
        tangent=tangent, likelihood=likelihood, root=FisherRoot.of(tangent, likelihood, seed + ranks.rank()),
        prior=posterior.prior, traces_wanted=bool(getattr(posterior.covariance, "traces", torch.zeros(1)).any()),
        seed=seed, labels=runner.labels, count=runner.count, summary=runner.summary,
        temperature=posterior.temperature,
    )  # fmt: skip
    result = runner.run(Update(posterior.covariance, posterior.method), problem)
    further = runner.summary()
    residual, noise = likelihood.residual_variance(further.statistics), posterior.noise_variance
    if remedy is not None and residual is not None and noise is not None and residual > FAR * noise:
        log.warning(
            "The mean squared residual of the further data is %.3g, %.2g times the noise variance, which stays at "
            "%.3g: the network predicts these data worse than expected, and they narrow its predictions all the same. "
            "%s", residual, residual / noise, noise, remedy,
        )  # fmt: skip
    summary = DataSummary(posterior.samples, posterior.statistics).added(further)
    weighted = posterior.method.sample_weights or data.weighted
    whole = replace(
        posterior, tangent=tangent, covariance=result.covariance, samples=summary.samples,
        statistics=summary.statistics,
        method=replace(posterior.method, first_samples=None, sample_weights=weighted),
    )  # fmt: skip
    return whole.at(posterior.prior.precision, posterior.noise_variance)


def _check_invertible(former: Posterior) -> None:
    """Raises if the covariance has no inverse, or is a subspace, which lacks the directions of further data."""
    covariance = former.covariance
    zeros = {b.name: torch.zeros(b.size, dtype=covariance.dtype, device=covariance.device) for b in covariance.blocks}
    precision_product(covariance, zeros, former.method)
    if has_rank(covariance) and covariance.continued_by == "basis":
        raise LapwingError(
            f"The posterior by {former.method} has only the directions of its own data, and further data have other "
            "directions. Fit lw.KFAC(), lw.Diagonal() or lw.Full()."
        )


def _surveyed(options: FitOptions, former: Tangent, model: Any, inputs: Any, activation: str | None) -> Tangent:
    """Surveys the network that was trained further, with the parameters of the former fit."""
    if isinstance(model, torch.nn.Module):
        present = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if not present.issuperset(former.parameters):
            raise _other_network(model, former)
    forward = options.forward or former.call.forward
    call = replace(former.call, model=checked_network(model, False), forward=forward, activation=activation, looks=True)
    memory = options.memory or former.memory
    tangent = Tangent.survey(call, inputs, lambda name, _: name in former.parameters, memory=memory)
    if tangent.blocks != former.blocks or tangent.outputs != former.outputs:
        raise _other_network(tangent.model, former)
    return tangent


def _other_network(model: Any, former: Tangent) -> LapwingError:
    return LapwingError(
        f"{type(model).__name__} has other layers than the network of the former posterior, "
        f"{type(former.model).__name__} with {former.outputs} outputs. Train a copy of that network further."
    )
