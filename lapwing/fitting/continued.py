"""Adds further data to a posterior after further training: `prior=` of `lw.fit`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..data.data import Data
from ..data.inputs import Inputs
from ..errors import LapwingError
from ..methods.prior import Prior
from ..network.gate import checked_network
from ..network.stamp import Stamp
from ..posterior import Posterior
from ..posterior.further_data import check_invertible, with_data
from ..running.runner import NoCheckpoint
from ..tangent import Tangent
from .options import FitOptions


def continued(options: FitOptions, former: Posterior, model: Any, loader: Any, checkpoint: NoCheckpoint) -> Posterior:
    """Returns the posterior of further data with a former posterior as the prior: see `lw.fit`."""
    former._check_network()
    check_invertible(former)
    data = Data.of(loader, former, options.sample_weights)
    tangent = _surveyed(options, former.tangent, model, data.first.inputs, former.likelihood.activation)
    with checkpoint.opened(data, options.described, tangent):
        remedy = "Train the network longer on them, or fit without prior=, which tunes the noise variance again."
        whole = with_data(former, tangent, data, remedy, checkpoint)
    return replace(
        whole, prior=Prior(former.prior.precision, former.tangent.mean(), fixed=True), noise_fixed=True, history={},
        method=replace(whole.method, after_former=True), stamp=Stamp.of(tangent.model),
    )  # fmt: skip


def _surveyed(options: FitOptions, former: Tangent, model: Any, inputs: Inputs, activation: str | None) -> Tangent:
    """Surveys the network that was trained further, with the parameters of the former fit."""
    if isinstance(model, torch.nn.Module):
        present = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if not present.issuperset(former.parameters):
            raise _other_network(model, former)
    forward = options.forward or former.call.forward
    call = replace(former.call, model=checked_network(model, False), forward=forward, activation=activation, looks=True)
    memory = options.memory or former.memory
    tangent = Tangent.survey(call, inputs, lambda name, _: name in former.parameters, memory=memory)
    if tangent.blocks != former.blocks or tangent.outputs != former.outputs:
        raise _other_network(tangent.model, former)
    return tangent


def _other_network(model: Any, former: Tangent) -> LapwingError:
    return LapwingError(
        f"{type(model).__name__} has other layers than the network of the former posterior, "
        f"{type(former.model).__name__} with {former.outputs} outputs. Train a copy of that network further."
    )
