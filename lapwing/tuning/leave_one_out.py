"""Leave-one-out predictions of the exact linearised model, by which `BoundedEvidence` bounds a regression."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import LapwingError
from ..likelihoods.targets import aligned_targets
from ..network import batches
from ..network.eager import parameters_of
from ..posterior import Posterior
from ..tangent import Tangent
from ..tangent.anchors import Anchors
from .search import ascend, best_of_grid

MAX_ROWS = 1000
"""The kernel is built of at most so many pairs of a sample and an output."""

MAX_WEIGHTS = 1_000_000
"""All trained weights count where a network has at most so many: their kernel then takes no longer than most fits."""

MAX_MULTIPLY_ADDS = 2**33
"""The rows of all samples may take so many, for the same reason."""

MAX_EXPLICIT_WEIGHTS = 1000
"""Weights without a layer family, whose rows are gradients of one sample after another."""

RANGE = (-10.0, 6.0)
"""Decades of δσ², relative to the mean eigenvalue of the kernel, that are searched."""

SAME_SAMPLE = 0.98
"""Cosine between the gradients of two samples from which on they are left out at once: each predicts the other."""


log = logging.getLogger("lapwing")


@dataclass(frozen=True)
class LeaveOneOut:
    """The exact Gaussian process of the linearised network on some training samples, at its own best δ and σ².

    Attributes:
        width: s, the mean variance of a target given the other samples, or its mean squared error if that is more.
        precision: δ, as a multiple of the given one where there was one.
        noise_variance: σ².
        samples: how many samples it is built of.
        more_weights: whether it counts weights that the posterior leaves out.
    """

    width: float
    precision: float
    noise_variance: float
    samples: int
    more_weights: bool


@torch.no_grad()
def leave_one_out(posterior: Posterior, parts: Sequence[tuple[Any, Tensor]]) -> LeaveOneOut:
    """Returns `s = max(mean_n diag V_n, mean_n e_n²)`, `V_n = ([C⁻¹]_nn)⁻¹`, `e_n = V_n [C⁻¹ r]_n`, `C = JJᵀ/δ + σ²I`.

    The linearised network is a Gaussian process, `r = y - f + J(θ̂ - μ0) ~ N(0, C)`, whose marginal likelihood and
    leave-one-out predictions are exact (Rasmussen & Williams 2006, equations 5.8, 5.10 to 5.12, for blocks), at its own
    mode and not at the network's weights, which need not be one. A sample is left out with all its outputs, and with
    samples like it, since duplicates would predict its target. Errors count besides variances, since the model has no
    noise that outputs share.

    All trained weights count (`requires_grad`), also where the posterior treats only some: the layers before the
    treated ones were trained on the targets too. Where they are too many, or a layer among them is refused, only the
    treated weights count.

    Args:
        posterior: of a regression with noise σ². Its network is used, and its prior where all weights are treated.
        parts: batches of inputs and targets. Of many samples with many outputs some are taken.

    Cost: M = N C backward passes, at most MAX_ROWS, `JJᵀ` of all pairs, and time O(M³).
    """
    parts = [part for part in parts if batches.size(part[0])]
    try:
        tangent = _trained(posterior, parts[0][0], sum(batches.size(inputs) for inputs, _ in parts))
        if tangent is not None:
            return _left_out(posterior, tangent, parts)
    except (LapwingError, RuntimeError) as error:  # of layers that the fit has nothing to do with
        log.info("The trained weights that %s leaves out do not count: %s", posterior.method, error)
    return _left_out(posterior, posterior.tangent, parts)


def _left_out(posterior: Posterior, tangent: Tangent, parts: Sequence[tuple[Any, Tensor]]) -> LeaveOneOut:
    """Returns what `leave_one_out` does, for these weights."""
    residuals = torch.cat([_residuals(posterior, inputs, targets) for inputs, targets in parts])  # (N, C)
    treated = tangent is posterior.tangent
    outputs, prior_fixed = residuals.shape[1], posterior.prior.fixed and treated
    count = min(len(residuals), max(20, MAX_ROWS // outputs))
    times = min(outputs, MAX_ROWS // count)
    samples = (torch.arange(count) * len(residuals) // count).repeat_interleave(times)
    turns = torch.arange(len(samples)) % outputs
    anchors = Anchors(tangent, tuple(inputs for inputs, _ in parts), samples, turns)
    precision = posterior.prior.precision if prior_fixed else torch.ones(len(tangent.blocks), dtype=torch.float64)
    weights = {block.name: 1 / value for block, value in zip(tangent.blocks, precision.tolist(), strict=True)}
    mean = posterior.prior.mean if treated else {}
    offset = {name: (value - mean.get(name, 0.0)).double()[None] for name, value in tangent.mean().items()}
    labels = residuals[samples, turns] + anchors.inner(offset)[0].double()
    gram = anchors.gram(weights, torch.float64)
    values, vectors = torch.linalg.eigh(gram)
    values, squares = values.clamp_min(0), (vectors.T @ labels).square()
    unit = float(values.mean()) or 1.0

    def at(log10: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the eigenvalues of `δC` where `δσ² = 10^log10` of the kernel's mean, and the best 1/δ there."""
        spectrum = values + unit * 10**log10
        if prior_fixed:
            return spectrum, torch.ones_like(log10)
        return spectrum, (squares / spectrum).mean().clamp_min(1e-100)  # 0: nothing to explain

    def evidence(log10: Tensor) -> Tensor:
        spectrum, scale = at(log10)
        return -0.5 * (squares / (scale * spectrum) + (scale * spectrum).log()).sum()

    grid, best = best_of_grid(lambda log10: float(evidence(values.new_tensor(log10))), *RANGE, 65)
    start = values.new_tensor(grid[best : best + 1])
    log10 = ascend(lambda point: evidence(point[0]), start, RANGE[:1], RANGE[1:])[0]
    spectrum, scale = at(log10)
    inverse = (vectors / (scale * spectrum)) @ vectors.T
    width = _width(gram, inverse, labels, times, times == outputs)
    return LeaveOneOut(width, 1 / float(scale), float(scale * unit * 10**log10), count, not treated)


def _trained(posterior: Posterior, inputs: Any, samples: int) -> Tangent | None:
    """Returns the tangent of all trained weights; None where the posterior treats them, or they take too long."""
    tangent = posterior.tangent
    treated = {name for block in tangent.blocks for name in block.parameters}
    others = {
        name: value.numel()
        for name, value in parameters_of(tangent.model).items()
        if value.requires_grad and name not in treated and value.is_floating_point()
    }
    if not others or tangent.size + sum(others.values()) > MAX_WEIGHTS:
        return None
    names = treated | others.keys()
    whole = Tangent.survey(
        tangent.model, inputs, lambda name, _: name in names, tangent.forward, tangent.memory, warn=False
    )
    if whole.explicit_size > MAX_EXPLICIT_WEIGHTS or samples * whole.plan.work(whole.blocks) > MAX_MULTIPLY_ADDS:
        return None
    return whole


def _width(gram: Tensor, inverse: Tensor, labels: Tensor, times: int, whole: bool) -> float:
    """Returns s.

    Args:
        gram: `JJᵀ` (M, M), the pairs of a sample side by side.
        inverse: C⁻¹ (M, M).
        labels: r (M,).
        times: how many pairs a sample has.
        whole: whether these are all its outputs, so that samples can be compared.
    """
    count = len(labels) // times
    kernel = gram.unflatten(0, (count, times)).unflatten(2, (count, times)).diagonal(dim1=1, dim2=3).sum(-1)  # (N, N)
    size = kernel.diagonal().clamp_min(torch.finfo(kernel.dtype).tiny).sqrt()
    same = kernel >= SAME_SAMPLE * size * size[:, None] if whole else torch.zeros_like(kernel, dtype=torch.bool)
    same.fill_diagonal_(True)
    weighted, inside = inverse @ labels, torch.arange(times, device=labels.device)
    variance = error = 0.0
    for group in same.unique(dim=0):  # samples that are left out at once
        rows = (group.nonzero() * times + inside).flatten()
        left = torch.linalg.inv(inverse[rows][:, rows])
        members = (same == group).all(1).nonzero() * times + inside  # of the samples with exactly this group
        counted = torch.isin(rows, members)
        variance += float(left.diagonal()[counted].sum())
        error += float((left @ weighted[rows])[counted].square().sum())
    return max(variance, error) / len(labels)


def _residuals(posterior: Posterior, inputs: Any, targets: Tensor) -> Tensor:
    """Returns y - f, (B, C), in float64."""
    outputs = posterior.tangent.outputs_of(inputs).double()
    posterior.likelihood.check(outputs, targets)
    return aligned_targets("Gaussian", outputs, targets) - outputs
