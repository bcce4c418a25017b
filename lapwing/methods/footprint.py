"""The memory of a fit in bytes and its length in forward passes, from shapes, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..covariance import Covariance
from ..data import batches
from ..jacobian.blocks import Block
from ..jacobian.jacobian import SLICE_BYTES
from ..likelihoods import Likelihood
from ..network.probe import PROBED_SAMPLES
from ..tangent import Tangent
from .problem import MemoryNeed, root_columns, root_positions

CHECKED_COLUMNS = 2
"""Minimum number of gradient columns of a record of a new shape: the check of the sample axis needs them."""

DECOMPOSITION_BYTES = 24
"""Bytes per entry of a matrix that is decomposed: its copy in float64, and the workspace of LAPACK."""


@dataclass(frozen=True)
class Footprint:
    """What a method needs for a fit.

    Attributes:
        kept: bytes of the covariance.
        peak: maximum bytes that the fit holds in addition to the network; includes `kept`.
        passes: length of the fit in forward passes of its data, without tuning.
        rank: number of directions K of a subspace; None for other structures.
        needs: tensors that must fit the memory budget as a whole.
        note: a sentence about the limits of these numbers, or None.
    """

    kept: int
    peak: int
    passes: float
    rank: int | None = None
    needs: tuple[MemoryNeed, ...] = ()
    note: str | None = None


@dataclass(frozen=True)
class FitShape:
    """The sizes of a fit that has not begun.

    Attributes:
        tangent: the surveyed network.
        likelihood: p(y|f).
        columns: number of columns R of the Fisher root.
        samples: number of samples n that the loader shows.
        batch: number of samples in the first batch.
        sample_bytes: bytes of the inputs of one sample.
        activations: bytes of the activations that one sample's record holds; 0 if they were not measured.
        graph: bytes of the outputs of all modules for one sample; 0 if they were not measured.
    """

    tangent: Tangent
    likelihood: Likelihood
    columns: int
    samples: int
    batch: int
    sample_bytes: int
    activations: int = 0
    graph: int = 0

    @classmethod
    def of(cls, tangent: Tangent, likelihood: Likelihood, inputs: Any, samples: int) -> FitShape:
        """Returns the shape of a fit whose first batch has these inputs."""
        count = batches.size(inputs)
        columns = root_columns(likelihood, tangent.outputs, root_positions(tangent), tangent.device)
        each = sum(x.numel() * x.dtype.itemsize for x in batches.tensors(inputs)) // count
        return cls(tangent, likelihood, columns, samples, count, each)

    @property
    def pass_length(self) -> float:
        """Length of one pass over the data, in forward passes: the forward pass and a backward pass for each column."""
        return 1.0 if self.tangent.treats_output_alone else 1.0 + self.columns

    @property
    def survey(self) -> int:
        """Bytes that the survey holds: two graphs of a few samples, their gradients, and gradients of the weights."""
        sizes = [block.size for block in self.tangent.blocks]
        graphs = min(self.batch, PROBED_SAMPLES) * (4 * self.graph + 3 * self.gradients(1))
        return graphs + self.tangent.dtype.itemsize * (self.tangent.size + 3 * max(sizes))

    def gradients(self, columns: int) -> int:
        """Returns the bytes of one sample's gradients for R columns."""
        outputs = sum(outputs for outputs, _ in self.tangent.plan.sizes)
        return columns * (outputs + 3 * self.tangent.explicit_size) * self.tangent.dtype.itemsize

    def chunk(self, dtype: torch.dtype | None = None, scratch: int = 0) -> int:
        """Returns the bytes of the samples that are recorded at once, with `scratch` further numbers per sample."""
        columns, tangent = self.columns, self.tangent
        if tangent.positions is not None and tangent.positions.direct:
            return tangent.memory  # as many positions as fit
        length = min(self.batch, tangent.chunk_length(columns, dtype, scratch))
        dtype = dtype or tangent.dtype
        each = self.record(max(columns, CHECKED_COLUMNS), dtype) + scratch * dtype.itemsize
        widest = max([0, *(block.size for block in tangent.blocks if self._writes_rows(block))])
        rows = min(length * columns * widest * tangent.dtype.itemsize, SLICE_BYTES, tangent.memory // 8)
        return length * self.activations + min(length * each, tangent.memory) + 2 * rows

    def row_chunk(self, count: int, dtype: torch.dtype) -> int:
        """Returns the bytes that are held while M rows of J are written out and joined."""
        row = self.tangent.size * dtype.itemsize
        at_once = max(1, min(count, self.tangent.memory // (4 * row)))
        samples = max(1, -(-at_once * min(count, self.samples) // max(1, count)))
        return samples * (self.activations + self.record(-(-at_once // samples), dtype)) + 2 * at_once * row

    def record(self, columns: int, dtype: torch.dtype) -> int:
        """Returns the bytes of one sample's record without activations: gradients, or contractions after them.

        A contraction copies the gradients of its layer; in a wider dtype, it copies them again and the patches too.
        """
        sizes, itemsize = self.tangent.plan.sizes, self.tangent.dtype.itemsize
        wider = dtype.itemsize > itemsize
        copies = [columns * outputs + wider * (2 * patches + columns * outputs) for outputs, patches in sizes]
        gathered = itemsize * columns * sum(outputs for outputs, _ in sizes)
        contracted = gathered + dtype.itemsize * max(copies, default=0)
        unfolded = 2 * itemsize * max((patches for _, patches in sizes), default=0)
        return unfolded + max(self.gradients(columns), contracted)

    def _writes_rows(self, block: Block) -> bool:
        """Whether rows of J of a block are written out: its layer sees several positions, or tokens."""
        plan = self.tangent.plan
        if plan.is_explicit(block) or block.matrix is None:
            return False
        outputs = sum(plan.sizes[i][0] for i, _, _ in plan.uses.get(block.name, ()))
        return block.matrix.one_hot or outputs > math.prod(block.matrix_shape[:2])

    def stored(self, kind: type[Covariance], extra: Mapping[str, Any], dtype: torch.dtype | None = None) -> int:
        """Returns the bytes of a covariance's tensors, as its files list them.

        Args:
            kind: class of the covariance.
            extra: its settings, as `Covariance.entries` reads them.
            dtype: dtype of the tensors whose dtype may vary; None means the network's.
        """
        scale = {"scale": 1.0} if kind.has_prior else {}
        dtype, total = dtype or self.tangent.dtype, 0
        for entry in kind.entries(self.tangent, {**scale, **extra}).values():
            assert entry.shape is not None
            stored = dtype if not entry.dtypes or dtype in entry.dtypes else entry.dtypes[0]
            total += math.prod(entry.shape) * stored.itemsize
        return total
