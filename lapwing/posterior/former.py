"""A posterior as the prior of further training: its quadratic penalty around the weights of the fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..covariance import Covariance, has_prior
from ..errors import LapwingError
from ..network.eager import own_parameters, real, uncompiled
from ..network.entry import full_precision
from ..tangent import Tangent, join
from .method_info import MethodInfo


@full_precision
def penalty(tangent: Tangent, covariance: Covariance, model: Any, method: MethodInfo) -> Tensor:
    """Returns `1/2 (θ - θ̂)ᵀ Σ⁻¹ (θ - θ̂)` at the weights θ of another network: see `Posterior.penalty`."""
    parameters = tangent.parameters
    named = own_parameters(uncompiled(model)) if isinstance(model, nn.Module) else {}
    named = {name: real(value) for name, value in named.items()}  # with the graph of a complex parameter
    wrong = [name for name, value in parameters.items() if name not in named or named[name].shape != value.shape]
    if wrong:
        raise LapwingError(
            f"The posterior treats the parameter {wrong[0]} {tuple(parameters[wrong[0]].shape)}, and "
            f"{type(model).__name__} has none with this name and shape. Pass a network of the same architecture."
        )
    if any(named[name].data_ptr() == value.data_ptr() != 0 for name, value in parameters.items()):
        raise LapwingError(
            "The network is the posterior's own, whose weights must stay as they are. Train a copy of it, "
            "model = copy.deepcopy(posterior.model), and write posterior.penalty(model)."
        )
    dtype, device = covariance.dtype, covariance.device
    moved = {name: named[name].to(device, dtype) - value.detach().to(dtype) for name, value in parameters.items()}
    distance = join(tangent.blocks, moved)
    with torch.no_grad():
        product = precision_product(covariance, {name: d.detach() for name, d in distance.items()}, method)
    value = torch.zeros((), dtype=dtype, device=device)
    for name, d in distance.items():  # the gradient is Σ⁻¹(θ - θ̂), so autograd keeps nothing of the product itself
        value = value + (d * product[name]).sum() - (d.detach() * product[name]).sum() / 2
    return value.to(tangent.dtype)


def precision_product(covariance: Covariance, vectors: dict[str, Tensor], method: MethodInfo) -> dict[str, Tensor]:
    """Returns `Σ⁻¹ v`; raises if the covariance has no inverse, or only one that needs a factorisation."""
    product = covariance.precision_mv(vectors) if has_prior(covariance) else None
    if product is None:
        raise LapwingError(
            f"The covariance by {method} has no inverse without a factorisation, so it cannot be a prior. Fit "
            "lw.KFAC(), lw.Diagonal() or lw.Full()."
        )
    return product
