"""`Samples`: a batch of the user's data, split once, here, into inputs, targets and weights; and `Inputs`.

Only this file looks into nested inputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..environment import unlocked_property
from ..errors import LapwingError
from ..linalg import is_finite
from . import batches
from .batches import JOINED, check_dense, describe, plain, tensors, tree

WEIGHT_KEYS = ("sample_weights", "weights")


@dataclass(frozen=True, eq=False, repr=False)
class Inputs:
    """The inputs of B samples: a tensor, or tensors, numbers and texts in nested tuples, lists and dicts.

    Tensors whose first dimension is B, and lists of B texts, hold one row for each sample. All samples share the rest.
    """

    value: Any  # as the network or the user's `forward` gets them
    spreads: Mapping[int, Tensor] = field(default_factory=dict)  # number of an uncertain leaf -> its variances in its
    # shape, or its covariances (B, n, n)
    checked: bool = False  # whether they have passed `Tangent.check`

    @classmethod
    def of(cls, value: Any, device: torch.device | None = None) -> Inputs:
        """Returns inputs with ordinary tensors on a device; None keeps theirs. `Inputs` there come back unchanged."""
        if not isinstance(value, cls):
            return cls(plain(value, device))
        moved = value.value if device is None else plain(value.value, device)
        return value if moved is value.value else replace(value, value=moved)

    @property
    def certain(self) -> Inputs:
        """The inputs without their spreads."""
        return replace(self, spreads={}) if self.spreads else self

    @unlocked_property
    def tensors(self) -> list[Tensor]:
        """The tensors, in the order of the structure."""
        return tensors(self.value)

    @property
    def leaves(self) -> list[Any]:
        """The tensors, numbers, texts and other objects, in the order of the structure."""
        return [self.value] if isinstance(self.value, Tensor) else pytree.tree_leaves(tree(self.value))

    @property
    def form(self) -> Hashable:
        """The structure as text, with shapes and dtypes; None if a leaf is not a tensor, or requires a gradient."""
        if not all(isinstance(leaf, Tensor) and not leaf.requires_grad for leaf in self.leaves):
            return None
        nest = None if isinstance(self.value, Tensor) else pytree.tree_structure(tree(self.value))
        return str(nest), *((leaf.shape, leaf.dtype) for leaf in self.tensors)

    @unlocked_property
    def samples(self) -> int:
        """B: the first dimension of the first tensor that has a dimension.

        A tensor (0,) before others stands for columns that a data set does not have, and is shared by all samples.
        """
        for place, leaf in enumerate(self.tensors, 1):
            if leaf.is_nested or leaf.layout != torch.strided:
                check_dense(leaf, "A tensor of the inputs")
            if leaf.ndim and (tuple(leaf.shape) != (0,) or not any(other.ndim for other in self.tensors[place:])):
                return leaf.shape[0]
        raise LapwingError(
            f"The inputs, {self}, hold no tensor whose first dimension is the batch. Pass such a tensor, by "
            "torch.as_tensor(x), alone or within tuples, lists and dicts, as in (texts, torch.arange(len(texts))). Let "
            "forward=lambda model, inputs: model(...) make the arguments of the network of it."
        )

    @unlocked_property
    def shared(self) -> tuple[bool, ...]:
        """Whether all samples share a tensor, for each: it is sparse, or its first dimension is not B."""
        return tuple(self._is_shared(leaf) for leaf in self.tensors)

    def _is_shared(self, leaf: Tensor) -> bool:
        return leaf.layout != torch.strided or not leaf.ndim or leaf.shape[0] != self.samples

    @property
    def wants_gradient(self) -> bool:
        """Whether results must be differentiable in the inputs or their spreads."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in (*self.tensors, *self.spreads.values()))

    @property
    def per_sample(self) -> dict[int, Tensor]:
        """The tensors with one row for each sample, by their number among the leaves."""
        numbered = enumerate(self.leaves)
        return {i: leaf for i, leaf in numbered if isinstance(leaf, Tensor) and not self._is_shared(leaf)}

    def take(self, rows: slice | Tensor) -> Inputs:
        """Returns the inputs of some samples. A list of B texts has one for each sample."""

        def cut(leaf: Any) -> Any:
            if isinstance(leaf, list):
                return leaf[rows] if isinstance(rows, slice) else [leaf[i] for i in rows.tolist()]
            return leaf[rows] if isinstance(leaf, Tensor) and not self._is_shared(leaf) else leaf

        value = pytree.tree_map(
            cut, tree(self.value),
            is_leaf=lambda x: isinstance(x, list) and len(x) == self.samples and all(isinstance(y, str) for y in x),
        )  # fmt: skip
        return replace(self, value=value, spreads={place: spread[rows] for place, spread in self.spreads.items()})

    def chunks(self, length: int) -> Iterator[tuple[slice, Inputs]]:
        """Yields consecutive slices of at most `length` samples and their inputs. It does not cut a short batch."""
        for start in range(0, self.samples, length):
            rows = slice(start, min(start + length, self.samples))
            yield rows, (self if rows == slice(0, self.samples) else self.take(rows))

    def with_leaves(self, changed: Mapping[int, Any]) -> Inputs:
        """Returns the inputs with other values of some leaves, by their number."""
        leaves, spec = pytree.tree_flatten(tree(self.value))
        return replace(self, value=pytree.tree_unflatten([changed.get(i, x) for i, x in enumerate(leaves)], spec))

    def digests(self, targets: Any = None) -> Tensor:
        """Returns a digest of each sample, (B,) int64: samples have the same if their tensors and texts are equal."""
        count, leaves, columns = self.samples, [*self.leaves, targets], []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_meta:
                each = leaf.shape[:1] == (count,)
                rows = (leaf if each else leaf[None]).detach().cpu().resolve_conj().resolve_neg()[:, None].flatten(1)
                rows = rows.contiguous().as_strided(rows.shape, (rows.shape[1], 1))  # y[:, None] of NumPy has stride 0
                parts = [*rows.view(torch.uint8).numpy()]
                columns.append(parts if each else [blake2b(parts[0], digest_size=8).digest()] * count)
        texts = [f"{leaf}\0".encode() for leaf in leaves if isinstance(leaf, str)]
        columns += [texts[start : start + count] for start in range(0, len(texts) - count + 1, count or 1)]
        digests = [blake2b(b"".join(row), digest_size=8).digest() for row in zip(*columns, strict=True)]
        return torch.tensor([int.from_bytes(one, "little", signed=True) for one in digests], dtype=torch.int64)

    def check_lists(self) -> None:
        """Raises for a list of B entries, unless it holds texts or tensors: each entry could belong to one sample."""
        count = self.samples
        unclear = lambda x: isinstance(x, list) and len(x) == count > 1 and not isinstance(x[0], (str, Tensor))  # noqa: E731
        if any(map(unclear, pytree.tree_leaves(tree(self.value), is_leaf=unclear))):
            raise _unclear_list(self)

    def check_finite(self, where: str) -> None:
        """Raises if inputs are NaN or infinite, or torch does not compute with them; `where` names them."""
        for leaf in self.tensors:
            if leaf.is_nested or leaf.layout == torch.strided:  # a sparse tensor may be shared by all samples
                check_dense(leaf, f"A tensor of {where}")
            if leaf.is_floating_point() and not is_finite(leaf):
                raise _not_finite(leaf, where)

    def __repr__(self) -> str:
        return describe(self.value)


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
            check_dense(targets, "A tensor of the targets")
            if not targets.ndim or len(targets) > inputs.samples:
                raise _wrong_targets(inputs, targets)
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


def _wrong_targets(inputs: Inputs, targets: Tensor) -> LapwingError:
    """Returns the error for targets without rows, or with more rows than there are samples."""
    what = "have more rows than the samples" if targets.ndim else "have no dimensions"
    line = (
        "Pass one row for each sample in both: a single one as x[None] and y[None], and a list of samples as "
        "torch.utils.data.DataLoader(samples, batch_size=100)."
    )
    if any(inputs.shared):
        line = JOINED
    elif targets.ndim and any(leaf.shape[1:2] == targets.shape[:1] for leaf in inputs.tensors):
        line = (
            "If the second dimension of the inputs is the batch, pass x.transpose(0, 1), and forward=lambda model, x: "
            "model(x.transpose(0, 1))."
        )
    return LapwingError(f"The targets of a batch, {describe(targets)}, {what}. The inputs are {inputs}. {line}")


def _unclear_list(inputs: Inputs) -> LapwingError:
    return LapwingError(
        f"The inputs, {inputs}, hold a list of {inputs.samples} entries and have {inputs.samples} samples: each entry "
        "may belong to one sample, or to all. Write torch.tensor(numbers) for the former, tuple(entries) for the "
        "latter."
    )


def _not_finite(leaf: Tensor, where: str) -> LapwingError:
    bad = (~torch.isfinite(leaf)).flatten(1).any(1) if leaf.ndim > 1 else ~torch.isfinite(leaf)
    first = int(bad.nonzero()[0]) if bad.ndim else 0
    return LapwingError(
        f"A tensor of {where}, of shape {tuple(leaf.shape)}, has NaN or infinite values in {int(bad.sum())} samples "
        f"(first: sample {first}). Pass finite numbers: drop these samples or impute them, for instance by x = "
        "x.nan_to_num(). If the network itself takes NaN, mark it: x = x.nan_to_num(-999.0), and forward=lambda model, "
        "x: model(x.where(x != -999.0, torch.nan))."
    )
