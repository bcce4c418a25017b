"""The Jacobian of a matrix weight at one position per sample: `J[n, r] = g[n, r] a[n]ᵀ`, which is never formed.

Weights (P,) and vectors (K, P) are laid out as (O, I), the bias as the last input column. For a layer that gives the
outputs, `FisherSums` adds up samples from the parts of Λ instead of the C columns of its root.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from ..linalg import add_squares, doubled
from .jacobian import BlockJacobian, MatrixJacobian, Reads, Weightings, reflect_
from .shared_outer import SharedOuter
from .strips import Strips


class Outer(MatrixJacobian):
    """One position per sample: inputs a (B, I) and output gradients g (B, R, O).

    `g=None` means that the layer gives the network's outputs: R = O, and g is the identity, or diagonal with the
    `slopes` (B, O) of the network's tail. `bias` appends an input of ones, which is formed only if a product needs it.
    """

    groups = 1

    def __init__(
        self, a: Tensor, g: Tensor | None, outputs: int, bias: bool = False, slopes: Tensor | None = None
    ) -> None:
        self._a, self._g, self._bias, self.is_output = a, g, bias, g is None
        self.slopes = slopes if g is None else None  # g has them already
        self.batch, self.outputs, self.inputs = a.shape[0], outputs, a.shape[1] + bias
        self.size = outputs * self.inputs
        self.cotangents = outputs if g is None else g.shape[1]

    @cached_property
    def a(self) -> Tensor:
        """Inputs (B, I)."""
        return F.pad(self._a, (0, 1), value=1.0) if self._bias else self._a

    @property
    def g(self) -> Tensor:
        """Output gradients (B, R, O). If the layer gives the outputs, this forms the identity, or diag(slopes)."""
        if self._g is not None:
            return self._g
        if self.slopes is not None:
            return torch.diag_embed(self.slopes)
        return torch.eye(self.outputs, dtype=self._a.dtype, device=self._a.device).expand(self.batch, -1, -1)

    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        step = self.step(self.batch * self.cotangents * self.inputs * self.a.element_size(), self.outputs)
        g = self.g
        for start in range(0, self.outputs, step):
            rows = g[:, :, start : start + step, None] * self.a[:, None, None, :]  # (B, R, o, I)
            yield slice(start * self.inputs, (start + rows.shape[2]) * self.inputs), rows.flatten(2)

    def rotate(self, inputs: Tensor | None, outputs: Tensor | None) -> Outer:
        a, g = self.a if inputs is None else self._turned(inputs[0]), self._g
        if outputs is not None:
            g = self.g
            g = g @ outputs[0] if g.is_contiguous() else (g.transpose(0, 1) @ outputs[0]).transpose(0, 1)
        return self._like(a, g)

    def _like(self, a: Tensor, g: Tensor | None) -> Outer:
        """Returns J with other inputs and gradients, the same slopes, and slices of the same size."""
        other = Outer(a, g, self.outputs, slopes=self.slopes)
        other.slice_bytes = self.slice_bytes
        return other

    def _turned(self, basis: Tensor) -> Tensor:
        """Returns `a U` (B, K) for U (I, K), without forming the bias column."""
        if not self._bias:
            return self._a @ basis
        return F.linear(self._a, basis[:-1].mT, basis[-1])

    def rotate_inputs(self, basis: Tensor) -> Outer | None:
        """Returns J for inputs [|a - U Uᵀ a|, Uᵀ a], or None if a needs a gradient (a norm has a kink at 0)."""
        if self._a.requires_grad:
            return None
        inside = self._turned(basis)
        outside = torch.linalg.vector_norm(self.a - inside @ basis.mT, dim=1, keepdim=True)
        return self._like(torch.cat([outside, inside], 1), self._g)

    @property
    def strips(self) -> Strips:  # type: ignore[override]
        return Strips.whole(self.a[:, None, None], self.g[:, :, None, None])

    def weighted_factors(self, candidates: Weightings) -> tuple[Tensor | None, Iterator[Tensor]]:
        """Returns g, None if the layer gives the outputs, and the scales `s[n, j] = Σ_i a²[n, i] w[j, i]` (B, O)."""
        squares, layout = self._a.square(), (self.outputs, self.inputs, self._bias)
        return self._g, (F.linear(squares, *weighting.matrix(*layout)) for weighting in candidates)

    def weighted(self, candidates: Weightings, reads: Reads) -> Sequence[Tensor] | Tensor:
        """Returns `Q g diag(s) gᵀ Q` (B, R, R), `Σ_j g² s_j` for g and H g (2, B, R), or `Σ_j s_j Σ_r (H g)²_j` (B,).

        Time for n weights: O(n B R² O), O(n B R O), or O(n B O).
        """
        _, scales = self.weighted_factors(candidates)
        if reads == "covariances":
            g = reflect_(self.g.clone(), 1)
            return [(g * scale.unsqueeze(1)) @ g.mT for scale in scales]
        centred = self.g - self.g.mean(1, keepdim=True)
        if reads == "scale":
            squares = centred.square_().sum(1)  # (B, O)
            return [(scale * squares).sum(-1) for scale in scales]
        stacked = torch.stack(list(scales), -1)  # (B, O, n)
        return torch.stack([self.g.square() @ stacked, centred.square_() @ stacked]).movedim(-1, 0)

    def squared_sum(self) -> Tensor:
        """Returns `(Σ_r g²)ᵀ a²` (P,). Time O(B O I)."""
        return (self.g.square().sum(1).T @ self.a.square()).flatten()

    def squared_norm(self) -> Tensor:
        """Returns `Σ_n |a|² Σ_r |g|²` ()."""
        return (self.a.square().sum(-1) * self.g.square().sum((1, 2))).sum()

    def sum_rows(self) -> Tensor:
        """Returns `gᵀ a` summed over samples (R, P)."""
        return torch.einsum("nro,ni->roi", self.g, self.a).flatten(1)

    def jvp(self, vectors: Tensor) -> Tensor:
        """Returns `g (V_k a)` (B, R, K), for slices of V. Time O(B K O (I + R))."""
        step = self.step(self.batch * self.outputs * self.a.element_size(), len(vectors))
        products = []
        for part in vectors.split(step):
            pushed = F.linear(self.a, part.reshape(-1, self.inputs))  # (B, K O)
            pushed = pushed.reshape(self.batch, -1, self.outputs)  # (B, K, O)
            products.append(self._through_tail(pushed.mT) if self.is_output else self.g @ pushed.mT)
        return products[0] if len(products) == 1 else torch.cat(products, -1)

    def vjp(self, cotangents: Tensor) -> Tensor:
        """Returns `Σ_n (u g) aᵀ` (S, P)."""
        g = self._through_tail(cotangents).mT if self.is_output else cotangents.mT @ self.g  # (B, S, O)
        return (g.permute(1, 2, 0).flatten(0, 1) @ self.a).reshape(cotangents.shape[-1], -1)

    def columns(self, index: Tensor, places: Sequence[int]) -> Iterator[Tensor]:
        """Yields `J[n, r, (o, i)] = g[n, r, o] a[n, i]` in one part, without forming rows."""
        yield self.g[:, :, index // self.inputs] * self.a[:, None, index % self.inputs]  # (B, R, k)

    def _through_tail(self, values: Tensor) -> Tensor:
        """Returns entries (B, O, K) of the layer's outputs times the slopes."""
        return values if self.slopes is None else values * self.slopes.unsqueeze(-1)

    def plus(self, other_uses: Sequence[BlockJacobian]) -> BlockJacobian:
        return SharedOuter(self.strips).within(self.slice_bytes).plus(other_uses)

    def gram(self, other: BlockJacobian) -> Tensor:
        """Returns `(a·a')(g·g')` (B, R, B', R')."""
        if not isinstance(other, Outer):
            return SharedOuter(self.strips).within(self.slice_bytes).gram(other)
        inputs = F.linear(self.a, other.a)  # (B, B')
        gradients = F.linear(self.g.flatten(0, 1), other.g.flatten(0, 1))
        shape = (self.batch, self.cotangents, other.batch, other.cotangents)
        return gradients.reshape(shape) * inputs[:, None, :, None]

    def joint_weighted_gram(self, weights: Tensor, other: BlockJacobian) -> Tensor:
        """Multiplies J by the weighted rows of J', which costs R + I products for each entry of g', not R I."""
        if self.cotangents == 1 or other is self or not isinstance(other, Outer):
            return super().joint_weighted_gram(weights, other)
        matrix, products = weights.view(self.outputs, self.inputs), []
        step = other.step(other.cotangents * other.size * other.a.element_size(), other.batch)
        for a, g in zip(other.a.split(step), other.g.split(step), strict=True):
            rows = g[..., None] * (a[:, None, :] * matrix)[:, None]  # (b', R', O, I)
            products.append(self.jvp(rows.flatten(2).flatten(0, 1)).unflatten(2, g.shape[:2]))
        return torch.cat(products, 2)

    def add_kronecker_factors(
        self, reduce: bool, inputs: Tensor, outputs: Tensor | None, weights: Tensor | None = None
    ) -> int:
        """Adds A and Γ, or only A if `outputs` is None."""
        if outputs is not None:
            g = self.g if self.g.is_contiguous() else self.g.transpose(0, 1)  # in the order of memory
            add_squares(outputs, g.flatten(0, 1)[None])
        a = self.a if weights is None else self.a * weights.mean(1, keepdim=True).sqrt().to(self.a)
        add_squares(inputs, a[None])
        return self.batch


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
