"""What `lw.fit` does with `validation=`: held-out data tune, and choose between the last layer and all weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from ..errors import LapwingError
from ..network import batches
from ..network.loaders import first_batch
from ..tuning import Tuning, Validation

log = logging.getLogger("lapwing")


def validation_tuning(validation: Any, tune: Tuning | None, loader: Iterable[Any], first: tuple[Any, Any]) -> Tuning:
    """Returns the tuning on held-out data; warns where they are the training data.

    Args:
        validation: a loader, or a pair of tensors (x, y).
        tune: what the user gave beside it; None where that is nothing.
        loader: the training data.
        first: their first batch.

    Raises:
        LapwingError: for a tuning beside it, and for what is neither a loader nor a pair.
    """
    if tune is not None:
        raise LapwingError(
            f"validation= and tune={type(tune).__name__} exclude each other, since validation= tunes by "
            "lw.Validation(loader). Leave one of them out."
        )
    pair = isinstance(validation, tuple) and len(validation) == 2 and isinstance(validation[1], Tensor)
    held_out = [validation] if pair else validation
    tuning = Validation(held_out)
    if held_out is loader or _same_dataset(held_out, loader) or _same_rows(batches.split(first_batch(held_out)), first):
        log.warning(
            "The validation data are the training data. The network fits these better than any others, so that its "
            "error bars come out too narrow and its probabilities too sure. Pass data that it was not trained on: "
            "validation=(x_val, y_val)."
        )
    return tuning


def _same_dataset(one: Any, other: Any) -> bool:
    """Whether two loaders show one data set, and neither chooses a part of it."""
    loaders = (one, other)
    if not all(isinstance(loader, DataLoader) for loader in loaders) or one.dataset is not other.dataset:
        return False
    return all(type(loader.sampler) in (RandomSampler, SequentialSampler) for loader in loaders)


def _same_rows(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether two batches begin with the same samples, as many as both have."""
    count = min(batches.size(one[0]), batches.size(other[0]))
    rows = [[tensor[:count].cpu() for tensor in batches.tensors(batch)] for batch in (one, other)]
    kinds = [[(tensor.shape, tensor.dtype) for tensor in tensors] for tensors in rows]
    return kinds[0] == kinds[1] and all(torch.equal(*pair) for pair in zip(*rows, strict=True))
