"""Data behind the door: what a user passed, as batches that every pass reads again, on one process or several."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from .. import ranks
from ..errors import LapwingError
from . import batches
from .frames import as_loader
from .loaders import equal_batches, first_batch, known_size, sampler_size

log = logging.getLogger("lapwing")

SHARE_OUT = "Let the data set share them out by torch.utils.data.get_worker_info(), or use num_workers=1."


class Data:
    """Training or held-out data: an iterable of batches that can be read several times.

    Over several processes these are the data of this rank, and the joined data are those of all ranks, in order. A
    `DistributedSampler` repeats samples so that all ranks have equally many. `Data` leaves these out: sample k of rank
    r is number `r + k R` of the sampler's order, or no sample if that order is shorter.

    Args:
        given: data as the user passed them: see `as_loader`.
        network: network whose weights give the dtype of arrays.
        sample_weights: whether the batches hold sample weights. Then `Data` yields `batches.Weighted`.

    Attributes:
        loader: the data as an iterable of batches.
        weighted: whether the batches hold sample weights.
    """

    def __init__(self, given: Any, network: Any, sample_weights: bool = False) -> None:
        self.loader, self.weighted = as_loader(given, network), sample_weights

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches.

        Raises:
            LapwingError: if sample weights are missing or negative, or, in one process, if all of them are 0.
        """
        total = 0.0
        for batch in self._without_padding():
            if self.weighted:
                batch = batches.weighted(batch)
                total += float(batch.weights.sum())  # type: ignore[union-attr]
            yield batch
        if self.weighted and not total and not ranks.several():
            raise LapwingError(
                "All sample weights are 0, so there are no data. Pass positive weights for some samples."
            )

    def __len__(self) -> int:
        return len(self.loader)

    def _without_padding(self) -> Iterator[Any]:
        left = _unrepeated(self.loader) if ranks.several() else None
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

    @cached_property
    def first(self) -> Any:
        """The first batch of the joined data, on every rank. Collective the first time.

        Raises:
            LapwingError: if the loader is none, can be read only once, or shows no sample.
        """
        if not ranks.several():
            first = first_batch(self.loader)
            return batches.weighted(first) if self.weighted else first
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

    def first_of_rank(self) -> list[Tensor]:
        """Returns the tensors of the first batch of this rank; none if it has no batch.

        Raises:
            LapwingError: if the loader shows another first batch the second time.
        """
        once, again = (batches.tensors(next(iter(self), ())) for _ in range(2))
        if len(again) != len(once) or not all(
            one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
            for one, other in zip(once, again, strict=True)
        ):
            raise LapwingError(
                "The loader shows other samples the second time, and a checkpoint counts on their order. Pass "
                "shuffle=False; the fit does not depend on the order."
            )
        return once

    @property
    def known_size(self) -> int | None:
        """The number of samples of all ranks, or None if it is unknown before the data are read in one process."""
        return sum(map(sum, self.sizes)) if ranks.several() else known_size(self.loader)

    @property
    def expected_size(self) -> int | None:
        """`known_size`, or else the number of samples that a sampler draws, which a `collate_fn` may change."""
        known = self.known_size
        return sampler_size(self.loader) if known is None and isinstance(self.loader, DataLoader) else known

    @cached_property
    def sizes(self) -> list[list[int]]:
        """The sizes of the batches of each rank. Collective the first time; reads a loader that has no length."""
        loader, count = self.loader, known_size(self.loader) if isinstance(self.loader, DataLoader) else None
        if count is None:
            sizes = [size for size in (batches.size(batches.split(batch)[0]) for batch in self) if size]
        else:
            length, unrepeated = loader.batch_sampler.batch_size, _unrepeated(loader)
            count = count if unrepeated is None else min(unrepeated, count)
            sizes = [min(length, count - start) for start in range(0, count, length)]
        return ranks.gathered("the sizes of the shares", sizes)

    @property
    def before(self) -> list[int]:
        """The sizes of the batches of the ranks before this one; none in one process."""
        earlier = self.sizes[: ranks.rank()] if ranks.several() else []
        return [size for part in earlier for size in part]

    def on_first_rank(self) -> Any:
        """Returns the joined data as a list of batches on rank 0, and an empty list on the others.

        In one process it returns the data themselves.
        """
        return ranks.gathered_on_first("the held-out data", list(self)) if ranks.several() else self

    def overlaps(self, other: Data) -> bool:
        """Whether two data sets are the same, share memory, or begin with the same samples."""
        firsts = [batches.split(one.first) for one in (self, other)]
        same = self.loader is other.loader or (
            self._shows_all and other._shows_all and self.loader.dataset is other.loader.dataset
        )
        parts = [one._tensors(first) for one, first in zip((self, other), firsts, strict=True)]
        return any(ranks.gathered("held-out data", same)) or _share_memory(*parts) or _same_rows(*firsts)

    @property
    def _shows_all(self) -> bool:
        """Whether a data loader shows its whole data set, in any order."""
        return isinstance(self.loader, DataLoader) and type(self.loader.sampler) in (RandomSampler, SequentialSampler)

    def _tensors(self, first: Any) -> Sequence[Tensor]:
        """Returns the tensors of a data set that is shown whole, or else those of the first batch."""
        whole = self._shows_all and isinstance(self.loader.dataset, TensorDataset)
        return self.loader.dataset.tensors if whole else batches.tensors(first)

    def warn_of_unseen(self, shown: int | None) -> None:
        """Warns if a data loader shows fewer samples than its data set has, or each of them once for each worker.

        Over several processes each loader shows its share, so nothing is checked.
        """
        loader = self.loader
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if shown is None or distributed or not isinstance(loader, DataLoader):
            return
        try:
            total = len(loader.dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            streams = isinstance(loader.dataset, IterableDataset) and loader.num_workers > 1
            two = list(islice(loader, 2)) if streams else []
            if len(two) == 2 and equal_batches(*two):
                log.warning(
                    "Two workers of the loader begin with the same batch: each sample may count once a worker. %s",
                    SHARE_OUT,
                )  # fmt: skip
            return
        if shown < total:
            chosen = isinstance(getattr(loader.batch_sampler, "sampler", None), SubsetRandomSampler)
            log.log(
                logging.INFO if chosen else logging.WARNING,  # such a sampler says which samples are meant
                "The loader shows %d of the %d samples of its data set, and the posterior is that of %d. Pass "
                "data_size=%d if the network was trained on all of them.", shown, total, shown, total,
            )  # fmt: skip
        elif isinstance(loader.dataset, IterableDataset) and shown == total * loader.num_workers > total:
            log.warning(
                "The loader shows %d samples, each of the %d of its data set once a worker. %s",
                shown, total, SHARE_OUT,
            )  # fmt: skip


def _unrepeated(loader: Any) -> int | None:
    """Returns the number of samples of a loader that its `DistributedSampler` does not repeat; None for all."""
    batch_sampler = getattr(loader, "batch_sampler", None) if isinstance(loader, DataLoader) else None
    sampler = batch_sampler.sampler if type(batch_sampler) is BatchSampler else None
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    return max(0, -((sampler.rank - len(sampler.dataset)) // sampler.num_replicas))  # type: ignore[arg-type]


def _share_memory(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether inputs and targets share memory, as if one table was shuffled for training."""
    return len(one) == len(other) and all(
        a.device == b.device and not a.is_meta
        and a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
        for a, b in zip(one, other, strict=True)
    )  # fmt: skip


def _same_rows(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether the shorter of two batches is the beginning of the longer one."""
    count = min(batches.size(one[0]), batches.size(other[0]))
    rows = [[tensor[:count] for tensor in batches.tensors(batch)] for batch in (one, other)]
    if any(tensor.is_meta for tensors in rows for tensor in tensors):
        return False
    rows = [[tensor.cpu() for tensor in tensors] for tensors in rows]
    kinds = [[(tensor.shape, tensor.dtype) for tensor in tensors] for tensors in rows]
    return kinds[0] == kinds[1] and all(torch.equal(*pair) for pair in zip(*rows, strict=True))
