"""The memory of a fit in bytes and its length in forward passes, from shapes, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..covariance import Covariance
from ..data.inputs import Inputs
from ..likelihoods import Likelihood
from ..tangent import MemoryNeed, Tangent
from .problem import FisherRoot

DECOMPOSITION_BYTES = 24  # per entry of a matrix that is decomposed: its copy in float64, and LAPACK's workspace


DECOMPOSITION_PRODUCTS = 10
"""Time of an eigendecomposition, in products of two matrices of its size: 7 on one thread of a CPU, 16 on two."""


def decompositions(*sizes: int) -> float:
    """Returns the multiply-adds that take as long as eigendecompositions of these sizes."""
    return DECOMPOSITION_PRODUCTS * sum(float(size) ** 3 for size in sizes)


@dataclass(frozen=True)
class Footprint:
    """What a method needs for a fit."""

    kept: int  # bytes of the covariance
    peak: int  # maximum bytes that the fit holds in addition to the network; includes `kept`
    passes: float  # length of the fit in forward passes of its data, without tuning
    rank: int | None = None  # number of directions K of a subspace; None for other structures
    needs: tuple[MemoryNeed, ...] = ()  # tensors that must fit the memory budget as a whole
    products: float = 0.0  # multiply-adds of matrices that are as wide as weights or rows, in addition to the passes


@dataclass(frozen=True)
class FitShape:
    """The sizes of a fit that has not begun."""

    tangent: Tangent
    likelihood: Likelihood
    columns: int  # number of columns R of the Fisher root
    samples: int  # number of samples n that the loader shows
    batch: int  # number of samples in the first batch
    sample_bytes: int  # bytes of the inputs of one sample
    activations: int = 0  # bytes of the activations in the record of one sample; 0 if they were not measured

    @classmethod
    def of(cls, tangent: Tangent, likelihood: Likelihood, inputs: Inputs, samples: int) -> FitShape:
        """Returns the shape of a fit whose first batch has these inputs."""
        count = inputs.samples
        columns = FisherRoot.of(tangent, likelihood, 0).columns
        each = sum(x.numel() * x.dtype.itemsize for x in inputs.tensors) // count
        return cls(tangent, likelihood, columns, samples, count, each)

    def with_drawn_root(self) -> FitShape:
        """Returns the shape of a fit whose Fisher root is drawn for any number of outputs."""
        root = FisherRoot.of(self.tangent, self.likelihood, 0, self.columns).drawn()
        return replace(self, columns=root.columns)

    @property
    def pass_length(self) -> float:
        """Length of one pass over the data, in forward passes: the forward pass and a backward pass for each column."""
        return 1.0 if self.tangent.treats_output_alone else 1.0 + self.columns

    def chunk(self, dtype: torch.dtype | None = None, scratch: int = 0) -> int:
        """Returns the bytes of the samples that are recorded at once, with `scratch` further numbers per sample."""
        tangent = self.tangent
        if tangent.positions.rows_are_positions:
            return tangent.memory  # as many positions as fit
        length = min(self.batch, tangent.chunk_length(self.columns, dtype, scratch))
        each = tangent.bytes_per_sample(self.columns, dtype, scratch)
        return length * self.activations + min(length * each, tangent.memory)

    def stored(self, kind: type[Covariance], extra: Mapping[str, Any], dtype: torch.dtype | None = None) -> int:
        """Returns the bytes of a covariance's tensors, with the settings `extra` that `Covariance.entries` reads.

        `dtype` is the dtype of tensors whose dtype may vary; None means the network's.
        """
        dtype, total = dtype or self.tangent.dtype, 0
        for entry in kind.entries(self.tangent, extra).values():
            assert entry.shape is not None
            stored = dtype if not entry.dtypes or dtype in entry.dtypes else entry.dtypes[0]
            total += math.prod(entry.shape) * stored.itemsize
        return total
