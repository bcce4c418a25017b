"""Leave-one-out predictions of the exact linearised model: the width of a regression, and the rates of counts."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..covariance import Latent, has_positions, without_spread
from ..covariance.terms import DenseTerm
from ..data.inputs import Inputs, Samples
from ..linalg import doubled
from ..methods.passes import Batch
from ..network.eager import parameters_of
from ..posterior import Posterior
from ..posterior.latents import latent_of_batch
from ..posterior.tuned import Training, evenly_spaced_batches
from ..prediction.linearized import default_way
from ..tangent import Tangent
from .gaussian_process import LeaveOneOut, Process
from .training_kernel import MAX_ROWS, MIN_INPUTS, TargetPairs, most_rows, process_of

MAX_WEIGHTS = 1_000_000  # maximum number of trained weights for which all of them count
MAX_MULTIPLY_ADDS = 2**33  # the same limit for the multiply-adds that form the rows of the kernel
MAX_EXPLICIT_WEIGHTS = 1000  # and for weights without a layer family, whose rows need a backward pass per sample
LOWEST_WIDTH = 0.5  # if s is below this fraction of the mean squared residual, training has not converged
HIGHEST_RAISED = 0.0  # then log10 δσ² is raised at most to this: there the noise equals the mean eigenvalue

log = logging.getLogger("lapwing")


@torch.no_grad()
def leave_one_out(
    posterior: Posterior, parts: Sequence[Samples], size: float | None = None, residual: float = 0.0
) -> LeaveOneOut:
    """Returns `s = max(mean_n diag V_n, mean_n e_n²)`, `V_n = ([C⁻¹]_nn)⁻¹`, `e_n = V_n [C⁻¹ r]_n`, `C = JJᵀ/δ + σ²I`.

    The linearised network is a Gaussian process, `r = y - f + J(θ̂ - μ0) ~ N(0, C)`, whose marginal likelihood and
    leave-one-out predictions are exact (Rasmussen & Williams 2006, equations 5.8, 5.10 to 5.12, for blocks), also if
    the network's weights are not a mode. A sample is left out with all its outputs, and with its copies, which would
    predict its target. The errors count because the model has no noise that outputs share. The labels lose the
    likeliest constant of each output: targets far from 0 would otherwise need a wide prior. It is about 0 if the
    weights cannot produce it, as in forces, which are derivatives of an energy. A few samples with 100 times the median
    of V_n do not count: one far input would decide the width of all.

    σ² explains at least a tenth of the targets (`MAX_EXPLAINED`): a noise of 0 is too narrow for posteriors with fewer
    degrees of freedom. δσ² is raised until s is half of `residual`, the network's mean squared residual
    (`LOWEST_WIDTH`), at most to `HIGHEST_RAISED`: the linearised model of a network that was not trained to the end
    would explain residuals that the network still has. The kernel holds n of N = `size` samples, so s is multiplied by
    `learning_curve` at N/n. A sample of weight w counts as w copies: residual and kernel are multiplied by √w. Weights
    are divided by their mean, with copies: if w copies were w measurements, their equal targets would show no noise.

    All trained weights count, also those that the posterior does not treat, since they were trained on the targets too;
    unless they are too many, or lapwing refuses one of the layers.

    Cost: M = n C backward passes, at most MAX_ROWS, `JJᵀ` of all pairs, and its eigendecomposition, O(M³).
    """
    # 1. the δσ² of highest evidence
    process, _ = _process_of_trained(posterior, parts)
    size, log10 = size or sum(part.count for part in parts), process.best()
    result, end = process.left_out(log10, size), log10.new_tensor(HIGHEST_RAISED)
    # 2. if s is too small for the residual: the smallest δσ² at which it is not, by bisection
    if log10 < end and result.width < LOWEST_WIDTH * residual:
        for _ in range(10):
            middle = (log10 + end) / 2
            result = process.left_out(middle, size)
            log10, end = (middle, end) if result.width < LOWEST_WIDTH * residual else (log10, middle)
    # 3. for exact draws, the variance of left-out targets at their own δ and σ²
    if posterior.covariance.distinct_draws and posterior.noise_variance:
        delta = float(posterior.prior.precision.mean()) / result.weight
        own = math.log10(posterior.noise_variance * delta / process.unit)
        result = replace(result, variance_of_draws=process.left_out(log10.new_tensor(own), size, 1 / delta).variance)
    return result


@torch.no_grad()
def left_out_latents(posterior: Posterior, training: Training, samples: int) -> tuple[Latent, Tensor, Tensor]:
    """Returns latents (M, P) of the P outputs of targets that a network has not seen, these, and weights (M,).

    The mean of y becomes `f' = f - e h`, for the left-out error e of `leave_one_out` and its leverage h: the network's
    output moves as far as the one of the linearised model does. If the network is nearer to its targets than left-out
    predictions are, in the mean square, it has overfitted, and f' are these: `f' = f + r - e` for its residual r.

    Other outputs, such as log variances, keep their means, and censored targets their outputs. The covariance is the
    posterior's at seen inputs; if left-out targets decide a spread with correlations between layers, it is divided by
    √(1 - h), half the way to unseen inputs on a logarithmic scale. Counts have none: their spread follows from their
    noise. At most `samples` training samples are read.
    """
    samples = min(samples, max(MIN_INPUTS, 2 * MAX_ROWS // posterior.tangent.width))
    parts = list(evenly_spaced_batches(training, samples, posterior))
    process, pairs = _process_of_trained(posterior, parts)
    warn_of_windows(posterior, process.windows)
    # 1. e and h (M,), with e = 0 for a target that is missing or censored
    errors, leverages = process.left_out_errors()
    roots = (process.counts / pairs.noise).sqrt()
    errors = torch.where(roots > 0, errors / roots, 0.0)
    # 2. f' (M,): Σ w e² is compared with Σ w (r + e h)², both relative to the noise
    sums = [(roots * part).square().sum() for part in (errors, pairs.residuals + errors * leverages)]
    mean = pairs.outputs - (errors * leverages if sums[0] <= sums[1] else errors - pairs.residuals)
    # 3. latents with f' as the mean of y; a factor of the spread also counts at unseen inputs, where a spread with
    #    correlations between layers is wider
    decided = posterior.likelihood.left_out_decides
    spread = decided == "spread" or posterior.noise_variance is not None
    latent, targets, weights = _rows_of_targets(posterior, parts, pairs.places, spread)
    mean = torch.cat([mean[:, None], latent.mean[:, 1:]], 1)
    if decided == "spread" and posterior.covariance.joins_layers:
        latent = Latent(latent.mean, (DenseTerm(latent.covariance / (1 - leverages).sqrt()[:, None, None]),))
    return replace(latent, mean=mean), targets, weights / process.weight


def warn_of_windows(posterior: Posterior, windows: bool) -> None:
    """Warns if left-out samples are windows of a series, which no fit without held-out data measures well."""
    if windows:
        log.warning(
            "The inputs of %s are overlapping windows of a series, which share values: its intervals may be too narrow "
            "for a later stretch. Hold such a stretch out, and pass it as validation=.",
            type(posterior.tangent.model).__name__,
        )  # fmt: skip


def _rows_of_targets(
    posterior: Posterior, parts: Sequence[Samples], places: Tensor, spread: bool
) -> tuple[Latent, Tensor, Tensor]:
    """Returns latents (M, P), targets (M, 1), or (M, 2) for intervals, and sample weights (M,).

    `places` (M,) are indices among the targets of all samples. Outputs k, K + k, ... belong to target k of K. Without
    `spread` nothing but the network runs.
    """
    tangent, rows = posterior.tangent, []
    count = min(posterior.likelihood.target_shape(tangent.outputs)[0], tangent.outputs)  # K
    for part in parts:
        known = Batch.of(tangent, part).rows()
        latent: Any = without_spread(known["outputs"])
        if spread:
            latent = latent_of_batch(tangent, posterior.covariance, part.inputs, default_way(tangent), False)
            latent = latent.rows if has_positions(latent) else latent
        mean = doubled(latent.mean).unflatten(-1, (-1, count)).mT.flatten(0, 1)  # (B K, P)
        covariance = doubled(latent.variance).reshape(-1, 1, 1)
        if count < tangent.outputs:
            blocks = doubled(latent.own_covariance).unflatten(-1, (-1, count)).unflatten(-3, (-1, count))
            covariance = blocks.diagonal(dim1=-3, dim2=-1).movedim(-1, 1).flatten(0, 1)  # (B K, P, P)
        weights = torch.ones(len(latent.mean)) if known["weights"] is None else known["weights"]
        weights = doubled(weights).to(mean.device).repeat_interleave(count)
        rows.append((mean, covariance, known["targets"].to(mean.device).reshape(len(mean), -1), weights))
    mean, covariance, targets, weights = (torch.cat(part)[places] for part in zip(*rows, strict=True))
    return Latent(mean, (DenseTerm(covariance),)), targets, weights


def _process_of_trained(posterior: Posterior, parts: Sequence[Samples]) -> tuple[Process, TargetPairs]:
    """Returns the process of all trained weights, or of those that the posterior treats if these are too many."""
    parts, outputs = [part for part in parts if part.count], posterior.tangent.width
    rows = min(sum(part.count for part in parts) * outputs, most_rows(outputs))
    try:
        tangent = trained(posterior, parts[0].inputs, rows, MAX_MULTIPLY_ADDS)
        if tangent is not None:
            return process_of(posterior, tangent, parts)
    except Exception as error:  # from layers that the fit does not treat
        log.info("The trained weights that %s leaves out do not count: %s", posterior.method, error)
    return process_of(posterior, posterior.tangent, parts)


def untreated(tangent: Tangent) -> dict[str, int]:
    """Returns the trained parameters that a tangent leaves out, and the numbers of their weights."""
    named = parameters_of(tangent.model).items()
    left = {name: value for name, value in named if value.requires_grad and name not in tangent.parameters}
    return {name: value.numel() for name, value in left.items() if value.is_floating_point()}


def trained(posterior: Posterior, inputs: Inputs, rows: int, most: float) -> Tangent | None:
    """Returns the tangent of all trained weights, or None if the posterior treats all of them or there are too many.

    Too many are more than `MAX_WEIGHTS`, or more than `most` multiply-adds for this number of rows of the Jacobian.
    """
    tangent = posterior.tangent
    left = untreated(tangent)
    if not left:
        return None
    names = tangent.parameters.keys() | left.keys()
    if tangent.size + sum(left.values()) <= MAX_WEIGHTS:
        call = replace(tangent.call, activation=posterior.likelihood.activation, looks=True)
        whole = Tangent.survey(call, inputs, lambda name, _: name in names, memory=tangent.memory, warn=False)
        plan = whole.plan
        if plan.explicit_size <= MAX_EXPLICIT_WEIGHTS and rows * plan.work(whole.blocks) <= most:
            return whole
    log.info(
        "%s has too many trained weights to use all of them: only those that %s treats count for the width",
        type(tangent.model).__name__, posterior.method,
    )  # fmt: skip
    return None
