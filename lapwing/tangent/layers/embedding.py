"""Embeddings: rows of a table picked by token, so that the inputs a are one-hot and A is a vector of counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..blocks import Matrix
from ..jacobian import BlockJacobian, MatrixJacobian
from .use import BatchAxis, Handler, Use, Watched


class OneHot(MatrixJacobian):
    """`J[n, r] = Σ_t g[n, r, t] e_token(n, t)ᵀ` for tokens (B, T) and g (B, R, T, O).

    Laid out as (O = width, I = vocabulary). Repeated tokens of a sample are merged at the first of them, so that
    positions never share a weight.
    """

    groups = 1

    def __init__(self, tokens: Tensor, g: Tensor, vocabulary: int) -> None:
        same = tokens[:, :, None] == tokens[:, None, :]  # (B, T, T)
        first = same & (same.cumsum(1) == 1)  # row t: the positions merged into t, the first with its token
        self.tokens, self.g = tokens, torch.einsum("nts,nrsd->nrtd", first.to(g.dtype), g)
        self.vocabulary, self.width = vocabulary, g.shape[-1]
        self.batch, self.cotangents, self.size = tokens.shape[0], g.shape[1], vocabulary * g.shape[-1]
        self.unmerged = g

    def row_slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields rows for one output channel after another."""
        for channel in range(self.width):
            rows = self.g.new_zeros(self.batch, self.cotangents, self.vocabulary)
            index = self.tokens[:, None, :].expand(-1, self.cotangents, -1)
            yield (
                slice(channel * self.vocabulary, (channel + 1) * self.vocabulary),
                rows.scatter_add(2, index, self.g[..., channel]),
            )

    def rotate(self, inputs: Tensor | None, outputs: Tensor | None) -> OneHot:
        """Returns J with g in another basis (1, O, O); the one-hot inputs are in A's eigenbasis already."""
        if inputs is not None:
            raise ValueError("one-hot inputs are not rotated")
        return self if outputs is None else OneHot(self.tokens, self.unmerged @ outputs[0], self.vocabulary)

    def weighted_factor(self, weights: Tensor) -> Tensor:
        """Returns `g √w` at the tokens met, (B, R, T O)."""
        picked = weights.reshape(self.width, self.vocabulary)[:, self.tokens].permute(1, 2, 0)  # (B, T, O)
        return (self.g * picked.sqrt()[:, None]).flatten(2)

    def weighted_grams(self, candidates: Sequence[Tensor]) -> list[Tensor]:
        """Returns the thin factors' Gram matrices (B, R, R)."""
        factors = [self.weighted_factor(weights) for weights in candidates]
        return [factor @ factor.mT for factor in factors]

    def squared_sum(self) -> Tensor:
        """Returns `Σ J²` (P,) by adding up where tokens agree."""
        table = self.g.new_zeros(self.vocabulary, self.width)
        return table.index_add(0, self.tokens.flatten(), self.g.square().sum(1).flatten(0, 1)).T.flatten()

    def squared_norm(self) -> Tensor:
        """Returns `Σ J²` ()."""
        return self.g.square().sum()

    def sum_rows(self) -> Tensor:
        """Returns `Σ_n J[n]` (R, P)."""
        table = self.g.new_zeros(self.cotangents, self.vocabulary, self.width)
        added = table.index_add(1, self.tokens.flatten(), self.g.transpose(0, 1).flatten(1, 2))
        return added.mT.flatten(1)

    def jvp(self, vectors: Tensor) -> Tensor:
        """Returns `J V` (B, R, K) from the entries of V at the tokens met."""
        picked = vectors.reshape(-1, self.width, self.vocabulary)[:, :, self.tokens]  # (K, O, B, T)
        return torch.einsum("nrtd,kdnt->nrk", self.g, picked)

    def gram(self, other: BlockJacobian) -> Tensor:
        """Returns `[token = token'](g·g')` summed over positions, (B, R, B', R')."""
        if not isinstance(other, OneHot):
            return super().gram(other)
        same = (self.tokens[:, :, None, None] == other.tokens).to(self.g.dtype)  # (B, T, B', T')
        return torch.einsum("nrtd,ntms,mqsd->nrmq", self.g, same, other.g)

    def kronecker_factors(self, reduce: bool) -> tuple[Tensor, Tensor, int]:
        """Returns A as its diagonal, the counts (1, V), Γ (1, O, O) and #(n, t).

        Always in the expand form, for which A is exactly diagonal; `reduce` changes nothing here.
        """
        counts = torch.bincount(self.tokens.flatten(), minlength=self.vocabulary).to(self.g.dtype)
        g = self.unmerged.flatten(0, 2)
        return counts[None], (g.T @ g)[None], self.tokens.numel()


class EmbeddingUse(Use):
    """`out = W[tokens]`."""

    family = "embedding"

    def __init__(self, tokens: Tensor, weight: Tensor, padding: int | None) -> None:
        super().__init__(tokens, weight)
        self.padding = padding
        self.sample_dims = tokens.ndim

    def matrix(self) -> Matrix:
        """(O = width, I = vocabulary), stored transposed."""
        vocabulary, width = self.parameters["weight"].shape
        return Matrix(1, width, vocabulary, transposed=True)

    def jacobian(
        self, g: Tensor | None, axis: BatchAxis, samples: int, roles: frozenset[str], dtype: torch.dtype
    ) -> OneHot:
        """The padding token has no gradient, as in torch."""
        assert g is not None  # an embedding of tokens is no output
        width = self.matrix().outputs
        tokens = axis.front(self.inputs, samples).reshape(samples, -1)  # (B, T)
        g = axis.front(g, samples, 1).reshape(g.shape[0], samples, -1, width).transpose(0, 1).to(dtype)
        if self.padding is not None:
            g = g * (tokens != self.padding)[:, None, :, None]
        return OneHot(tokens, g, self.matrix().inputs)


def _embedding(args: tuple, kwargs: dict, watched: Watched) -> Use | None:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("max_norm") is not None:
        return None
    padding, weight = given.get("padding_idx"), given["weight"]
    return EmbeddingUse(given["input"], weight, None if padding is None else padding % weight.shape[0])


HANDLERS: dict[object, Handler] = {F.embedding: _embedding}
