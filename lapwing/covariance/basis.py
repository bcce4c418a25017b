"""Directions in weight space for subspace covariances: written out, or as combinations of rows of the Jacobian."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..contents import FLOATS, Entry, check_json, is_count, is_positive, largest
from ..linalg import row_products, total
from ..tangent import Anchors, Record, Tangent, Vectors


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
    def entries(cls, tangent: Tangent, extra: Any) -> dict[str, Entry]:
        """Returns what `tensors()` in a file must be, beside this `extra()`.

        Raises:
            Mismatch: where that is not a `extra()`.
        """

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
        """Multiplied out once."""
        return torch.stack([row_products(v, v) for v in self.vectors.values()])

    def rows(self) -> Vectors:
        """Returns them."""
        return self.vectors

    def project(self, record: Record) -> Tensor:
        """Takes the cheaper of forward mode and the blocks' products."""
        if not self.rank:  # no row of J spanned anything
            return record.outputs.new_zeros(record.samples, record.cotangents, 0, dtype=record.dtype)
        return record.jvp(self.vectors)

    def combine(self, coefficients: Tensor) -> Vectors:
        """Multiplies out."""
        return {name: coefficients.to(rows.dtype) @ rows for name, rows in self.vectors.items()}

    def inner(self, vectors: Vectors) -> Tensor:
        """Sums over blocks."""
        return total(vectors[name].to(rows.dtype) @ rows.T for name, rows in self.vectors.items())

    def tensors(self) -> dict[str, Tensor]:
        """Returns the rows of each block."""
        return dict(self.vectors)

    @classmethod
    def entries(cls, tangent: Tangent, extra: Any) -> dict[str, Entry]:
        """K rows a block."""
        check_json(extra, {"rank": is_count}, "covariance/extra/basis")
        bound = largest(torch.float32, 1 / 2)
        return {block.name: Entry((extra["rank"], block.size), FLOATS, -bound, bound) for block in tangent.blocks}

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> ExplicitBasis:
        """Takes them in the order of the blocks."""
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
        """Contracts with the anchors' rows."""
        scaled = {name: self.scales[name] * vector.to(self.dtype) for name, vector in vectors.items()}
        return self.anchors.inner(scaled) @ self.coefficients.T

    def tensors(self) -> dict[str, Tensor]:
        """Returns the anchors and their coefficients: inputs of the training data are among them."""
        return {**{f"anchors/{k}": v for k, v in self.anchors.tensors().items()}, "coefficients": self.coefficients}

    def extra(self) -> dict[str, Any]:
        """Returns the scales and how the anchors' inputs nest."""
        return {**super().extra(), "scales": self.scales, "rows": len(self.anchors), "nests": self.anchors.nests()}

    @classmethod
    def entries(cls, tangent: Tangent, extra: Any) -> dict[str, Entry]:
        """K combinations of M rows, and the inputs that the rows are taken at."""
        scales = {block.name: is_positive for block in tangent.blocks}
        pattern = {"rank": is_count, "scales": scales, "rows": is_count, "nests": [str]}
        check_json(extra, pattern, "covariance/extra/basis")
        bound = largest(torch.float64, 1 / 4)
        parts = {f"anchors/{k}": e for k, e in Anchors.entries(tangent, extra["rows"], extra["nests"]).items()}
        return {**parts, "coefficients": Entry((extra["rank"], extra["rows"]), (torch.float64,), -bound, bound)}

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> ImplicitBasis:
        """Rebuilds it around the tangent."""
        parts = {k.removeprefix("anchors/"): v for k, v in tensors.items() if k.startswith("anchors/")}
        anchors = Anchors.from_tensors(tangent, parts, extra["nests"])
        return cls(anchors, tensors["coefficients"], extra["scales"])
