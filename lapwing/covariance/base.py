"""The protocol of covariances over the weights: `Covariance`, and `PriorCovariance` if the prior can be changed.

A vector over the weights is a dict: block name -> (..., P_block).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor
from typing_extensions import TypeIs

from ..errors import LapwingError, shown
from ..jacobian.jacobian import Reads
from ..tangent import FLOATS, Block, Record, Tangent, TensorSpec, Vectors
from .layer_block import LayerBlock
from .terms import Terms

COVARIANCES: dict[str, type[Covariance]] = {}
"""Class name -> class, for all classes that a file may name. A file never causes an import."""

Registered = TypeVar("Registered", bound="type[Covariance]")


def register_covariance(kind: Registered) -> Registered:
    """Registers a class of covariances, so that files can hold it: a decorator of the class.

    A file names the class, which needs `entries` and `from_tensors`. `lw.load` finds it if its module has been
    imported.

    Raises:
        LapwingError: if `kind` is not a class of covariances, or if another class has its name.
    """
    if not (isinstance(kind, type) and issubclass(kind, Covariance)):
        raise LapwingError(
            f"register_covariance takes a class that extends Covariance, not {shown(kind)}. Write "
            "@register_covariance above the class."
        )
    other = COVARIANCES.get(kind.__name__, kind)
    if (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
        raise LapwingError(
            f"The name {kind.__name__} belongs to a covariance of {other.__module__}. Give the class of "
            f"{kind.__module__} another name."
        )
    COVARIANCES[kind.__name__] = kind
    return kind


def rows_spec(tangent: Tangent, count: int) -> dict[str, TensorSpec]:
    """Returns the shape and dtypes of rows (count, P_block) by block in a file."""
    return {block.name: TensorSpec((count, block.size), FLOATS) for block in tangent.blocks}


def precision_spec(tangent: Tangent) -> TensorSpec:
    """Returns the shape and dtype of prior precisions δ (n_blocks,) in a file."""
    return TensorSpec((len(tangent.blocks),), (torch.float64,))


def same_ratios(precision: Tensor, other: Tensor) -> bool:
    """Whether two prior precisions (n_blocks,) are equal up to a factor, and stay so: the first needs no gradient."""
    if precision.requires_grad and len(precision) > 1:
        return False
    precision = precision.detach()
    return torch.allclose(precision / precision[0], other / other[0], rtol=1e-12, atol=0)


def join_blocks(blocks: tuple[Block, ...], vectors: Vectors) -> Tensor:
    """Joins the blocks of a vector into (..., P)."""
    return torch.cat([vectors[block.name] for block in blocks], -1)


def split_blocks(blocks: tuple[Block, ...], flat: Tensor) -> Vectors:
    """Splits (..., P) into blocks."""
    parts = flat.split([block.size for block in blocks], -1)
    return {block.name: part for block, part in zip(blocks, parts, strict=True)}


class Stored(ABC):
    """An object in a file: a covariance, or the basis of one."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors, by name."""

    @classmethod
    @abstractmethod
    def entries(cls, tangent: Tangent, extra: Mapping[str, Any]) -> dict[str, TensorSpec]:
        """Returns the shape and dtype of each of `tensors()`, given `extra()`."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tangent: Tangent, tensors: dict[str, Tensor], extra: dict[str, Any]) -> Self:
        """Rebuilds the object from `tensors()` and `extra()`, which agree with `entries`."""

    def extra(self) -> dict[str, Any]:
        """Returns the settings that are not tensors, as values that JSON can store."""
        return {}


class Covariance(Stored):
    """A PSD matrix Σ over the weights of some blocks.

    `continued_by` says how further data are added to the curvature: to Kronecker factors and other sums by block, to a
    matrix G, to rows U with `G = Uᵀ M U`, or to the curvature on a fixed basis. None: they cannot be.
    """

    blocks: tuple[Block, ...]
    record_dtype: torch.dtype | None = None  # in which records must be contracted; None is the usual one
    precision: Tensor | None = None  # δ of each of `blocks`, (n_blocks,) float64; None without a prior
    full_rank: bool = False  # every direction of the weights has a positive variance
    has_prior: ClassVar[bool] = False  # the prior can be changed: ask `has_prior(covariance)`
    scratch_per_row: int = 0  # numbers per row of J that `output_covariance` needs temporarily
    distinct_draws: int | None = None  # number of draws that Σ is made of; None for any other Σ
    keeps_outputs: ClassVar[bool] = False  # a layer that gives all outputs needs no matrix (B, C, C)
    joins_layers: ClassVar[bool] = True  # weights of different layers may be correlated
    continued_by: Literal["blocks", "matrix", "rows", "basis"] | None = None

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    def block(self, name: str) -> Block:
        return next(block for block in self.blocks if block.name == name)

    @abstractmethod
    def mv(self, vectors: Vectors) -> Vectors:
        """Returns `Σ v`."""

    def products(self, vectors: Vectors, memory: int) -> Iterator[tuple[slice, Vectors]]:
        """Yields `Σ v` for slices of the rows of v (n, P_block) whose copies in a product fit the memory budget."""
        count = len(next(iter(vectors.values())))
        length = max(1, memory // (8 * self.dtype.itemsize * self.size))  # about seven copies
        for rows in (slice(start, start + length) for start in range(0, count, length)):
            yield rows, self.mv({name: v[rows].to(self.device, self.dtype) for name, v in vectors.items()})

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator) -> Vectors:
        """Returns n draws of `N(0, Σ)`: block name -> (n, P_block)."""

    def samples(self, count: int, generator: torch.Generator, length: int) -> Iterator[tuple[slice, Vectors]]:
        """Yields slices of n draws and their values, about `length` at a time, or at once if Σ is made of draws."""
        length = count if self.distinct_draws else max(1, length)  # parts would repeat the same draws
        for start in range(0, count, length):
            rows = slice(start, min(start + length, count))
            yield rows, self.sample(rows.stop - start, generator)

    @abstractmethod
    def diagonal(self) -> Vectors:
        """Returns the marginal variances: block name -> (P_block,)."""

    @abstractmethod
    def output_covariance(self, record: Record) -> Terms:
        """Returns `J Σ Jᵀ` of each sample as a sum of terms."""

    @abstractmethod
    def joint_output_covariance(self, record: Record, other: Record) -> Tensor:
        """Returns `J Σ J'ᵀ` (B, R, B', R') for the samples of two records, which may be the same record."""

    @abstractmethod
    def layer_block(self, name: str) -> LayerBlock:
        """Returns the covariance of one block with a matrix layout, without correlations with other layers."""

    def has_rounding_noise(self) -> bool:
        """Whether rounding noise of the curvature exceeds `λ + δ/s` in some direction, and so decides its variance."""
        return False

    def to_dense(self) -> Tensor:
        """Returns Σ (P, P), blocks in order. Memory O(P²)."""
        eye = torch.eye(self.size, dtype=self.dtype, device=self.device)
        return join_blocks(self.blocks, self.mv(split_blocks(self.blocks, eye)))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the covariance's tensors."""
        return next(iter(self.tensors().values())).dtype

    @property
    def device(self) -> torch.device:
        """The device of the covariance's tensors."""
        return next(iter(self.tensors().values())).device


class PriorCovariance(Covariance):
    """A covariance from a curvature G and a Gaussian prior that can be changed without another pass over the data."""

    precision: Tensor  # prior precision δ of each block (n_blocks,), float64
    scale: float  # s = N/(n σ² τ), the factor of the curvature at unit noise
    has_prior = True

    @abstractmethod
    def with_prior(self, precision: Tensor, scale: float) -> PriorCovariance:
        """Returns the covariance under another prior precision (n_blocks,) and scale of the curvature."""

    @abstractmethod
    def log_det_ratio(self, precision: Tensor, scale: Tensor | float) -> Tensor:
        """Returns `logdet(I + s Δ^(-1/2) G Δ^(-1/2))` at any prior precision, differentiable in both arguments."""

    def effective_dimension(self, precision: Tensor, scale: Tensor | float) -> Tensor:
        """Returns `γ = -d/d log δ logdet(I + s G/δ)` (n_blocks,), the number of directions that the data determine."""
        precision = precision.detach().clone().requires_grad_()
        with torch.enable_grad():
            ratio = self.log_det_ratio(precision, scale)
        return -precision.detach() * torch.autograd.grad(ratio, precision)[0]

    @property
    def correlated(self) -> list[bool]:
        """Whether each block has correlations; a diagonal curvature has a γ two to three times as large as KFAC's."""
        return [True] * len(self.precision)

    def extra(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def precision_mv(self, vectors: Vectors) -> Vectors | None:
        """Returns `Σ⁻¹ v`, without a factorisation, or None if some directions have variance 0."""
        return None

    @abstractmethod
    def shares_contraction_with(self, other: PriorCovariance) -> bool:
        """Whether both multiply J by the same matrices, so that one `output_covariances` can serve both."""

    @abstractmethod
    def output_covariances(self, record: Record, candidates: Sequence[Self], reads: Reads) -> Iterable[Terms]:
        """Returns `J Σ_i Jᵀ` for several priors of this curvature that are contracted with it, sharing products with J.

        "variances" gives one `MarginalTerm`, "scale" one `ScaleTerm`.
        """

    def output_covariance(self, record: Record) -> Terms:
        (terms,) = self.output_covariances(record, [self], "covariances")
        return terms

    def evidence_gap(self, precision: Tensor, scale: Tensor | float) -> Tensor:
        """Returns `s tr((I - VVᵀ) Δ^(-1/2) G Δ^(-1/2))`, the curvature outside a subspace; 0 without a subspace."""
        return torch.zeros((), dtype=torch.float64, device=precision.device)


def has_prior(covariance: Covariance) -> TypeIs[PriorCovariance]:
    """Whether the prior of a covariance can be changed."""
    return covariance.has_prior
