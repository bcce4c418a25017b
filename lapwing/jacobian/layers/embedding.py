"""Embeddings: tokens select rows of a table, so the inputs a are one-hot and A is a vector of counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...linalg import total
from ..blocks import Matrix
from ..jacobian import BlockJacobian, DiagonalWeights, MatrixJacobian, Reads, Weightings, reflect_
from ..strips import at_positions
from .use import BatchAxis, Use, Watched, aten, by_name, register_reader


class OneHot(MatrixJacobian):
    """`J[n, r] = Σ_t g[n, r, t] e_token(n, t)ᵀ` for tokens (B, T) and g (B, R, T, O).

    The layout is (O = width, I = vocabulary). Repeated tokens of a sample are merged: no two positions share a weight,
    and a sample has at most V positions.
    """

    groups = 1

    def __init__(self, tokens: Tensor, g: Tensor, vocabulary: int) -> None:
        self.vocabulary, self.width = vocabulary, g.shape[-1]
        self.batch, self.cotangents, self.size = tokens.shape[0], g.shape[1], vocabulary * g.shape[-1]
        self.unmerged = tokens, g
        # g (B, R, T, O) is summed over equal tokens (B, T) of a sample; unused positions have g = 0
        samples, length = tokens.shape[0], min(tokens.shape[1], vocabulary)
        ordered, order = tokens.sort(1)
        new = torch.ones_like(tokens, dtype=torch.bool)
        new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        place = torch.empty_like(order).scatter_(1, order, new.cumsum(1) - 1)  # index among the distinct tokens
        first = length * torch.arange(samples, device=tokens.device)[:, None]
        table = g.new_zeros(g.shape[1], samples * length, g.shape[-1])
        merged = table.index_add(1, (first + place).flatten(), g.transpose(0, 1).flatten(1, 2))  # (R, B V, O)
        self.tokens = order.new_zeros(samples, length).scatter_(1, place, tokens)
        self.g = merged.unflatten(1, (samples, length)).transpose(0, 1)

    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        for channel in range(self.width):
            rows = self.g.new_zeros(self.batch, self.cotangents, self.vocabulary)
            index = self.tokens[:, None, :].expand(-1, self.cotangents, -1)
            part = slice(channel * self.vocabulary, (channel + 1) * self.vocabulary)
            yield part, rows.scatter_add(2, index, self.g[..., channel])

    def rotate(self, inputs: Tensor | None, outputs: Tensor | None) -> OneHot:
        assert inputs is None  # one-hot inputs are in the eigenbasis of A
        if outputs is None:
            return self
        return OneHot(self.tokens, self.g @ outputs[0], self.vocabulary).within(self.slice_bytes)

    def weighted(self, candidates: Weightings, reads: Reads) -> Sequence[Tensor] | Tensor:
        """Uses Gram matrices, squared row norms, or squared Frobenius norms of `g √w`, w at the tokens."""
        found = []
        for weighting in candidates:
            picked = weighting.at(lambda flat: flat.reshape(self.width, self.vocabulary)[:, self.tokens])  # (O, B, T)
            factor = (self.g * picked.permute(1, 2, 0).sqrt()[:, None]).flatten(2)  # g √w (B, R, T O)
            if reads == "covariances":
                factor = reflect_(factor, 1)
                found.append(factor @ factor.mT)
                continue
            norms = [part.square().sum(-1) for part in (factor, factor - factor.mean(1, keepdim=True))]
            found.append(torch.stack(norms) if reads == "variances" else norms[1].sum(-1))
        return found

    def squared_sum(self) -> Tensor:
        sums = self.g.new_zeros(self.width, self.vocabulary)
        sums.T.index_add_(0, self.tokens.flatten(), self.g.square().sum(1).flatten(0, 1))
        return sums.flatten()

    def squared_norm(self) -> Tensor:
        return self.g.square().sum()

    def sum_rows(self) -> Tensor:
        sums = self.g.new_zeros(self.cotangents, self.width, self.vocabulary)
        sums.mT.index_add_(1, self.tokens.flatten(), self.g.transpose(0, 1).flatten(1, 2))
        return sums.flatten(1)

    def jvp(self, vectors: Tensor) -> Tensor:
        """Returns `J V` (B, R, K) from the entries of V at the sample's tokens, by slices of V."""
        step = self.step(self.tokens.numel() * self.width * self.g.element_size(), len(vectors))
        tables = vectors.reshape(-1, self.width, self.vocabulary).split(step)
        products = [torch.einsum("nrtd,kdnt->nrk", self.g, table[:, :, self.tokens]) for table in tables]
        return torch.cat(products, -1)

    def vjp(self, cotangents: Tensor) -> Tensor:
        return OneHot(self.tokens, torch.einsum("nrs,nrtd->nstd", cotangents, self.g), self.vocabulary).sum_rows()

    def plus(self, other_uses: Sequence[BlockJacobian]) -> BlockJacobian:
        uses = [self, *[other for other in other_uses if isinstance(other, OneHot)]]
        if len(uses) <= len(other_uses):  # some uses are not embeddings
            return super().plus(other_uses)
        tokens, gradients = zip(*[use.unmerged for use in uses], strict=True)
        return OneHot(torch.cat(tokens, 1), torch.cat(gradients, 2), self.vocabulary)

    def gram(self, other: BlockJacobian) -> Tensor:
        """Returns `[token = token'](g·g')` summed over positions (B, R, B', R'), by slices of `self.tokens`."""
        if not isinstance(other, OneHot):
            return super().gram(other)
        length = self.tokens.shape[1]
        step = self.step(self.batch * other.tokens.numel() * self.g.element_size(), length)
        parts = zip(self.tokens.split(step, 1), self.g.split(step, 2), strict=True)
        return total(
            torch.einsum("nrtd,ntms,mqsd->nrmq", g, (tokens[:, :, None, None] == other.tokens).to(g.dtype), other.g)
            for tokens, g in parts
        )

    def add_kronecker_factors(
        self, reduce: bool, inputs: Tensor, outputs: Tensor, weights: Tensor | None = None
    ) -> int:
        """Adds the counts (1, V), the diagonal of A, and Γ (1, O, O). Ignores `reduce`, which would fill A."""
        tokens, g = self.unmerged
        g = g.transpose(0, 1).flatten(0, 2)  # (R B T, O): cotangents come first in memory
        times = None if weights is None else at_positions(weights.to(inputs), tokens.shape[1]).flatten()
        inputs += torch.bincount(tokens.flatten(), times, minlength=self.vocabulary)
        outputs += g.T @ g
        return tokens.numel()


class TiedTable(BlockJacobian):
    """A table (V, O), row-major, whose rows tokens select, and which is also the matrix of linear layers.

    J is the sum of all uses: L of the linear layers and E of the tokens. E is 0 outside the rows of a sample's tokens,
    and K is L in these rows. So `J² = L² + (K + E)² - K²`, which forms no rows of J.
    """

    def __init__(self, uses: Sequence[BlockJacobian]) -> None:
        kinds: list[list[Any]] = [[use for use in uses if isinstance(use, OneHot) == hot] for hot in (False, True)]
        linear, tokens = (first.plus(rest) if rest else first for first, *rest in kinds)
        self.batch, self.cotangents, self.size = tokens.batch, tokens.cotangents, tokens.size
        self._linear, self._tokens, self._width = linear, tokens, tokens.width
        places, common = tokens.tokens, torch.zeros_like(tokens.g)
        for a, g in linear.strips:
            index = places[:, None, None].expand(*g.shape[:3], -1)  # (B, R, t, T)
            common = common + torch.einsum("nrtk,nti->nrki", g[:, :, :, 0].gather(3, index), a[:, :, 0])
        unused = (places == 0) & (torch.arange(places.shape[1], device=places.device) > 0)
        common = torch.where(unused[:, None, :, None], 0.0, common)
        self._both, self._common = (OneHot(places, g, tokens.vocabulary) for g in (common + tokens.g, common))

    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        for part, rows in self._linear.row_slices():
            table, index = rows.unflatten(2, (-1, self._width)), self._tokens.tokens - part.start // self._width
            inside = (index >= 0) & (index < table.shape[2])
            index = (index * inside)[:, None, :, None].expand_as(self._tokens.g)
            yield part, table.scatter_add(2, index, self._tokens.g * inside[:, None, :, None]).flatten(2)

    def squared_sum(self) -> Tensor:
        more = self._both.squared_sum() - self._common.squared_sum()
        return (self._linear.squared_sum() + more.view(self._width, -1).T.flatten()).clamp_min(0.0)

    def weighted(self, candidates: Weightings, reads: Reads) -> Sequence[Tensor] | Tensor:
        several = list(candidates)
        turned = [DiagonalWeights(one.flat.view(-1, self._width).T.flatten()) for one in several]
        both, common = (part.weighted(turned, reads) for part in (self._both, self._common))
        sums = [sum(parts) - k for *parts, k in zip(self._linear.weighted(several, reads), both, common, strict=True)]
        return sums if reads == "covariances" else [one.clamp_min(0.0) for one in sums]


class EmbeddingUse(Use):
    """`out = W[tokens]`."""

    family = "embedding"
    transposed = one_hot = True

    def __init__(self, tokens: Tensor, weight: Tensor, padding: int | None) -> None:
        super().__init__(tokens, weight)
        self.padding = padding
        self.sample_dims = tokens.ndim

    def matrix(self) -> Matrix:
        return Matrix.of(self.parameters["weight"].shape, transposed=self.transposed, one_hot=self.one_hot)

    def jacobian(
        self, g: Tensor | None, axis: BatchAxis, samples: int, roles: frozenset[str], dtype: torch.dtype, limit: int
    ) -> OneHot:
        """Returns the block Jacobian. The padding token has no gradient, as in torch."""
        assert g is not None  # embeddings do not give the outputs
        width = self.matrix().outputs
        tokens = axis.front(self.inputs, samples).reshape(samples, -1).long()  # (B, T)
        g = axis.front(g, samples, 1).reshape(g.shape[0], samples, -1, width).transpose(0, 1).to(dtype)
        if self.padding is not None:
            g = g * (tokens != self.padding)[:, None, :, None]
        return OneHot(tokens, g, self.matrix().inputs)


def _embedding(args: tuple, kwargs: dict, watched: Watched) -> Use | None:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    named = by_name(names, args, kwargs)
    if named.get("max_norm") is not None:
        return None
    padding, weight = named.get("padding_idx"), named["weight"]
    return EmbeddingUse(named["input"], weight, None if padding is None else padding % weight.shape[0])


def _exported_embedding(args: tuple, kwargs: dict, watched: Watched) -> Use | None:
    weight, tokens, *padding = args[:3]
    return _embedding((tokens, weight, padding[0] if padding and padding[0] >= 0 else None), {}, watched)


register_reader(_embedding, F.embedding)
register_reader(_exported_embedding, aten.embedding.default)
