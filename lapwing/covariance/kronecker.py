"""The curvature of one layer in the eigenbasis of its Kronecker factors, for KFAC and EKFAC."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..jacobian.jacobian import DiagonalWeights, Reads, Weightings, as_matrix
from ..linalg import SLICE_NUMBERS
from ..tangent import Block, BlockJacobian, TensorSpec
from .layer_block import LayerBlock
from .structures import Structure, weighted_terms
from .terms import EigenTerm, Summand, of_both

MIN_SAVED_COLUMNS = 128
"""Minimum number of saved columns for which a rotation leaves out the null space, which needs additional steps."""


@dataclass(frozen=True)
class KroneckerFactors:
    """Eigenpairs of the sums `A = U_in diag(α) U_inᵀ` and `Γ = U_out diag(γ) U_outᵀ`, to which data can be added."""

    inputs: Tensor | None  # U_in (G, I, I), or None if A is diagonal (embeddings)
    outputs: Tensor  # U_out (G, O, O)
    input_eigenvalues: Tensor  # α (G, I), float64
    output_eigenvalues: Tensor  # γ (G, O), float64
    count: Tensor  # (1,), number # of positions (integer) or sum of their weights (float64)

    def products(self) -> Tensor:
        """Returns `γ_j α_i / #` (G, O, I), the eigenvalues of KFAC's curvature."""
        outputs, inputs = self.output_eigenvalues[..., :, None], self.input_eigenvalues[..., None, :]
        inputs = inputs / self.count.to(inputs.device)
        products = self.outputs.new_empty(*outputs.shape[:-1], inputs.shape[-1])
        step = max(1, SLICE_NUMBERS // max(1, inputs.numel()))
        for some, part in zip(outputs.split(step, -2), products.split(step, -2), strict=True):
            part.copy_(some * inputs)
        return products


class KroneckerBlock(Structure):
    """`(U_out ⊗ U_in) diag(λ) (U_out ⊗ U_in)ᵀ` in G groups. U_in is None if A is diagonal (embeddings).

    λ (G, O, I) are KFAC's `γ_j α_i / #`, or EKFAC's second moments of the rotated Jacobian.
    """

    kind = "kronecker"

    def __init__(self, eigenvalues: Tensor, factors: KroneckerFactors) -> None:
        self.eigenvalues, self.factors = eigenvalues, factors
        self.inputs, self.outputs = factors.inputs, factors.outputs

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
        reduced = None
        # products with the range of A and back must cost less than one product with all directions
        if self.inputs is not None and 2 * self.null_size - self.inputs.shape[-1] > MIN_SAVED_COLUMNS:
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

    def tensors(self) -> dict[str, Tensor]:
        named = {"eigenvalues": self.eigenvalues, **vars(self.factors)}
        return {name: value for name, value in named.items() if value is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> KroneckerBlock:
        factors: Any = {"inputs": None, **tensors}
        return cls(factors.pop("eigenvalues"), KroneckerFactors(**factors))

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


class KroneckerLayer(LayerBlock):
    """One layer's `(U_out ⊗ U_in) diag(w) (U_out ⊗ U_in)ᵀ`, for w (G, O, I)."""

    def __init__(self, inputs: Tensor | None, outputs: Tensor, weights: Tensor) -> None:
        self._inputs, self._outputs, self._weights = inputs, outputs, weights

    def covariances(self, mean: Tensor, variance: Tensor | None) -> EigenTerm:
        """Returns `U_out diag_j(Σ_i (U_inᵀ M U_in)_ii w_ji) U_outᵀ`, `M = m mᵀ + variance` (Streamlined, eq. 10)."""
        assert self._inputs is not None  # tokens have no moments
        basis = self._inputs[0]
        moment = (mean @ basis).square()  # `(U_inᵀ M U_in)_ii` (B, I)
        if variance is not None:  # (B, I), or covariances (B, I, I)
            more = variance @ basis.square() if variance.ndim == 2 else ((variance @ basis) * basis).sum(-2)
            moment = moment + more
        return EigenTerm(self._outputs[0], moment @ self._weights[0].T)

    def rotation(self) -> tuple[Tensor | None, Tensor]:
        return self._inputs, self._outputs.square() @ self._weights
