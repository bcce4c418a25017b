"""The Jacobian of a matrix weight at T positions per sample, or in G groups: `J[n, r] = Σ_t g[n, r, t] a[n, t]ᵀ`.

A contraction uses rows, formed in slices, or products over positions, whichever needs fewer products. It processes one
strip of positions at a time. Weights (P,) are laid out as (G, O, I), the bias as the last input column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import isqrt

import torch
from torch import Tensor

from ..linalg import add_squares, nonnegative, total
from .chunked_rows import ChunkedRows, RotatedOuter
from .jacobian import BlockJacobian, DiagonalWeights, MatrixJacobian, Reads, Weightings, materialised, reflect_
from .strips import Strip, Strips, at_positions

REDUCTION = 40
"""Cost of multiplying and summing one entry, in multiply-adds of a matrix product."""

CACHE_BYTES = 2**22
"""Maximum size of the rows that are squared and summed together on a CPU, so that they stay in its cache."""


class SharedOuter(ChunkedRows, MatrixJacobian):
    """T positions per sample in G groups: inputs a (B, T, G, I) and output gradients g (B, R, T, G, O), in strips."""

    def __init__(self, strips: Strips) -> None:
        self.strips: Strips = strips
        self.batch, self.cotangents, self.positions, self.groups, self.outputs, self.inputs = strips.shape
        self.size = self.groups * self.outputs * self.inputs

    def row_slices(self, whole: bool = False) -> Iterator[tuple[slice, Tensor]]:
        """Yields `Σ_t g a` for slices of output channels: one product of (R o, t) by (t, I) per sample and strip."""
        channel_bytes = self.batch * self.cotangents * self.inputs * self.strips.dtype.itemsize
        step = self.outputs if whole else self.step(channel_bytes, self.outputs)
        for group, start in product(range(self.groups), range(0, self.outputs, step)):
            channels = slice(start, min(start + step, self.outputs))
            pairs = ((a[:, :, group], g[:, :, :, group, channels]) for a, g in self.strips)
            rows = total(g.transpose(2, 3).flatten(1, 2) @ a for a, g in pairs)  # (B, R o, I)
            first, count = group * self.outputs + start, channels.stop - start
            part = slice(first * self.inputs, (first + count) * self.inputs)
            yield part, rows.reshape(self.batch, self.cotangents, -1)

    def rotate(self, inputs: Tensor | None, outputs: Tensor | None) -> SharedOuter | RotatedOuter:
        """Rotates each side at the cheaper place: a if T < R O, and g if T < I, else the rows."""
        turn_a = inputs is None or self.positions < self.cotangents * self.outputs
        turn_g = outputs is None or self.positions < self.inputs
        turned = SharedOuter(self.strips.rotated(inputs if turn_a else None, outputs if turn_g else None))
        turned = turned.within(self.slice_bytes)
        if turn_a and turn_g:
            return turned
        return RotatedOuter(turned, None if turn_a else inputs, None if turn_g else outputs)

    def parts(self, whole: bool = False) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yields rows `Σ_t g a`, products of (R o, t) by (t, I). `whole` means all output channels."""
        for samples, outputs in self._steps(whole):
            parts = (
                g[samples, :, :, :, outputs].permute(0, 3, 1, 4, 2).flatten(2, 3) @ a[samples].transpose(1, 2)
                for a, g in self.strips
            )  # (b, G, R o, I)
            yield samples, outputs, total(parts).unflatten(2, (self.cotangents, -1))

    def _steps(self, whole: bool) -> Iterator[tuple[slice, slice]]:
        """Yields slices of samples and of output channels that fit one slice.

        Several strips are computed again in each sweep, so a slice then has all samples and as many channels as fit.
        """
        channel = self.groups * self.cotangents * self.inputs * self.strips.dtype.itemsize
        limit, count = self.slice_bytes, self.batch
        if len(self.strips) == 1:
            limit = self._cached()
            count = max(1, min(count, limit // (channel * self.outputs)))
        some = self.outputs if whole else max(1, min(self.outputs, limit // (channel * count)))
        for o, n in product(range(0, self.outputs, some), range(0, self.batch, count)):
            yield slice(n, min(n + count, self.batch)), slice(o, min(o + some, self.outputs))

    def pairs_are_cheaper(self, candidates: int, norms: bool = False) -> bool:
        """Whether pairs of positions cost less than rows, for this number of weights (0 for squares)."""
        outputs, inputs, size = self.outputs, self.inputs, self.outputs * self.inputs
        # cost of a sample and a group, in multiply-adds; n weights, T(T + 1)/2 pairs t <= t'
        pairs, count = self.positions * (self.positions + 1) // 2, max(1, candidates)  # an expert may have no token
        # pairs: a_t ⊙ a_t' (I); for each weight its product with W (O I), and g times the result (R O)
        by_pairs = pairs * (count * (size + REDUCTION * self.cotangents * outputs) + REDUCTION * inputs)
        # rows: Σ_t g a (R O I T); the rows times each weight, or two kinds of squares if norms are read (R O I)
        by_rows = self.cotangents * size * (self.positions + (2 if norms else count) * REDUCTION)
        # and for each weight the Gram matrix of the rows (R² O I), or its products with two squares (2 R O I)
        by_rows += candidates * size * (2 * self.cotangents if norms else self.cotangents**2)
        return len(self.strips) == 1 and 0 < by_pairs < by_rows

    @property
    def pair_bytes(self) -> int:
        """Bytes of the pairs of positions of one sample."""
        numbers = self.groups * (2 * self.inputs + 3 * self.cotangents * self.outputs)
        return self.positions * (self.positions + 1) // 2 * numbers * self.strips.dtype.itemsize

    def _pairs(self, limit: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yields samples, products `a_t a_t'` (G, b k, I) for the k pairs t <= t', and g (b, R, k, G, O) at t and t'.

        g at t' is doubled if t < t', since the pair (t', t) is left out. A step has one sample, or at most `limit`
        bytes.
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

    def _cached(self, share: int = 1) -> int:
        """Maximum bytes that are multiplied and summed together. On a CPU they stay in a part 1/share of its cache."""
        return min(self.slice_bytes, CACHE_BYTES // share) if self.strips.device.type == "cpu" else self.slice_bytes

    def squared_sum(self) -> Tensor:
        """Returns `Σ_n,r J²` (P,) >= 0 from rows, or from pairs of positions: `Σ_tt' (g_t ⊙ g_t')(a_t ⊙ a_t')ᵀ`."""
        if not self.pairs_are_cheaper(0):
            return super().squared_sum()
        ((a, g),) = self.strips
        sums = a.new_zeros(self.groups, self.outputs, self.inputs)
        step = max(1, self._cached() * self.batch // max(1, a.nbytes + g.nbytes))
        for x, h in zip(a.split(step), g.split(step), strict=True):
            for gap in range(self.positions):  # the pairs (t, t + gap) are two views
                inputs = (x[:, gap:] * x[:, : self.positions - gap]).flatten(0, 1).transpose(0, 1)  # (G, b t, I)
                outputs = (h[:, :, gap:] * h[:, :, : self.positions - gap]).sum(1).flatten(0, 1)  # (b t, G, O)
                sums.baddbmm_(outputs.permute(1, 2, 0), inputs, alpha=2 if gap else 1)
        return sums.flatten().clamp_min_(0.0)

    def weighted(self, candidates: Weightings, reads: Reads) -> Sequence[Tensor] | Tensor:
        """Uses rows, or pairs of positions if they need fewer products."""
        several = materialised(candidates)
        if reads == "covariances" and self.pairs_are_cheaper(len(several)):
            return self._covariances_by_pairs(several)
        fits = reads == "variances" and self.pair_bytes <= self.slice_bytes
        if fits and self.pairs_are_cheaper(len(several), norms=True):
            return self._variances_by_pairs(several)
        return super().weighted(several, reads)

    def _covariances_by_pairs(self, several: Sequence[DiagonalWeights]) -> list[Tensor]:
        """Returns `Q Σ_tt' g_t diag(W (a_t ⊙ a_t')) g_t'ᵀ Q` (B, R, R) for each weighting W."""
        ((a, g),) = self.strips
        turned, grams = SharedOuter(Strips.whole(a, reflect_(g.clone(), 1))), [list[Tensor]() for _ in several]
        for samples, inputs, g, h in turned._pairs(self._cached(4)):
            for weighting, parts in zip(several, grams, strict=True):
                scales = inputs @ self._matrices(weighting.flat).mT  # (G, b k, O)
                scales = scales.transpose(0, 1).unflatten(0, (samples.stop - samples.start, -1)).unsqueeze(1)
                gram = (g * scales).flatten(2) @ h.flatten(2).mT
                parts.append((gram + gram.mT) / 2)
        return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in grams]

    def _variances_by_pairs(self, several: Sequence[DiagonalWeights]) -> Tensor:
        """Returns both diagonals (n, 2, B, R)."""
        parts = []
        for _, inputs, g, h in self._pairs(self.slice_bytes):
            products = torch.stack([g * h, (g - g.mean(1, keepdim=True)) * (h - h.mean(1, keepdim=True))]).flatten(3)
            weights = (self._weights(weighting).unflatten(1, (self.outputs, -1)) for weighting in several)
            scales = (inputs @ w.mT for w in weights)  # (G, b k, O)
            columns = (scale.transpose(0, 1).reshape(len(g), -1, 1) for scale in scales)
            parts.append(torch.cat([products @ column for column in columns], -1))  # (2, b, R, n)
        return nonnegative(torch.cat(parts, 1)).movedim(-1, 0)

    def centred_squares(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Uses rows, or pairs of positions: `Σ_tt' (Σ_r g_t ⊙ g_t') (a_t ⊙ a_t')ᵀ` of centred g."""
        if self.pair_bytes > self.slice_bytes or not self.pairs_are_cheaper(0):
            yield from super().centred_squares()
            return
        ((a, g),) = self.strips
        g, itemsize = g - g.mean(1, keepdim=True), g.dtype.itemsize
        first, second = torch.triu_indices(self.positions, self.positions, device=a.device)
        twice = torch.where(first == second, 1.0, 2.0).to(a)
        numbers = len(first) * self.groups * (3 * self.inputs + 5 * self.outputs)
        count = self.step(numbers * itemsize, self.batch)
        for n in range(0, self.batch, count):
            samples = slice(n, min(n + count, self.batch))
            channels = g[samples].permute(0, 3, 4, 2, 1)  # (b, G, O, T, R)
            gradients = (channels @ channels.mT)[..., first, second] * twice  # (b, G, O, k)
            x = a[samples]
            inputs = torch.cat([x[:, t : t + 1] * x[:, t:] for t in range(self.positions)], 1).transpose(1, 2)
            rows = max(len(gradients), self.cotangents)  # leaves room for the weights of the channels
            step = self.step(rows * self.groups * self.inputs * itemsize, self.outputs)
            for start in range(0, self.outputs, step):
                outputs = slice(start, min(start + step, self.outputs))
                yield samples, outputs, gradients[:, :, outputs] @ inputs

    def jvp(self, vectors: Tensor) -> Tensor:
        """Returns `J V` (B, R, K) from rows or as `gᵀ(V_k a)`, whichever needs fewer products."""
        count = vectors.shape[0]
        # rows cost R O I T and their products with V R O I K; V_k a costs K T O I and gᵀ(V_k a) K T O R; both without O
        by_rows = self.cotangents * self.inputs * (self.positions + count)
        by_push = count * self.positions * (self.inputs + self.cotangents)
        if by_rows <= by_push:
            return super().jvp(vectors)
        vectors = vectors.reshape(count, self.groups, self.outputs, self.inputs)
        return total(self._pushed(a, g, vectors) for a, g in self.strips)

    def _pushed(self, a: Tensor, g: Tensor, vectors: Tensor) -> Tensor:
        """Returns `gᵀ(V_k a)` (B, R, K) for one strip and V (K, G, O, I), by slices of V."""
        step = self.step(a[..., 0].numel() * self.outputs * a.element_size(), len(vectors))
        g, parts = g.flatten(2), []
        for some in vectors.split(step):
            pushed = torch.einsum("ntgi,kgoi->nktgo", a, some)
            parts.append(g @ pushed.flatten(2).mT)  # (B, R, k)
        return torch.cat(parts, -1)

    def vjp(self, cotangents: Tensor) -> Tensor:
        """Returns `Jᵀu` from rows (R (T + S) products per weight), or from `u g` at every position (S T products)."""
        count = cotangents.shape[-1]
        by_rows = self.cotangents * self.inputs * (self.positions + count)
        if count * self.positions * (self.inputs + self.cotangents) >= by_rows:
            return super().vjp(cotangents)
        numbers = self.batch * self.positions * self.groups * self.outputs
        step = self.step(8 * numbers, count)
        return torch.cat([total(_pulled(a, g, u) for a, g in self.strips) for u in cotangents.split(step, -1)])

    def plus(self, other_uses: Sequence[BlockJacobian]) -> BlockJacobian:
        strips = [use.strips for use in (self, *other_uses) if use.strips is not None]
        return SharedOuter(Strips.cat(strips)) if len(strips) == 1 + len(other_uses) else super().plus(other_uses)

    def sum_rows(self) -> Tensor:
        """Returns `Σ_n,t g a` (R, P)."""
        return total(torch.einsum("nrtgo,ntgi->rgoi", g, a) for a, g in self.strips).flatten(1)

    def squared_norm(self) -> Tensor:
        """Returns `Σ J²` from rows, or from Gram matrices of positions, `Σ_tt' (a_t·a_t')(g_t·g_t')`, if T is small."""
        by_rows = self.cotangents * self.outputs * self.inputs
        by_positions = self.positions * (self.inputs + self.cotangents * self.outputs)
        if by_rows <= by_positions:
            return total(rows.square().sum() for _, rows in self.row_slices())
        return total(
            (torch.einsum("ntgi,nsgi->ngts", a, b) * torch.einsum("nrtgo,nrsgo->ngts", g, h)).sum()
            for a, g in self.strips
            for b, h in self.strips
        )

    def gram(self, other: BlockJacobian) -> Tensor:
        """Returns `J J'ᵀ` (B, R, B', R') from rows, or as `Σ_tt' (a_t·a'_t')(g_t·g'_t')`, whichever is cheaper."""
        theirs = other.strips
        if theirs is None or self.rows_are_cheaper(theirs):
            return super().gram(other)
        _, columns, positions = theirs.shape[:3]
        cells = max(1, self.slice_bytes // (self.strips.dtype.itemsize * columns))
        mine = min(self.positions, max(isqrt(cells), cells // positions))  # all positions, if a table fits
        return total(
            self._position_gram((a[:, :, group], g[:, :, :, group]), (b[:, :, group], h[:, :, :, group]))
            for a, g in self.strips.finer(mine)
            for b, h in theirs.finer(max(1, cells // mine))
            for group in range(self.groups)
        )

    def rows_are_cheaper(self, other: Strips) -> bool:
        """Whether rows need fewer products per group than pairs of positions of both sides."""
        batch, cotangents, positions = other.shape[:3]
        # rows of both sides from their positions, and a product of O I numbers for each pair of rows
        mine, theirs = self.batch * self.cotangents, batch * cotangents
        formed = mine * self.positions + (0 if other is self.strips else theirs * positions)
        by_rows = (formed + mine * theirs) * self.outputs * self.inputs
        # a_t·a'_t' for each pair of samples, g_t·g'_t' for each pair of rows, and the product of both
        one_pair = self.batch * batch * self.inputs + mine * theirs * (self.outputs + REDUCTION)
        return by_rows <= self.positions * positions * one_pair

    def _position_gram(self, mine: Strip, theirs: Strip) -> Tensor:
        """Returns the Gram matrix (B, R, B', R') of two strips of one group, by slices of samples and cotangents."""
        (a, g), (b, h) = mine, theirs
        here, there, columns = a.shape[1], b.shape[1], h.shape[1]
        pair = here * columns * there * a.element_size()  # bytes for one of my rows and one of their samples
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
                    products = left.flatten(0, 2) @ far.T
                    products = products.reshape(*left.shape[:3], -1, columns, there)  # (b, r, t, b', R', t')
                    gram[n : n + samples, r : r + some, m : m + count] = (products * inputs).sum((2, 5))
        return gram

    def add_kronecker_factors(
        self, reduce: bool, inputs: Tensor, outputs: Tensor, weights: Tensor | None = None
    ) -> int:
        strips: Iterable[Strip] = self.strips
        if weights is not None:
            w = at_positions(weights, self.positions)
            mean = w.mean(1, keepdim=True).clamp_min(torch.finfo(w.dtype).tiny)
            strips = self._scaled(w / mean.sqrt() if reduce else w.sqrt())
        if reduce:  # the mean of a (B, 1, G, I) and the sum of g (B, R, 1, G, O) over positions
            sums = [(a.sum(1, keepdim=True), g.sum(2, keepdim=True)) for a, g in strips]
            strips = [(total(a for a, _ in sums) / self.positions, total(g for _, g in sums))]
        for a, g in strips:
            add_squares(inputs, a.permute(2, 0, 1, 3).flatten(1, 2))  # (G, B t, I)
            for some in g.split(self.step(g[0].numel() * g.element_size(), self.batch)):
                _add_output_squares(outputs, some)
        return self.batch * (1 if reduce else self.positions)

    def _scaled(self, factors: Tensor) -> Iterator[Strip]:
        """Yields the strips with a times factors (B, T)."""
        start = 0
        for a, g in self.strips:
            stop = start + a.shape[1]
            yield a * factors[:, start:stop, None, None].to(a), g
            start = stop


def _add_output_squares(sums: Tensor, g: Tensor) -> None:
    """Adds the lower triangle of `Σ g gᵀ` to sums (G, O, O), for g (b, R, t, G, O).

    The positions of a feature map are contiguous. Products sample by sample then need no copy of g. Up to 128 channels
    they are faster than a copy.
    """
    if g.stride(2) == 1 and g.shape[3] == 1 and g.shape[4] <= min(g.shape[2], 128):
        maps = g.squeeze(3).mT  # (b, R, O, t)
        maps = maps if maps.stride(0) >= maps.stride(1) else maps.transpose(0, 1)  # the order in memory
        maps = maps.flatten(0, 1)
        sums += (maps @ maps.mT).sum(0)
    else:
        add_squares(sums, g.permute(3, 0, 1, 2, 4).flatten(1, 3))  # (G, b R t, O)


def _pulled(a: Tensor, g: Tensor, cotangents: Tensor) -> Tensor:
    """Returns `Σ_n,t (u g) aᵀ` (S, P) for one strip and u (B, R, S)."""
    g = (cotangents.mT @ g.flatten(2)).unflatten(2, g.shape[2:])  # (B, S, t, G, O)
    return torch.einsum("nstgo,ntgi->sgoi", g, a).flatten(1)
