"""`Data`: the user's data as batches that every pass reads again, in one process or several."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import islice
from operator import length_hint
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
    default_collate,
)

from .. import ranks
from ..errors import LapwingError, shown
from . import batches
from .frames import Columns, as_loader, columns_of
from .inputs import Inputs, Samples
from .progress import tracked

log = logging.getLogger("lapwing")

SHARE_OUT = "Let the data set share them out by torch.utils.data.get_worker_info(), or use num_workers=1."
"""Advice if each worker of a loader shows all samples."""


class Data:
    """Training or held-out data, as `as_loader` accepts them: an iterable of batches that can be read several times.

    Over several processes these are the data of this rank. The joined data are the data of all ranks, in order. A
    `DistributedSampler` repeats samples until all ranks have the same number, and `Data` leaves the repeated samples
    out: sample k of rank r is number `r + k R` of the sampler's order, or no sample if that order is shorter.

    A loader without a length, which may be endless, is read up to
    `data_size` samples. Frames are read in the order of `columns`; () keeps the order of each frame.
    """

    def __init__(
        self, given: Any, network: Any, sample_weights: bool = False, data_size: int | None = None,
        columns: Columns = (),
    ) -> None:  # fmt: skip
        self.columns, self.weighted, self._data_size = columns or columns_of(given), sample_weights, data_size
        self.loader = as_loader(given, network, columns)
        self.wants_digests = False  # whether iterations keep the digests of their samples, until one reaches the end
        self.row_digests = torch.zeros(0, dtype=torch.int64, device="cpu")

    def __iter__(self) -> Iterator[Samples]:
        """Yields the batches. Raises if all sample weights are 0."""
        most, start, total, digests = _unrepeated(self.loader) if ranks.several() else None, 0, 0.0, []
        if most is None and not length_hint(self.loader):
            most = self._data_size
        parsed: Iterable[Samples] | None = self._listed
        if parsed is None:  # parsed again in each iteration
            parsed = (Samples.of(batch, self.weighted) for batch in kept_batches(self.loader))
        try:
            for samples in parsed if most != 0 else ():
                samples = replace(samples, start=start)
                if most is not None and samples.count > most - start:
                    samples = samples.take(slice(0, most - start))
                start += samples.count
                if samples.weights is not None:
                    total += float(samples.weights.sum())
                if self.wants_digests:
                    digests.append(samples.digests())
                yield samples
                if most is not None and start >= most:
                    break
        finally:  # also of a pass that ends early
            if sum(map(len, digests)) > len(self.row_digests):
                self.row_digests = torch.cat(digests)
        self.wants_digests = False
        if self.weighted and not total and not ranks.several():
            raise LapwingError(
                "All sample weights are 0, so there are no data. Pass positive weights for some samples."
            )

    @cached_property
    def _listed(self) -> list[Samples] | None:
        """The batches of a list; None for another loader."""
        listed = type(self.loader) in (list, tuple)
        return [Samples.of(batch, self.weighted) for batch in self.loader] if listed else None

    @classmethod
    def of(cls, given: Any, posterior: Any, sample_weights: bool = False) -> Data:
        """Returns data that are read as in a posterior's fit, or `given` if it already is `Data`."""
        model, columns = posterior.model, posterior.columns
        data = given if isinstance(given, cls) else cls(given, model, sample_weights, columns=columns)
        data.check_keys(posterior.likelihood)
        return data

    def __len__(self) -> int:
        return len(self.loader)

    @cached_property
    def first(self) -> Samples:
        """First batch of the joined data, on every rank. The first access is collective.

        Raises for data that are not a loader, that can be read only once, or that have no samples.
        """
        loader: Any = self.loader
        batches.check_loader(loader, "A fit")
        if ranks.several():
            return self._first_of_ranks()
        # with `persistent_workers` a DataLoader returns the same iterator, reset
        if not isinstance(loader, DataLoader) and iter(loader) is iter(loader):
            raise LapwingError(
                f"The loader, of type {type(loader).__name__}, can be read only once, and every pass needs the same "
                "data. Pass a DataLoader or a list of batches, not a generator."
            )
        streams_samples = isinstance(loader, IterableDataset) and not all(map(_is_batch, islice(loader, 1)))
        samples = None if streams_samples else next(iter(self), None)
        if samples is None:
            raise _no_batch(loader)
        if not samples.count:
            raise LapwingError("The first batch of the loader has no samples. Check the dataset's length and filters.")
        return samples

    def _first_of_ranks(self) -> Samples:
        """Returns the first batch of the first rank that has one; warns if this rank has the same."""
        mine = next((samples for samples in self if samples.count), None)
        every = ranks.gathered("the first batch", mine is not None)
        if not any(every):
            raise LapwingError("The loaders of all processes show no sample. Check the dataset's length and filters.")
        source = every.index(True)
        first: Any = ranks.sent("the first batch", mine, source)
        if mine is not None and ranks.rank() != source and torch.equal(mine.digests(), first.digests()):
            log.warning(
                "Process %d shows the same first batch as process %d. Each must show its own share of the data, or "
                "samples count several times: give the DataLoader a DistributedSampler, or each process its part of a "
                "list.", ranks.rank(), source,
            )  # fmt: skip
        return first

    def check_keys(self, likelihood: Any) -> None:
        """Raises if the targets are a dict with other keys than the heads of the likelihood."""
        wanted = getattr(likelihood, "keys", ())
        first = self.first if wanted and not ranks.several() else vars(self).get("first")  # read only if it is needed
        if wanted and first is None and self._listed:  # of this process
            first = self._listed[0]
        found = first.heads if first else ()
        if found not in ((), wanted):
            raise _other_keys(found, wanted)

    def first_of_rank(self, purpose: str = "a checkpoint needs") -> list[Tensor]:
        """Returns the tensors of this rank's first batch, if any. Raises if the loader then shows another one."""
        once, again = (list(islice(self, 1)) for _ in range(2))
        digests = [[samples.digests() for samples in first] for first in (once, again)]
        if len(once) != len(again) or not all(map(torch.equal, *digests)):
            raise LapwingError(
                f"The loader shows other samples the second time, and {purpose} the same order. Pass "
                "shuffle=False; the fit does not depend on the order. Random augmentation and generators change "
                "samples too: pass a list of batches."
            )
        return [leaf for samples in once for leaf in samples.leaves()]

    @property
    def known_size(self) -> int | None:
        """Number of samples of all ranks; None if one process has to read its data to count them."""
        if ranks.several():
            return sum(map(sum, self.sizes))
        return known_size(self.loader) if self._listed is None else sum(samples.count for samples in self._listed)

    @property
    def expected_size(self) -> int | None:
        """`known_size`, or if that is None, the number of samples that the sampler draws, before any `collate_fn`."""
        known = self.known_size
        return sampler_size(self.loader) if known is None and isinstance(self.loader, DataLoader) else known

    @cached_property
    def _counted(self) -> int:
        """Number of samples that the loader shows; the first access reads it."""
        return sum(samples.count for samples in tracked(self, "samples"))

    def count(self) -> int:
        """Returns `expected_size`, or N if that is None and N is given; else reads the loader once to count n."""
        return self.expected_size or self._data_size or self._counted

    @cached_property
    def sizes(self) -> list[list[int]]:
        """Sizes of the batches of each rank. The first access is collective, and reads a loader of unknown size."""
        loader, count = self.loader, known_size(self.loader)
        if count is None:
            sizes = [samples.count for samples in self if samples.count]
        else:
            length, unrepeated = loader.batch_sampler.batch_size, _unrepeated(loader)
            count = count if unrepeated is None else min(unrepeated, count)
            sizes = [min(length, count - start) for start in range(0, count, length)]
        return ranks.gathered("the sizes of the shares", sizes)

    @property
    def before(self) -> list[int]:
        """Sizes of the batches of the ranks before this one; an empty list in one process."""
        earlier = self.sizes[: ranks.rank()] if ranks.several() else []
        return [size for part in earlier for size in part]

    def on_first_rank(self) -> Data:
        """Returns the joined data on rank 0, no data on other ranks, and `self` in one process."""
        return Data(ranks.gathered_on_first("the held-out data", list(self)), None) if ranks.several() else self

    @property
    def source(self) -> Any:
        """The data set of a data loader that shows all of it, in any order; otherwise the loader."""
        loader = self.loader
        whole = isinstance(loader, DataLoader) and type(loader.sampler) in (RandomSampler, SequentialSampler)
        return loader.dataset if whole else loader


def _other_keys(found: Any, wanted: Any) -> LapwingError:
    return LapwingError(
        f"The targets are a dict with the keys {shown(list(found))}, and the likelihood has "
        f"{f'the heads {shown(list(wanted))}' if wanted else 'no heads'}. Use the same keys in the targets and in "
        "likelihood=lw.Joint(...), with NaN for unknown values. Or fit one head at a time: "
        f"[(x, y[{found[0]!r}]) for x, y in loader], with forward=lambda model, inputs: model(inputs)[...]."
    )


def warn_of_unseen(loader: DataLoader, shown: int) -> None:
    """Warns if a data loader shows `shown` samples, fewer than its data set has, or shows each once per worker."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():  # each process has its share
        return
    try:
        total = len(loader.dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        streams = isinstance(loader.dataset, IterableDataset) and loader.num_workers > 1
        two = list(islice(kept_batches(loader), 2)) if streams else []
        if len(two) == 2 and torch.equal(*(Inputs(batch).digests() for batch in two)):
            log.warning(
                "Two workers of the loader begin with the same batch: each sample may count once per worker. %s",
                SHARE_OUT,
            )  # fmt: skip
        return
    if shown < total:
        chosen = isinstance(getattr(loader.batch_sampler, "sampler", None), SubsetRandomSampler)
        log.log(
            logging.INFO if chosen else logging.WARNING,  # the user chose the samples of such a sampler
            "The loader shows %d of the %d samples of its data set, and the posterior counts only these. Pass "
            "data_size=%d if the network was trained on all of them.", shown, total, total,
        )  # fmt: skip
    elif isinstance(loader.dataset, IterableDataset) and shown == total * loader.num_workers > total:
        log.warning(
            "The loader shows %d samples, each of the %d of its data set once per worker. %s",
            shown, total, SHARE_OUT,
        )  # fmt: skip


def _unrepeated(loader: Any) -> int | None:
    """Returns the number of samples that a `DistributedSampler` does not repeat; None without such a sampler."""
    batch_sampler = getattr(loader, "batch_sampler", None) if isinstance(loader, DataLoader) else None
    sampler = batch_sampler.sampler if type(batch_sampler) is BatchSampler else None
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    return max(0, -((sampler.rank - len(sampler.dataset)) // sampler.num_replicas))  # type: ignore[arg-type]


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
