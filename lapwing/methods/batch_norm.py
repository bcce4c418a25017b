"""Batch norm statistics of a network whose weights were averaged, taken from data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from ..errors import LapwingError
from ..network import batches
from ..network.batches import Forward
from ..network.calling import call
from ..network.eager import without_compiled
from ..network.loaders import checked_batches


class _OnInputs(nn.Module):
    """A network called as in the fit."""

    def __init__(self, network: nn.Module, called: Forward | None) -> None:
        super().__init__()
        self.network, self.called = network, called

    def forward(self, inputs: Any) -> Tensor:
        try:
            return call(self.network, inputs, self.called)
        except (LapwingError, ValueError) as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise LapwingError(
                f"Batch norm statistics of {type(self.network).__name__} have no variance on "
                f"{batches.describe(inputs)}: it has one value per channel. Pass batches of at least 2 samples, "
                "DataLoader(..., drop_last=True), or batch_norm='keep'."
            ) from error


def refresh(network: nn.Module, loader: Iterable[Any], forward: Forward | None, seed: int) -> None:
    """Takes batch norm statistics anew, in training mode: the mean over batches of each batch's.

    Args:
        network: changed in place, its mode too.
        loader: (inputs, targets) batches.
        forward: `forward(network, inputs)`, or None.
        seed: of dropout; torch's generators are left as they were.

    Raises:
        LapwingError: for a batch with one value per channel, or bad inputs.
    """
    device = next(network.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), without_compiled():
        torch.default_generator.manual_seed(seed)
        for each in devices:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        wrapped = ([inputs] for inputs, _ in checked_batches(network, loader))  # update_bn takes the first of a list
        update_bn(wrapped, _OnInputs(network, forward))
