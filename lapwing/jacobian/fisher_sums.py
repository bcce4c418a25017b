"""Sums over samples for a layer that gives the outputs, from the parts of Λ instead of the C columns of its root."""

from __future__ import annotations

from torch import Tensor

from ..linalg import doubled
from .outer import Outer


class FisherSums:
    """Sums of `Λ ⊗ a aᵀ` over samples, for a layer that gives the outputs. It is not a Jacobian and has no rows.

    Λ has a diagonal (B, O), and off the diagonal `-v vᵀ` for v (B, O), or 0: O numbers per sample instead of O².
    """

    def __init__(self, layer: Outer, diagonal: Tensor, vector: Tensor | None) -> None:
        dtype = layer.a.dtype
        self._layer = layer
        self._diagonal, self._vector = diagonal.to(dtype), None if vector is None else vector.to(dtype)

    def squared_sum(self) -> Tensor:
        """Returns `Σ_n Λ_oo a²` (P,). Time O(B O I)."""
        return (self._diagonal.T @ self._layer.a.square()).flatten()

    def rotated_squared_sum(self, inputs: Tensor | None, outputs: Tensor | None) -> Tensor:
        """Returns `squared_sum` in another basis, from the diagonal of `Uᵀ Λ U`.

        In float64, since variances `Σ p U² - (Σ p U)²` of peaked probabilities cancel.
        """
        diagonal = self._diagonal
        if outputs is not None:
            basis, diagonal = doubled(outputs[0]), doubled(diagonal)
            if self._vector is None:
                diagonal = diagonal @ basis.square()
            else:
                vector = doubled(self._vector)
                diagonal = (diagonal + vector.square()) @ basis.square() - (vector @ basis).square()
            diagonal = diagonal.clamp_min(0.0)
        return FisherSums(self._layer.rotate(inputs, None), diagonal, None).squared_sum()

    def add_kronecker_factors(
        self, reduce: bool, inputs: Tensor, outputs: Tensor, weights: Tensor | None = None
    ) -> int:
        """Adds A and `Γ = Σ Λ` as `MatrixJacobian.add_kronecker_factors` does."""
        outputs[0].diagonal().add_(self._diagonal.sum(0))
        if self._vector is not None:  # without the diagonal of v vᵀ, which would cancel
            outputs[0] -= (self._vector.T @ self._vector).fill_diagonal_(0.0)
        return self._layer.add_kronecker_factors(reduce, inputs, None, weights)
