"""Posteriors made from the passes of a method, or without `lw.fit` from a network and a known covariance."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..covariance import Covariance, has_prior
from ..covariance.low_rank_diagonal import LowRankPlusDiagonal
from ..data.batches import Forward
from ..data.data import Data
from ..data.loaders import check_data_size, other_size
from ..data.progress import show_progress, tracked
from ..data.samples import checked
from ..errors import LapwingError
from ..likelihoods import Likelihood, resolve
from ..likelihoods.inferred import check_logits, inferred_likelihood, warn_of_misfit
from ..methods import FitResult, Method, Problem
from ..methods.passes import Batch
from ..methods.prior import Prior
from ..methods.state import DataSummary
from ..network.eager import LOCK, parameters_of, uncompiled
from ..network.stamp import Stamp
from ..posterior import MethodInfo, Posterior
from ..running.runner import Runner
from ..tangent import Tangent, join


def posteriors_of(
    runner: Runner, method: Method, problem: Problem, result: FitResult
) -> tuple[Posterior, tuple[Posterior, ...]]:
    """Returns the posteriors of all data and of their first parts, at the δ, σ² and T of the method, before tuning."""
    tangent, likelihood, prior = result.tangent or problem.tangent, problem.likelihood, problem.prior
    if result.noise_variance is not None:
        likelihood = likelihood.with_noise_variance(result.noise_variance)
    if result.logit_temperature is not None:
        likelihood = likelihood.with_logit_temperature(result.logit_temperature)
    if result.precision is not None:
        prior = replace(prior, precision=result.precision, fixed=True)

    def posterior(covariance: Covariance, statistics: Mapping[str, Tensor], samples: int, factor: float) -> Posterior:
        given = likelihood if has_prior(covariance) else problem.likelihood
        fitted = Posterior(
            tangent=tangent, covariance=covariance, likelihood=likelihood, prior=prior, statistics=dict(statistics),
            samples=samples, data_factor=factor, temperature=problem.temperature,
            method=replace(MethodInfo.of(method), sample_weights=runner.weighted), noise_fixed=not given.needs_noise,
            stamp=Stamp.of(tangent.model), history=result.history, columns=runner.columns,
        )  # fmt: skip
        settled = fitted.noise_fixed and has_prior(covariance)
        return fitted.at(prior.precision, likelihood.noise_variance) if settled else fitted

    summary, factor = result.summary, result.data_factor
    if summary is None:
        summary = runner.summary()
        if problem.data_size is None:  # the steps of a method may have ended before the data
            factor *= runner.count() / summary.samples
    if problem.data_size is not None:
        count = summary.samples if result.summary is None else runner.count()
        check_data_size(problem.data_size, count)
        factor *= problem.data_size / count
    whole = posterior(result.covariance, summary.statistics, summary.samples, factor)
    parts = [posterior(*kept, samples, 1.0) for samples, kept in runner.first_parts.items()]
    if parts and factor > 1:
        parts.append(posterior(result.covariance, summary.statistics, summary.samples, 1.0))
    return whole, tuple(parts)


def copied(model: nn.Module, method: str) -> nn.Module:
    """Returns a copy of the uncompiled network for a method that moves the mean; raises if it cannot be copied."""
    try:
        with LOCK:  # during another thread's pass the network may hold tensors with a graph
            return copy.deepcopy(uncompiled(model))
    except (RuntimeError, TypeError) as error:
        raise LapwingError(
            f"{type(model).__name__} cannot be copied ({error}), and {method} puts the moved mean into a copy. Keep no "
            "tensors with a graph, locks or files in the module."
        ) from error


@torch.no_grad()
def put(network: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Writes parameters and buffers, by name, into a copy of the user's network."""
    tensors = {**dict(network.named_buffers()), **parameters_of(network)}
    for name, value in values.items():
        tensors[name].copy_(value)


def diagonal(tangent: Tangent, variances: Mapping[str, Tensor], precision: Tensor | None = None) -> LowRankPlusDiagonal:
    """Returns the covariance of independent weights from variances by parameter, and the prior precision if known."""
    joined = {name: value.to(tangent.device, tangent.dtype) for name, value in variances.items()}
    parts = join(tangent.blocks, joined)
    return LowRankPlusDiagonal(
        tangent.blocks, parts, {name: part.new_zeros(0, len(part)) for name, part in parts.items()}, precision
    )


def constructed(
    model: nn.Module,
    names: Collection[str],
    covariance: Callable[[Tangent], Covariance],
    data: Data,
    method: MethodInfo,
    likelihood: str | Likelihood | None,
    forward: Forward | None,
    memory: int | None,
    progress: bool | None,
) -> Posterior:
    """Returns the posterior around the network's weights, after one forward pass over the data.

    `covariance` returns Σ, without a prior. A noise variance that is None becomes the mean squared residual. Raises if
    the input is invalid, or if the loader shows no batch the second time.
    """
    first = data.first
    likelihood = inferred_likelihood(first.targets, data) if likelihood is None else resolve(likelihood)
    tangent = Tangent.survey(
        model, first.inputs, lambda name, _: name in names, forward, memory, targets=first.targets,
        activation=likelihood.activation,
    )  # fmt: skip
    summary = DataSummary()
    with show_progress(progress):
        for samples in checked(tracked(data, "likelihood"), tangent.device):
            rows = Batch.of(tangent, samples).rows()
            if not summary.samples:
                likelihood.check(rows["outputs"], rows["targets"])
                pair = rows["outputs"], rows["targets"]
                check_logits(likelihood, *pair, next(tangent.model.parameters()).dtype)
            summary.add(likelihood, **rows)
    if not summary.samples:
        raise other_size(0, f"to {method.name}", None)
    warn_of_misfit(likelihood, *pair, summary.statistics)
    noise_fixed = not likelihood.needs_noise
    if not noise_fixed:
        likelihood = likelihood.with_noise_variance(likelihood.residual_variance(summary.statistics))
    zero = torch.zeros(len(tangent.blocks), dtype=torch.float64, device=tangent.device)
    centre = {name: torch.zeros_like(mean) for name, mean in tangent.mean().items()}
    return Posterior(
        tangent, covariance(tangent), likelihood, Prior(zero, centre, fixed=True),
        summary.statistics, summary.samples, 1.0, 1.0, replace(method, sample_weights=data.weighted), noise_fixed,
        Stamp.of(tangent.model), columns=data.columns,
    )  # fmt: skip
