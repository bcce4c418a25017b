"""Sums over samples for a layer that gives the outputs, with Λ by its parts: the root's C columns are not formed."""

from __future__ import annotations

from torch import Tensor

from ..linalg import doubled
from .outer import Outer


class FisherSums:
    """Sums of `Λ ⊗ a aᵀ` over samples, for a layer that gives the outputs. It is no Jacobian and has no rows.

    Λ has a diagonal (B, O), and off the diagonal `-v vᵀ` for v (B, O), or 0: O numbers per sample instead of O².

    Args:
        layer: inputs a of the layer; its g is the identity.
        diagonal: diagonal of Λ (B, O).
        beside: v (B, O), or None if Λ is diagonal.
    """

    def __init__(self, layer: Outer, diagonal: Tensor, beside: Tensor | None) -> None:
        dtype = layer.a.dtype
        self._layer = layer
        self._diagonal, self._beside = diagonal.to(dtype), None if beside is None else beside.to(dtype)

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
            if self._beside is None:
                diagonal = diagonal @ basis.square()
            else:
                beside = doubled(self._beside)
                diagonal = (diagonal + beside.square()) @ basis.square() - (beside @ basis).square()
            diagonal = diagonal.clamp_min(0.0)
        return FisherSums(self._layer.rotate(inputs, None), diagonal, None).squared_sum()

    def add_kronecker_factors(
        self, reduce: bool, inputs: Tensor, outputs: Tensor, weights: Tensor | None = None
    ) -> int:
        """Adds A and `Γ = Σ Λ` as `MatrixJacobian.add_kronecker_factors` does."""
        outputs[0].diagonal().add_(self._diagonal.sum(0))
        if self._beside is not None:  # the diagonal of v vᵀ is left out, which would cancel
            outputs[0] -= (self._beside.T @ self._beside).fill_diagonal_(0.0)
        return self._layer.add_input_factor(inputs, weights)
