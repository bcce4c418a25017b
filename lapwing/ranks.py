"""Several processes: how the ranks of a `torch.distributed` process group make one fit together.

`lw.fit`, `lw.novelty` and `Posterior.update` open `across_ranks`. Inside it the functions of this file are collective:
every rank calls them in the same order. Outside it, and in one process, they return what they are given.

Each collective begins with `gathered`, in which a rank may report that it has failed. So an exception on one rank ends
the other ranks at their next collective, and no rank waits for a rank that has given up.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from .errors import LapwingError

T = TypeVar("T")


@dataclass
class _Group:
    """The ranks of a fit."""

    rank: int  # number of this process
    size: int  # number of processes
    settled: bool = False  # whether every rank knows of the error that is being raised

    def run(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Calls a collective of torch; raises if another process has ended or is slow, or a device has no backend."""
        try:
            collective(*arguments, **options)
        except (RuntimeError, ValueError) as error:
            self.settled = True
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise LapwingError(
                f"Process {self.rank} of {self.size} cannot reach the others: {reason}. If another process has ended, "
                "see the end of its log; one that was killed has none, and often ran out of memory. If one is only "
                "slow, pass a longer init_process_group(timeout=...). If a device has no backend, call "
                "init_process_group() without a backend. Then start all processes again."
            ) from error

    def gathered(self, label: str, value: Any, failure: str | None = None) -> list[Any]:
        """Returns the values of all ranks, by rank; raises if a rank fails, or is at another place of the fit."""
        messages: list[Any] = [None] * self.size
        self.run(distributed.all_gather_object, messages, _packed((label, failure, value)))
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
    """Writes tensors on the CPU, and of a view only the numbers that it shows."""

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
    """Opens a group of all ranks if the process group has more than one; also a decorator."""
    initialised = distributed.is_available() and distributed.is_initialized()
    with _in_group() if initialised and distributed.get_world_size() > 1 else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _in_group() -> Iterator[None]:
    """Opens a group of all ranks, or stays in the open one. An error on one rank reaches all."""
    group = _group.get() or _Group(distributed.get_rank(), distributed.get_world_size())
    token = _group.set(group)
    try:
        group.gathered("the start of a fit", None)
        yield
        group.gathered("the end of a fit", None)
    except BaseException as error:
        if not group.settled:
            with contextlib.suppress(LapwingError):
                group.gathered("a failure", None, f"{type(error).__name__}: {error}")
        group.settled = False  # an outer fit has an error on every rank
        raise
    finally:
        _group.reset(token)


def several() -> bool:
    """Whether several processes make this fit."""
    return _group.get() is not None


def rank() -> int:
    """Returns the rank of this process in a fit; 0 in one process."""
    group = _group.get()
    return 0 if group is None else group.rank


def gathered(label: str, value: T) -> list[T]:
    """Returns the values of all ranks, by rank. Tensors of other ranks arrive on the CPU."""
    group = _group.get()
    return [value] if group is None else group.gathered(label, value)


def gathered_on_first(label: str, values: list[T]) -> list[T]:
    """Returns the lists of all ranks as one list on rank 0, and an empty list on the others."""
    group = _group.get()
    if group is None:
        return values
    group.gathered(label, None)
    messages: list[Any] | None = None if group.rank else [b""] * group.size
    group.run(distributed.gather_object, _packed(values), messages)
    return [value for message in messages or [] for value in pickle.loads(message)]


def sent(label: str, value: T, source: int = 0) -> T:
    """Returns the value of one rank on all ranks. Its tensors arrive on the CPU, on that rank too."""
    group = _group.get()
    if group is None:
        return value
    group.gathered(label, None)
    message = [_packed(value) if group.rank == source else b""]
    group.run(distributed.broadcast_object_list, message, source)
    return pickle.loads(message[0])


def on_first(label: str, compute: Callable[[], T]) -> T:
    """Returns the result that rank 0 computes. An exception in `compute` ends the fit on all ranks."""
    value: Any = None if rank() else compute()
    return sent(label, value)


def overwrite(label: str, tensors: Iterable[Tensor]) -> None:
    """Writes the numbers of rank 0 into tensors of equal shapes, such as an eigenbasis."""
    group = _group.get()
    if group is None:
        return
    values = list(tensors)
    group.gathered(label, None)
    for value in values:
        buffer = value.clone(memory_format=torch.contiguous_format)
        group.run(distributed.broadcast, buffer, 0)
        if not torch.equal(buffer, value):
            value.copy_(buffer)


def joined(label: str, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Returns the sums of the tensors of all ranks, by name.

    Ranks may lack some names. Tensors are on the CPU or on the network's device, and may be overwritten. Raises if one
    name has several shapes, dtypes or kinds of device: the networks differ.
    """
    group = _group.get()
    if group is None:
        return dict(tensors)
    mine = {name: (tuple(value.shape), value.dtype, value.device.type) for name, value in tensors.items()}
    every = group.gathered(label, mine)
    kinds = {name: kind for one in every for name, kind in one.items()}
    odd = [name for one in every for name, kind in one.items() if kind != kinds[name]]
    if odd:
        raise LapwingError(
            f"The processes sum tensors of different shapes, dtypes or devices in '{label}': {odd[0]} has "
            f"{kinds[odd[0]]} in one of them. Pass the same network and method in each of them."
        )
    whole: dict[str, Tensor] = {}
    for name, (_, dtype, _) in kinds.items():
        if dtype != torch.bool and all(name in one for one in every):
            whole[name] = tensors[name].contiguous()
            group.run(distributed.all_reduce, whole[name])
    if len(whole) < len(kinds):  # such as the inputs of chosen samples, which one rank has
        parts = group.gathered(label, {name: value for name, value in tensors.items() if name not in whole})
        for name in kinds.keys() - whole.keys():
            value = reduce(torch.add, [part[name] for part in parts if name in part])
            whole[name] = value.to("cpu" if kinds[name][2] == "cpu" else device)
    return {name: whole[name] for name in kinds}
