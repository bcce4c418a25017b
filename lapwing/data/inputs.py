"""`Inputs`: what a network is called with for B samples. Only this file and `Samples` look into nested inputs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..environment import unlocked_property
from ..errors import LapwingError
from ..linalg import is_finite
from .batches import check_dense, describe, plain, tensors, tree


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
        """Returns the inputs of some samples."""

        def texts(value: Any) -> bool:
            return (
                isinstance(value, list) and len(value) == self.samples and all(isinstance(text, str) for text in value)
            )

        def cut(leaf: Any) -> Any:
            if isinstance(leaf, list):
                return leaf[rows] if isinstance(rows, slice) else [leaf[i] for i in rows.tolist()]
            return leaf[rows] if isinstance(leaf, Tensor) and not self._is_shared(leaf) else leaf

        spreads = {place: spread[rows] for place, spread in self.spreads.items()}
        return replace(self, value=pytree.tree_map(cut, tree(self.value), is_leaf=texts), spreads=spreads)

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
        texts = [leaf.encode() for leaf in leaves if isinstance(leaf, str)]
        columns += [texts[start : start + count] for start in range(0, len(texts) - count + 1, count or 1)]
        digests = [blake2b(b"".join(row), digest_size=8).digest() for row in zip(*columns, strict=True)]
        return torch.tensor([int.from_bytes(one, "little", signed=True) for one in digests], dtype=torch.int64)

    def check_lists(self) -> None:
        """Raises for a list of B entries, unless it holds texts or tensors: each entry could belong to one sample."""
        count = self.samples

        def look(value: Any) -> bool:
            if isinstance(value, list) and len(value) == count > 1 and not isinstance(value[0], (str, Tensor)):
                raise _unclear_list(self)
            return False

        pytree.tree_leaves(tree(self.value), is_leaf=look)

    def check_finite(self, where: str) -> None:
        """Raises if inputs are NaN or infinite, or torch does not compute with them; `where` names them."""
        for leaf in self.tensors:
            if leaf.is_nested or leaf.layout == torch.strided:  # a sparse tensor may be shared by all samples
                check_dense(leaf, f"A tensor of {where}")
            if leaf.is_floating_point() and not is_finite(leaf):
                raise _not_finite(leaf, where)

    def __repr__(self) -> str:
        """Shows the structure and shapes."""
        return describe(self.value)


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
