"""What a fit and a prediction take, counted from shapes before anything runs: the terms in which methods state it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

import torch

from ..contents import Entry
from ..covariance import Covariance, PriorCovariance
from ..jacobian.jacobian import SLICE_BYTES
from ..likelihoods import Likelihood
from ..linalg import is_reduced
from ..network import batches
from ..tangent import Tangent
from .problem import EXACT_FISHER_OUTPUTS, Need, root_columns, root_positions

MOVE = 40
"""What reading, changing and writing one number costs, in multiply-adds of a matrix product."""

DOUBLE = 2
"""What a multiply-add in float64 costs, in those of float32."""

CALL = 80_000
"""What one operation costs before it computes anything, in multiply-adds."""

EIGEN = 13
"""What eigenpairs of an n x n matrix cost, in n³ multiply-adds."""

CHECKED_COLUMNS = 2
"""Records of a new shape have at least the gradients of so many columns: the check of where samples lie takes them."""

DRAWN = 100
"""What a column of the Fisher root that is drawn at one position costs beside its numbers, in moved numbers."""

WORKSPACE = 24
"""Bytes a number of a matrix that is decomposed: its copy in float64, and the workspace of LAPACK."""


def singular(rows: int, columns: int) -> int:
    """Returns what singular vectors of (m, n) cost in multiply-adds.

    What each number takes besides `min(m, n)` is its way from memory, again and again.
    """
    least = min(rows, columns)
    return rows * columns * (10 * least + 900)


def eigenpairs(size: int, rank: int) -> float:
    """Returns what eigenpairs of an n x n sum of so many squares take: `linalg.eigen_in_place`."""
    if not is_reduced(size, rank):
        return EIGEN * size**3
    return EIGEN * rank**3 + DOUBLE * size * rank * (3 * size + 5 * rank)


@dataclass(frozen=True)
class Work:
    """What one sample takes.

    Attributes:
        records: recordings of the network, each a forward pass that keeps what layers got.
        backwards: backward passes of its activations.
        products: multiply-adds beside the network.
        decompositions: multiply-adds of LAPACK, which runs at a speed of its own.
    """

    records: float = 0.0
    backwards: float = 0.0
    products: float = 0.0
    decompositions: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Returns both."""
        return Work(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def times(self, factor: float) -> Work:
        """Returns so many of it."""
        return Work(*(factor * part for part in astuple(self)))


@dataclass(frozen=True)
class Cost:
    """What a method takes.

    Attributes:
        fit: for each sample of the data, tuning left out.
        predict: for each input.
        kept: bytes of the covariance.
        peak: bytes that the fit holds at most beside the network, the covariance included.
        tuned: whether a tuning follows: the method does not choose the prior itself.
        note: a sentence on what the numbers leave open.
        rank: K of a subspace, on which all candidates of a tuning share one projection; None for other structures.
        needs: what has to fit the memory budget whole.
    """

    fit: Work
    predict: Work
    kept: int
    peak: int
    tuned: bool = True
    note: str | None = None
    rank: int | None = None
    needs: tuple[Need, ...] = ()


@dataclass(frozen=True)
class Layer:
    """One block of weights as its contractions see it.

    Attributes:
        size: P.
        positions: T, how many places of a sample use the weights.
        shape: (G, O, I), or None where rows are all there is.
        one_hot: whether inputs are one-hot, such as tokens.
        is_output: whether the layer's output is the network's.
    """

    size: int
    positions: int
    shape: tuple[int, int, int] | None
    one_hot: bool
    is_output: bool

    @property
    def single(self) -> bool:
        """Whether each row is one outer product, which is never written out."""
        return self.shape is not None and self.positions == 1 and not self.one_hot

    def rows(self, columns: int) -> float:
        """Returns what R rows take to be written out."""
        products = columns * self.positions * self.size if self.positions > 1 and self.shape and not self.one_hot else 0
        return products + MOVE * columns * self.size

    def squares(self, columns: int) -> float:
        """Returns what `Σ_r J²` takes, or the diagonal of `J diag(w) Jᵀ`."""
        if self.shape is None:
            return 2 * MOVE * columns * self.size
        groups, outputs, inputs = self.shape
        if self.one_hot:  # a sample reaches one row of weights at each position
            return 2 * MOVE * columns * self.positions * outputs
        if self.positions > 1:
            pairs = self.positions * (self.positions + 1) / 2
            by_pairs = pairs * (self.size + MOVE * groups * (columns * outputs + inputs))
            return min(self.rows(columns) + MOVE * columns * self.size, by_pairs)
        return self.size + MOVE * (columns * outputs * (not self.is_output) + inputs)

    def factors(self, columns: int) -> float:
        """Returns what both Kronecker factors take."""
        if self.shape is None:
            return self.squares(columns)
        groups, outputs, inputs = self.shape
        sides = (0 if self.one_hot else inputs, 1), (outputs, columns)
        half = (count * side * (max(side // 2, min(side, 256)) + MOVE) for side, count in sides)
        return groups * self.positions * sum(half)

    def turned(self, columns: int) -> float:
        """Returns what it takes to turn R rows into the eigenbasis of the factors."""
        if self.shape is None:
            return 0.0
        groups, outputs, inputs = self.shape
        left = 0 if self.one_hot else min(self.positions, columns * outputs) * inputs**2
        right = 0 if self.is_output else min(self.positions, inputs) * columns * outputs**2
        return groups * (left + right)

    def rotated(self) -> float:
        """Returns what it takes to turn a row that is written out into the eigenbasis of the factors."""
        if self.shape is None:
            return 0.0
        _, outputs, inputs = self.shape
        return self.size * (outputs + (0 if self.one_hot else inputs))

    def projected(self, columns: int, rank: int) -> float:
        """Returns what `J Wᵀ` takes for K directions."""
        by_rows = self.rows(columns) + rank * columns * self.size
        if self.shape is None:
            return by_rows
        outputs = self.shape[0] * self.shape[1]
        pushed = self.positions * ((columns + MOVE) * outputs + (0 if self.one_hot else self.size))
        return min(by_rows, rank * pushed)


@dataclass(frozen=True)
class Outline:
    """What a method may know of a fit that has not begun.

    Attributes:
        tangent: the network.
        likelihood: of the targets.
        prior_open: whether the prior precision is to be chosen.
        columns: R of the Fisher root.
        samples: n, how many samples the loader shows.
        batch: how many of them the first batch has.
        sample_bytes: bytes of the inputs of one sample.
        sample_numbers: how many numbers they have.
        activations: bytes that the network holds for the record of one sample; 0 where only shapes are known.
        gradients: bytes that each column of it adds.
        patches: bytes that layers add.
    """

    tangent: Tangent
    likelihood: Likelihood
    prior_open: bool
    columns: int
    samples: int
    batch: int
    sample_bytes: int
    sample_numbers: int
    activations: int
    gradients: int
    patches: int

    @classmethod
    def of(
        cls, tangent: Tangent, likelihood: Likelihood, inputs: Any, samples: int, prior_open: bool = True
    ) -> Outline:  # fmt: skip
        """Returns the outline of a fit whose first batch has these inputs."""
        leaves, count = batches.tensors(inputs), batches.size(inputs)
        columns = root_columns(likelihood, tangent.outputs, root_positions(tangent), tangent.device)
        numbers, sizes = sum(x.numel() for x in leaves), sum(x.numel() * x.dtype.itemsize for x in leaves)
        gradients = sum(outputs for outputs, _ in tangent.plan.sizes) + 3 * tangent.explicit_size
        patches, itemsize = max((patches for _, patches in tangent.plan.sizes), default=0), tangent.dtype.itemsize
        memory = 0, gradients * itemsize, 2 * patches * itemsize
        return cls(
            tangent, likelihood, prior_open, columns, samples, count, sizes // count, numbers // count, *memory
        )  # fmt: skip

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """Block name -> its layer."""
        plan, layers = self.tangent.plan, {}
        for block in self.tangent.blocks:
            uses = [i for i, _, _ in plan.uses.get(block.name, ())]
            matrix = None if plan.is_explicit(block) or block.matrix is None else block.matrix_shape
            positions = sum(plan.sizes[i][0] for i in uses) // (matrix[0] * matrix[1]) if matrix else 1
            one_hot = block.matrix is not None and block.matrix.one_hot
            is_output = self.tangent.treats_output_alone if self.tangent.positions else plan.last in uses
            layers[block.name] = Layer(block.size, max(1, positions), matrix, one_hot, is_output)
        return layers

    def total(self, count: Callable[[Layer], float]) -> float:
        """Returns a sum over layers."""
        return sum(map(count, self.layers.values()))

    def once(self, products: float) -> Work:
        """Returns products that are done once for all data, as a part of each sample's."""
        return Work(products=products / max(1, self.samples))

    def decomposed(self, products: float) -> Work:
        """Returns a decomposition of so many multiply-adds, as a part of each sample's work."""
        return Work(decompositions=products / max(1, self.samples))

    def over_data(self, count: Callable[[Layer, int], float], factor: float = 1.0, sums: bool = False) -> Work:
        """Returns one pass over the data, with what each layer takes for R columns.

        `sums` over all rows take one column of a layer that gives the outputs and is treated alone.
        """
        columns = 1 if sums and self.tangent.treats_output_alone else self.columns
        return Work(1, columns, factor * self.total(lambda layer: count(layer, columns)) + self._drawn)

    @property
    def _drawn(self) -> float:
        """What the Fisher root takes where it is drawn at all positions of an input."""
        positions, outputs = root_positions(self.tangent), self.tangent.outputs
        if positions == 1 or positions * outputs <= EXACT_FISHER_OUTPUTS:
            return 0.0
        return MOVE * self.columns * positions * (DRAWN + 3 * outputs)

    def prediction(self, count: Callable[[Layer, int], float], factor: float = 1.0) -> Work:
        """Returns the prediction of an input, with what each layer takes for all outputs."""
        positions = self.tangent.positions
        outputs = self.tangent.outputs * (1 if positions is None or positions.direct else positions.count)
        backwards = 0 if all(layer.is_output for layer in self.layers.values()) else outputs
        return Work(1, backwards, factor * self.total(lambda layer: count(layer, outputs)))

    def chunk(self, dtype: torch.dtype | None = None, scratch: int = 0) -> int:
        """Returns the bytes of the samples that are recorded at once, with `scratch` further numbers of each."""
        columns, tangent = self.columns, self.tangent
        if tangent.positions is not None and tangent.positions.direct:
            return tangent.memory  # as many positions as fit
        length = min(self.batch, tangent.chunk_length(columns, dtype, scratch))
        dtype = dtype or tangent.dtype
        each = self.record(max(columns, CHECKED_COLUMNS), dtype) + scratch * dtype.itemsize
        rows = 2 * min(self._rows(length * columns), SLICE_BYTES, tangent.memory // 8)
        return length * self.activations + min(length * each, tangent.memory) + rows

    def row_chunk(self, count: int, dtype: torch.dtype) -> int:
        """Returns the bytes of what is recorded at once to write out M rows of J, and of its parts joined."""
        row = self.tangent.size * dtype.itemsize
        at_once = max(1, min(count, self.tangent.memory // (4 * row)))
        samples = max(1, -(-at_once * min(count, self.samples) // max(1, count)))
        return samples * (self.activations + self.record(-(-at_once // samples), dtype)) + 2 * at_once * row

    def record(self, columns: int, dtype: torch.dtype) -> int:
        """Returns the bytes of a sample's record beside activations: of backward passes, or of contractions after them.

        A contraction copies the gradients of its layer; in a wider dtype, once more and with the patches.
        """
        sizes, itemsize = self.tangent.plan.sizes, self.tangent.dtype.itemsize
        wider = dtype.itemsize > itemsize
        copies = [columns * outputs + wider * (2 * patches + columns * outputs) for outputs, patches in sizes]
        gathered = itemsize * columns * sum(outputs for outputs, _ in sizes)
        contracted = gathered + dtype.itemsize * max(copies, default=0)
        return self.patches + max(columns * self.gradients, contracted)

    def _rows(self, count: int) -> int:
        """Returns the bytes of so many rows of the largest layer that writes them out, and not as gradients."""
        sizes = [layer.size for layer in self.layers.values() if layer.shape is not None and not layer.single]
        return count * max([0, *sizes]) * self.tangent.dtype.itemsize

    def stored(self, kind: type[Covariance], extra: Mapping[str, Any], dtype: torch.dtype | None = None) -> int:
        """Returns the bytes of a covariance's tensors, as its files list them; in `dtype` where they leave it open."""
        scale = {"scale": 1.0} if issubclass(kind, PriorCovariance) else {}
        entries = kind.entries(self.tangent, {**scale, **extra}).values()
        return sum(_bytes(entry, dtype or self.tangent.dtype) for entry in entries)


def _bytes(entry: Entry, dtype: torch.dtype) -> int:
    assert entry.shape is not None
    stored = dtype if not entry.dtypes or dtype in entry.dtypes else entry.dtypes[0]
    return math.prod(entry.shape) * stored.itemsize
