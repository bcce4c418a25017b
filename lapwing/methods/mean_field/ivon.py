"""The posterior in the state of an IVON optimiser, read without the package that it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...errors import LapwingError


def ivon_variances(optimizer: Any, own: Mapping[str, Tensor], model: str) -> dict[str, Tensor]:
    """Returns `σ² = 1 / (λ (h + γ))` of every parameter of a network that an IVON optimiser trains, float64.

    Args:
        optimizer: with `hess` h, one vector over the parameters in order, `ess` λ and `weight_decay` γ in each of its
            parameter groups.
        own: name -> the network's parameters.
        model: the network's name.

    Raises:
        LapwingError: for another optimiser, numbers that are no precisions, or another network.
    """
    kind = type(optimizer).__name__
    groups = list(getattr(optimizer, "param_groups", ()))
    states = [(group.get("hess"), group.get("ess"), group.get("weight_decay")) for group in groups]
    if not states or not all(isinstance(hess, Tensor) and None not in (ess, decay) for hess, ess, decay in states):
        raise LapwingError(
            f"Asked for MeanField.from_optimizer of {kind}, found no 'hess', 'ess' and 'weight_decay' in its parameter "
            "groups; an optimiser with IVON's state is needed: train with ivon.IVON(model.parameters(), lr=0.1, "
            "ess=len(dataset)), or fine-tune with lw.fit(model, loader, lw.MeanField())."
        )
    names = {id(value): name for name, value in own.items()}
    found: dict[str, Tensor] = {}
    for number, (group, (hess, ess, decay)) in enumerate(zip(groups, states, strict=True)):
        parameters = [value for value in group["params"] if value is not None]
        sizes = [value.numel() for value in parameters]
        precision = ess * (hess.detach().flatten().double() + decay)
        positive = precision.isfinite() & (precision > 0)
        if len(precision) != sum(sizes) or not bool(positive.all()):
            raise LapwingError(
                f"Asked for MeanField.from_optimizer of {kind}, found in parameter group {number} a 'hess' of "
                f"{len(precision)} numbers for {sum(sizes)} weights, {int((~positive).sum())} of them without a "
                "positive finite precision; one for each weight is needed: check that training has not diverged, and "
                "pass the optimiser as it is after training."
            )
        for value, part in zip(parameters, precision.split(sizes), strict=True):
            if id(value) in names:
                found[names[id(value)]] = (1 / part).reshape(value.shape)
    if not found:
        raise LapwingError(
            f"Asked for MeanField.from_optimizer of {kind} around {model}, found none of its {len(own)} parameters in "
            "the optimiser; the network that it trains is needed, not a copy: pass the model whose parameters() it was "
            "made with."
        )
    return found
