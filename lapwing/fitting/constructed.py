"""Posteriors without `lw.fit`, from a network and a known covariance."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..covariance import Covariance
from ..covariance.low_rank_diagonal import LowRankPlusDiagonal
from ..data.batches import Forward
from ..data.data import Data, other_size
from ..data.inputs import checked
from ..data.progress import show_progress, tracked
from ..errors import LapwingError
from ..likelihoods import Likelihood, resolve
from ..likelihoods.inferred import check_logits, inferred_likelihood, warn_of_misfit
from ..methods import Batch, DataSummary
from ..methods.prior import Prior
from ..network.eager import LOCK, parameters_of, uncompiled
from ..network.stamp import Stamp
from ..posterior import MethodInfo, Posterior
from ..tangent import Tangent, join


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
    no_factor = {name: part.new_zeros(0, len(part)) for name, part in parts.items()}
    return LowRankPlusDiagonal(tangent.blocks, parts, no_factor, precision)


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
    if "targets" in summary.statistics:  # of Gaussian noise
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
