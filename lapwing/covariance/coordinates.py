"""Columns of the identity as directions in weight space: a subset of the weights, kept as indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..contents import FLOATS, Entry, Mismatch, check_json, is_count
from ..tangent import Block, Record, Tangent, Vectors
from .basis import Basis


class CoordinateBasis(Basis):
    """W picks K weights, `W_k = e_{i_k}ᵀ`: indices in place of rows, so memory is O(K).

    Args:
        blocks: the blocks.
        picked: indices of K different weights among all P, blocks in order; directions come in this order.
        dtype: what coefficients and records are contracted in.
    """

    def __init__(self, blocks: Sequence[Block], picked: Tensor, dtype: torch.dtype) -> None:
        self.picked, self.rank, self.dtype = picked, len(picked), dtype
        self._sizes = {block.name: block.size for block in blocks}
        stops = torch.tensor(list(self._sizes.values()), device=picked.device).cumsum(0)
        self._block = torch.searchsorted(stops, picked, right=True)  # (K,), which block each weight is of
        ascending, order = picked.sort()
        self._where: dict[str, Tensor] = {}  # block -> its directions, by ascending weight
        self._index: dict[str, Tensor] = {}  # block -> its picked weights, ascending
        first = 0
        for name, stop in zip(self._sizes, stops.tolist(), strict=True):
            end = int(torch.searchsorted(ascending, stop))
            if end > first:
                self._where[name] = order[first:end]
                self._index[name] = ascending[first:end] - (stop - self._sizes[name])
            first = end
        self._places = {name: index.tolist() for name, index in self._index.items()}

    @property
    def grams(self) -> Tensor:
        """Diagonal; made when asked for, since `prior_gram` needs no n_blocks K² numbers."""
        numbers = torch.arange(len(self._sizes), device=self.picked.device)
        return torch.diag_embed((self._block == numbers[:, None]).double())

    def prior_gram(self, precision: Tensor) -> Tensor:
        """Returns the precisions of the picked weights as a diagonal matrix (K, K)."""
        return torch.diag(precision[self._block])

    def project(self, record: Record) -> Tensor:
        """Gathers columns of J, block by block; blocks without a picked weight are not looked at.

        Cost: the record's gradients, and for layers that see several positions its rows, whatever K; memory O(B R K).
        """
        projected = record.outputs.new_empty(record.samples, record.cotangents, self.rank, dtype=record.dtype)
        for name, index in self._index.items():
            first = 0
            for part in record[name].columns(index, self._places[name]):
                projected[..., self._where[name][first : first + part.shape[-1]]] = part
                first += part.shape[-1]
        return projected

    def combine(self, coefficients: Tensor) -> Vectors:
        """Puts coefficients (n, K) where their weights are."""
        coefficients = coefficients.to(self.dtype)
        out = {name: coefficients.new_zeros(len(coefficients), size) for name, size in self._sizes.items()}
        for name, where in self._where.items():
            out[name][:, self._index[name]] = coefficients[:, where]
        return out

    def inner(self, vectors: Vectors) -> Tensor:
        """Gathers the picked weights' entries (n, K)."""
        first = next(iter(vectors.values()))
        out = first.new_empty(*first.shape[:-1], self.rank, dtype=self.dtype)
        for name, index in self._index.items():
            out[..., self._where[name]] = vectors[name][..., index].to(self.dtype)
        return out

    def rows(self) -> Vectors:
        """Returns W written out, (K, P_block) a block. Memory O(K P): for small networks."""
        return self.combine(torch.eye(self.rank, dtype=self.dtype, device=self.picked.device))

    def tensors(self) -> dict[str, Tensor]:
        """Returns W as a sparse matrix: its entries, all 1, and the weight of each."""
        return {"entries": torch.ones(self.rank, dtype=self.dtype, device=self.picked.device), "weights": self.picked}

    @classmethod
    def entries(cls, tangent: Tangent, extra: Any) -> dict[str, Entry]:
        """K ones and as many places among all weights."""
        check_json(extra, {"rank": is_count}, "covariance/extra/basis")
        shape, ones = (extra["rank"],), Entry((extra["rank"],), FLOATS, 1.0, 1.0)
        return {"entries": ones, "weights": Entry(shape, (torch.int64,), 0, tangent.size - 1)}

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> CoordinateBasis:
        """Rebuilds it, in the dtype of the entries."""
        if len(tensors["weights"].unique()) < len(tensors["weights"]):
            raise Mismatch("the tensor covariance/basis/weights names a weight twice")
        return cls(tangent.blocks, tensors["weights"], tensors["entries"].dtype)
