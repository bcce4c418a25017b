"""Further data: added to a posterior, at its weights or at others; and the posterior's penalty for further training."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import ranks
from ..covariance import Covariance, has_prior, has_rank
from ..data.data import Data
from ..errors import LapwingError, check_flag, shown
from ..methods import DataSummary, FisherRoot, Problem
from ..methods.updating import Update
from ..network.eager import own_parameters, real, uncompiled
from ..network.entry import full_precision
from ..running.fingerprints import check_same_network
from ..running.runner import NoCheckpoint, Runner
from ..tangent import Tangent, join
from ..tangent.retry import entry
from .method_info import MethodInfo
from .tuned import Training, Tuning, checked, tuned

if TYPE_CHECKING:
    from .posterior import Posterior

log = logging.getLogger("lapwing")

FAR = 4.0  # mean squared residual of further data, in noise variances, above which a warning is logged


@entry("The update", "Pass smaller batches, or load the posterior with a smaller memory=... of lw.load.")
def updated(posterior: Posterior, loader: Any, tune: Any, sample_weights: bool) -> Posterior:
    """Returns the posterior of the former data plus the data of a loader: see `Posterior.update`."""
    usable = isinstance(tune, Tuning) and tune.tunes_updates
    if tune is not None and not usable:
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
    whole = with_data(posterior, posterior.tangent, data, remedy if tune is None else None)
    if tune is None:
        return checked(whole)
    if tune.loader is not None:
        tune = replace(tune, loader=Data.of(tune.loader, posterior).on_first_rank())
    return checked(tuned(tune, whole, Training()))


def with_data(
    posterior: Posterior, tangent: Tangent, data: Data, remedy: str | None, checkpoint: NoCheckpoint | None = None
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
    if ranks.several():
        check_same_network(tangent.model)
    seed = posterior.samples  # differs from the default seed 0, and from the seed of an earlier update
    problem = Problem(
        tangent=tangent, likelihood=likelihood, root=FisherRoot.of(tangent, likelihood, seed + ranks.rank()),
        prior=posterior.prior, traces_wanted=bool(getattr(posterior.covariance, "traces", torch.zeros(1)).any()),
        seed=seed, temperature=posterior.temperature,
    )  # fmt: skip
    result = runner.run(Update(posterior.covariance, posterior.method), problem)
    further = result.summary
    assert further is not None  # `Runner.run` sets it
    residual, noise = likelihood.residual_variance(further.statistics), posterior.noise_variance
    if remedy is not None and residual is not None and noise is not None and residual > FAR * noise:
        log.warning(
            "The mean squared residual of the further data is %.3g, %.2g times the noise variance, which stays at "
            "%.3g: the network predicts these data worse than expected, and they narrow its predictions all the same. "
            "%s", residual, residual / noise, noise, remedy,
        )  # fmt: skip
    summary = DataSummary(posterior.samples, posterior.statistics).added(further)
    weighted = posterior.method.sample_weights or data.weighted
    likelihood, factor = posterior.likelihood.with_further(posterior.statistics, summary.statistics)
    whole = replace(
        posterior, tangent=tangent, covariance=result.covariance, samples=summary.samples,
        statistics=summary.statistics, likelihood=likelihood, temperature=posterior.temperature * factor,
        method=replace(posterior.method, first_samples=None, sample_weights=weighted),
    )  # fmt: skip
    return whole.at(posterior.prior.precision)


@full_precision
def penalty(tangent: Tangent, covariance: Covariance, model: Any, method: MethodInfo) -> Tensor:
    """Returns `1/2 (θ - θ̂)ᵀ Σ⁻¹ (θ - θ̂)` at the weights θ of another network: see `Posterior.penalty`."""
    parameters = tangent.parameters
    named = own_parameters(uncompiled(model)) if isinstance(model, nn.Module) else {}
    named = {name: real(value) for name, value in named.items()}  # with the graph of a complex parameter
    wrong = [name for name, value in parameters.items() if name not in named or named[name].shape != value.shape]
    if wrong:
        raise LapwingError(
            f"The posterior treats the parameter {wrong[0]} {tuple(parameters[wrong[0]].shape)}, and "
            f"{type(model).__name__} has none with this name and shape. Pass a network of the same architecture."
        )
    if any(named[name].data_ptr() == value.data_ptr() != 0 for name, value in parameters.items()):
        raise LapwingError(
            "The network is the posterior's own, whose weights must stay as they are. Train a copy of it, "
            "model = copy.deepcopy(posterior.model), and write posterior.penalty(model)."
        )
    dtype, device = covariance.dtype, covariance.device
    moved = {name: named[name].to(device, dtype) - value.detach().to(dtype) for name, value in parameters.items()}
    distance = join(tangent.blocks, moved)
    with torch.no_grad():
        product = _precision_product(covariance, {name: d.detach() for name, d in distance.items()}, method)
    value = torch.zeros((), dtype=dtype, device=device)
    for name, d in distance.items():  # the gradient is Σ⁻¹(θ - θ̂), so autograd keeps nothing of the product itself
        value = value + (d * product[name]).sum() - (d.detach() * product[name]).sum() / 2
    return value.to(tangent.dtype)


def check_invertible(former: Posterior) -> None:
    """Raises if the covariance has no inverse, or is a subspace, which lacks the directions of further data."""
    covariance = former.covariance
    zeros = {b.name: torch.zeros(b.size, dtype=covariance.dtype, device=covariance.device) for b in covariance.blocks}
    _precision_product(covariance, zeros, former.method)
    if has_rank(covariance) and covariance.continued_by == "basis":
        raise LapwingError(
            f"The posterior by {former.method} has only the directions of its own data, and further data have other "
            "directions. Fit lw.KFAC(), lw.Diagonal() or lw.Full()."
        )


def _precision_product(covariance: Covariance, vectors: dict[str, Tensor], method: MethodInfo) -> dict[str, Tensor]:
    """Returns `Σ⁻¹ v`; raises if the covariance has no inverse, or only one that needs a factorisation."""
    product = covariance.precision_mv(vectors) if has_prior(covariance) else None
    if product is None:
        raise LapwingError(
            f"The covariance by {method} has no inverse without a factorisation, so it cannot be a prior. Fit "
            "lw.KFAC(), lw.Diagonal() or lw.Full()."
        )
    return product
