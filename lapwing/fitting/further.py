"""Further data for a posterior: at the same weights (`Posterior.update`), or at those of further training."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from .. import ranks
from ..covariance import has_rank
from ..data import batches
from ..data.frames import as_loader
from ..data.loaders import WeightedLoader
from ..data.shares import joined_first_batch, share
from ..errors import LapwingError, shown
from ..methods import DataSummary, FisherRoot, Problem
from ..methods.updating import Update
from ..network.stamp import Stamp
from ..posterior import Posterior
from ..posterior.former import precision_product
from ..posterior.prior import Prior
from ..tangent import Tangent
from .checkpoint import Checkpoint
from .runner import Runner
from .same_fit import check_same_network


def with_further(
    posterior: Posterior, tangent: Tangent, loader: Any, checkpoint: Checkpoint | None = None
) -> Posterior:
    """Returns the posterior around a network, with the curvature and statistics of further data added.

    Args:
        posterior: of the data so far.
        tangent: the network at which the further data are looked at.
        loader: batches of these.
        checkpoint: where the fit goes on after an interruption.

    Raises:
        LapwingError: for curvatures that do not add, and bad data.
    """
    if posterior.data_factor != 1:
        raise LapwingError(
            f"The posterior stands for {posterior.data_factor:g} times the data of its fit, and further data have no "
            "place in that. Fit to all data at once, with data_size=."
        )
    likelihood = posterior.likelihood
    runner = Runner(loader, checkpoint=checkpoint)
    check_same_network(tangent.model, tangent.state())
    seed = posterior.samples  # draws for the further data are not those for the data so far
    generator = torch.Generator(tangent.device).manual_seed(seed + ranks.rank())
    traces = bool(getattr(posterior.covariance, "traces", torch.zeros(1)).any())
    problem = Problem(
        tangent, likelihood, FisherRoot(likelihood, tangent.outputs, generator), posterior.prior, traces, seed,
        runner.labels, runner.count, runner.summary, posterior.temperature,
    )  # fmt: skip
    result = runner.run(Update(posterior.covariance, posterior.method), problem)
    summary = DataSummary(posterior.samples, posterior.statistics).added(runner.summary())
    whole = replace(
        posterior, tangent=tangent, covariance=result.covariance, samples=summary.samples, statistics=summary.statistics
    )
    return whole.at(posterior.prior.precision, posterior.noise_variance)


def _check_prior(prior: Posterior) -> None:
    """Raises for a covariance without an inverse, and for a subspace, which knows nothing of further directions."""
    covariance = prior.covariance
    zeros = {b.name: torch.zeros(b.size, dtype=covariance.dtype, device=covariance.device) for b in covariance.blocks}
    precision_product(covariance, zeros, prior.method)
    if has_rank(covariance) and covariance.continued_by == "basis":
        raise LapwingError(
            f"The posterior by {prior.method} keeps the directions of its own data, and further data have others. Fit "
            "lw.KFAC(), lw.Diagonal() or lw.Full()."
        )


def continued(
    prior: Posterior,
    model: Any,
    loader: Any,
    others: Mapping[str, Any],
    sample_weights: bool,
    forward: Any,
    memory: Any,
    checkpoint: Checkpoint | None,
) -> Posterior:
    """Returns the posterior of further data at further trained weights, under a former posterior: see `lw.fit`.

    Args:
        prior: the former posterior.
        model: the network that was trained further.
        loader: the further data.
        others: what the user gave beside it that the former posterior decides.
        sample_weights: whether the batches are `(x, y, w)`.
        forward: how the network is called; None as in the former fit.
        memory: budget in bytes; None as in the former fit.
        checkpoint: where the fit goes on after an interruption; None where it cannot.

    Raises:
        LapwingError: for another option beside it, another network, or a covariance that cannot go on.
    """
    if not isinstance(prior, Posterior):
        raise LapwingError(
            f"prior={shown(prior)} is not a posterior. Pass one of a former fit, or prior_precision=1.0 for a Gaussian "
            "prior around 0."
        )
    if others:
        names = ", ".join(f"{name}=" for name in others)
        raise LapwingError(
            f"prior=posterior decides the method, the parameters, the likelihood and the prior, and {names} was given "
            "beside it. Write lw.fit(model, loader, prior=posterior)."
        )
    prior._check_network()
    former = prior.tangent
    _check_prior(prior)
    loader = share(as_loader(loader, model))
    first = joined_first_batch(loader)
    inputs, _ = batches.split(batches.weighted(first) if sample_weights else first)
    if isinstance(model, torch.nn.Module):
        present = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if not present.issuperset(former.parameters):
            raise _other_network(model, former)
    tangent = Tangent.survey(
        model, inputs, lambda name, _: name in former.parameters, forward or former.forward, memory or former.memory
    )
    if tangent.blocks != former.blocks or tangent.outputs != former.outputs:
        raise _other_network(tangent.model, former)
    training = WeightedLoader(loader, ranks.several()) if sample_weights else loader
    if checkpoint is not None:
        formerly = {"covariance": prior.covariance.tensors(), "method": prior.method, "samples": prior.samples}
        network = {"the network": tangent.state(), "the parameters": tangent.blocks}
        checkpoint.open(training, {**network, "the prior": formerly, "memory": tangent.memory})
    with checkpoint or nullcontext():
        whole = with_further(prior, tangent, training, checkpoint)
    return replace(
        whole, prior=Prior(prior.prior.precision, former.mean(), fixed=True), noise_fixed=True, history={},
        method=replace(prior.method, after_former=True), stamp=Stamp.of(tangent.state()),
    )  # fmt: skip


def _other_network(model: Any, former: Tangent) -> LapwingError:
    return LapwingError(
        f"{type(model).__name__} has other layers than the network of the former posterior, "
        f"{type(former.model).__name__} with {former.outputs} outputs. Train a copy of that one further."
    )
