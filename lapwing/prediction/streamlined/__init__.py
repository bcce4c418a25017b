"""Streamlined prediction: the Gaussian over the weights, pushed through the network layer by layer in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ... import batches
from ...covariance import Covariance, Latent
from ...covariance.output import Dense
from ...errors import LapwingError
from ...tangent import Tangent
from ...tangent.eager import without_compiled
from ...tangent.probe import check_mode
from ...tangent.record import wants_gradient
from ..way import Way
from .propagate import numbers_per_sample, propagate, read


@dataclass(frozen=True)
class Streamlined(Way):
    """Pushes the moments of `N(θ̂, Σ)` through the network, layer by layer, without Jacobians or weight draws.

    `Cov[h] = W Cov[a] Wᵀ + Σ_ii' E[a aᵀ]_ii' Cov[W_ji, W_j'i']` at linear layers, `diag(g') Cov[h] diag(g')` at
    activations. The mean is the network's output. Layers are taken as independent of each other, whatever the posterior
    says; within a layer its covariance counts in full. With the last layer alone treated, the same as `Linearized()`.
    Networks: `nn.Sequential`, nested or not, of `nn.Linear` and element-wise activations from the first treated layer
    on, any modules before it.

    Attributes:
        covariance: what is kept of hidden activations: "diagonal", their variances, or "full", their covariances. The
            outputs have covariances (B, C, C) in either case.

    Cost: no pass but the forward one. A layer with a Kronecker-factored posterior takes time O(B (I² + I O + O²)) for
    "diagonal", cubic in the widths and memory O(B D²) for "full"; the outputs take memory O(B C²). Batches are cut into
    chunks that fit the memory budget.

    Source: Li et al., Streamlining Prediction in Bayesian Deep Learning, equations 2 to 6; Kronecker-factored
    posteriors in their exact eigenbasis, where the paper approximates them by equation 10.

    Example:
        >>> latent = posterior.latent(x, via=lw.Streamlined())  # doctest: +SKIP
    """

    covariance: Literal["diagonal", "full"] = "diagonal"

    def __post_init__(self) -> None:
        if self.covariance not in ("diagonal", "full"):
            raise LapwingError(
                f"Asked for Streamlined(covariance={self.covariance!r}); accepted are 'diagonal' and 'full': write "
                "via=lw.Streamlined(covariance='diagonal')."
            )

    def latent(self, tangent: Tangent, covariance: Covariance, inputs: Any, joint: bool = False) -> Latent:
        """Returns the latent Gaussian at one batch, differentiable in inputs that require gradients.

        Raises:
            LapwingError: joint=True; a network or inputs that are not covered, named with what is; NaN or infinite
                inputs or outputs.
        """
        _check(tangent, inputs, joint)
        dtype = covariance.record_dtype or tangent.dtype
        # under the lock of without_compiled: other threads swap parameters
        with torch.set_grad_enabled(wants_gradient(inputs)), without_compiled():
            steps = read(tangent, covariance, self.covariance == "full")
            length = tangent.chunk_length(dtype=dtype, rows_held=numbers_per_sample(steps))
            parts = [propagate(steps, chunk, dtype) for _, chunk in batches.chunks(inputs, length)]
        mean = torch.cat([part.mean for part in parts])
        batches.check_outputs(mean, "these inputs")
        matrix = torch.cat([part.variance for part in parts if part.variance is not None])  # (B, C, C)
        return Latent(mean.to(tangent.dtype), (Dense(matrix.to(tangent.dtype)),))


def _check(tangent: Tangent, inputs: Any, joint: bool) -> None:
    network = type(tangent.model).__name__
    if joint:
        raise LapwingError(
            "Asked for joint=True via lw.Streamlined(), which carries each input's moments alone, without covariances "
            "across inputs; accepted is joint=False: write via=lw.Linearized() for joint=True."
        )
    if tangent.forward is not None:
        raise LapwingError(
            f"Asked for streamlined prediction through {network} called by forward={tangent.forward!r}, whose steps "
            "cannot be read; accepted is a network that is called as model(x): write via=lw.Linearized() instead."
        )
    if not isinstance(inputs, Tensor):
        raise LapwingError(
            f"Asked for streamlined prediction through {network} at {batches.describe(inputs)}; accepted is one tensor "
            "(B, ...) of inputs to an nn.Sequential: write via=lw.Linearized() instead."
        )
    check_mode(tangent.model)
    batches.check_inputs(inputs, next(iter(tangent.parameters.values())), "the inputs")


__all__ = ["Streamlined"]
