"""Linearised prediction: `f(x) ~ N(f(x, θ̂), J(x) Σ J(x)ᵀ)`, exact for the linearised network."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch

from ..covariance import AnyLatent, Covariance, JointLatent, Latent
from ..covariance.positions import LatentAtPositions
from ..covariance.terms import DenseTerm
from ..errors import LapwingError
from ..network import batches
from ..network.gate import Checked
from ..network.tracing import wants_gradient
from ..tangent import Tangent
from .positions import at_positions
from .uncertain import carried, separate
from .way import Way


@dataclass(frozen=True)
class Linearized(Way):
    """`f(x) ~ N(f(x, θ̂), J(x) Σ J(x)ᵀ)` (Immer et al. 2021, equation 6), without forming J where a layer allows.

    Cost: one forward and C backward passes of activations, and the structure's contractions; chunked under the memory
    budget, joint covariances for every pair of chunks. Differentiable in inputs that require gradients. Uncertain
    inputs (`lw.Uncertain`) add `J_x Σ_x J_xᵀ` by one more forward and C backward passes.

    Example:
        >>> import lapwing as lw
        >>> lw.Linearized()
        Linearized()
    """

    def latent(self, tangent: Tangent, covariance: Covariance, inputs: Any, joint: bool) -> AnyLatent:
        """Returns the latent Gaussian; with covariances (B, C, B, C) when joint."""
        values, spreads = separate(inputs)
        if not spreads:
            return _of_weights(tangent, covariance, values, joint)
        if tangent.positions is not None:
            raise LapwingError(
                "The outputs have positions, and uncertain inputs are not carried to them. Pass "
                "via=lw.MonteCarlo(draws=50), which draws the inputs too."
            )
        checked = tangent.check(values)
        mean, added = carried(tangent, values, spreads, wants_gradient(values))
        batches.check_outputs(mean, "these inputs")
        if not tangent.blocks:
            return Latent(mean, (DenseTerm(added),))
        latent = _of_weights(tangent, covariance, checked, joint)
        assert not isinstance(latent, LatentAtPositions)  # refused above
        return latent.plus(added)


def _of_weights(
    tangent: Tangent, covariance: Covariance, inputs: Any, joint: bool
) -> Latent | JointLatent | LatentAtPositions:
    """Returns `N(f(x, θ̂), J Σ Jᵀ)` at certain inputs."""
    dtype, checked = covariance.record_dtype, tangent.check(inputs)
    if tangent.positions is not None:
        return at_positions(tangent, covariance, checked, joint)
    if joint:
        return _joint(tangent, covariance, checked, dtype)
    parts = (
        Latent(record.outputs, tuple(term.to(tangent.dtype) for term in covariance.output_covariance(record)))
        for _, record in tangent.records(
            checked, dtype=dtype, scratch_per_sample=tangent.outputs * covariance.scratch_per_row
        )
    )
    return Latent.gather(parts, checked.samples)


def _joint(tangent: Tangent, covariance: Covariance, inputs: Checked, dtype: torch.dtype | None) -> JointLatent:
    """Returns `N(f(x, θ̂), J Σ Jᵀ)` of all inputs jointly, for pairs of chunks that fit the memory budget."""
    count, outputs = inputs.samples, tangent.outputs
    block = tangent.memory // (8 * tangent.dtype.itemsize)  # covariances of a pair, beside sums of a few such
    length = tangent.chunk_length(dtype=dtype, scratch_per_sample=outputs * covariance.scratch_per_row) // 2
    length = max(1, min(length, isqrt(block) // outputs))
    if length >= count:
        record = tangent.record(inputs, dtype=dtype)
        return JointLatent(record.outputs, covariance.joint_output_covariance(record, record).to(tangent.dtype))
    requests = list(inputs.chunks(length))
    means, matrix = [], torch.empty(count, outputs, count, outputs, dtype=tangent.dtype, device=tangent.device)
    for i, (mine, chunk) in enumerate(requests):
        record = tangent.record(chunk, dtype=dtype)
        means.append(record.outputs)
        for theirs, others in requests[: i + 1]:
            other = record if theirs == mine else tangent.record(others, dtype=dtype)
            part = covariance.joint_output_covariance(record, other).to(tangent.dtype)
            matrix[mine, :, theirs] = part
            if other is not record:
                matrix[theirs, :, mine] = part.permute(2, 3, 0, 1)
    return JointLatent(torch.cat(means), matrix)
