"""Anchors: M rows of the Jacobian at chosen (input, output) pairs, of which subspaces and inducing points are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..data import nesting
from ..data.inputs import Inputs
from ..jacobian.blocks import Vectors
from ..linalg import double_device, doubled, placed, total
from .cotangents import GivenCotangents
from .record import Record
from .stored import TensorSpec
from .tangent import Tangent

Weights = Mapping[str, float]


def ntk(mine: Record, theirs: Record, weights: Weights) -> Tensor:
    """Returns `Σ_b w_b J_b J'_bᵀ` (B, R, B', R'), the weighted NTK of two records."""
    blocks = ((weight, name, mine[name]) for name, weight in weights.items())
    return total(weight * block.gram(block if theirs is mine else theirs[name]) for weight, name, block in blocks)


@dataclass(frozen=True)
class Anchors:
    """Rows `J̃` (M, P): row m is the gradient of output `outputs[m]` at sample `samples[m]`.

    If the outputs have positions, output `t C + c` is output c of position t.
    """

    tangent: Tangent
    inputs: tuple[Inputs, ...]  # groups of samples of the same shape
    samples: Tensor  # indices (M,), counted over all groups in order
    outputs: Tensor  # indices (M,)

    def __len__(self) -> int:
        """M."""
        return len(self.samples)

    def rows(self, dtype: torch.dtype) -> Tensor:
        """Returns `J̃` (M, P). Cost: M backward passes, memory O(M P)."""
        device = double_device(self.tangent.device) if dtype == torch.float64 else self.tangent.device
        rows = torch.zeros(len(self), self.tangent.size, dtype=dtype, device=device)
        for slots, part in self.row_chunks(dtype):
            rows[slots] = part
        return rows

    def row_chunks(self, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields `(slots, J̃[slots])` for chunks of rows. The memory budget has room for three such chunks."""
        for slots, record in self.records(dtype, 4 * self.tangent.size):
            yield slots, record.rows().flatten(0, 1)

    def gram(self, weights: Weights, dtype: torch.dtype) -> Tensor:
        """Returns `Σ_b w_b J̃_b J̃_bᵀ` (M, M) float64, with products in `dtype`. Blocks without a weight are left out.

        Cost: about M²/(2 m) forward and backward passes for chunks of m rows; memory O(M²) and two chunks.
        """
        gram = torch.zeros(len(self), len(self), dtype=torch.float64, device=double_device(self.tangent.device))
        for mine, record, theirs, other in self._pairs(dtype):
            part = doubled(ntk(record, other, weights).reshape(len(mine), len(theirs)))
            gram[mine[:, None], theirs] = part
            gram[theirs[:, None], mine] = part.T
        return gram

    def grams(self, coefficients: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns `T J̃_b J̃_bᵀ Tᵀ` for each block (n_blocks, K, K) and T (K, M). Cost: as for `gram`."""
        count = len(coefficients)
        grams = torch.zeros(len(self.tangent.blocks), count, count, dtype=torch.float64, device=coefficients.device)
        for mine, record, theirs, other in self._pairs(dtype):
            for gram, name in zip(grams, record, strict=True):
                part = doubled(record[name].gram(other[name]).reshape(len(mine), len(theirs)))
                part = coefficients[:, mine] @ part @ coefficients[:, theirs].T
                gram += part if theirs is mine else part + part.T
        return grams

    def _pairs(self, dtype: torch.dtype) -> Iterator[tuple[Tensor, Record, Tensor, Record]]:
        """Yields `(slots, record, slots, record)` once for every pair of chunks."""
        requests = [
            (slots.reshape(-1, u.columns)[rows].flatten(), inputs.take(rows), u.take(rows))
            for slots, inputs, u in self.requests(dtype, 0, share=2)
            for rows, _ in self.tangent.records_of_chunk(inputs, u, dtype)
        ]
        for i, (mine, inputs, u) in enumerate(requests):
            record = self.tangent.record(inputs, u, dtype)
            for theirs, their_inputs, v in requests[: i + 1]:
                yield mine, record, theirs, record if theirs is mine else self.tangent.record(their_inputs, v, dtype)

    def combine(self, coefficients: Tensor) -> Vectors:
        """Returns `T J̃` for T (K, M): block name -> (K, P_block). Cost: M backward passes, memory O(K P)."""
        count, dtype = len(coefficients), coefficients.dtype
        coefficients = placed(coefficients, self.tangent.device)
        out = {b.name: coefficients.new_zeros(count, b.size) for b in self.tangent.blocks}
        for slots, record in self.records(dtype):
            chosen = coefficients[:, slots]  # (K, B R)
            for name, vectors in out.items():
                for part, rows in record[name].row_slices():
                    vectors[:, part] += chosen @ rows.flatten(0, 1)
        return out

    def products(self, record: Record, weights: Weights) -> Tensor:
        """Returns `Σ_b w_b J_b J̃_bᵀ` (B, R, M), NTK blocks with another record. Cost: M backward passes per record."""
        shape = record.samples, record.cotangents, len(self)
        parts = torch.zeros(shape, dtype=record.dtype, device=record.device)
        for slots, anchors in self.records(record.dtype):
            parts[:, :, slots] = ntk(record, anchors, weights).flatten(2)
        return parts

    def inner(self, vectors: Vectors) -> Tensor:
        """Returns `v J̃ᵀ` (n, M) for vectors v: block name -> (n, P_block)."""
        first = next(iter(vectors.values()))
        out = first.new_zeros(first.shape[0], len(self))
        for slots, record in self.records(first.dtype):
            out[:, slots] = record.jvp(vectors).flatten(0, 1).T
        return out

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors, by name, for saving."""
        parts = {f"inputs/{i}/{j}": x for i, g in enumerate(self.inputs) for j, x in enumerate(nesting.flatten(g)[0])}
        return {**parts, "samples": self.samples, "outputs": self.outputs}

    def nests(self) -> list[str]:
        """Returns the nesting of the tensors of each group, as JSON."""
        return [nesting.flatten(group)[1] for group in self.inputs]

    @classmethod
    def entries(cls, rows: int, nests: Sequence[str]) -> dict[str, TensorSpec]:
        """Returns the shape and dtype of each of `tensors()` for M rows, given `nests()`."""
        counts = [nesting.count_tensors(nest) for nest in nests]
        inputs = {f"inputs/{i}/{j}": TensorSpec() for i, count in enumerate(counts) for j in range(count)}
        return {**inputs, **dict.fromkeys(("samples", "outputs"), TensorSpec((rows,), (torch.int64,)))}

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: Mapping[str, Tensor], nests: list[str]) -> Anchors:
        """Rebuilds the anchors from `tensors()` and `nests()`."""
        groups = []
        for i, nest in enumerate(nests):
            leaves = (tensors[f"inputs/{i}/{j}"] for j in range(nesting.count_tensors(nest)))
            groups.append(nesting.unflatten(leaves, nest))
        return cls(tangent, tuple(groups), tensors["samples"], tensors["outputs"])

    @cached_property
    def _groups(self) -> list[tuple[int, Inputs, list[tuple[Tensor, Tensor]]]]:
        """Groups with their width and anchors: (samples (B,), slots (B, r)) for each number r of outputs per sample."""
        groups, first = [], 0
        for group in self.inputs:
            stop = first + group.samples
            here = ((self.samples >= first) & (self.samples < stop)).nonzero()[:, 0]
            here = here[self.samples[here].argsort(stable=True)]
            samples, counts = torch.unique_consecutive(self.samples[here], return_counts=True)
            starts = counts.cumsum(0) - counts
            picks = []
            for times in counts.unique().tolist():
                which = (counts == times).nonzero()[:, 0]
                slots = here[starts[which, None] + torch.arange(times, device=here.device)]
                picks.append((samples[which] - first, slots))
            groups.append((self.tangent.width_of(group), group, picks))
            first = stop
        return groups

    def requests(
        self, dtype: torch.dtype, scratch: int, share: int = 1
    ) -> Iterator[tuple[Tensor, Inputs, GivenCotangents]]:
        """Yields `(slots, inputs, cotangents)` of chunks. A sample is in several chunks if its outputs do not fit.

        The caller keeps `scratch` entries per row. `share` divides the memory budget of one chunk.
        """
        tangent = self.tangent
        for width, group, picks in self._groups:
            for samples, slots in picks:
                for columns in slots.split(self._columns(slots.shape[1], dtype, scratch, tangent.memory // share), 1):
                    times = columns.shape[1]
                    length = max(1, tangent.chunk_length(times, dtype, times * scratch) // share)
                    for mine, where in zip(samples.split(length), columns.split(length), strict=True):
                        u = torch.zeros(len(mine), width, times, device=tangent.device)
                        u.scatter_(1, self.outputs[where][:, None].to(u.device), 1.0)
                        yield where.flatten(), group.take(mine), GivenCotangents(u)

    def _columns(self, times: int, dtype: torch.dtype, scratch: int, limit: int) -> int:
        """Returns how many of `times` outputs of one sample fit the limit in bytes, at least one."""
        first, whole = (self.tangent.bytes_per_sample(n, dtype, n * scratch) for n in (1, times))
        if whole <= limit or times == 1:
            return times
        return 1 + max(0, limit - first) * (times - 1) // max(1, whole - first)

    def records(self, dtype: torch.dtype, scratch: int = 0) -> Iterator[tuple[Tensor, Record]]:
        """Yields `(slots, record)` of chunks. Slots have the order of the record's flattened (B, R)."""
        for slots, inputs, u in self.requests(dtype, scratch):
            for rows, record in self.tangent.records_of_chunk(inputs, u, dtype):
                yield slots.reshape(-1, u.columns)[rows].flatten(), record
