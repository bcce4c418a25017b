"""What comes out of a loader: its size, the first batch, all batches, checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from ..errors import LapwingError, shown
from . import batches


def equal_batches(one: Any, other: Any) -> bool:
    """Whether two batches hold the same numbers."""
    first, second = batches.tensors(one), batches.tensors(other)
    return len(first) == len(second) and all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, second, strict=True))


def first_batch(loader: Any) -> Any:
    """Returns the first batch, and makes sure that the loader begins again.

    Raises:
        LapwingError: for no loader, for one that can be gone through once only, and for one without samples.
    """
    batches.check_loader(loader, "A fit")
    iterator = iter(loader)
    if not isinstance(loader, DataLoader) and iter(loader) is iterator:  # one with lasting workers keeps and resets it
        raise LapwingError(
            f"The loader, of type {type(loader).__name__}, can be gone through once only, and every pass needs the "
            "same data. Pass a DataLoader or a list of batches, not a generator."
        )
    for batch in iterator:
        if isinstance(loader, IterableDataset) and not _is_batch(batch):
            raise LapwingError(
                f"The data set, of type {type(loader).__name__}, yields {batches.describe(batch)}, which is no batch. "
                "Pass torch.utils.data.DataLoader(dataset, batch_size=100), which joins its samples."
            )
        if batches.size(batches.split(batch)[0]) == 0:
            raise LapwingError("The first batch of the loader has no samples. Check the dataset's length and filters.")
        return batch
    raise LapwingError(
        f"The loader, of type {type(loader).__name__}, yields no batch. Check the dataset's length, and drop_last=True "
        "with a batch size above it."
    )


def _is_batch(item: Any) -> bool:
    """Whether an item of a data set holds as many inputs as targets."""
    try:
        inputs, targets = batches.split(item)
        return hasattr(targets, "__len__") and batches.size(inputs) == len(targets)
    except LapwingError:
        return False


def known_size(loader: Any) -> int | None:
    """Returns how many samples a loader is sure to show, without going through it; None where it does not say.

    Lists and tuples of batches say, and a `DataLoader` that keeps to its sampler and joins samples as torch does.
    """
    if type(loader) in (list, tuple):
        return sum(batches.size(batches.split(batch)[0]) for batch in loader)
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return None
    return sampler_size(loader) if loader.collate_fn is default_collate else None


def sampler_size(loader: DataLoader) -> int | None:
    """Returns how many samples a loader draws; None where its sampler does not say."""
    taken = loader.batch_sampler
    if type(taken) is not BatchSampler:
        return None
    try:
        count = len(taken.sampler)  # type: ignore[arg-type]  # `loader.sampler` is unused where this one was given
    except (TypeError, NotImplementedError):  # over an iterable data set, or a sampler that has no end
        return None
    return count - count % taken.batch_size if taken.drop_last else count


def other_size(shown: int, to: str, before: int | None) -> LapwingError:
    """Returns the error of a loader that shows another number of samples than before, or none after a first batch."""
    first = "a batch" if before is None else f"{before}"
    return LapwingError(
        f"The loader showed {first} at first and shows {shown} samples {to}. Every pass needs the same data. Pass a "
        "DataLoader or a list of batches, not a generator."
    )


def check_progress(progress: Any) -> None:
    """Raises for a `progress` that is neither True, False nor None."""
    if progress is not None and not isinstance(progress, bool):
        raise LapwingError(
            f"progress={shown(progress)} is neither True, for a bar, nor False, nor None, for a bar on a terminal. "
            "Write progress=False."
        )


def check_seed(seed: Any) -> None:
    """Raises for a seed that is not a whole number from 0 to 2**63 - 1."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**63:
        raise LapwingError(f"seed={shown(seed)} is not a whole number from 0 to 2**63 - 1. Write seed=0.")


def checked_batches(network: nn.Module, loader: Iterable[Any]) -> Iterator[tuple[Any, Tensor, Tensor | None]]:
    """Yields inputs, targets and sample weights of batches that are not empty, on the network's device."""
    device = next(network.parameters()).device
    for number, raw in enumerate(loader, 1):
        inputs, targets = batches.split(raw, device)
        batches.check_finite(inputs, f"the inputs of batch number {number}")
        if batches.size(inputs):
            yield inputs, targets, batches.weights_of(raw, device)
