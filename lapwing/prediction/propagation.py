"""Input errors through a network whose weights are certain."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..covariance import AnyLatent, Blockwise, Covariance
from ..data.batches import Forward
from ..errors import LapwingError
from ..network.call import Call
from ..network.entry import outside_modes
from ..network.gate import checked_memory, checked_network
from ..network.recording_plan import RecordingPlan
from ..tangent import Tangent
from .linearized import Linearized
from .uncertain import prepared
from .way import Way, checked_way


def untreated(model: nn.Module, forward: Forward | None, memory: int | None) -> tuple[Tangent, Covariance]:
    """Returns a checked network without treated weights, and Σ over no weights."""
    model = checked_network(model)
    tangent = Tangent(Call(model, forward), (), RecordingPlan(), {}, 0, checked_memory(memory, model))
    return tangent, Blockwise((), {}, torch.zeros(0, dtype=torch.float64, device=tangent.device), 1.0)


@outside_modes
def propagate(
    model: nn.Module,
    inputs: Any,
    via: Way = Linearized(),  # noqa: B008 (frozen)
    *,
    forward: Forward | None = None,
    memory: int | None = None,
) -> AnyLatent:
    """Propagates uncertain inputs through a network with certain weights: `f(x) ~ N(f(x), J_x Σ_x J_xᵀ)`.

    No fit is needed. If the weights are uncertain too, pass `lw.Uncertain` to `posterior.latent`.

    Args:
        model: the trained network, in eval mode. Outputs (B, C).
        inputs: inputs of the network, with `lw.Uncertain` instead of at least one tensor.
        via: `Linearized()`: to first order. `Streamlined()`: layer by layer in one pass; in full mode it equals
            `Linearized()` for the networks that it supports. `MonteCarlo(draws)`: the network itself at draws of x.
        forward: `forward(model, inputs)`, if the network is not called as `model(x)`, `model(*x)` or `model(**x)`.
        memory: memory budget in bytes for one chunk of samples; None as in `lw.fit`.

    Returns:
        `.mean .variance .std` (B, C), `.covariance` (B, C, C), `.sample(n)`; differentiable in x and Σ_x.

    Raises:
        LapwingError: if no input is uncertain; for bad inputs, and a network in training mode.

    Cost: C backward passes of activations for `Linearized`; S forward passes for `MonteCarlo`; one for `Streamlined`,
    after about a second per call in which it reads the network.

    Source: Li et al., Streamlining Prediction in Bayesian Deep Learning, section 4.3 and equation 6, with certain
    weights, after Petersen et al. 2024.

    Example:
        >>> import torch, lapwing as lw
        >>> model = torch.nn.Linear(3, 2).eval()
        >>> x = torch.randn(5, 3)
        >>> latent = lw.propagate(model, lw.Uncertain(x, 0.01))
        >>> torch.allclose(latent.covariance, 0.01 * model.weight @ model.weight.T, atol=1e-6)
        True
    """
    return certain_latent(*untreated(model, forward, memory), inputs, via)


def certain_latent(tangent: Tangent, covariance: Covariance, inputs: Any, via: Way) -> AnyLatent:
    """Returns the latent of `propagate` for a checked network."""
    checked_way(via)
    inputs = prepared(inputs, tangent.device)
    if not inputs.spreads:
        raise LapwingError(f"None of the inputs {inputs} is uncertain. Write lw.Uncertain(x, variance) instead of x.")
    with torch.set_grad_enabled(inputs.wants_gradient):
        return via.latent(tangent, covariance, inputs, False)
