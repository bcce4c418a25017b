"""Several processes: what the ranks of a `torch.distributed` process group tell one another while they fit.

`lw.fit` opens `across_ranks`. Inside it the functions of this file are collective: every rank calls them in one order.
Outside it, and in one process, they return what they are given. So predictions are not collective.

Each collective begins with `gathered`, in which a rank may say that it has failed. So an exception on one rank ends the
others at their next collective, and no rank waits for one that has given up.

The joined data are the shares of all ranks, one after another: those of rank 0 first.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from ..errors import LapwingError
from . import batches
from .loaders import WeightedLoader, equal_batches, first_batch, known_size
from .stamp import fingerprint

log = logging.getLogger("lapwing")

SMALL = 1024
"""Tensors of at most so many numbers travel in one message, larger ones in a collective each."""

LOST = "connection", "timed out", "timeout", "broken pipe", "remote process"
"""Words of torch's errors where another process is gone or silent."""

T = TypeVar("T")


@dataclass
class _Group:
    """The ranks of a fit.

    Attributes:
        rank: of this process.
        size: how many there are.
        sent: bytes that this rank has sent, counted as for a ring of ranks.
        collectives: how many.
        settled: whether every rank knows of the error that is being raised.
    """

    rank: int
    size: int
    sent: float = 0.0
    collectives: int = 0
    settled: bool = False

    def run(self, function: Any, *arguments: Any, nbytes: float, **options: Any) -> None:
        """Calls a collective of torch; counts the bytes that it sends.

        Raises:
            LapwingError: where another process is gone or silent, or the devices do not fit the process group.
        """
        self.sent, self.collectives = self.sent + nbytes, self.collectives + 1
        try:
            function(*arguments, **options)
        except (RuntimeError, ValueError) as error:
            self.settled = True
            here, text = f"Process {self.rank} of {self.size} cannot reach the others:", str(error).strip()
            if any(word in text.lower() for word in LOST):
                raise LapwingError(
                    f"{here} one of them has ended, or was silent for longer than the timeout of the process group. "
                    "See the end of its log; one that was killed from outside has none, and often ran out of memory. "
                    "Start all processes again. If one is only slow, pass a longer init_process_group(timeout=...)."
                ) from error
            raise LapwingError(
                f"{here} {text.partition(chr(10))[0].rstrip('.')}. Every process must run the same fit, with backends "
                "for the network's device and the CPU: call torch.distributed.init_process_group() without a backend, "
                "and start all processes again."
            ) from error

    def gathered(self, label: str, value: Any, failure: str | None = None) -> list[Any]:
        """Returns what each rank hands in.

        Raises:
            LapwingError: if a rank says that it has failed, or is somewhere else in the fit.
        """
        message = _packed((label, failure, value))
        messages: list[Any] = [None] * self.size
        self.run(distributed.all_gather_object, messages, message, nbytes=(self.size - 1) * len(message))
        labels, failures, values = zip(*map(pickle.loads, messages), strict=True)
        for rank, reason in enumerate(failures):
            if reason is not None and failure is None:
                self.settled = True
                raise LapwingError(f"The fit has failed in process {rank} of {self.size}, and ends here too: {reason}")
        if failure is None and len(set(labels)) > 1:
            self.settled = True
            raise LapwingError(
                f"The {self.size} processes are not at the same place of a fit: "
                f"{', '.join(map(repr, labels))}. Call lw.fit with the same network, method and options in each of "
                "them."
            )
        return list(values)


class _Pickler(pickle.Pickler):
    """Writes tensors without the rest of the storage that they are views of, for the CPU."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor:
            return NotImplemented
        plain = obj.detach().cpu()
        if plain.untyped_storage().nbytes() > plain.nbytes:
            plain = plain.clone()
        return plain.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _packed(value: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()


_group: ContextVar[_Group | None] = ContextVar("lapwing_ranks", default=None)


@contextlib.contextmanager
def across_ranks() -> Iterator[None]:
    """Lets the ranks of the process group work on one fit, where there is one of several ranks; also a decorator."""
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        yield
        return
    outer = _group.get()
    group = outer or _Group(distributed.get_rank(), distributed.get_world_size())
    token = _group.set(group)
    try:
        group.gathered("the start of a fit", None)
        yield
        group.gathered("the end of a fit", None)
    except BaseException as error:
        if not group.settled:
            with contextlib.suppress(LapwingError):
                group.gathered("a failure", None, f"{type(error).__name__}: {error}")
        group.settled = False  # a fit around this one has all ranks here, with an error each
        raise
    finally:
        _group.reset(token)
        if outer is None:
            log.debug(
                "Process %d of %d sent %.0f bytes in %d collectives.",
                group.rank, group.size, group.sent, group.collectives,
            )  # fmt: skip


def several() -> bool:
    """Whether a fit of several processes is running."""
    return _group.get() is not None


def rank() -> int:
    """Returns the rank of this process in a fit; 0 in one process."""
    group = _group.get()
    return 0 if group is None else group.rank


def size() -> int:
    """Returns how many processes work on a fit."""
    group = _group.get()
    return 1 if group is None else group.size


def gathered(label: str, value: T) -> list[T]:
    """Returns what each rank hands in, by rank. Tensors of other ranks arrive on the CPU."""
    group = _group.get()
    return [value] if group is None else group.gathered(label, value)


def decided(label: str, value: T, source: int = 0) -> T:
    """Returns what one rank hands in: a decision that rounding could make otherwise on another machine."""
    group = _group.get()
    if group is None:
        return value
    group.gathered(label, None)
    message = [_packed(value) if group.rank == source else b""]
    group.run(distributed.broadcast_object_list, message, source, nbytes=len(message[0]))
    return pickle.loads(message[0])


def joined(label: str, values: Tensor | None, dim: int = 0) -> Tensor | None:
    """Returns tensors of all ranks in the order of the joined data, along a dimension; None where no rank has any."""
    if not several():
        return values
    parts = gathered(label, values)
    some = [part for part in parts if part is not None]
    return torch.cat(some, dim) if some else None


def summed(label: str, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Returns sums over ranks of tensors by name, which may be overwritten. One that some ranks lack counts as 0 there.

    Args:
        label: where in the fit.
        tensors: of this rank, each on the CPU or on the network's device.
        device: the network's.

    Raises:
        LapwingError: for tensors of one name and several shapes: the networks differ.
    """
    group = _group.get()
    if group is None:
        return dict(tensors)
    large = {name for name, value in tensors.items() if value.numel() > SMALL and value.is_floating_point()}
    kind = {name: (tuple(value.shape), value.dtype, value.device.type) for name, value in tensors.items()}
    small = {name: value for name, value in tensors.items() if name not in large}
    kinds, messages = zip(*group.gathered(label, (kind, small)), strict=True)
    names = {name: kind[name] for kind in kinds for name in kind}
    odd = [name for kind in kinds for name in kind if kind[name] != names[name]]
    if odd:
        raise LapwingError(
            f"The processes sum tensors of different shapes, dtypes or devices in '{label}': {names[odd[0]]} is not "
            "that of all. Pass the same network and method in each of them."
        )
    everywhere = {name for name in names if all(name in kind for kind in kinds)} & large
    late = [name for name in names if name not in everywhere and not any(name in message for message in messages)]
    if late:  # such as the inputs of chosen samples
        more = group.gathered(label, {name: tensors[name] for name in late if name in tensors})
        messages = tuple({**message, **rest} for message, rest in zip(messages, more, strict=True))
    sums: dict[str, Tensor] = {}
    for name, (_, _, place) in names.items():
        if name in everywhere:
            sums[name] = tensors[name].contiguous()
            nbytes = 2 * (group.size - 1) / group.size * sums[name].nbytes
            group.run(distributed.all_reduce, sums[name], nbytes=nbytes)
        else:
            values = [message[name] for message in messages if name in message]
            sums[name] = sum(values[1:], values[0]).to("cpu" if place == "cpu" else device)
    return sums


def agree(label: str, tensors: Iterable[Tensor]) -> None:
    """Writes rank 0's numbers into tensors that differ between ranks, such as directions of an eigendecomposition.

    Ranks of one kind of machine have the same numbers, and then nothing but three sums a tensor is sent.
    """
    group = _group.get()
    if group is None:
        return
    values = list(tensors)
    prints = group.gathered(label, [fingerprint(value) for value in values])
    for i, value in enumerate(values):
        if not all(torch.equal(prints[0][i], mine[i]) for mine in prints[1:]):
            buffer = value.contiguous()
            group.run(distributed.broadcast, buffer, 0, nbytes=buffer.nbytes)
            value.copy_(buffer)


def check_same_network(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raises where the ranks have networks of different weights, or a wrapper that is collective in every call."""
    if not several():
        return
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise LapwingError(
            "The model is a DistributedDataParallel, whose calls wait for one another, and each process calls it as "
            "often as its share needs. Pass the network inside: model.module."
        )
    every = gathered("the weights", {name: fingerprint(value) for name, value in state.items()})
    for other, prints in enumerate(every):
        odd = [
            name for name in {**every[0], **prints}
            if name not in prints or name not in every[0]
            or not torch.allclose(every[0][name], prints[name], rtol=1e-9, atol=0, equal_nan=True)
        ]  # fmt: skip
        if odd:
            raise LapwingError(
                f"The network of process {other} has other weights than that of process 0: {odd[0]} differs. Load the "
                "state dict of one process in all of them (training in parallel leaves batch norm's statistics apart)."
            )


class Share:
    """The share of the joined data that a loader shows to this rank.

    The samples that a `DistributedSampler` shows twice, so that all ranks have equally many, are left out: sample k of
    rank r is number `r + k R` of the sampler's order, and no sample where that order has fewer.

    Args:
        loader: of this rank. It may be without samples.
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
        """The sizes of the batches of each rank. Collective the first time; goes through loaders without a length."""
        return gathered("the sizes of the shares", _sizes(self))

    @property
    def before(self) -> list[int]:
        """The sizes of the batches of the ranks before this one."""
        return [size for part in self.sizes[: rank()] for size in part]

    @property
    def count(self) -> int:
        """How many samples this rank has."""
        return sum(self.sizes[rank()])

    @property
    def total(self) -> int:
        """How many samples there are."""
        return sum(map(sum, self.sizes))

    @cached_property
    def first(self) -> Any:
        """The first batch of the joined data, on every rank. Collective the first time.

        Raises:
            LapwingError: where no rank has a sample.
        """
        batches.check_loader(self.loader, "A fit")
        mine = next((batch for batch in self if batches.size(batches.split(batch)[0])), None)
        every = gathered("the first batch", mine is not None)
        if not any(every):
            raise LapwingError("The loaders of all processes show no sample. Check the dataset's length and filters.")
        source = every.index(True)
        first = decided("the first batch", mine, source)
        if mine is not None and rank() != source and equal_batches(mine, first):
            log.warning(
                "Process %d shows the same first batch as process %d. Each must show its own share of the data, or "
                "samples count several times: give the DataLoader a DistributedSampler, or each process its part of a "
                "list.", rank(), source,
            )  # fmt: skip
        return first


def _without_padding(loader: Any) -> int | None:
    """Returns how many samples of a loader are not repeated by its `DistributedSampler`; None for all."""
    batch_sampler = getattr(loader, "batch_sampler", None) if isinstance(loader, DataLoader) else None
    sampler = batch_sampler.sampler if type(batch_sampler) is BatchSampler else None
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    return max(0, -((sampler.rank - len(sampler.dataset)) // sampler.num_replicas))  # type: ignore[arg-type]


def _sizes(share: Share) -> list[int]:
    """Returns the sizes of a share's batches, without loading them where the sampler says."""
    loader = share.loader
    count = known_size(loader) if isinstance(loader, DataLoader) else None
    if count is None:
        return [size for size in (batches.size(batches.split(batch)[0]) for batch in share) if size]
    length, without_padding = loader.batch_sampler.batch_size, _without_padding(loader)  # type: ignore[attr-defined]
    count = count if without_padding is None else min(without_padding, count)
    return [min(length, count - start) for start in range(0, count, length)]


def share(loader: Any) -> Any:
    """Returns a rank's loader as its share of the joined data; in one process the loader itself."""
    return Share(loader) if several() and not isinstance(loader, Share) else loader


def joined_first_batch(loader: Any) -> Any:
    """Returns the first batch of the joined data, or of a loader in one process: see `first_batch`."""
    return loader.first if isinstance(loader, Share) else first_batch(loader)


def share_of(loader: Any) -> Share | None:
    """Returns the share that a loader shows, with sample weights or without; None in one process."""
    loader = loader.loader if isinstance(loader, WeightedLoader) else loader
    return loader if isinstance(loader, Share) else None
