"""Jacobians of matrix weights as sums of outer products, `J[n, r] = Σ_t g[n, r, t] a[n, t]ᵀ`, contracted fast.

`Outer` is a layer used at one position (T = 1), where J never needs to be formed; `SharedOuter` is a layer used at T
positions (convolution, tokens, several calls) or in G groups, formed one slice of its output channels at a time.
Weights (P,) and vectors (K, P) are laid out as (G, O, I), the bias as the last input column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..numerics import total
from .jacobian import BlockJacobian, MatrixJacobian

REDUCTION = 40
"""What multiplying and summing one number costs in a position Gram, in multiply-adds of a matrix product."""


class Outer(MatrixJacobian):
    """One position a sample: inputs a (B, I) and output gradients g (B, R, O).

    `g=None` says that the layer's output *is* the network's output, so that g is the identity and R = O.
    """

    groups = 1

    def __init__(self, a: Tensor, g: Tensor | None, outputs: int) -> None:
        self.a, self._g = a, g
        self.outputs, self.inputs = outputs, a.shape[-1]
        self.batch, self.size = a.shape[0], outputs * a.shape[-1]
        self.cotangents = outputs if g is None else g.shape[1]

    @property
    def is_output(self) -> bool:
        """Whether the layer's output is the network's output."""
        return self._g is None

    @property
    def g(self) -> Tensor:
        """Output gradients (B, R, O), the identity written out where the layer is the output."""
        if self._g is None:
            return torch.eye(self.outputs, dtype=self.a.dtype, device=self.a.device).expand(self.batch, -1, -1)
        return self._g

    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields outer products for slices of the output channels."""
        step = self.step(self.batch * self.cotangents * self.inputs * self.a.element_size(), self.outputs)
        g = self.g
        for start in range(0, self.outputs, step):
            rows = g[:, :, start : start + step, None] * self.a[:, None, None, :]  # (B, R, o, I)
            yield slice(start * self.inputs, (start + rows.shape[2]) * self.inputs), rows.flatten(2)

    def rotate(self, inputs: Tensor | None, outputs: Tensor | None) -> Outer:
        """Returns J in another basis: a U_in and g U_out, for U_in (1, I, I) and U_out (1, O, O)."""
        a, g = self.a if inputs is None else self.a @ inputs[0], self._g
        if outputs is not None:  # one product: cotangents come first in memory
            g = (self.g.transpose(0, 1) @ outputs[0]).transpose(0, 1)
        return Outer(a, g, self.outputs).within(self.slice_bytes)

    def shared(self) -> SharedOuter:
        """Returns the same Jacobian, written for several positions."""
        return SharedOuter(self.a[:, None, None], self.g[:, :, None, None]).within(self.slice_bytes)

    def input_scale(self, weights: Tensor) -> Tensor:
        """Returns `s[n, j] = Σ_i a²[n, i] w[j, i]` (B, O), all that a diagonal weighting needs of the inputs."""
        return self.a.square() @ weights.reshape(self.outputs, self.inputs).T

    def weighted_factor(self, weights: Tensor) -> Tensor:
        """Returns `g √s` (B, R, O): a diagonal weighting is a thin factor. Time O(B O (I + R))."""
        scale = self.input_scale(weights)
        root = scale.clamp_min(torch.finfo(scale.dtype).tiny).sqrt()  # it has no slope at 0
        return self.g * root.unsqueeze(1)

    def weighted_grams(self, candidates: Sequence[Tensor]) -> list[Tensor]:
        """Returns the thin factors' Gram matrices (B, R, R)."""
        factors = [self.weighted_factor(weights) for weights in candidates]
        return [factor @ factor.mT for factor in factors]

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
        """Returns `gᵀ (V_k a)` (B, R, K). Time O(B K O (I + R))."""
        pushed = self.a @ vectors.reshape(-1, self.inputs).T  # (B, K O)
        pushed = pushed.reshape(self.batch, -1, self.outputs)  # (B, K, O)
        return pushed.mT if self.is_output else self.g @ pushed.mT

    def gram(self, other: BlockJacobian) -> Tensor:
        """Returns `(a·a')(g·g')` (B, R, B', R')."""
        if isinstance(other, SharedOuter):
            return self.shared().gram(other)
        if not isinstance(other, Outer):
            return super().gram(other)
        inputs = self.a @ other.a.T  # (B, B')
        gradients = self.g.flatten(0, 1) @ other.g.flatten(0, 1).T
        shape = (self.batch, self.cotangents, other.batch, other.cotangents)
        return gradients.reshape(shape) * inputs[:, None, :, None]

    def kronecker_factors(self, reduce: bool) -> tuple[Tensor, Tensor, int]:
        """Returns `A = Σ a aᵀ` (1, I, I), `Γ = Σ g gᵀ` (1, O, O) and their count of positions."""
        g = self.g.transpose(0, 1).flatten(0, 1)  # (R B, O): cotangents come first in memory
        return (self.a.T @ self.a)[None], (g.T @ g)[None], self.batch

    def add_kronecker_factors(self, reduce: bool, inputs: Tensor, outputs: Tensor) -> int:
        """Adds A and Γ without a copy between product and sum."""
        g = self.g.transpose(0, 1).flatten(0, 1)
        inputs[0].addmm_(self.a.T, self.a)
        outputs[0].addmm_(g.T, g)
        return self.batch


class SharedOuter(MatrixJacobian):
    """T positions a sample in G groups: inputs a (B, T, G, I) and output gradients g (B, R, T, G, O)."""

    def __init__(self, a: Tensor, g: Tensor) -> None:
        self.a, self.g = a, g
        self.batch, self.positions, self.groups, self.inputs = a.shape
        self.cotangents, self.outputs = g.shape[1], g.shape[-1]
        self.size = self.groups * self.outputs * self.inputs

    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields `Σ_t g a` for slices of the output channels, one product of (R o, T) by (T, I) a sample."""
        per_output = self.batch * self.cotangents * self.inputs * self.a.element_size()
        step = self.step(per_output, self.outputs)
        for group in range(self.groups):
            a = self.a[:, :, group]  # (B, T, I)
            for start in range(0, self.outputs, step):
                g = self.g[:, :, :, group, start : start + step]  # (B, R, T, o)
                rows = g.transpose(2, 3).flatten(1, 2) @ a  # (B, R o, I)
                first = (group * self.outputs + start) * self.inputs
                yield slice(first, first + g.shape[-1] * self.inputs), rows.reshape(self.batch, self.cotangents, -1)

    def rotate(self, inputs: Tensor | None, outputs: Tensor) -> RotatedOuter:
        """Returns J in another basis, for U_in (G, I, I) and U_out (G, O, O)."""
        a = self.a if inputs is None else _by_group(self.a, inputs)
        return RotatedOuter(a, self.g, outputs).within(self.slice_bytes)

    def jvp(self, vectors: Tensor) -> Tensor:
        """Returns `J V` (B, R, K) by rows or by `gᵀ(V_k a)`, whichever takes fewer products."""
        count = vectors.shape[0]
        by_rows = self.cotangents * self.inputs * (self.positions + count)
        by_push = count * self.positions * (self.inputs + self.cotangents)
        if by_rows <= by_push:
            return super().jvp(vectors)
        vectors = vectors.reshape(count, self.groups, self.outputs, self.inputs)
        per_vector = self.batch * self.positions * self.groups * self.outputs * self.a.element_size()
        step, g, parts = self.step(per_vector, count), self.g.flatten(2), []
        for start in range(0, count, step):
            pushed = torch.einsum("ntgi,kgoi->nktgo", self.a, vectors[start : start + step])
            parts.append(g @ pushed.flatten(2).mT)  # (B, R, k)
        return torch.cat(parts, -1)

    def sum_rows(self) -> Tensor:
        """Returns `Σ_n,t g a` (R, P)."""
        return torch.einsum("nrtgo,ntgi->rgoi", self.g, self.a).flatten(1)

    def squared_norm(self) -> Tensor:
        """Returns `Σ J²` by rows, or by the positions' Gram matrices `Σ_tt' (a_t·a_t')(g_t·g_t')` where T is small."""
        by_rows = self.cotangents * self.outputs * self.inputs
        by_positions = self.positions * (self.inputs + self.cotangents * self.outputs)
        if by_rows <= by_positions:
            return total(rows.square().sum() for _, rows in self.row_slices())
        inputs = torch.einsum("ntgi,nsgi->ngts", self.a, self.a)
        gradients = torch.einsum("nrtgo,nrsgo->ngts", self.g, self.g)
        return (inputs * gradients).sum()

    def gram(self, other: BlockJacobian) -> Tensor:
        """Returns `J J'ᵀ` (B, R, B', R') by rows, or by `Σ_tt' (a_t·a'_t')(g_t·g'_t')` where that is cheaper."""
        other = other.shared() if isinstance(other, Outer) else other
        if not isinstance(other, SharedOuter) or self._rows_are_cheaper(other):
            return super().gram(other)
        return total(self._position_gram(other, group) for group in range(self.groups))

    def _rows_are_cheaper(self, other: SharedOuter) -> bool:
        """Compares the products of both ways, a group."""
        mine, theirs = self.batch * self.cotangents, other.batch * other.cotangents
        formed = mine * self.positions + (0 if other is self else theirs * other.positions)
        by_rows = (formed + mine * theirs) * self.outputs * self.inputs
        pairs = self.positions * other.positions
        return by_rows <= pairs * (self.batch * other.batch * self.inputs + mine * theirs * (self.outputs + REDUCTION))

    def _position_gram(self, other: SharedOuter, group: int) -> Tensor:
        """Returns one group's part by positions, for slices of both sides' samples and of the cotangents."""
        a, g = self.a[:, :, group], self.g[:, :, :, group]  # (B, T, I), (B, R, T, O)
        b, h = other.a[:, :, group], other.g[:, :, :, group]
        one = self.positions * other.cotangents * other.positions * a.element_size()  # a row beside a sample of theirs
        theirs = self.step(one, other.batch)
        rows = self.step(one * theirs, self.batch * self.cotangents)
        mine, some = max(1, rows // self.cotangents), min(rows, self.cotangents)
        gram = a.new_empty(self.batch, self.cotangents, other.batch, other.cotangents)
        for m in range(0, other.batch, theirs):
            far, near = h[m : m + theirs].flatten(0, 2), b[m : m + theirs].flatten(0, 1)
            for n in range(0, self.batch, mine):
                inputs = a[n : n + mine].flatten(0, 1) @ near.T
                inputs = inputs.reshape(-1, 1, self.positions, len(b[m : m + theirs]), 1, other.positions)
                for r in range(0, self.cotangents, some):
                    left = g[n : n + mine, r : r + some]
                    products = (left.flatten(0, 2) @ far.T).reshape(
                        *left.shape[:3], -1, other.cotangents, other.positions
                    )  # (b, r, T, b', R', T')
                    gram[n : n + mine, r : r + some, m : m + theirs] = (products * inputs).sum((2, 5))
        return gram

    def kronecker_factors(self, reduce: bool) -> tuple[Tensor, Tensor, int]:
        """Returns `A` (G, I, I), `Γ` (G, O, O) and the count: #(n, t) with expand, N with reduce.

        Reduce takes the mean of a and the sum of g over positions; expand treats every position as a sample.
        """
        a, g = (self.a.mean(1, keepdim=True), self.g.sum(2, keepdim=True)) if reduce else (self.a, self.g)
        a = a.permute(2, 0, 1, 3).flatten(1, 2)  # (G, B T, I)
        g = g.permute(3, 0, 1, 2, 4).flatten(1, 3)  # (G, B R T, O)
        return a.mT @ a, g.mT @ g, self.batch * (1 if reduce else self.positions)


class RotatedOuter(BlockJacobian):
    """`J[n, r] = U_outᵀ Σ_t g a` for inputs a (B, T, G, I) rotated already, g (B, R, T, G, O) and U_out (G, O, O).

    The output side is rotated where that is cheaper: g itself where T < I, else the rows.
    """

    def __init__(self, a: Tensor, g: Tensor, outputs: Tensor) -> None:
        self.batch, positions, self.groups, self.inputs = a.shape
        self.cotangents, self.outputs = g.shape[1], g.shape[-1]
        self.size = self.groups * self.outputs * self.inputs
        self._rotation: Tensor | None = outputs
        self.a, self.g = a, g
        if positions < self.inputs:
            self.g, self._rotation = _by_group(g, outputs), None

    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields rows for slices of the output channels, or all of a group's at once where rows are rotated."""
        if self._rotation is None:
            yield from SharedOuter(self.a, self.g).within(self.slice_bytes).row_slices()
            return
        for group in range(self.groups):
            g = self.g[:, :, :, group].transpose(2, 3).flatten(1, 2)  # (B, R O, T)
            rows = (g @ self.a[:, :, group]).unflatten(1, (self.cotangents, self.outputs))  # (B, R, O, I)
            rows = self._rotation[group].T @ rows
            first = group * self.outputs * self.inputs
            yield slice(first, first + self.outputs * self.inputs), rows.flatten(2)


def _by_group(values: Tensor, basis: Tensor) -> Tensor:
    """Multiplies (..., T, G, I) by (G, I, I) group by group, along whichever of T and I is contiguous."""
    if basis.shape[0] > 1:
        return torch.einsum("...gi,gij->...gj", values, basis)
    if values.stride(-1) == 1 or values.stride(-3) != 1:
        return values @ basis[0]
    return (basis[0].T @ values.squeeze(-2).mT).mT.unsqueeze(-2)  # patches and feature maps: T is contiguous
