"""Loaders whose batches have names or forms of their own: `lw.batches` picks the inputs and the targets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from ..errors import LapwingError, shown
from .batches import describe, is_loader
from .frames import as_loader

Pick = Callable[[Any], Any]
Part = str | Sequence[str] | Pick


def batches(loader: Any, inputs: Part, targets: Part | None = None) -> Any:
    """Returns a loader of (inputs, targets) for every call that takes one, from a loader of other batches.

    Args:
        loader: a `DataLoader`, a map-style `Dataset`, a list of batches, or another iterable of batches.
        inputs: a key of the batch; several keys, which give a dict for `model(**inputs)`; or a function of the batch.
        targets: the same for the targets; several keys give the dict of `lw.Joint`. None leaves inputs for predictions.

    Raises:
        LapwingError: if `loader` is not a loader, or at the first batch without one of the keys.

    Cost: none beyond the loader's own. A `DataLoader` stays one, with its sampler, seeds and worker processes.

    Example:
        >>> import torch, lapwing as lw
        >>> loader = [{"pixels": torch.randn(8, 4), "digit": torch.randint(3, (8,)), "name": ["a"] * 8}]
        >>> posterior = lw.fit(torch.nn.Linear(4, 3).eval(), lw.batches(loader, inputs="pixels", targets="digit"))
        >>> posterior.predict(lw.batches(loader, inputs="pixels")).probs.shape
        torch.Size([8, 3])
    """
    loader = as_loader(loader, None)
    if not is_loader(loader):
        raise LapwingError(f"lw.batches needs a loader, an iterable of batches, and got {shown(loader)}. Pass [batch].")
    pick = partial(_picked, inputs=inputs, targets=targets)
    if isinstance(loader, DataLoader):
        loader = copy.copy(loader)
        loader._iterator = None  # persistent workers of the given loader would not pick
        loader.collate_fn = partial(_collated, collate=loader.collate_fn, pick=pick)
        return loader
    if isinstance(loader, list):
        return [pick(batch) for batch in loader]
    if isinstance(loader, Iterator):  # it can be read once
        return map(pick, loader)
    return (_SizedLoader if hasattr(loader, "__len__") else _Loader)(loader, pick)


def _picked(batch: Any, inputs: Part, targets: Part | None) -> Any:
    x = _part(batch, inputs)
    return x if targets is None else (x, _part(batch, targets))


def _collated(rows: Any, collate: Pick, pick: Pick) -> Any:
    return pick(collate(rows))


@dataclass(frozen=True)
class _Loader:
    loader: Any
    pick: Pick

    def __iter__(self) -> Iterator[Any]:
        return map(self.pick, self.loader)


class _SizedLoader(_Loader):
    def __len__(self) -> int:
        return len(self.loader)


def _part(batch: Any, keys: Part) -> Any:
    try:
        if callable(keys):
            return keys(batch)
        return batch[keys] if isinstance(keys, str) else {key: batch[key] for key in keys}
    except Exception as error:
        found = f"the keys {shown(list(batch))}" if isinstance(batch, Mapping) else describe(batch)
        raise LapwingError(
            f"lw.batches takes {shown(keys)} from a batch, which has {found}, and this raised {type(error).__name__}. "
            "Pass keys that it has, or a function: inputs=lambda batch: batch[0]."
        ) from error
