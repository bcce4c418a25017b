"""What the exact linearised model says of samples that it has not seen; `BoundedEvidence` holds a regression to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import batches
from ..likelihoods.targets import aligned_targets
from ..posterior import Posterior
from ..tangent.anchors import Anchors
from .evidence import maximise


@dataclass(frozen=True)
class LeaveOneOut:
    """The exact Gaussian process of the linearised network on some training samples, at its own best δ and σ².

    Attributes:
        variance: s, of a target given the others; the mean over targets.
        precision: δ, as a multiple of the given one where there was one.
        noise_variance: σ².
    """

    variance: float
    precision: float
    noise_variance: float


def leave_one_out(posterior: Posterior, parts: Sequence[tuple[Any, Tensor]], rows: int) -> LeaveOneOut:
    """Returns `s = mean_m 1/[C⁻¹]_mm`, `C = JJᵀ/δ + σ²I`, at the δ and σ² of greatest marginal likelihood.

    The linearised network is a Gaussian process, `y - f + J(θ̂ - μ0) ~ N(0, C)`, whose marginal likelihood and
    leave-one-out predictions are exact (Rasmussen & Williams 2006, equations 5.8 and 5.12), at its own mode and not at
    the network's weights, which need not be one.

    Args:
        posterior: of a regression with noise σ²; of it count the network, the treated weights and the prior.
        parts: batches of inputs and targets.
        rows: M, the most pairs of a sample and an output; where there are more, outputs take turns.

    Cost: M backward passes, `JJᵀ` of all pairs, and time O(M³).
    """
    tangent = posterior.tangent
    parts = [(inputs, targets) for inputs, targets in parts if batches.size(inputs)]
    residuals = torch.cat([_residuals(posterior, inputs, targets) for inputs, targets in parts])  # (N, C)
    count, outputs = residuals.shape
    times = min(outputs, max(1, rows // count))
    samples = torch.arange(count).repeat_interleave(times)
    turns = torch.arange(len(samples)) % outputs
    anchors = Anchors(tangent, tuple(inputs for inputs, _ in parts), samples, turns)
    precision = posterior.prior.precision if posterior.prior.given else torch.ones_like(posterior.prior.precision)
    weights = {block.name: 1 / value for block, value in zip(tangent.blocks, precision.tolist(), strict=True)}
    moved = {name: (value - posterior.prior.mean[name]).double()[None] for name, value in tangent.mean().items()}
    labels = residuals[samples, turns] + anchors.inner(moved)[0].double()
    values, vectors = torch.linalg.eigh(anchors.gram(weights, torch.float64))
    values, squares = values.clamp_min(0), (vectors.T @ labels).square()
    unit = float(values.mean()) or 1.0

    def at(log10: float) -> tuple[Tensor, float]:
        """Returns the eigenvalues of `δC` where `δσ² = 10^log10` of the kernel's mean, and the best 1/δ there."""
        spectrum = values + unit * 10**log10
        scale = 1.0 if posterior.prior.given else float((squares / spectrum).mean())
        return spectrum, max(scale, 1e-100)  # 0 where there is nothing to explain

    def evidence(log10: float) -> float:
        spectrum, scale = at(log10)
        return -0.5 * float((squares / (scale * spectrum) + (scale * spectrum).log()).sum())

    best = maximise(evidence, -10.0, 6.0, 65)
    spectrum, scale = at(best)
    inverse = vectors.square() @ (1 / (scale * spectrum))  # [C⁻¹]_mm
    return LeaveOneOut(float((1 / inverse).mean()), 1 / scale, scale * unit * 10**best)


def _residuals(posterior: Posterior, inputs: Any, targets: Tensor) -> Tensor:
    """Returns y - f, (B, C), in float64."""
    outputs = posterior.tangent.outputs_of(inputs).double()
    posterior.likelihood.check(outputs, targets)
    return aligned_targets("Gaussian", outputs, targets) - outputs
