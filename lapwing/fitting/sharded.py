"""What `lw.fit` does with a network that `fully_shard` has spread over processes: it fits the last layer alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ..errors import LapwingError
from ..methods import Method
from ..network import batches, ranks
from ..network.batches import Forward
from ..network.data import as_loader
from ..network.sharded import Head
from ..tangent import LastLayer, Predicate
from ..tuning import EarlyStopping, Tuning, Validation


def check_last_layer(method: Method | None, params: Predicate | LastLayer) -> None:
    """Raises unless the last layer alone is to be treated."""
    if not isinstance(params, LastLayer):
        raise LapwingError(
            f"{type(method).__name__} needs gradients of all weights to treat, and those of a network that is sharded "
            "by fully_shard are in no process: pass params=lw.last_layer for the last layer alone."
        )


def with_features(
    model: nn.Module, forward: Forward | None, loader: Any, validation: Any, tune: Tuning | None, sample_weights: bool
) -> tuple[Head, Any, Any, Any]:
    """Returns the last layer of a sharded network, and training data, held-out data and tuning with its features.

    Cost: one pass of the network over the data. The features of all samples of a process are kept on the CPU.
    """
    share = ranks.share(as_loader(loader, model))
    parts = batches.weighted if sample_weights else batches.split
    head = Head(model, forward, parts(ranks.joined_first_batch(share))[0])

    def held_out(data: Any) -> Any:
        return head.features(ranks.share(as_loader(data, model, "val")), batches.split)

    training = head.features(share, parts)
    if isinstance(tune, (EarlyStopping, Validation)):
        tune = replace(tune, loader=held_out(tune.loader))
    return head, training, None if validation is None else held_out(validation), tune
