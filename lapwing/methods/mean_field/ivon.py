"""The posterior in the state of an IVON optimiser, read without the package that it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...errors import LapwingError


def ivon_variances(optimizer: Any, parameters: Mapping[str, Tensor], model: str) -> dict[str, Tensor]:
    """Returns `σ² = 1 / (λ (h + γ))` of every parameter of a network that an IVON optimiser trains, float64.

    Args:
        optimizer: with `hess` h, one vector over the parameters in order, `ess` λ and `weight_decay` γ in each of its
            parameter groups.
        parameters: the network's, by name.
        model: the network's name.

    Raises:
        LapwingError: for another optimiser, numbers that are no precisions, or another network.
    """
    kind = type(optimizer).__name__
    groups = list(getattr(optimizer, "param_groups", ()))
    states = [(group.get("hess"), group.get("ess"), group.get("weight_decay")) for group in groups]
    if not states or not all(isinstance(hess, Tensor) and None not in (ess, decay) for hess, ess, decay in states):
        raise LapwingError(
            f"MeanField.from_optimizer needs an optimiser with IVON's state: the parameter groups of {kind} have no "
            "'hess', 'ess' and 'weight_decay'. Train with ivon.IVON(model.parameters(), lr=0.1, ess=len(dataset)), or "
            "fine-tune with lw.fit(model, loader, lw.MeanField())."
        )
    names = {id(value): name for name, value in parameters.items()}
    variances: dict[str, Tensor] = {}
    for number, (group, (hess, ess, decay)) in enumerate(zip(groups, states, strict=True)):
        trained = [value for value in group["params"] if value is not None]
        sizes = [value.numel() for value in trained]
        precision = ess * (hess.detach().flatten().double() + decay)
        positive = precision.isfinite() & (precision > 0)
        if len(precision) != sum(sizes) or not bool(positive.all()):
            raise LapwingError(
                f"The 'hess' of {kind} in parameter group {number} has {len(precision)} numbers for {sum(sizes)} "
                f"weights, and {int((~positive).sum())} of them give no positive finite precision. Check that training "
                "has not diverged, and pass the optimiser as it is after training."
            )
        for value, part in zip(trained, precision.split(sizes), strict=True):
            if id(value) in names:
                variances[names[id(value)]] = (1 / part).reshape(value.shape)
    if not variances:
        raise LapwingError(
            f"{kind} trains none of the {len(parameters)} parameters of {model}. Pass the model whose parameters() it "
            "was made with, not a copy."
        )
    return variances
