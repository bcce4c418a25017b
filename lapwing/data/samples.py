"""`Samples`: a batch of the user's data, split into inputs, targets and weights. Every batch is parsed here, once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import LapwingError
from . import batches
from .batches import JOINED, check_dense, describe, plain, tensors
from .inputs import Inputs

WEIGHT_KEYS = ("sample_weights", "weights")


@dataclass(frozen=True, eq=False)
class Samples:
    """B samples of the user's data: what `Data` yields, and what tunings read."""

    inputs: Inputs
    targets: Any  # a tensor, or what the likelihood refuses
    weights: Tensor | None = None  # w (B,), at least 0; None means ones
    start: int = 0  # number of samples before these
    heads: tuple[str, ...] = ()  # sorted names of the heads, if the targets were a dict

    @classmethod
    def of(cls, batch: Any, weighted: bool = False) -> Samples:
        """Splits a batch of the user's loader, or raises; returns `Samples` unchanged.

        A batch is `(inputs, targets)`, `(input_1, ..., input_k, targets)`, or a mapping with one of the keys labels,
        label, targets, target, y, such as a Hugging Face batch. With `weighted` the last part of a tuple is the
        weights, or they have one of the keys sample_weights, weights of a mapping.
        """
        if isinstance(batch, cls):
            return batch
        rest, weights = _without_weights(batch) if weighted else (batch, None)
        first, targets, heads = batches.pair(rest)
        inputs, targets = Inputs.of(first), plain(targets)
        if weighted:
            weights = _checked_weights(weights, inputs.samples)
        if isinstance(targets, Tensor):
            targets = targets.detach() if targets.requires_grad else targets  # of a teacher with a graph
            _check_targets(inputs, targets)
        return cls(inputs, targets, weights, heads=heads)

    @property
    def count(self) -> int:
        """The number of samples, B."""
        return self.inputs.samples

    def to(self, device: torch.device | None) -> Samples:
        """Returns the samples on a device; None keeps theirs."""
        inputs, targets = Inputs.of(self.inputs, device), plain(self.targets, device)
        return replace(self, inputs=inputs, targets=targets, weights=plain(self.weights, device))

    def take(self, rows: slice | Tensor) -> Samples:
        """Returns some of the samples, with the same `start`."""
        weights = None if self.weights is None else self.weights[rows]
        return replace(self, inputs=self.inputs.take(rows), targets=self.targets[rows], weights=weights)

    def leaves(self) -> list[Tensor]:
        """Returns all tensors: inputs, targets and weights."""
        return [*self.inputs.tensors, *tensors(self.targets), *tensors(self.weights)]

    def digests(self) -> Tensor:
        """Returns a digest of each sample, its inputs and targets, (B,) int64."""
        return self.inputs.digests(self.targets)


def checked(data: Iterable[Samples], device: torch.device) -> Iterator[Samples]:
    """Yields the samples of batches that are not empty, with finite inputs, on a device."""
    for number, samples in enumerate(data, 1):
        samples.inputs.check_finite(f"the inputs of batch number {number}")
        if samples.count:
            yield samples.to(device)


def _without_weights(batch: Any) -> tuple[Any, Any]:
    """Returns a batch without its weights, and the weights."""
    if isinstance(batch, Mapping):
        name = next((key for key in WEIGHT_KEYS if key in batch), None)
        if name is not None and batch[name] is not None:
            return {key: value for key, value in batch.items() if key != name}, batch[name]
    elif isinstance(batch, (tuple, list)) and len(batch) >= 3 and batch[-1] is not None:
        return batch[:-1], batch[-1]
    raise LapwingError(
        f"A batch of the loader is {describe(batch)}, which holds no sample weights. With sample_weights=True let the "
        "loader yield (inputs, targets, weights), or dicts with the key sample_weights."
    )


def _checked_weights(weights: Any, count: int) -> Tensor:
    """Returns weights (B,), at least float32. Raises unless they are B finite numbers of at least 0."""
    values = plain(torch.as_tensor(weights))
    check_dense(values, "A tensor of the sample weights")
    if values.shape not in ((count,), (count, 1)) or values.dtype.is_complex:
        raise LapwingError(
            f"The sample weights of a batch, {describe(values)}, are not one number for each of {count} samples. Pass "
            f"a tensor of shape ({count},)."
        )
    values = values.reshape(count).to(torch.promote_types(values.dtype, torch.float32))
    usable = values.isfinite() & (values >= 0)
    if not bool(usable.all()):
        raise LapwingError(
            f"The sample weights of a batch, {describe(values)}, are negative, NaN or infinite for "
            f"{int((~usable).sum())} samples. Pass finite weights of at least 0."
        )
    return values


def _check_targets(inputs: Inputs, targets: Tensor) -> None:
    """Raises unless targets are a dense tensor with at most one row for each sample."""
    check_dense(targets, "A tensor of the targets")
    if not targets.ndim or len(targets) > inputs.samples:
        raise _wrong_targets(inputs, targets)


def _wrong_targets(inputs: Inputs, targets: Tensor) -> LapwingError:
    """Returns the error for targets without rows, or with more rows than there are samples."""
    what = "have more rows than the samples" if targets.ndim else "have no dimensions"
    line = "Pass one row for each sample in both: a single one as x[None] and y[None]."
    if any(inputs.shared):
        line = JOINED
    elif targets.ndim and any(leaf.shape[1:2] == targets.shape[:1] for leaf in inputs.tensors):
        line = (
            "If the second dimension of the inputs is the batch, pass x.transpose(0, 1), and forward=lambda model, x: "
            "model(x.transpose(0, 1))."
        )
    return LapwingError(f"The targets of a batch, {describe(targets)}, {what}. The inputs are {inputs}. {line}")
