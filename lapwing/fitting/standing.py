"""Where a fit stands: what the runner needs to go on, and how a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..methods.state import DataSummary, State
from ..network import ranks


@dataclass
class Standing(State):
    """Where a fit stands in a pass: what it needs to go on, beside the states of the passes before.

    Attributes:
        state: of the pass.
        summary: of the samples whose statistics are summed.
        prefixes: states of the first samples, by `number/path`.
        statistics: of the first samples, by `number/name`.
        generators: states of the random generators, by name.
        batches: how many batches of this round through the data are done.
        start: how many samples these had.
        taken: how many steps are done; at a landmark, how many visits.
        rounds: how many rounds are done.
        expected: n, 0 before it is known.
        whole: whether the summary is of all samples.
        any_counted: whether any target counted.
        finished: whether the pass is.
    """

    state: State = field(default_factory=State)
    summary: DataSummary = field(default_factory=DataSummary)
    prefixes: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)
    generators: dict[str, Tensor] = field(default_factory=dict)
    batches: int = 0
    start: int = 0
    taken: int = 0
    rounds: int = 0
    expected: int = 0
    whole: bool = False
    any_counted: bool = False
    finished: bool = False


@dataclass(frozen=True)
class Entry:
    """A standing as a file holds it.

    Attributes:
        label: of its pass.
        layouts: what a file does not say of a tensor that is not contiguous or not on the CPU, by path: whether it is
            on the device of the weights, and its strides.
        tensors: on the CPU; None where the file alone has them.
    """

    label: str
    layouts: dict[str, Any]
    tensors: dict[str, Tensor] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, label: str, standing: Standing, copy: bool, joint: bool = False) -> Entry:
        """Makes an entry. All ranks make a joint one together, where they have one state: any can go on from it."""
        flat = standing.tensors()
        layouts = {}
        for path, tensor in flat.items():
            strides = torch.empty_like(tensor, device="meta").stride()  # those of a tensor without gaps
            if not tensor.is_contiguous() or tensor.device.type != "cpu":
                layouts[path] = [tensor.device.type != "cpu", list(strides)]
        entry = cls(label, layouts, {path: _on_cpu(tensor, copy) for path, tensor in flat.items()})
        return entry._with_ranks() if joint else entry

    def _with_ranks(self) -> Entry:
        """Returns the entry with what each rank has beside the state, as `rank/path`."""
        assert self.tensors is not None
        alone = {path: tensor for path, tensor in self.tensors.items() if not path.startswith("state/")}
        tensors, layouts = dict(self.tensors), dict(self.layouts)
        for rank, (parts, others) in enumerate(ranks.gathered("a checkpoint", (alone, self.layouts))):
            tensors |= {f"{rank}/{path}": tensor for path, tensor in parts.items()}
            layouts |= {f"{rank}/{path}": layout for path, layout in others.items() if path in parts}
        return replace(self, tensors=tensors, layouts=layouts)

    def of_rank(self, rank: int) -> Entry:
        """Returns what one rank needs of a joint entry."""
        assert self.tensors is not None
        prefix = f"{rank}/"
        tensors, layouts = (
            {path.removeprefix(prefix): each[path] for path in each if path.startswith((prefix, "state/"))}
            for each in (self.tensors, self.layouts)
        )
        return replace(self, tensors=tensors, layouts=layouts)

    @property
    def place(self) -> tuple[bool, int]:
        """How far the pass is: whether it is finished, and its steps or visits."""
        assert self.tensors is not None
        return bool(self.tensors["finished"]), int(self.tensors["taken"])

    def standing(self, fresh: Standing, device: torch.device) -> Standing:
        """Returns the standing, from one of the same pass."""
        assert self.tensors is not None
        flat = {}
        for path, tensor in self.tensors.items():
            moved, strides = self.layouts.get(path, (False, tensor.stride()))
            place = device if moved else torch.device("cpu")
            flat[path] = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=place)
            flat[path].copy_(tensor)  # to where torch puts it: products may depend on how memory is aligned
        return fresh.with_tensors(flat)


def _on_cpu(tensor: Tensor, copy: bool) -> Tensor:
    moved = tensor.detach().cpu()
    return moved.clone() if copy and moved.data_ptr() == tensor.data_ptr() else moved


def rest_of(loader: Any, count: int) -> Iterable[Any]:
    """Returns the batches of a loader after so many; without loading those, where the loader has a sampler."""
    if not count:
        return loader
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if not plain or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return islice(loader, count, None)
    return DataLoader(
        loader.dataset, batch_sampler=_Rest(loader.batch_sampler, count), collate_fn=loader.collate_fn,
        num_workers=loader.num_workers, pin_memory=loader.pin_memory, timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn, multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator, prefetch_factor=loader.prefetch_factor,
    )  # fmt: skip


class _Rest:
    """A sampler of batches without the first ones."""

    def __init__(self, sampler: Iterable[list[int]], count: int) -> None:
        self._sampler, self._count = sampler, count

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self._sampler), self._count, None)
