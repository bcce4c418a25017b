"""Jacobians of matrix weights as sums of outer products, `J[n, r] = Σ_t g[n, r, t] a[n, t]ᵀ`, contracted fast.

`Outer` is a layer used at one position (T = 1), where J never needs to be formed; `SharedOuter` is a layer used at T
positions (convolution, tokens, several calls) or in G groups, formed one slice of its output channels at a time, from
one strip of positions after another.
Weights (P,) and vectors (K, P) are laid out as (G, O, I), the bias as the last input column.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import product
from math import isqrt

import torch
from torch import Tensor

from ..linalg import add_squares, doubled, linear, matmul, nonnegative, total
from .jacobian import BlockJacobian, MatrixJacobian, Weighting, kept
from .strips import Strip, Strips

REDUCTION = 40
"""What multiplying and summing one number costs, in multiply-adds of a matrix product."""

CACHE_BYTES = 2**22
"""Rows that are squared and summed are formed so many bytes at a time on a CPU, and never leave its cache."""


class Outer(MatrixJacobian):
    """One position a sample: inputs a (B, I) and output gradients g (B, R, O).

    `g=None` says that the layer's output *is* the network's output, so that g is the identity and R = O. `bias` appends
    an input of ones; it is written out where a product needs it.
    """

    groups = 1

    def __init__(self, a: Tensor, g: Tensor | None, outputs: int, bias: bool = False) -> None:
        self._a, self._g, self._bias = a, g, bias
        self.batch, self.outputs, self.inputs = a.shape[0], outputs, a.shape[1] + bias
        self.size = outputs * self.inputs
        self.cotangents = outputs if g is None else g.shape[1]

    @cached_property
    def a(self) -> Tensor:
        """Inputs (B, I)."""
        return torch.cat([self._a, self._a.new_ones(self.batch, 1)], 1) if self._bias else self._a

    @property
    def is_output(self) -> bool:
        """Whether the layer's output is the network's output."""
        return self._g is None

    @property
    def g(self) -> Tensor:
        """Output gradients (B, R, O), the identity written out where the layer is the output."""
        if self._g is None:
            return torch.eye(self.outputs, dtype=self._a.dtype, device=self._a.device).expand(self.batch, -1, -1)
        return self._g

    @property
    def _samples_first(self) -> bool:
        """Whether g lies in memory as (B, R, O): a chain's does, autograd's as (R, B, O)."""
        return self.g.is_contiguous()

    @property
    def _rows_of_g(self) -> Tensor:
        """Gradients as one matrix in the order of memory, (B R, O) or (R B, O)."""
        return (self.g if self._samples_first else self.g.transpose(0, 1)).flatten(0, 1)

    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields outer products for slices of the output channels."""
        step = self.step(self.batch * self.cotangents * self.inputs * self.a.element_size(), self.outputs)
        g = self.g
        for start in range(0, self.outputs, step):
            rows = g[:, :, start : start + step, None] * self.a[:, None, None, :]  # (B, R, o, I)
            yield slice(start * self.inputs, (start + rows.shape[2]) * self.inputs), rows.flatten(2)

    def rotate(self, inputs: Tensor | None, outputs: Tensor | None) -> Outer:
        """Returns J in another basis: a U_in and g U_out, for U_in (1, I, I) and U_out (1, O, O)."""
        a, g = self.a if inputs is None else self._turned(inputs[0]), self._g
        if outputs is not None:
            turned = matmul(self._rows_of_g, outputs[0])
            shape = (self.batch, self.cotangents) if self._samples_first else (self.cotangents, self.batch)
            g = turned.view(*shape, self.outputs)
            g = g if self._samples_first else g.transpose(0, 1)
        return Outer(a, g, self.outputs).within(self.slice_bytes)

    def _turned(self, basis: Tensor) -> Tensor:
        """Returns `a U` (B, K) for U (I, K), without writing the bias's column out."""
        if not self._bias:
            return matmul(self._a, basis)
        return linear(self._a, basis[:-1].mT, basis[-1])

    def rotate_inputs(self, basis: Tensor) -> Outer | None:
        """Returns J for inputs [|a - U Uᵀ a|, Uᵀ a]; None where a needs a gradient, since a length has a kink at 0."""
        if self._a.requires_grad:
            return None
        inside = self._turned(basis)
        beside = torch.linalg.vector_norm(self.a - matmul(inside, basis.mT), dim=1, keepdim=True)
        return Outer(torch.cat([beside, inside], 1), self._g, self.outputs).within(self.slice_bytes)

    def shared(self) -> SharedOuter:
        """Returns the same Jacobian, written for several positions."""
        return SharedOuter(Strips.whole(self.a[:, None, None], self.g[:, :, None, None])).within(self.slice_bytes)

    def input_scale(self, weighting: Weighting) -> Tensor:
        """Returns `s[n, j] = Σ_i a²[n, i] w[j, i]` (B, O), all that a diagonal weighting needs of the inputs."""
        return linear(self._a.square(), *weighting.matrix(self.outputs, self.inputs, self._bias))

    def weighted_factors(self, candidates: Iterable[Weighting]) -> tuple[Tensor | None, Iterator[Tensor]]:
        """Returns g, None where the layer is the output, and the scales of the inputs."""
        return self._g, map(self.input_scale, candidates)

    def weighted_grams(self, candidates: Iterable[Weighting]) -> list[Tensor]:
        """Returns `g diag(s) gᵀ` (B, R, R)."""
        return [(self.g * scale.unsqueeze(1)) @ self.g.mT for scale in map(self.input_scale, candidates)]

    def weighted_norms(self, candidates: Iterable[Weighting]) -> tuple[Tensor, Tensor]:
        """Returns `Σ_j g² s_j` and the same of `H g`, each (n, B, R). Time O(n B R O)."""
        stacked = torch.stack(list(map(self.input_scale, candidates)), -1)  # (B, O, n)
        parts = (part.square() @ stacked for part in (self.g, self.g - self.g.mean(1, keepdim=True)))
        plain, centred = (part.movedim(-1, 0) for part in parts)
        return plain, centred

    def squared_sum(self) -> Tensor:
        """Returns `(Σ_r g²)ᵀ a²` (P,). Time O(B O I)."""
        return matmul(self.g.square().sum(1).T, self.a.square()).flatten()

    def squared_norm(self) -> Tensor:
        """Returns `Σ_n |a|² Σ_r |g|²` ()."""
        return (self.a.square().sum(-1) * self.g.square().sum((1, 2))).sum()

    def sum_rows(self) -> Tensor:
        """Returns `gᵀ a` summed over samples (R, P)."""
        return torch.einsum("nro,ni->roi", self.g, self.a).flatten(1)

    def jvp(self, vectors: Tensor) -> Tensor:
        """Returns `gᵀ (V_k a)` (B, R, K), for slices of V. Time O(B K O (I + R))."""
        step = self.step(self.batch * self.outputs * self.a.element_size(), len(vectors))
        products = []
        for part in vectors.split(step):
            pushed = linear(self.a, part.reshape(-1, self.inputs))  # (B, K O)
            pushed = pushed.reshape(self.batch, -1, self.outputs)  # (B, K, O)
            products.append(pushed.mT if self.is_output else self.g @ pushed.mT)
        return products[0] if len(products) == 1 else torch.cat(products, -1)

    def vjp(self, cotangents: Tensor) -> Tensor:
        """Returns `Σ_n (u g) aᵀ` (S, P)."""
        g = cotangents.mT if self.is_output else cotangents.mT @ self.g  # (B, S, O)
        return (g.permute(1, 2, 0).flatten(0, 1) @ self.a).reshape(cotangents.shape[-1], -1)

    def columns(self, index: Tensor, places: Sequence[int]) -> Iterator[Tensor]:
        """Yields `J[n, r, (o, i)] = g[n, r, o] a[n, i]` at once, without rows."""
        yield self.g[:, :, index // self.inputs] * self.a[:, None, index % self.inputs]  # (B, R, k)

    def plus(self, others: Sequence[BlockJacobian]) -> BlockJacobian:
        """Joins the positions of several uses."""
        return self.shared().plus(others)

    def gram(self, other: BlockJacobian) -> Tensor:
        """Returns `(a·a')(g·g')` (B, R, B', R')."""
        if isinstance(other, SharedOuter):
            return self.shared().gram(other)
        if not isinstance(other, Outer):
            return super().gram(other)
        inputs = linear(self.a, other.a)  # (B, B')
        gradients = linear(self.g.flatten(0, 1), other.g.flatten(0, 1))
        shape = (self.batch, self.cotangents, other.batch, other.cotangents)
        return gradients.reshape(shape) * inputs[:, None, :, None]

    def add_kronecker_factors(
        self, reduce: bool, inputs: Tensor, outputs: Tensor, weights: Tensor | None = None
    ) -> int:
        self._add_output_factor(outputs)
        if weights is not None:
            add_squares(inputs, (self.a * weights.sqrt().to(self.a)[:, None])[None])
            return self.batch
        add_squares(inputs[:, :-1, :-1] if self._bias else inputs, self._a[None])
        if self._bias:  # the last row of A = Σ [a, 1] [a, 1]ᵀ; its last column, above the diagonal, is not read
            ones = inputs[0, -1]
            ones[:-1].addmv_(self._a.T, self._a.new_ones(self.batch))
            ones[-1].add_(self.batch)
        return self.batch

    def _add_output_factor(self, sums: Tensor) -> None:
        add_squares(sums, self._rows_of_g[None])

    def summed(self, diagonal: Tensor, beside: Tensor | None) -> SummedOutput:
        """Returns what gives sums over `Λ ⊗ a aᵀ`, for a layer that gives the outputs and Λ by its parts (B, O)."""
        dtype = self._a.dtype
        return SummedOutput(self, diagonal.to(dtype), None if beside is None else beside.to(dtype))


class SummedOutput(Outer):
    """`rootᵀ J` of a layer that gives the outputs, for sums over samples alone: the root's C columns are not formed.

    Λ has a diagonal (B, O), and `-v vᵀ` beside it for v (B, O), or 0: O numbers a sample where the root has O².
    """

    def __init__(self, layer: Outer, diagonal: Tensor, beside: Tensor | None) -> None:
        super().__init__(layer._a, None, layer.outputs, layer._bias)
        self._diagonal, self._beside = diagonal, beside

    def squared_sum(self) -> Tensor:
        """Returns `Σ_n Λ_oo a²` (P,). Time O(B O I)."""
        return matmul(self._diagonal.T, self.a.square()).flatten()

    def rotate(self, inputs: Tensor | None, outputs: Tensor | None) -> SummedOutput:
        """Returns the same in another basis, of which `squared_sum` alone is right: the diagonal of `Uᵀ Λ U`.

        In float64, since variances `Σ p U² - (Σ p U)²` of peaked probabilities cancel.
        """
        diagonal, beside = self._diagonal, self._beside
        if outputs is not None:
            basis, diagonal = doubled(outputs[0]), doubled(diagonal)
            if beside is None:
                diagonal = diagonal @ basis.square()
            else:
                beside = doubled(beside)
                diagonal = (diagonal + beside.square()) @ basis.square() - (beside @ basis).square()
            diagonal, beside = diagonal.clamp_min(0.0).to(self._a), None
        turned = Outer(self.a if inputs is None else self._turned(inputs[0]), None, self.outputs)
        return turned.within(self.slice_bytes).summed(diagonal, beside)

    def _add_output_factor(self, sums: Tensor) -> None:
        sums[0].diagonal().add_(self._diagonal.sum(0))
        if self._beside is not None:  # the diagonal of v vᵀ is left out, which would cancel
            sums[0] -= matmul(self._beside.T, self._beside).fill_diagonal_(0.0)


class InParts(BlockJacobian):
    """A Jacobian of G groups of (O, I) whose rows are formed in parts that a cache holds, and summed at once."""

    groups: int
    outputs: int
    inputs: int

    @abstractmethod
    def parts(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yields samples, output channels, and their rows (b, G, R, o, I)."""

    def _matrices(self, weights: Tensor) -> Tensor:
        """Returns weights (P, ...) as (G, O, I, ...)."""
        return weights.reshape(self.groups, self.outputs, self.inputs, *weights.shape[1:])

    def weighted_grams(self, candidates: Iterable[Weighting]) -> list[Tensor]:
        """Returns `J diag(w) Jᵀ` (B, R, R) for several weights, the rows formed once."""
        roots, grams = [self._matrices(weighting.flat.sqrt()) for weighting in candidates], list[Tensor]()
        for samples, outputs, rows in self.parts():
            grams = grams or [rows.new_zeros(self.batch, self.cotangents, self.cotangents) for _ in roots]
            for root, gram in zip(roots, grams, strict=True):
                scaled = (rows * root[:, None, outputs]).flatten(3)
                gram[samples] += (scaled @ scaled.mT).sum(1)
        return grams

    def weighted_norms(self, candidates: Iterable[Weighting]) -> tuple[Tensor, Tensor]:
        """Returns the diagonals of `J diag(w) Jᵀ` and `H J diag(w) Jᵀ H`, each (n, B, R), from squares taken once."""
        several, norms = kept(candidates), list[Tensor]()
        here, w = slice(0, 0), torch.empty(0)
        for samples, outputs, rows in self.parts():
            if outputs != here:
                here, w = outputs, rows.new_empty(self.groups, len(several), rows[0, 0, 0].numel())
                for i, weighting in enumerate(several):
                    w[:, i] = self._weights(weighting, outputs)
            norms = norms or [rows.new_zeros(self.batch, self.cotangents, len(several)) for _ in range(2)]
            rows = rows.flatten(3)
            for norm, values in zip(norms, (rows, rows - rows.mean(2, keepdim=True)), strict=True):
                squares = values.square().transpose(0, 1).flatten(1, 2)  # (G, b R, o I)
                norm[samples] += _group_products(squares, w).sum(0).unflatten(0, (-1, self.cotangents))
        plain, centred = (norm.movedim(-1, 0) for norm in norms)
        return plain, centred

    def _weights(self, weighting: Weighting, outputs: slice = slice(None)) -> Tensor:
        """Returns the weights of some output channels (G, o I)."""
        return weighting.at(lambda flat: self._matrices(flat)[:, outputs]).flatten(1)

    def squared_sum(self) -> Tensor:
        """Returns `Σ_n,r J²` (P,)."""
        sums: Tensor | None = None
        for _, outputs, rows in self.parts():
            sums = rows.new_zeros(self.groups, self.outputs, self.inputs) if sums is None else sums
            sums[:, outputs] += rows.square().sum((0, 2))
        assert sums is not None
        return sums.flatten()

    def _steps(self, strips: Strips, whole: bool = False) -> Iterator[tuple[slice, slice]]:
        """Yields slices of samples with all their output channels; of one sample's where these are too many.

        All samples come with one slice of channels before the next. Of several strips, which each sweep computes anew,
        all samples with as few slices of channels as fit.
        """
        channel = self.groups * self.cotangents * self.inputs * strips.dtype.itemsize
        limit, count = self.slice_bytes, self.batch
        if len(strips) == 1:
            limit = min(limit, CACHE_BYTES) if strips.device.type == "cpu" else limit
            count = max(1, min(count, limit // (channel * self.outputs)))
        some = self.outputs if whole else max(1, min(self.outputs, limit // (channel * count)))
        for o, n in product(range(0, self.outputs, some), range(0, self.batch, count)):
            yield slice(n, min(n + count, self.batch)), slice(o, min(o + some, self.outputs))


class SharedOuter(InParts, MatrixJacobian):
    """T positions a sample in G groups: inputs a (B, T, G, I) and output gradients g (B, R, T, G, O), by strips."""

    def __init__(self, strips: Strips) -> None:
        self.strips = strips
        self.batch, self.cotangents, self.positions, self.groups, self.outputs, self.inputs = strips.shape
        self.size = self.groups * self.outputs * self.inputs

    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields `Σ_t g a` for slices of the output channels, one product of (R o, t) by (t, I) a sample and strip."""
        step = self.step(self.batch * self.cotangents * self.inputs * self.strips.dtype.itemsize, self.outputs)
        for group, start in product(range(self.groups), range(0, self.outputs, step)):
            channels = slice(start, min(start + step, self.outputs))
            rows = total(
                g[:, :, :, group, channels].transpose(2, 3).flatten(1, 2) @ a[:, :, group] for a, g in self.strips
            )  # (B, R o, I)
            first, count = group * self.outputs + start, channels.stop - start
            part = slice(first * self.inputs, (first + count) * self.inputs)
            yield part, rows.reshape(self.batch, self.cotangents, -1)

    def rotate(self, inputs: Tensor | None, outputs: Tensor | None) -> SharedOuter | RotatedOuter:
        """Returns J in another basis, for U_in (G, I, I) and U_out (G, O, O).

        Each side is rotated where that is cheaper: a where T < R O and g where T < I, else the rows.
        """
        turn_a = inputs is None or self.positions < self.cotangents * self.outputs
        turn_g = outputs is None or self.positions < self.inputs
        turned = SharedOuter(self.strips.rotated(inputs if turn_a else None, outputs if turn_g else None))
        turned = turned.within(self.slice_bytes)
        if turn_a and turn_g:
            return turned
        return RotatedOuter(turned, None if turn_a else inputs, None if turn_g else outputs)

    def parts(self, whole: bool = False) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yields rows `Σ_t g a`, products of (R o, t) by (t, I); with `whole` of all output channels."""
        for samples, outputs in self._steps(self.strips, whole):
            parts = (
                g[samples, :, :, :, outputs].permute(0, 3, 1, 4, 2).flatten(2, 3) @ a[samples].transpose(1, 2)
                for a, g in self.strips
            )  # (b, G, R o, I)
            yield samples, outputs, total(parts).unflatten(2, (self.cotangents, -1))

    def pairs_are_cheaper(self, candidates: int, norms: bool = False) -> bool:
        """Compares products of pairs of positions, for so many weights (0 for squares), with rows."""
        outputs, inputs, size = self.outputs, self.inputs, self.outputs * self.inputs
        pairs, count = self.positions * (self.positions + 1) // 2, max(1, candidates)  # none of an expert without token
        by_pairs = pairs * (count * (size + REDUCTION * self.cotangents * outputs) + REDUCTION * inputs)
        by_rows = self.cotangents * size * (self.positions + (2 if norms else count) * REDUCTION)
        by_rows += candidates * size * (2 * self.cotangents if norms else self.cotangents**2)
        return len(self.strips) == 1 and 0 < by_pairs < by_rows

    @property
    def pair_bytes(self) -> int:
        """What the pairs of positions of one sample take."""
        numbers = self.groups * (2 * self.inputs + 3 * self.cotangents * self.outputs)
        return self.positions * (self.positions + 1) // 2 * numbers * self.strips.dtype.itemsize

    def _pairs(self, limit: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yields samples, their products `a_t a_t'` (G, b k, I) for the k pairs of positions, and g at t and at t'.

        Gradients (b, R, k, G, O) count pairs of two positions, which stand for two, twice: those at t' are doubled.
        The pairs of all samples yielded at once take so many bytes, or are those of one.
        """
        ((a, g),) = self.strips
        first, second = torch.triu_indices(self.positions, self.positions, device=a.device)
        twice = torch.where(first == second, 1.0, 2.0).to(a)[:, None, None]
        step = max(1, limit // self.pair_bytes)
        for n in range(0, self.batch, step):
            samples = slice(n, min(n + step, self.batch))
            inputs, left, right = a[samples], g[samples], g[samples]
            inputs = (inputs[:, first] * inputs[:, second]).flatten(0, 1).transpose(0, 1)
            yield samples, inputs, left[:, :, first], right[:, :, second] * twice

    @property
    def _cached(self) -> int:
        """Bytes of pairs that are multiplied and summed at once: on a CPU they stay in its cache."""
        return min(self.slice_bytes, CACHE_BYTES // 4) if self.strips.device.type == "cpu" else self.slice_bytes

    def squared_sum(self) -> Tensor:
        """Returns `Σ_n,r J²` (P,) by rows, or by pairs of positions `Σ_tt' (g_t ⊙ g_t')(a_t ⊙ a_t')ᵀ`."""
        if not self.pairs_are_cheaper(0):
            return super().squared_sum()
        pairs = self._pairs(self._cached)
        parts = ((inputs, (g * h).sum(1).flatten(0, 1).permute(1, 2, 0)) for _, inputs, g, h in pairs)
        return total(_group_products(outputs, inputs.mT) for inputs, outputs in parts).flatten()

    def weighted_grams(self, candidates: Iterable[Weighting]) -> list[Tensor]:
        """Returns `J diag(w) Jᵀ` by rows, or by pairs of positions: `Σ_tt' g_t diag(W (a_t ⊙ a_t')) g_t'ᵀ`."""
        several = list(candidates)
        if not self.pairs_are_cheaper(len(several)):
            return super().weighted_grams(several)
        grams = [list[Tensor]() for _ in several]
        for samples, inputs, g, h in self._pairs(self._cached):
            for weighting, parts in zip(several, grams, strict=True):
                scales = _group_products(inputs, self._matrices(weighting.flat))  # (G, b k, O)
                scales = scales.transpose(0, 1).unflatten(0, (samples.stop - samples.start, -1)).unsqueeze(1)
                gram = (g * scales).flatten(2) @ h.flatten(2).mT
                parts.append((gram + gram.mT) / 2)
        return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in grams]

    def weighted_norms(self, candidates: Iterable[Weighting]) -> tuple[Tensor, Tensor]:
        """Returns both diagonals by rows, or by pairs of positions for one weighting after another."""
        several = kept(candidates)
        if self.pair_bytes > self.slice_bytes or not self.pairs_are_cheaper(len(several), norms=True):
            return super().weighted_norms(several)
        parts = []
        for _, inputs, g, h in self._pairs(self.slice_bytes):
            products = torch.stack([g * h, (g - g.mean(1, keepdim=True)) * (h - h.mean(1, keepdim=True))]).flatten(3)
            weights = (self._weights(weighting).unflatten(1, (self.outputs, -1)) for weighting in several)
            scales = (_group_products(inputs, w) for w in weights)  # (G, b k, O)
            columns = (scale.transpose(0, 1).reshape(len(g), -1, 1) for scale in scales)
            parts.append(torch.cat([products @ column for column in columns], -1))  # (2, b, R, n)
        plain, centred = nonnegative(torch.cat(parts, 1)).movedim(-1, 1)
        return plain, centred

    def jvp(self, vectors: Tensor) -> Tensor:
        """Returns `J V` (B, R, K) by rows or by `gᵀ(V_k a)`, whichever takes fewer products."""
        count = vectors.shape[0]
        by_rows = self.cotangents * self.inputs * (self.positions + count)
        by_push = count * self.positions * (self.inputs + self.cotangents)
        if by_rows <= by_push:
            return super().jvp(vectors)
        vectors = vectors.reshape(count, self.groups, self.outputs, self.inputs)
        return total(self._pushed(a, g, vectors) for a, g in self.strips)

    def _pushed(self, a: Tensor, g: Tensor, vectors: Tensor) -> Tensor:
        """Returns `gᵀ(V_k a)` (B, R, K) of a strip, for slices of V (K, G, O, I)."""
        step = self.step(a[..., 0].numel() * self.outputs * a.element_size(), len(vectors))
        g, parts = g.flatten(2), []
        for some in vectors.split(step):
            pushed = torch.einsum("ntgi,kgoi->nktgo", a, some)
            parts.append(g @ pushed.flatten(2).mT)  # (B, R, k)
        return torch.cat(parts, -1)

    def vjp(self, cotangents: Tensor) -> Tensor:
        """Returns `Jᵀu` by rows, R (T + S) products of a weight, or by `u g` at every position, S T of them."""
        count = cotangents.shape[-1]
        by_rows = self.cotangents * self.inputs * (self.positions + count)
        if count * self.positions * (self.inputs + self.cotangents) >= by_rows:
            return super().vjp(cotangents)
        numbers = self.batch * self.positions * self.groups * self.outputs
        step = self.step(8 * numbers, count)
        return torch.cat([total(_pulled(a, g, u) for a, g in self.strips) for u in cotangents.split(step, -1)])

    def plus(self, others: Sequence[BlockJacobian]) -> BlockJacobian:
        """Joins the positions of several uses."""
        uses = [self, *[other.shared() if isinstance(other, Outer) else other for other in others]]
        strips = [use.strips for use in uses if isinstance(use, SharedOuter)]
        return SharedOuter(Strips.joined(strips)) if len(strips) == len(uses) else super().plus(others)

    def sum_rows(self) -> Tensor:
        """Returns `Σ_n,t g a` (R, P)."""
        return total(torch.einsum("nrtgo,ntgi->rgoi", g, a) for a, g in self.strips).flatten(1)

    def squared_norm(self) -> Tensor:
        """Returns `Σ J²` by rows, or by the positions' Gram matrices `Σ_tt' (a_t·a_t')(g_t·g_t')` where T is small."""
        by_rows = self.cotangents * self.outputs * self.inputs
        by_positions = self.positions * (self.inputs + self.cotangents * self.outputs)
        if by_rows <= by_positions:
            return total(rows.square().sum() for _, rows in self.row_slices())
        return total(_table_sum(mine, theirs) for mine in self.strips for theirs in self.strips)

    def gram(self, other: BlockJacobian) -> Tensor:
        """Returns `J J'ᵀ` (B, R, B', R') by rows, or by `Σ_tt' (a_t·a'_t')(g_t·g'_t')` where that is cheaper."""
        other = other.shared() if isinstance(other, Outer) else other
        if not isinstance(other, SharedOuter) or self.rows_are_cheaper(other):
            return super().gram(other)
        cells = max(1, self.slice_bytes // (self.strips.dtype.itemsize * other.cotangents))
        mine = min(self.positions, max(isqrt(cells), cells // other.positions))  # whole, where a table fits
        return total(
            self._position_gram((a[:, :, group], g[:, :, :, group]), (b[:, :, group], h[:, :, :, group]))
            for a, g in self.strips.finer(mine)
            for b, h in other.strips.finer(max(1, cells // mine))
            for group in range(self.groups)
        )

    def rows_are_cheaper(self, other: SharedOuter) -> bool:
        """Compares the products of both ways, a group."""
        mine, theirs = self.batch * self.cotangents, other.batch * other.cotangents
        formed = mine * self.positions + (0 if other is self else theirs * other.positions)
        by_rows = (formed + mine * theirs) * self.outputs * self.inputs
        pairs = self.positions * other.positions
        return by_rows <= pairs * (self.batch * other.batch * self.inputs + mine * theirs * (self.outputs + REDUCTION))

    def _position_gram(self, mine: Strip, theirs: Strip) -> Tensor:
        """Returns one group's part of two strips (B, t, I) and (B', t', I), for slices of samples and cotangents."""
        (a, g), (b, h) = mine, theirs
        here, there, columns = a.shape[1], b.shape[1], h.shape[1]
        pair = here * columns * there * a.element_size()  # of one row with one sample of theirs
        count = self.step(pair, len(b))
        rows = self.step(pair * count, self.batch * self.cotangents)
        samples, some = max(1, rows // self.cotangents), min(rows, self.cotangents)
        gram = a.new_empty(self.batch, self.cotangents, len(b), columns)
        for m in range(0, len(b), count):
            far, near = h[m : m + count].flatten(0, 2), b[m : m + count].flatten(0, 1)
            for n in range(0, self.batch, samples):
                inputs = a[n : n + samples].flatten(0, 1) @ near.T
                inputs = inputs.reshape(-1, 1, here, len(b[m : m + count]), 1, there)
                for r in range(0, self.cotangents, some):
                    left = g[n : n + samples, r : r + some]
                    products = (left.flatten(0, 2) @ far.T).reshape(
                        *left.shape[:3], -1, columns, there
                    )  # (b, r, t, b', R', t')
                    gram[n : n + samples, r : r + some, m : m + count] = (products * inputs).sum((2, 5))
        return gram

    def add_kronecker_factors(
        self, reduce: bool, inputs: Tensor, outputs: Tensor, weights: Tensor | None = None
    ) -> int:
        for a, g in [self._reduced()] if reduce else self.strips:
            if weights is not None:
                a = a * weights.sqrt().to(a)[:, None, None, None]
            add_squares(inputs, a.permute(2, 0, 1, 3).flatten(1, 2))  # (G, B t, I)
            for some in g.split(self.step(g[0].numel() * g.element_size(), self.batch)):  # each is copied
                add_squares(outputs, some.permute(3, 0, 1, 2, 4).flatten(1, 3))  # (G, b R t, O)
        return self.batch * (1 if reduce else self.positions)

    def _reduced(self) -> Strip:
        """Returns the mean of a (B, 1, G, I) and the sum of g (B, R, 1, G, O) over positions."""
        sums = [(a.sum(1, keepdim=True), g.sum(2, keepdim=True)) for a, g in self.strips]
        return total(a for a, _ in sums) / self.positions, total(g for _, g in sums)


def _group_products(left: Tensor, right: Tensor) -> Tensor:
    """Returns `x yᵀ` (G, m, n) for x (G, m, k) and y (G, n, k)."""
    return linear(left[0], right[0])[None] if len(left) == 1 else left @ right.mT


def _pulled(a: Tensor, g: Tensor, cotangents: Tensor) -> Tensor:
    """Returns `Σ_n,t (u g) aᵀ` (S, P) of a strip, for u (B, R, S)."""
    g = (cotangents.mT @ g.flatten(2)).unflatten(2, g.shape[2:])  # (B, S, t, G, O)
    return torch.einsum("nstgo,ntgi->sgoi", g, a).flatten(1)


def _table_sum(mine: Strip, theirs: Strip) -> Tensor:
    """Returns `Σ_n,g,t,t' (a_t·a_t')(g_t·g_t')` () of two strips of the same samples."""
    inputs = torch.einsum("ntgi,nsgi->ngts", mine[0], theirs[0])
    return (inputs * torch.einsum("nrtgo,nrsgo->ngts", mine[1], theirs[1])).sum()


class RotatedOuter(InParts):
    """`J[n, r] = U_outᵀ (Σ_t g aᵀ) U_in` for U_in (G, I, I) and U_out (G, O, O); None is the identity."""

    def __init__(self, shared: SharedOuter, inputs: Tensor | None, outputs: Tensor | None) -> None:
        self.batch, self.cotangents, self.size = shared.batch, shared.cotangents, shared.size
        self.groups, self.outputs, self.inputs = shared.groups, shared.outputs, shared.inputs
        self._shared, self._inputs, self._outputs = shared, inputs, outputs
        self.within(shared.slice_bytes)

    def parts(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yields rows that are rotated, of all output channels where their outputs are."""
        for samples, outputs, rows in self._shared.parts(whole=self._outputs is not None):
            rows = self._turned(rows)  # frees those before
            yield samples, outputs, rows

    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields rows for slices of the output channels; for all of a group's where the rows' outputs are rotated."""
        row_bytes = self.batch * self.cotangents * self.size * self._shared.strips.dtype.itemsize
        slice_bytes = self.slice_bytes if self._outputs is None else row_bytes
        for part, rows in SharedOuter(self._shared.strips).within(slice_bytes).row_slices():
            group = part.start // (self.outputs * self.inputs)
            rows = rows.unflatten(-1, (-1, self.inputs)).unsqueeze(1)  # (B, 1, R, o, I)
            yield part, self._turned(rows, slice(group, group + 1)).squeeze(1).flatten(2)

    def _turned(self, rows: Tensor, groups: slice = slice(None)) -> Tensor:
        """Rotates rows (b, G, R, o, I) of some groups."""
        several = rows.shape[1] > 1  # groups, whose bases a product would copy for every sample
        if self._outputs is not None and several:
            rows = rows.permute(1, 3, 0, 2, 4)  # (G, o, b, R, I)
            rows = (self._outputs[groups].mT @ rows.flatten(2)).view(rows.shape).permute(2, 0, 3, 1, 4)
        elif self._outputs is not None:
            rows = self._outputs[groups].mT @ rows
        if self._inputs is not None and several:
            rows = rows.transpose(0, 1)  # (G, b, R, o, I)
            return (rows.flatten(1, 3) @ self._inputs[groups]).view(rows.shape).transpose(0, 1)
        return rows if self._inputs is None else matmul(rows, self._inputs[groups][0])
