"""The correlation of the features before the last layer, which "diagonal" mode does not carry through the network.

It is nearly the same at all inputs, so it is estimated once, from draws of the weights through the Jacobian of the
features φ: R is the correlation that belongs to `Σ_n Cov[φ(x_n)] / tr Cov[φ(x_n)]`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...covariance import Covariance
from ...data.inputs import Inputs
from ...linalg import symmetric_eigen
from ...network.call import Call
from ...tangent import Tangent
from ..weight_draws import latent_of_draws
from .moments import FeatureCorrelation

if TYPE_CHECKING:
    from .program import Program

DRAWS, TOGETHER = 16, 8
"""Number of draws of the weights, and of inputs that share them: 64 inputs see 128 draws."""

RANK = 64
"""Maximum rank of F in `R = F Fᵀ + diag(r)`: a product costs C n K per sample, not C n²."""


def correlation_of(
    tangent: Tangent, covariance: Covariance, program: Program, inputs: Inputs
) -> FeatureCorrelation | None:
    """Returns the mean correlation of the features, or None if they are certain or support no draws.

    Cost: about 50 forward passes of the inputs.
    """
    if program.features is None:
        return None
    graph, source = program.graph, program.features

    def features(model: nn.Module, value: Any) -> Tensor:
        some = Inputs(value)
        return graph.run(some)[source].reshape(some.samples, -1)

    width = features(tangent.model, inputs.take(slice(0, 1)).value).shape[1]
    trunk, rows = replace(tangent, call=Call(tangent.model, features), outputs=width), []
    for seed, (_, some) in enumerate(inputs.chunks(TOGETHER)):
        latent: Any = latent_of_draws(trunk, covariance, some, DRAWS, seed, False)
        if latent is None:
            return None
        moved = latent.deviations  # (S, B, n)
        sizes = moved.square().sum((0, 2), keepdim=True).sqrt()
        rows.append((moved / sizes.clamp_min(torch.finfo(moved.dtype).tiny)).flatten(0, 1))
    drawn = torch.cat(rows)
    drawn = drawn / drawn.norm(dim=0).clamp_min(torch.finfo(drawn.dtype).tiny)  # R = drawnᵀ drawn
    _, vectors = symmetric_eigen(drawn @ drawn.mT)
    factor = drawn.mT @ vectors[:, -min(RANK, width) :].to(drawn)
    return FeatureCorrelation(factor, (1 - factor.square().sum(1)).clamp_min(0), program.fingerprints())
