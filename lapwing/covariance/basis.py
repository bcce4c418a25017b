"""Bases of subspace covariances: stored rows, combinations of rows of J, or columns of the identity."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..files import prefixed, under
from ..linalg import row_products, total
from ..tangent import FLOATS, Anchors, Block, Record, Tangent, TensorSpec, Vectors
from .base import Stored, rows_spec, same_ratios


class Basis(Stored):
    """K directions W (K, P) in weight space."""

    rank: int  # K
    dtype: torch.dtype
    record_dtype: torch.dtype | None = None  # in which records must be projected; None is the usual one

    @property
    def scratch_per_row(self) -> int:
        """Numbers per row of J that a projection needs temporarily: it is summed over blocks and cast to float64."""
        return 3 * self.rank

    @property
    @abstractmethod
    def grams(self) -> Tensor:
        """`W_b W_bᵀ` for each block (n_blocks, K, K), float64."""

    @abstractmethod
    def project(self, record: Record) -> Tensor:
        """Returns `J Wᵀ` (B, R, K)."""

    @abstractmethod
    def combine(self, coefficients: Tensor) -> Vectors:
        """Returns `c W` for c (n, K): block name -> (n, P_block)."""

    @abstractmethod
    def inner(self, vectors: Vectors) -> Tensor:
        """Returns `v Wᵀ` (n, K)."""

    def extra(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def rows(self) -> Vectors:
        """Returns W itself: block name -> (K, P_block). Memory O(K P)."""
        return self.combine(torch.eye(self.rank, dtype=self.dtype, device=self.grams.device))

    def prior_gram(self, precision: Tensor) -> Tensor:
        """Returns `W Δ Wᵀ` (K, K) for precisions δ (n_blocks,)."""
        return torch.einsum("b,bkl->kl", precision, self.grams)


class ExplicitBasis(Basis):
    """Directions stored as rows: block name -> (K, P_block)."""

    def __init__(self, vectors: Vectors) -> None:
        first = next(iter(vectors.values()))
        self.vectors, self.rank, self.dtype = vectors, first.shape[0], first.dtype

    @cached_property
    def grams(self) -> Tensor:
        return torch.stack([row_products(v, v) for v in self.vectors.values()])

    def rows(self) -> Vectors:
        return self.vectors

    def project(self, record: Record) -> Tensor:
        if not self.rank:  # all rows of J were zero
            return torch.zeros(record.samples, record.cotangents, 0, dtype=record.dtype, device=record.device)
        return record.jvp(self.vectors)

    def combine(self, coefficients: Tensor) -> Vectors:
        return {name: coefficients.to(rows) @ rows for name, rows in self.vectors.items()}

    def inner(self, vectors: Vectors) -> Tensor:
        return total(vectors[name].to(rows.dtype) @ rows.T for name, rows in self.vectors.items())

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.vectors)

    @classmethod
    def entries(cls, tangent: Tangent, extra: Mapping[str, Any]) -> dict[str, TensorSpec]:
        return rows_spec(tangent, extra["rank"])

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> ExplicitBasis:
        return cls({block.name: tensors[block.name] for block in tangent.blocks})


class ImplicitBasis(Basis):
    """Directions `W = T J̃ D` that combine M rows of the Jacobian and are never formed: memory O(K M).

    J̃ are `anchors`, T (K, M) `coefficients` and D `scales`, a factor by block name. Products with the network's
    Jacobian are blocks of the NTK, `J Wᵀ = J D J̃ᵀ Tᵀ`. They subtract nearly equal numbers, so records are contracted
    in float64.
    """

    dtype = record_dtype = torch.float64

    def __init__(self, anchors: Anchors, coefficients: Tensor, scales: Mapping[str, float]) -> None:
        self.anchors, self.coefficients, self.scales = anchors, coefficients, dict(scales)
        self.rank = len(coefficients)

    @cached_property
    def grams(self) -> Tensor:
        """Computed from the NTK of the anchors, block by block. Cost: as for the Gram matrix of the anchors."""
        squares = torch.tensor([scale**2 for scale in self.scales.values()], device=self.coefficients.device)
        return squares[:, None, None] * self.anchors.grams(self.coefficients, self.dtype)

    def prior_gram(self, precision: Tensor) -> Tensor:
        """Returns `W Δ Wᵀ`: `c I` if `Δ = c D⁻¹`, since the fit makes `T J̃ D J̃ᵀ Tᵀ = I`; otherwise from `grams`.

        The first case saves a second Gram matrix of the anchors, which costs as much as the rest of a large fit.
        """
        ratios = precision * torch.tensor([*self.scales.values()]).to(precision)
        if not same_ratios(ratios, torch.ones_like(ratios)):
            return super().prior_gram(precision)
        return ratios[0] * torch.eye(self.rank, dtype=torch.float64, device=precision.device)

    @property
    def scratch_per_row(self) -> int:
        """M more than other bases: products with all anchors are formed before they are combined."""
        return len(self.anchors) + super().scratch_per_row

    def project(self, record: Record) -> Tensor:
        """Returns combined NTK blocks between the record and the anchors. Cost: M backward passes per record."""
        return self.anchors.products(record, self.scales) @ self.coefficients.T.to(record.dtype)

    def combine(self, coefficients: Tensor) -> Vectors:
        """Returns `c W`. Cost: M backward passes."""
        combined = self.anchors.combine(coefficients.to(self.dtype) @ self.coefficients)
        return {name: self.scales[name] * vectors for name, vectors in combined.items()}

    def inner(self, vectors: Vectors) -> Tensor:
        scaled = {name: self.scales[name] * vector.to(self.dtype) for name, vector in vectors.items()}
        return self.anchors.inner(scaled) @ self.coefficients.T

    def tensors(self) -> dict[str, Tensor]:
        """Returns the anchors and their coefficients. The anchors include inputs of the training data."""
        return {**prefixed("anchors", self.anchors.tensors()), "coefficients": self.coefficients}

    def extra(self) -> dict[str, Any]:
        return {**super().extra(), "scales": self.scales, "rows": len(self.anchors), "nests": self.anchors.nests()}

    @classmethod
    def entries(cls, tangent: Tangent, extra: Mapping[str, Any]) -> dict[str, TensorSpec]:
        parts = prefixed("anchors", Anchors.entries(extra["rows"], extra["nests"]))
        return {**parts, "coefficients": TensorSpec((extra["rank"], extra["rows"]), (torch.float64,))}

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> ImplicitBasis:
        anchors = Anchors.from_tensors(tangent, under("anchors", tensors), extra["nests"])
        return cls(anchors, tensors["coefficients"], extra["scales"])


class CoordinateBasis(Basis):
    """W picks K weights, `W_k = e_{i_k}ᵀ`, in the order of the indices `picked` (blocks in order). Memory O(K)."""

    def __init__(self, blocks: Sequence[Block], picked: Tensor, dtype: torch.dtype) -> None:
        self.picked, self.rank, self.dtype = picked, len(picked), dtype
        self._sizes = {block.name: block.size for block in blocks}
        stops = torch.tensor(list(self._sizes.values()), device=picked.device).cumsum(0)
        self._block = torch.searchsorted(stops, picked, right=True)  # (K,), number of the block of each weight
        self._where: dict[str, Tensor] = {}  # block -> numbers of its directions, in the order of `_index`
        self._index: dict[str, Tensor] = {}  # block -> indices of its picked weights, ascending
        for number, block in enumerate(blocks):
            where = (self._block == number).nonzero()[:, 0]
            if len(where):
                index, order = (picked[where] - (stops[number] - block.size)).sort()
                self._where[block.name], self._index[block.name] = where[order], index
        self._places = {name: index.tolist() for name, index in self._index.items()}

    @property
    def grams(self) -> Tensor:
        """Diagonal matrices. Not stored, since `prior_gram` does not need these n_blocks K² numbers."""
        numbers = torch.arange(len(self._sizes), device=self.picked.device)
        return torch.diag_embed((self._block == numbers[:, None]).double())

    def prior_gram(self, precision: Tensor) -> Tensor:
        return torch.diag(precision[self._block])

    def project(self, record: Record) -> Tensor:
        """Gathers columns of J. Cost for any K: the gradients, and rows of layers with several positions."""
        shape = record.samples, record.cotangents, self.rank
        projected = torch.empty(shape, dtype=record.dtype, device=record.device)
        for name, index in self._index.items():
            first = 0
            for part in record[name].columns(index, self._places[name]):
                projected[..., self._where[name][first : first + part.shape[-1]]] = part
                first += part.shape[-1]
        return projected

    def combine(self, coefficients: Tensor) -> Vectors:
        coefficients = coefficients.to(self.dtype)
        out = {name: coefficients.new_zeros(len(coefficients), size) for name, size in self._sizes.items()}
        for name, where in self._where.items():
            out[name][:, self._index[name]] = coefficients[:, where]
        return out

    def inner(self, vectors: Vectors) -> Tensor:
        first = next(iter(vectors.values()))
        out = first.new_empty(*first.shape[:-1], self.rank, dtype=self.dtype)
        for name, index in self._index.items():
            out[..., self._where[name]] = vectors[name][..., index].to(self.dtype)
        return out

    def tensors(self) -> dict[str, Tensor]:
        """Returns W as a sparse matrix: its entries, all 1, and the index of the weight of each entry."""
        return {"entries": torch.ones(self.rank, dtype=self.dtype, device=self.picked.device), "weights": self.picked}

    @classmethod
    def entries(cls, tangent: Tangent, extra: Mapping[str, Any]) -> dict[str, TensorSpec]:
        shape = (extra["rank"],)
        return {"entries": TensorSpec(shape, FLOATS), "weights": TensorSpec(shape, (torch.int64,))}

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> CoordinateBasis:
        return cls(tangent.blocks, tensors["weights"], tensors["entries"].dtype)
