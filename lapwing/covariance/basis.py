"""Directions in weight space, which subspace covariances are made on."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ..numerics import total
from ..tangent import Record, Vectors


class Basis(ABC):
    """K directions in weight space.

    Attributes:
        grams: `W_b W_bᵀ` of each block (n_blocks, K, K), float64.
        dtype: the dtype of the directions.
    """

    grams: Tensor
    dtype: torch.dtype

    @abstractmethod
    def project(self, record: Record) -> Tensor:
        """Returns `J Wᵀ` (B, R, K)."""

    @abstractmethod
    def combine(self, coefficients: Tensor) -> Vectors:
        """Returns `c W`, (n, P_block) a block, for c (n, K)."""

    @abstractmethod
    def inner(self, vectors: Vectors) -> Tensor:
        """Returns `v Wᵀ` (n, K)."""

    def rows(self) -> Vectors:
        """Returns W written out, (K, P_block) a block. Memory O(K P)."""
        return self.combine(torch.eye(self.grams.shape[-1], dtype=self.dtype, device=self.grams.device))


class ExplicitBasis(Basis):
    """Directions stored as rows, (K, P_block) a block."""

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors
        self.dtype = next(iter(vectors.values())).dtype
        self.grams = torch.stack([v.double() @ v.double().T for v in vectors.values()])

    def rows(self) -> Vectors:
        """Returns them."""
        return self.vectors

    def project(self, record: Record) -> Tensor:
        """Takes the cheaper of forward mode and the blocks' products."""
        return record.jvp(self.vectors)

    def combine(self, coefficients: Tensor) -> Vectors:
        """Multiplies out."""
        return {name: coefficients.to(rows.dtype) @ rows for name, rows in self.vectors.items()}

    def inner(self, vectors: Vectors) -> Tensor:
        """Sums over blocks."""
        return total(vectors[name].to(rows.dtype) @ rows.T for name, rows in self.vectors.items())
