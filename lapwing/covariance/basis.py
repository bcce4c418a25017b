"""Directions in weight space for subspace covariances: rows, combinations of rows of J, or columns of the identity."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..linalg import row_products, total
from ..tangent import FLOATS, Anchors, Block, Record, Tangent, TensorSpec, Vectors
from .base import same_ratios


class Basis(ABC):
    """K directions W (K, P) in weight space.

    Attributes:
        rank: K.
        dtype: the dtype of the directions.
        record_dtype: the dtype records must be projected in, or None for the usual one.
    """

    rank: int
    dtype: torch.dtype
    record_dtype: torch.dtype | None = None

    @property
    def scratch_per_row(self) -> int:
        """Numbers that a projection, summed by blocks and cast to float64, keeps for each row of J while it works."""
        return 3 * self.rank

    @property
    @abstractmethod
    def grams(self) -> Tensor:
        """`W_b W_bᵀ` of each block (n_blocks, K, K), float64."""

    @abstractmethod
    def project(self, record: Record) -> Tensor:
        """Returns `J Wᵀ` (B, R, K)."""

    @abstractmethod
    def combine(self, coefficients: Tensor) -> Vectors:
        """Returns `c W`, (n, P_block) a block, for c (n, K)."""

    @abstractmethod
    def inner(self, vectors: Vectors) -> Tensor:
        """Returns `v Wᵀ` (n, K)."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors that make up the basis, by name, for saving."""

    @classmethod
    @abstractmethod
    def entries(cls, tangent: Tangent, extra: Mapping[str, Any]) -> dict[str, TensorSpec]:
        """Returns the shape and dtype of each of `tensors()`, given `extra()`."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tangent: Tangent, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> Basis:
        """Rebuilds the basis from `tensors()` and `extra()`, which agree with `entries`."""

    def extra(self) -> dict[str, Any]:
        """Returns what is not a tensor, as JSON."""
        return {"rank": self.rank}

    def rows(self) -> Vectors:
        """Returns W written out, (K, P_block) a block. Memory O(K P)."""
        return self.combine(torch.eye(self.rank, dtype=self.dtype, device=self.grams.device))

    def prior_gram(self, precision: Tensor) -> Tensor:
        """Returns `W Δ Wᵀ` (K, K) for one precision a block."""
        return torch.einsum("b,bkl->kl", precision, self.grams)


class ExplicitBasis(Basis):
    """Directions stored as rows, (K, P_block) a block."""

    def __init__(self, vectors: Vectors) -> None:
        first = next(iter(vectors.values()))
        self.vectors, self.rank, self.dtype = vectors, first.shape[0], first.dtype

    @cached_property
    def grams(self) -> Tensor:
        return torch.stack([row_products(v, v) for v in self.vectors.values()])

    def rows(self) -> Vectors:
        return self.vectors

    def project(self, record: Record) -> Tensor:
        """Takes the cheaper of forward mode and the blocks' products."""
        if not self.rank:  # no row of J spanned anything
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
        return {block.name: TensorSpec((extra["rank"], block.size), FLOATS) for block in tangent.blocks}

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> ExplicitBasis:
        return cls({block.name: tensors[block.name] for block in tangent.blocks})


class ImplicitBasis(Basis):
    """Directions `W = T J̃ D` that combine M rows of the Jacobian and are never written out: memory O(K M).

    Products with the network's Jacobian are blocks of the NTK, `J Wᵀ = J D J̃ᵀ Tᵀ`; they subtract nearly equal numbers,
    so records are to be contracted in float64.

    Args:
        anchors: J̃.
        coefficients: T (K, M), float64.
        scales: D, one number a block.
    """

    dtype = record_dtype = torch.float64

    def __init__(self, anchors: Anchors, coefficients: Tensor, scales: Mapping[str, float]) -> None:
        self.anchors, self.coefficients, self.scales = anchors, coefficients, dict(scales)
        self.rank = len(coefficients)

    @cached_property
    def grams(self) -> Tensor:
        """From the NTK of each block among the anchors. Cost: as their Gram matrix."""
        squares = torch.tensor([scale**2 for scale in self.scales.values()], device=self.coefficients.device)
        return squares[:, None, None] * self.anchors.grams(self.coefficients, self.dtype)

    def prior_gram(self, precision: Tensor) -> Tensor:
        """Returns `W Δ Wᵀ`: `c I` where `Δ = c D⁻¹`, since the fit makes `T J̃ D J̃ᵀ Tᵀ = I`; else from `grams`.

        So the Gram matrix of the anchors, which takes as long as the rest of a large fit, is not made a second time.
        """
        ratios = precision * torch.tensor([*self.scales.values()]).to(precision)
        per_block = precision.requires_grad and len(precision) > 1
        if per_block or not same_ratios(ratios, torch.ones_like(ratios)):
            return super().prior_gram(precision)
        return ratios[0] * torch.eye(self.rank, dtype=torch.float64, device=precision.device)

    @property
    def scratch_per_row(self) -> int:
        """M more: products with all anchors come before their combination."""
        return len(self.anchors) + super().scratch_per_row

    def project(self, record: Record) -> Tensor:
        """Returns NTK blocks between the record and the anchors, combined. Cost: M backward passes a record."""
        return self.anchors.products(record, self.scales) @ self.coefficients.T.to(record.dtype)

    def combine(self, coefficients: Tensor) -> Vectors:
        """Returns one weighted backward pass for each row of c."""
        combined = self.anchors.combine(coefficients.to(self.dtype) @ self.coefficients)
        return {name: self.scales[name] * vectors for name, vectors in combined.items()}

    def inner(self, vectors: Vectors) -> Tensor:
        scaled = {name: self.scales[name] * vector.to(self.dtype) for name, vector in vectors.items()}
        return self.anchors.inner(scaled) @ self.coefficients.T

    def tensors(self) -> dict[str, Tensor]:
        """Returns the anchors and their coefficients: inputs of the training data are among them."""
        return {**{f"anchors/{k}": v for k, v in self.anchors.tensors().items()}, "coefficients": self.coefficients}

    def extra(self) -> dict[str, Any]:
        return {**super().extra(), "scales": self.scales, "rows": len(self.anchors), "nests": self.anchors.nests()}

    @classmethod
    def entries(cls, tangent: Tangent, extra: Mapping[str, Any]) -> dict[str, TensorSpec]:
        """K combinations of M rows, and the inputs that the rows are taken at."""
        parts = {f"anchors/{name}": spec for name, spec in Anchors.entries(extra["rows"], extra["nests"]).items()}
        return {**parts, "coefficients": TensorSpec((extra["rank"], extra["rows"]), (torch.float64,))}

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> ImplicitBasis:
        parts = {k.removeprefix("anchors/"): v for k, v in tensors.items() if k.startswith("anchors/")}
        anchors = Anchors.from_tensors(tangent, parts, extra["nests"])
        return cls(anchors, tensors["coefficients"], extra["scales"])


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
        return torch.diag(precision[self._block])

    def project(self, record: Record) -> Tensor:
        """Gathers columns of J, block by block; blocks without a picked weight are not looked at.

        Cost: the record's gradients, and for layers that see several positions its rows, whatever K; memory O(B R K).
        """
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
        """Returns W as a sparse matrix: its entries, all 1, and the weight of each."""
        return {"entries": torch.ones(self.rank, dtype=self.dtype, device=self.picked.device), "weights": self.picked}

    @classmethod
    def entries(cls, tangent: Tangent, extra: Mapping[str, Any]) -> dict[str, TensorSpec]:
        shape = (extra["rank"],)
        return {"entries": TensorSpec(shape, FLOATS), "weights": TensorSpec(shape, (torch.int64,))}

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> CoordinateBasis:
        return cls(tangent.blocks, tensors["weights"], tensors["entries"].dtype)
