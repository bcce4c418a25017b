"""The curvature of one block, `U diag(λ) Uᵀ`, U orthonormal: diagonal or dense. `kronecker.py` has the Kronecker kind.

Every function of the curvature is a weighting `w(λ)` in this basis, so a new prior needs no refactorisation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from math import inf

import torch
from torch import Tensor

from ..jacobian.jacobian import Reads, Weightings
from ..linalg import SLICE_NUMBERS, doubled
from ..tangent import Block, BlockJacobian, TensorSpec
from .layer_block import DiagonalLayer, FactorLayer, LayerBlock
from .terms import (
    EigenTerm,
    FactoredTerm,
    MarginalTerm,
    ReflectedSum,
    ScaleTerm,
    Summand,
    cross_covariance,
    factored_or_dense,
    of_both,
)


class Structure(ABC):
    """The curvature of one block, `U diag(λ) Uᵀ`."""

    kind: str
    eigenvalues: Tensor  # λ, in any shape of P entries; weights w have the same shape

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor | None]:
        """The eigenvalues as float64 points and weights, condensed if there are many."""
        return condensed(self.eigenvalues)

    @abstractmethod
    def rotate(self, vectors: Tensor, back: bool = False) -> Tensor:
        """Returns `Uᵀ v` (or `U v`) for v (..., P). The rotated side has the shape `(..., *λ.shape)`."""

    @abstractmethod
    def diagonal(self, weights: Tensor) -> Tensor:
        """Returns the diagonal of `U diag(w) Uᵀ` (P,)."""

    @abstractmethod
    def output_covariances(self, jacobian: BlockJacobian, candidates: Weightings, reads: Reads) -> Iterable[Summand]:
        """Returns `J U diag(w) Uᵀ Jᵀ` of each sample for several weights w. J is rotated only once."""

    @abstractmethod
    def joint_output(self, jacobian: BlockJacobian, other: BlockJacobian, weights: Tensor) -> Tensor:
        """Returns `J U diag(w) Uᵀ J'ᵀ` (B, R, B', R') for the samples of two Jacobians, which may be the same."""

    @abstractmethod
    def layer_block(self, weights: Tensor, shape: tuple[int, int, int]) -> LayerBlock:
        """Returns `U diag(w) Uᵀ` as the covariance of a matrix weight of shape (G, O, I)."""

    def has_rounding_noise(self, precision: float) -> bool:
        """Whether the rounding error of some eigenvalue λ exceeds λ + precision."""
        return False

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors that make up the structure, by name: the fields of a dataclass."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Structure:
        """Rebuilds the structure from `tensors()`, which agree with `entries`."""
        return cls(**tensors)

    @classmethod
    @abstractmethod
    def entries(cls, block: Block, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Returns the shape and dtype of each of `tensors()` for a block."""


def weighted_terms(
    jacobian: BlockJacobian, candidates: Weightings, reads: Reads, basis: Tensor | None = None
) -> Iterable[Summand]:
    """Returns the part of `J diag(w) Jᵀ` in `reads` for several w: factors if the layer has one position, or matrices.

    J is in the basis in which the weights are diagonal. If the layer gives the network's outputs, `basis` is U_out,
    which rotates them back; None means the identity.
    """
    factors = jacobian.weighted_factors(candidates) if reads == "covariances" or jacobian.is_output else None
    if factors is not None:
        g, scales = factors
        if reads == "scale":
            return _scales(scales, basis)
        return ((EigenTerm(basis, s) if g is None else FactoredTerm(g, s)).read(reads) for s in scales)
    found = jacobian.weighted(candidates, reads)
    if reads == "covariances":
        return map(ReflectedSum, found)
    if reads == "variances":
        return (MarginalTerm(*diagonals) for diagonals in found)
    return (ScaleTerm(trace.unsqueeze(-1) / jacobian.cotangents) for trace in found)


def _scales(scales: Iterable[Tensor], basis: Tensor | None) -> Iterable[ScaleTerm]:
    """Returns the mean centred variance of `U diag(s) Uᵀ` for several s (B, C)."""
    if basis is None:
        return (ScaleTerm(s.mean(-1, keepdim=True) * (1 - 1 / s.shape[-1])) for s in scales)
    squares = (basis - basis.mean(0)).square().mean(0)
    return (ScaleTerm((s @ squares).unsqueeze(-1)) for s in scales)


@dataclass(eq=False, repr=False)
class DiagonalBlock(Structure):
    """`diag(λ)`."""

    eigenvalues: Tensor
    kind = "diagonal"

    def rotate(self, vectors: Tensor, back: bool = False) -> Tensor:
        return vectors

    def diagonal(self, weights: Tensor) -> Tensor:
        return weights

    def output_covariances(self, jacobian: BlockJacobian, candidates: Weightings, reads: Reads) -> Iterable[Summand]:
        return weighted_terms(jacobian, candidates, reads)

    def joint_output(self, jacobian: BlockJacobian, other: BlockJacobian, weights: Tensor) -> Tensor:
        return jacobian.joint_weighted_gram(weights, other)

    def layer_block(self, weights: Tensor, shape: tuple[int, int, int]) -> LayerBlock:
        return DiagonalLayer(weights.reshape(shape))

    @classmethod
    def entries(cls, block: Block, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"eigenvalues": TensorSpec((block.size,), (dtype,))}


@dataclass(eq=False, repr=False)
class DenseBlock(Structure):
    """`U diag(λ) Uᵀ` with a dense U (P, P)."""

    eigenvalues: Tensor
    basis: Tensor
    kind = "dense"

    def rotate(self, vectors: Tensor, back: bool = False) -> Tensor:
        return vectors @ (self.basis.T if back else self.basis)

    def diagonal(self, weights: Tensor) -> Tensor:
        return self.basis.square() @ weights

    def output_covariances(self, jacobian: BlockJacobian, candidates: Weightings, reads: Reads) -> Iterable[Summand]:
        rows = jacobian.rows() @ self.basis
        return (factored_or_dense(rows * weighting.flat.sqrt()).read(reads) for weighting in candidates)

    def joint_output(self, jacobian: BlockJacobian, other: BlockJacobian, weights: Tensor) -> Tensor:
        root = self.basis * weights.sqrt()
        return cross_covariance(*of_both(lambda one: one.rows() @ root, jacobian, other))

    def layer_block(self, weights: Tensor, shape: tuple[int, int, int]) -> LayerBlock:
        return FactorLayer((self.basis * weights.sqrt()).T.reshape(-1, *shape[1:]))

    @classmethod
    def entries(cls, block: Block, dtype: torch.dtype) -> dict[str, TensorSpec]:
        size = block.size
        return {"eigenvalues": TensorSpec((size,), (dtype,)), "basis": TensorSpec((size, size), (dtype,))}


PER_UNIT = 64
"""Number of bins per unit of log λ, for which two points per bin give `log(1 + t λ)` to a relative error of 1e-7."""

MANY = 100_000
"""Minimum number of eigenvalues that are condensed."""


def condensed(eigenvalues: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns points λ' (n,) and weights w (n,) in float64 such that `Σ_i log(1 + t λ_i) = Σ_k w_k log(1 + t λ'_k)`.

    The third derivative of `log(1 + exp u)` is smaller than the function. A third central moment in a bin of width h in
    u is at most `h³/10`, so the relative error is at most `h³/60`: 6e-8, or 1e-10 for evenly filled bins. Zeros are
    left out. Returns λ and None if λ has few entries, or only zeros, or entries that are not finite and >= 0. The sums
    are made on the CPU and do not depend on the order of threads.
    """
    values = eigenvalues.flatten()
    if len(values) < MANY:
        return doubled(values), None
    low, high = values.aminmax()
    if not 0 <= low <= high < inf or high == 0:  # aminmax returns NaN if there is one
        return doubled(values), None
    return _condensed(values, high)


def _condensed(values: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the points and weights of `condensed` for many λ, of which `high` is the largest."""
    # 1. bins of log λ, `PER_UNIT` of them per unit
    parts = values.split(SLICE_NUMBERS)
    smallest = torch.stack([torch.where(part > 0, part, inf).amin() for part in parts]).amin()
    lowest, highest = doubled(torch.stack([smallest, high])).cpu().log()
    sums = lowest.new_zeros(3, 1 + int(PER_UNIT * (highest - lowest)))  # sums of powers 0, 1 and 2
    # 2. number of λ in each bin, and sums of their places in it and of the squares of these
    for part in parts:
        places = PER_UNIT * (doubled(part[part > 0]).cpu().log() - lowest)
        bins = places.long()
        within = places - bins
        for power, added in enumerate((None, within, within.square())):
            sums[power] += torch.bincount(bins, added, minlength=sums.shape[1])
    # 3. mean and standard deviation of log λ in each bin
    filled = sums[0] > 0
    counts, means, spreads = sums[:, filled]
    means, spreads = means / counts, spreads / counts
    spreads = (spreads - means.square()).clamp_min(0.0).sqrt() / PER_UNIT
    means = lowest + (filled.nonzero().squeeze(1) + means) / PER_UNIT
    # 4. two points at mean ± deviation, with half the number each: they keep moments 0 to 2 of the bin
    points = torch.cat([means - spreads, means + spreads]).exp()
    return points.to(values.device), counts.repeat(2).to(values.device) / 2
