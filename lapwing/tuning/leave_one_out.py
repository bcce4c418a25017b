"""What the exact linearised model says of samples that it has not seen; `BoundedEvidence` holds a regression to it."""

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

ROWS = 1000
"""The most pairs of a sample and an output that the kernel is built of."""

LARGE = 1_000_000
"""Weights of a network, all of them, up to which a kernel of them takes no longer than most fits."""

WORK = 2**33
"""Multiply-adds that the rows of all samples may take for the same reason."""

EXPLICIT = 1000
"""Weights without a layer family, whose rows are gradients of one sample after another."""

RANGE = (-10.0, 6.0)
"""Decades of δσ², relative to the mean eigenvalue of the kernel, that are searched."""

ALIKE = 0.98
"""Cosine between the gradients of two samples from which on one tells the other's target, and is left out with it."""


log = logging.getLogger("lapwing")


@dataclass(frozen=True)
class LeaveOneOut:
    """The exact Gaussian process of the linearised network on some training samples, at its own best δ and σ².

    Attributes:
        width: s, the mean variance of a target given the other samples, or its mean squared error if that is more.
        precision: δ, as a multiple of the given one where there was one.
        noise_variance: σ².
        samples: how many samples it knows.
        beyond: whether weights count that the posterior leaves out.
    """

    width: float
    precision: float
    noise_variance: float
    samples: int
    beyond: bool


@torch.no_grad()
def leave_one_out(posterior: Posterior, parts: Sequence[tuple[Any, Tensor]]) -> LeaveOneOut:
    """Returns `s = max(mean_n diag V_n, mean_n e_n²)`, `V_n = ([C⁻¹]_nn)⁻¹`, `e_n = V_n [C⁻¹ r]_n`, `C = JJᵀ/δ + σ²I`.

    The linearised network is a Gaussian process, `r = y - f + J(θ̂ - μ0) ~ N(0, C)`, whose marginal likelihood and
    leave-one-out predictions are exact (Rasmussen & Williams 2006, equations 5.8, 5.10 to 5.12, for blocks), at its own
    mode and not at the network's weights, which need not be one. A sample is left out with all its outputs, and with
    samples like it: duplicates would tell its target. Errors count besides variances, since noise that outputs share is
    none of the model's.

    All trained weights count (`requires_grad`), also where the posterior treats only some: the layers before the last
    one have seen the targets too. Where they are too many, or something in their layers refuses, those that are treated
    count alone.

    Args:
        posterior: of a regression with noise σ²; of it count the network and, where all its weights are treated, the
            prior.
        parts: batches of inputs and targets. Of many samples with many outputs some are taken.

    Cost: M = N C backward passes, at most ROWS, `JJᵀ` of all pairs, and time O(M³).
    """
    parts = [part for part in parts if batches.size(part[0])]
    try:
        tangent = _trained(posterior, parts[0][0], sum(batches.size(inputs) for inputs, _ in parts))
        if tangent is not None:
            return _left_out(posterior, tangent, parts)
    except (LapwingError, RuntimeError) as error:  # of layers that the fit has nothing to do with
        log.info("The trained weights that %s leaves out cannot be looked at: %s", posterior.method, error)
    return _left_out(posterior, posterior.tangent, parts)


def _left_out(posterior: Posterior, tangent: Tangent, parts: Sequence[tuple[Any, Tensor]]) -> LeaveOneOut:
    """Returns what `leave_one_out` does, for these weights."""
    residuals = torch.cat([_residuals(posterior, inputs, targets) for inputs, targets in parts])  # (N, C)
    own = tangent is posterior.tangent
    outputs, given = residuals.shape[1], posterior.prior.given and own
    count = min(len(residuals), max(20, ROWS // outputs))
    times = min(outputs, ROWS // count)
    samples = (torch.arange(count) * len(residuals) // count).repeat_interleave(times)
    turns = torch.arange(len(samples)) % outputs
    anchors = Anchors(tangent, tuple(inputs for inputs, _ in parts), samples, turns)
    precision = posterior.prior.precision if given else torch.ones(len(tangent.blocks), dtype=torch.float64)
    weights = {block.name: 1 / value for block, value in zip(tangent.blocks, precision.tolist(), strict=True)}
    mean = posterior.prior.mean if own else {}
    moved = {name: (value - mean.get(name, 0.0)).double()[None] for name, value in tangent.mean().items()}
    labels = residuals[samples, turns] + anchors.inner(moved)[0].double()
    gram = anchors.gram(weights, torch.float64)
    values, vectors = torch.linalg.eigh(gram)
    values, squares = values.clamp_min(0), (vectors.T @ labels).square()
    unit = float(values.mean()) or 1.0

    def at(log10: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the eigenvalues of `δC` where `δσ² = 10^log10` of the kernel's mean, and the best 1/δ there."""
        spectrum = values + unit * 10**log10
        if given:
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
    return LeaveOneOut(width, 1 / float(scale), float(scale * unit * 10**log10), count, not own)


def _trained(posterior: Posterior, inputs: Any, samples: int) -> Tangent | None:
    """Returns the tangent of all trained weights; None where the posterior treats them, or they take too long."""
    own = posterior.tangent
    treated = {name for block in own.blocks for name in block.parameters}
    missing = {
        name: value.numel()
        for name, value in parameters_of(own.model).items()
        if value.requires_grad and name not in treated and value.is_floating_point()
    }
    if not missing or own.size + sum(missing.values()) > LARGE:
        return None
    wanted = treated | missing.keys()
    found = Tangent.survey(own.model, inputs, lambda name, _: name in wanted, own.forward, own.memory, warn=False)
    if found.explicit_size > EXPLICIT or samples * found.plan.work(found.blocks) > WORK:
        return None
    return found


def _width(gram: Tensor, inverse: Tensor, labels: Tensor, times: int, whole: bool) -> float:
    """Returns s.

    Args:
        gram: `JJᵀ` (M, M), the pairs of a sample together.
        inverse: C⁻¹ (M, M).
        labels: r (M,).
        times: how many pairs a sample has.
        whole: whether these are all its outputs, so that samples can be compared.
    """
    count = len(labels) // times
    kernel = gram.unflatten(0, (count, times)).unflatten(2, (count, times)).diagonal(dim1=1, dim2=3).sum(-1)  # (N, N)
    size = kernel.diagonal().clamp_min(torch.finfo(kernel.dtype).tiny).sqrt()
    alike = kernel >= ALIKE * size * size[:, None] if whole else torch.zeros_like(kernel, dtype=torch.bool)
    alike.fill_diagonal_(True)
    weighted, inside = inverse @ labels, torch.arange(times, device=labels.device)
    variance = error = 0.0
    for group in alike.unique(dim=0):  # samples that are left out together
        rows = (group.nonzero() * times + inside).flatten()
        left = torch.linalg.inv(inverse[rows][:, rows])
        own = (alike == group).all(1).nonzero() * times + inside  # those with exactly this company
        mine = torch.isin(rows, own)
        variance += float(left.diagonal()[mine].sum())
        error += float((left @ weighted[rows])[mine].square().sum())
    return max(variance, error) / len(labels)


def _residuals(posterior: Posterior, inputs: Any, targets: Tensor) -> Tensor:
    """Returns y - f, (B, C), in float64."""
    outputs = posterior.tangent.outputs_of(inputs).double()
    posterior.likelihood.check(outputs, targets)
    return aligned_targets("Gaussian", outputs, targets) - outputs
