"""Leave-one-out predictions of the exact linearised model: `BoundedEvidence` sets a regression's width by them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..data import batches
from ..errors import LapwingError
from ..network.eager import parameters_of
from ..posterior import Posterior
from ..tangent import Tangent
from .gaussian_process import LeaveOneOut
from .training_kernel import process_of

MAX_WEIGHTS = 1_000_000
"""All trained weights count where a network has at most so many: their kernel then takes no longer than most fits."""

MAX_MULTIPLY_ADDS = 2**33
"""The rows of all samples may take so many, for the same reason."""

MAX_EXPLICIT_WEIGHTS = 1000
"""Weights without a layer family, whose rows are gradients of one sample after another."""

LOWEST_WIDTH = 0.5
"""Where s is less than this part of the mean squared residual, the network was not trained to the end."""

HIGHEST_RAISED = 0.0
"""To fit as badly as the network, δσ² is raised to this decade at most: noise as large as the kernel."""

log = logging.getLogger("lapwing")


@torch.no_grad()
def leave_one_out(
    posterior: Posterior, parts: Sequence[tuple[Any, ...]], size: float | None = None, residual: float = 0.0
) -> LeaveOneOut:
    """Returns `s = max(mean_n diag V_n, mean_n e_n²)`, `V_n = ([C⁻¹]_nn)⁻¹`, `e_n = V_n [C⁻¹ r]_n`, `C = JJᵀ/δ + σ²I`.

    The linearised network is a Gaussian process, `r = y - f + J(θ̂ - μ0) ~ N(0, C)`, whose marginal likelihood and
    leave-one-out predictions are exact (Rasmussen & Williams 2006, equations 5.8, 5.10 to 5.12, for blocks), at its own
    mode and not at the network's weights, which need not be one. A sample is left out with all its outputs, and with
    its copies, which would predict its target. Errors count besides variances, since the model has no
    noise that outputs share.

    Output biases have their trained value for μ0: targets far from 0 would else ask for a wide prior of all weights.

    Weights that explain all targets but no noise would leave nothing to posteriors that see less, so σ² is at least
    what leaves a tenth of the targets to it (`MAX_EXPLAINED`).

    A network that was not trained to the end leaves residuals that its linearised model could explain, and predicts
    with them all the same. So δσ² is raised until s is half of their mean square (`LOWEST_WIDTH`), to
    `HIGHEST_RAISED` at most: the model then fits about as the network does.

    Of N samples, n are in the kernel. More samples tell more: s is multiplied by `learning_curve` at N/n.

    All trained weights count (`requires_grad`), also where the posterior treats only some: the layers before the
    treated ones were trained on the targets too. Where they are too many, or a layer among them is refused, only the
    treated weights count.

    Args:
        posterior: of a regression with noise σ². Its network is used, and its prior where all weights are treated.
        parts: batches of inputs and targets, and perhaps sample weights: w copies of a sample are one whose residual
            and kernel are multiplied by √w, and the count of targets is Σ w. Of many samples with many
            outputs some are taken.
        size: N; as many as there are in `parts` where None.
        residual: the network's mean squared residual, below half of which s does not go if δσ² can be raised; 0 for
            none.

    Cost: M = n C backward passes, at most MAX_ROWS, `JJᵀ` of all pairs, and one eigendecomposition of it, O(M³).
    """
    parts = [part for part in parts if batches.size(part[0])]
    samples = sum(batches.size(inputs) for inputs, *_ in parts)
    try:
        tangent = _trained(posterior, parts[0][0], samples)
        if tangent is not None:
            return _left_out(posterior, tangent, parts, size or samples, residual)
    except (LapwingError, RuntimeError) as error:  # of layers that the fit has nothing to do with
        log.info("The trained weights that %s leaves out do not count: %s", posterior.method, error)
    return _left_out(posterior, posterior.tangent, parts, size or samples, residual)


def _left_out(
    posterior: Posterior, tangent: Tangent, parts: Sequence[tuple[Any, ...]], size: float, residual: float
) -> LeaveOneOut:
    """Returns what `leave_one_out` does, for these weights."""
    process = process_of(posterior, tangent, parts)
    log10 = process.best()
    result, end = process.left_out(log10, size), log10.new_tensor(HIGHEST_RAISED)
    if log10 < end and result.width < LOWEST_WIDTH * residual:
        for _ in range(10):
            middle = (log10 + end) / 2
            result = process.left_out(middle, size)
            log10, end = (middle, end) if result.width < LOWEST_WIDTH * residual else (log10, middle)
    if posterior.covariance.distinct_draws and posterior.noise_variance:
        delta = float(posterior.prior.precision.mean())
        own = math.log10(posterior.noise_variance * delta / process.unit)
        result = replace(result, drawn=process.left_out(log10.new_tensor(own), size, 1 / delta).variance)
    return result


def _trained(posterior: Posterior, inputs: Any, samples: int) -> Tangent | None:
    """Returns the tangent of all trained weights; None where the posterior treats them, or they take too long."""
    tangent = posterior.tangent
    treated = {name for block in tangent.blocks for name in block.parameters}
    others = {
        name: value.numel()
        for name, value in parameters_of(tangent.model).items()
        if value.requires_grad and name not in treated and value.is_floating_point()
    }
    if not others:
        return None
    names = treated | others.keys()
    if tangent.size + sum(others.values()) <= MAX_WEIGHTS:
        whole = Tangent.survey(
            tangent.model, inputs, lambda name, _: name in names, tangent.forward, tangent.memory, warn=False
        )
        if whole.explicit_size <= MAX_EXPLICIT_WEIGHTS and samples * whole.plan.work(whole.blocks) <= MAX_MULTIPLY_ADDS:
            return whole
    log.info(
        "%s is too large to look at all trained weights: only those that %s treats count for the noise variance",
        type(tangent.model).__name__, posterior.method,
    )  # fmt: skip
    return None
