"""The curvature of one block, `U diag(λ) Uᵀ`, U orthonormal: diagonal, Kronecker-factored for KFAC and EKFAC, or dense.

Every function of the curvature is a weighting `w(λ)` in this basis, so a new prior needs no refactorisation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from ..jacobian.jacobian import DiagonalWeights, Reads, Weightings, as_matrix
from ..linalg import SLICE_NUMBERS, condensed
from ..tangent import Block, BlockJacobian, TensorSpec
from .layer_block import DiagonalLayer, FactorLayer, KroneckerLayer, LayerBlock
from .terms import (
    EigenTerm,
    FactoredTerm,
    MarginalTerm,
    ReflectedSum,
    ScaleTerm,
    Summand,
    Term,
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
        """Returns all tensors that make up the structure, by name: the fields of a dataclass that are not None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if value is not None}

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
    which rotates them back; None means the identity. The slopes of a tail then stretch each output.
    """
    factors = jacobian.weighted_factors(candidates) if reads == "covariances" or jacobian.is_output else None
    if factors is not None:
        g, scales = factors
        slopes = jacobian.slopes
        if reads == "scale" and slopes is None:  # the mean centred variance of U diag(s) Uᵀ
            if basis is None:
                return (ScaleTerm(s.mean(-1, keepdim=True) * (1 - 1 / s.shape[-1])) for s in scales)
            squares = (basis - basis.mean(0)).square().mean(0)
            return (ScaleTerm((s @ squares).unsqueeze(-1)) for s in scales)
        terms: Iterable[Term] = (EigenTerm(basis, s) if g is None else FactoredTerm(g, s) for s in scales)
        if slopes is not None:
            terms = (term.stretched(slopes) for term in terms)
        return terms if reads == "covariances" else (term.read(reads) for term in terms)
    found = jacobian.weighted(candidates, reads)
    if reads == "covariances":
        return map(ReflectedSum, found)
    if reads == "variances":
        return (MarginalTerm(*diagonals) for diagonals in found)
    return (ScaleTerm(trace.unsqueeze(-1) / jacobian.cotangents) for trace in found)


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


MIN_SAVED_COLUMNS = 128
"""Minimum number of saved columns for which a rotation leaves out the null space, which needs additional steps."""


@dataclass(eq=False, repr=False)
class KroneckerBlock(Structure):
    """`(U_out ⊗ U_in) diag(λ) (U_out ⊗ U_in)ᵀ` in G groups.

    U_in and U_out are eigenvectors of the sums `A = U_in diag(α) U_inᵀ` and `Γ = U_out diag(γ) U_outᵀ`, to which
    further data can be added. λ are KFAC's `γ_j α_i / M`, or EKFAC's second moments of the rotated Jacobian.
    """

    eigenvalues: Tensor  # λ (G, O, I)
    outputs: Tensor  # U_out (G, O, O)
    input_eigenvalues: Tensor  # α (G, I), float64
    output_eigenvalues: Tensor  # γ (G, O), float64
    count: Tensor  # (1,), number # of positions (integer) or sum of their weights (float64)
    inputs: Tensor | None = None  # U_in (G, I, I), or None if A is diagonal (embeddings)
    kind = "kronecker"

    @classmethod
    def of_factors(
        cls, inputs: Tensor | None, outputs: Tensor, alpha: Tensor, gamma: Tensor, count: Tensor
    ) -> KroneckerBlock:
        """Returns the block with KFAC's eigenvalues."""
        columns, rows = alpha[..., None, :] / count.to(alpha.device), gamma[..., :, None]
        products = outputs.new_empty(*gamma.shape, alpha.shape[-1])
        step = max(1, SLICE_NUMBERS // max(1, columns.numel()))
        for some, part in zip(rows.split(step, -2), products.split(step, -2), strict=True):
            part.copy_(some * columns)
        return cls(products, outputs, alpha, gamma, count, inputs)

    def rotate(self, vectors: Tensor, back: bool = False) -> Tensor:
        """Returns `U_outᵀ M U_in` for v as a matrix M (G, O, I), or its inverse."""
        matrix = vectors if back else vectors.unflatten(-1, self.eigenvalues.shape)
        outputs = self.outputs if back else self.outputs.mT
        matrix = outputs @ matrix
        if self.inputs is not None:
            matrix = matrix @ (self.inputs.mT if back else self.inputs)
        return matrix.flatten(-3) if back else matrix

    def has_rounding_noise(self, precision: float) -> bool:
        """Whether `eps λ_max > μ + precision`; μ is the smallest positive maximum of a row or column of λ."""
        # γ_j has an error of eps γ_max, largest times α_max; the same holds for α_i; eigenvalues of 0 are exact
        error = torch.finfo(self.eigenvalues.dtype).eps * float(self.eigenvalues.amax())
        if error <= precision:
            return False
        largest = torch.cat([self.eigenvalues.amax(1).flatten(), self.eigenvalues.amax(2).flatten()])
        return error > float(largest[largest > 0].amin()) + precision

    def diagonal(self, weights: Tensor) -> Tensor:
        """Returns `U_out² w (U_in²)ᵀ` (P,)."""
        spread = self.outputs.square() @ weights
        return (spread if self.inputs is None else spread @ self.inputs.square().mT).flatten()

    def output_covariances(self, jacobian: BlockJacobian, candidates: Weightings, reads: Reads) -> Iterable[Summand]:
        """Rotates a and g, then weights them. An output layer keeps `U_out diag(s) U_outᵀ` as factors.

        If the null space of A is large, J is rotated only to the range of A (`rotate_inputs`). Then one weight stands
        for the whole null space.
        """
        jacobian = as_matrix(jacobian)
        outputs = None if jacobian.is_output else self.outputs
        reduced, columns = None, 0 if self.inputs is None else self.inputs.shape[-1]
        # products with the range of A and back must cost less than one product with all directions
        saves = columns > MIN_SAVED_COLUMNS and 2 * self.null_size - columns > MIN_SAVED_COLUMNS
        if self.inputs is not None and saves:
            reduced = jacobian.rotate_inputs(self.inputs[0, :, self.null_size :])
        if reduced is None:
            return weighted_terms(jacobian.rotate(self.inputs, outputs), candidates, reads, self.outputs[0])
        first = self.null_size - 1
        ranges = (DiagonalWeights(one.flat.reshape(self.eigenvalues.shape[1:])[:, first:]) for one in candidates)
        return weighted_terms(reduced.rotate(None, outputs), ranges, reads, self.outputs[0])

    @cached_property
    def null_size(self) -> int:
        """Number of leading input directions with equal λ, at least 1: the null space of A, orthogonal to all data."""
        same = (self.eigenvalues == self.eigenvalues[..., :1]).flatten(0, 1).all(0)
        return int(same.cumprod(0).sum())

    def joint_output(self, jacobian: BlockJacobian, other: BlockJacobian, weights: Tensor) -> Tensor:
        left, right = of_both(lambda one: as_matrix(one).rotate(self.inputs, self.outputs), jacobian, other)
        return left.joint_weighted_gram(weights.flatten(), right)

    def layer_block(self, weights: Tensor, shape: tuple[int, int, int]) -> LayerBlock:
        return KroneckerLayer(self.inputs, self.outputs, weights)

    @classmethod
    def entries(cls, block: Block, dtype: torch.dtype) -> dict[str, TensorSpec]:
        groups, outputs, inputs = block.matrix_shape
        named = {
            "eigenvalues": TensorSpec((groups, outputs, inputs), (dtype,)),
            "outputs": TensorSpec((groups, outputs, outputs), (dtype,)),
            "input_eigenvalues": TensorSpec((groups, inputs), (torch.float64,)),
            "output_eigenvalues": TensorSpec((groups, outputs), (torch.float64,)),
            "count": TensorSpec((1,), (torch.int64, torch.float64)),
        }
        if block.matrix is not None and not block.matrix.one_hot:
            named["inputs"] = TensorSpec((groups, inputs, inputs), (dtype,))
        return named


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
