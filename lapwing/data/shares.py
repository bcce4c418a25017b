"""The share of the data that each of several processes has. The joined data are the shares of all ranks, in order."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from .. import ranks
from ..errors import LapwingError
from . import batches
from .loaders import WeightedLoader, equal_batches, first_batch, known_size

log = logging.getLogger("lapwing")


class Share:
    """The share of the joined data that a loader shows to this rank.

    A `DistributedSampler` repeats samples so that all ranks have equally many. These are left out: sample k of rank r
    is number `r + k R` of the sampler's order, or no sample if that order is shorter.

    Args:
        loader: loader of this rank. It may have no samples.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        left = _without_padding(self.loader)
        if left == 0:
            return
        for batch in self.loader:
            if left is None:
                yield batch
                continue
            size = batches.size(batches.split(batch)[0])
            yield batch if size <= left else batches.take(batch, slice(0, left))
            left -= size
            if left <= 0:
                return

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    @cached_property
    def sizes(self) -> list[list[int]]:
        """The sizes of the batches of each rank. Collective the first time; reads a loader that has no length."""
        return ranks.gathered("the sizes of the shares", _sizes(self))

    @property
    def before(self) -> list[int]:
        """The sizes of the batches of the ranks before this one."""
        return [size for part in self.sizes[: ranks.rank()] for size in part]

    @property
    def count(self) -> int:
        """The number of samples of this rank."""
        return sum(self.sizes[ranks.rank()])

    @property
    def total(self) -> int:
        """The number of samples of all ranks."""
        return sum(map(sum, self.sizes))

    @cached_property
    def first(self) -> Any:
        """The first batch of the joined data, on every rank. Collective the first time.

        Raises:
            LapwingError: if no rank has a sample.
        """
        batches.check_loader(self.loader, "A fit")
        mine = next((batch for batch in self if batches.size(batches.split(batch)[0])), None)
        every = ranks.gathered("the first batch", mine is not None)
        if not any(every):
            raise LapwingError("The loaders of all processes show no sample. Check the dataset's length and filters.")
        source = every.index(True)
        first = ranks.sent("the first batch", mine, source)
        if mine is not None and ranks.rank() != source and equal_batches(mine, first):
            log.warning(
                "Process %d shows the same first batch as process %d. Each must show its own share of the data, or "
                "samples count several times: give the DataLoader a DistributedSampler, or each process its part of a "
                "list.", ranks.rank(), source,
            )  # fmt: skip
        return first


def _without_padding(loader: Any) -> int | None:
    """Returns the number of samples of a loader that its `DistributedSampler` does not repeat; None for all."""
    batch_sampler = getattr(loader, "batch_sampler", None) if isinstance(loader, DataLoader) else None
    sampler = batch_sampler.sampler if type(batch_sampler) is BatchSampler else None
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    return max(0, -((sampler.rank - len(sampler.dataset)) // sampler.num_replicas))  # type: ignore[arg-type]


def _sizes(share: Share) -> list[int]:
    """Returns the sizes of a share's batches, without loading them if the sampler knows them."""
    loader = share.loader
    count = known_size(loader) if isinstance(loader, DataLoader) else None
    if count is None:
        return [size for size in (batches.size(batches.split(batch)[0]) for batch in share) if size]
    length, without_padding = loader.batch_sampler.batch_size, _without_padding(loader)  # type: ignore[attr-defined]
    count = count if without_padding is None else min(without_padding, count)
    return [min(length, count - start) for start in range(0, count, length)]


def share(loader: Any) -> Any:
    """Returns a rank's loader as its share of the joined data, or in one process the loader itself."""
    return Share(loader) if ranks.several() and not isinstance(loader, Share) else loader


def joined_first_batch(loader: Any) -> Any:
    """Returns the first batch of the joined data, or of a loader in one process: see `first_batch`."""
    return loader.first if isinstance(loader, Share) else first_batch(loader)


def share_of(loader: Any) -> Share | None:
    """Returns the share that a loader shows, with sample weights or without; None in one process."""
    loader = loader.loader if isinstance(loader, WeightedLoader) else loader
    return loader if isinstance(loader, Share) else None


def on_first_rank(loader: Any) -> Any:
    """Returns the joined data as a list of batches on rank 0, and an empty list on the others.

    In one process it returns the loader itself.
    """
    return ranks.gathered_on_first("the held-out data", list(Share(loader))) if ranks.several() else loader
