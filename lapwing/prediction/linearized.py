"""Linearised prediction: `f(x) ~ N(f(x, θ̂), J(x) Σ J(x)ᵀ)`, exact for the linearised network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .. import batches
from ..covariance import AnyLatent, Covariance, JointLatent, Latent
from ..covariance.output import Dense, concatenate
from ..tangent import Tangent
from ..tangent.record import wants_gradient
from .uncertain import carried, separate
from .way import Way


@dataclass(frozen=True)
class Linearized(Way):
    """`f(x) ~ N(f(x, θ̂), J(x) Σ J(x)ᵀ)` (Immer et al. 2021, equation 6), without forming J where a layer allows.

    Cost: one forward and C backward passes of activations, and the structure's contractions; chunked under the memory
    budget. Differentiable in inputs that require gradients. Uncertain inputs (`lw.Uncertain`) add `J_x Σ_x J_xᵀ` by one
    more forward and C backward passes.

    Example:
        >>> import lapwing as lw
        >>> lw.Linearized()
        Linearized()
    """

    def latent(self, tangent: Tangent, covariance: Covariance, inputs: Any, joint: bool) -> AnyLatent:
        """Returns the latent Gaussian; (B, C, B, C) covariances from one record of the whole batch when joint."""
        values, spreads = separate(inputs)
        if not spreads:
            return _of_weights(tangent, covariance, values, joint)
        batches.check_inputs(values, torch.empty(0, device=tangent.device), "the inputs")
        mean, added = carried(tangent, values, spreads, wants_gradient(values))
        batches.check_outputs(mean, "these inputs")
        if not tangent.blocks:
            return Latent(mean, (Dense(added),))
        latent = _of_weights(tangent, covariance, values, joint)
        if isinstance(latent, Latent):
            return Latent(latent.mean, (*latent.terms, Dense(added)))
        own = torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
        return JointLatent(latent.mean, latent.covariance + torch.einsum("bcd,be->bced", added, own))


def _of_weights(tangent: Tangent, covariance: Covariance, inputs: Any, joint: bool) -> Latent | JointLatent:
    """Returns `N(f(x, θ̂), J Σ Jᵀ)` at certain inputs."""
    dtype = covariance.record_dtype
    if joint:
        record = tangent.record(inputs, dtype=dtype)
        matrix = covariance.joint_output_covariance(record)
        return JointLatent(record.outputs, matrix.to(tangent.dtype))
    means, terms = [], []
    for _, record in tangent.records(inputs, dtype=dtype):
        means.append(record.outputs)
        terms.append([term.to(tangent.dtype) for term in covariance.output_covariance(record)])
    return Latent(means[0] if len(means) == 1 else torch.cat(means), concatenate(terms))
