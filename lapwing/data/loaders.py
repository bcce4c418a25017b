"""Loaders: their size, their first batch, and checks of their batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from ..errors import LapwingError
from . import batches
from .samples import Samples


def kept_batches(loader: Any) -> Iterator[Any]:
    """Yields the batches of a loader, which stay as they are while others are read.

    A loader may fill the same tensors with every batch. So their tensors are copied, unless the loader is a list, or
    torch's own that joins samples into new tensors or receives them from workers.
    """
    torchs_own = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    makes_new = torchs_own and (loader.collate_fn is default_collate or loader.num_workers > 0)
    if makes_new or type(loader) in (list, tuple):
        return iter(loader)
    return map(batches.copied, loader)


def first_batch(loader: Any, weighted: bool = False) -> Samples:
    """Returns the first batch of a loader; raises if it can be read only once, or has no samples."""
    batches.check_loader(loader, "A fit")
    iterator = iter(loader)
    # with `persistent_workers` a DataLoader returns the same iterator, reset
    if not isinstance(loader, DataLoader) and iter(loader) is iterator:
        raise LapwingError(
            f"The loader, of type {type(loader).__name__}, can be read only once, and every pass needs the same "
            "data. Pass a DataLoader or a list of batches, not a generator."
        )
    for batch in iterator:
        if isinstance(loader, IterableDataset) and not _is_batch(batch):
            break
        samples = Samples.of(batches.copied(batch), weighted)
        if samples.count:
            return samples
        raise LapwingError("The first batch of the loader has no samples. Check the dataset's length and filters.")
    raise _no_batch(loader)


def _no_batch(loader: Any) -> LapwingError:
    """Returns the error for a loader without batches, or a data set whose items are samples."""
    kind = type(loader).__name__
    for item in loader:
        return LapwingError(
            f"The data set, of type {kind}, yields {batches.describe(item)}, which is not a batch. Pass "
            "torch.utils.data.DataLoader(dataset, batch_size=100), which joins its samples."
        )
    return LapwingError(
        f"The loader, of type {kind}, yields no batch. Check the dataset's length, and drop_last=True with a batch "
        "size above it."
    )


def _is_batch(item: Any) -> bool:
    """Whether an item of a data set is a batch: it has the same number of inputs and targets."""
    try:
        samples = Samples.of(item)
        return hasattr(samples.targets, "__len__") and samples.count == len(samples.targets)
    except LapwingError:
        return False


def known_size(loader: Any) -> int | None:
    """Returns the number of samples of torch's own `DataLoader`, or None if it is unknown."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return None
    return sampler_size(loader) if loader.collate_fn is default_collate else None


def sampler_size(loader: DataLoader) -> int | None:
    """Returns the number of samples that the sampler of a loader draws, or None if it is unknown."""
    drawn = loader.batch_sampler
    if type(drawn) is not BatchSampler:
        return None
    try:
        count = len(drawn.sampler)  # type: ignore[arg-type]  # `loader.sampler` is unused if the user gave this one
    except (TypeError, NotImplementedError):  # an iterable data set, or a sampler without an end
        return None
    return count - count % drawn.batch_size if drawn.drop_last else count


def other_size(shown: int, to: str, before: int | None) -> LapwingError:
    """Returns the error for a loader that shows another number of samples than before; `before` None: a batch."""
    first = "a batch" if before is None else f"{before}"
    return LapwingError(
        f"The loader showed {first} at first and shows {shown} samples {to}. Every pass needs the same data. Pass a "
        "DataLoader or a list of batches, not a generator."
    )


def check_data_size(data_size: int, count: int) -> None:
    """Raises if N is below the number of samples that the loader shows."""
    if data_size < count:
        raise LapwingError(
            f"data_size={data_size} is below the {count} samples that the loader shows. Leave data_size out, or give "
            "the size of the whole training set."
        )
