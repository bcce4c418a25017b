"""Covariances whose prior cannot be changed: `LowRankPlusDiagonal` for SWAG and mean field, `Draws` for sampled LLA."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..files import prefixed, under
from ..jacobian.jacobian import DiagonalWeights
from ..linalg import total
from ..tangent import FLOATS, Block, Record, Tangent, TensorSpec, Vectors
from .base import Covariance, precision_spec, register_covariance, rows_spec
from .layer_block import FactorLayer, LayerBlock
from .structures import weighted_terms
from .terms import FactoredTerm, Summand, Terms, add_term, cross_covariance, of_both, standard_normal, turned_back


@register_covariance
class LowRankPlusDiagonal(Covariance):
    """`Σ = D + FᵀF` with a diagonal D (P,) >= 0 and a factor F (K, P) that crosses blocks; K may be 0."""

    def __init__(
        self, blocks: tuple[Block, ...], variances: Vectors, factor: Vectors, precision: Tensor | None = None
    ) -> None:
        self.blocks, self.precision = blocks, precision
        self.variances = {block.name: variances[block.name] for block in blocks}
        self.factor = {block.name: factor[block.name] for block in blocks}
        self.rank = len(self.factor[blocks[0].name])

    @property
    def full_rank(self) -> bool:  # type: ignore[override]
        """Whether all of D is positive."""
        return all(bool((variances > 0).all()) for variances in self.variances.values())

    def mv(self, vectors: Vectors) -> Vectors:
        inner = total(vectors[name] @ rows.T for name, rows in self.factor.items())  # (n, K)
        return {name: vectors[name] * self.variances[name] + inner @ rows for name, rows in self.factor.items()}

    def sample(self, count: int, generator: torch.Generator) -> Vectors:
        """Returns `√D z + Fᵀ ε`, with one ε in R^K for all blocks."""
        shared = standard_normal((count, self.rank), self.factor[self.blocks[0].name], generator)
        return {
            name: standard_normal((count, len(d)), d, generator) * d.sqrt() + shared @ self.factor[name]
            for name, d in self.variances.items()
        }

    def diagonal(self) -> Vectors:
        return {name: self.variances[name] + rows.square().sum(0) for name, rows in self.factor.items()}

    def output_covariance(self, record: Record) -> Terms:
        """Returns the terms of `J D Jᵀ`, and the thin factor `J Fᵀ` (B, R, K)."""
        terms: tuple[Summand, ...] = ()
        for name, variances in self.variances.items():
            weights = variances.to(record.dtype)
            (term,) = weighted_terms(record[name], [DiagonalWeights(weights)], "covariances")
            terms = add_term(terms, term)
        if not self.rank:
            return turned_back(terms)
        factor = record.jvp(self.factor)  # last, so that it reuses the gradients of the layers
        return (*turned_back(terms), FactoredTerm(factor))

    def joint_output_covariance(self, record: Record, other: Record) -> Tensor:
        matrix: Any = 0
        for name, d in self.variances.items():
            left, right = of_both(itemgetter(name), record, other)
            matrix = matrix + left.joint_weighted_gram(d.to(record.dtype), right)
        if self.rank:
            factors = of_both(lambda one: one.jvp(self.factor), record, other)  # (B, R, K)
            matrix = matrix + cross_covariance(*factors)
        return matrix

    def layer_block(self, name: str) -> LayerBlock:
        shape = self.block(name).matrix_shape[1:]
        return FactorLayer(self.factor[name].reshape(-1, *shape), self.variances[name].reshape(shape))

    def tensors(self) -> dict[str, Tensor]:
        prior = {} if self.precision is None else {"precision": self.precision}
        return {**prefixed("variances", self.variances), **prefixed("factor", self.factor), **prior}

    def extra(self) -> dict[str, Any]:
        return {"rank": self.rank, "prior": self.precision is not None}

    @classmethod
    def entries(cls, tangent: Tangent, extra: Mapping[str, Any]) -> dict[str, TensorSpec]:
        variances = {block.name: TensorSpec((block.size,), FLOATS) for block in tangent.blocks}
        prior = {"precision": precision_spec(tangent)} if extra["prior"] else {}
        return {**prefixed("variances", variances), **prefixed("factor", rows_spec(tangent, extra["rank"])), **prior}

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: dict[str, Tensor], extra: dict[str, Any]) -> LowRankPlusDiagonal:
        variances, factor = under("variances", tensors), under("factor", tensors)
        return cls(tangent.blocks, variances, factor, tensors.get("precision"))


@register_covariance
class Draws(Covariance):
    """`Σ = (1/S) Σ_k z_k z_kᵀ` from draws `z_k ~ N(0, Ψ)` (S, P) at one prior precision, which cannot be changed."""

    def __init__(self, blocks: tuple[Block, ...], draws: Vectors, precision: Tensor) -> None:
        self.blocks, self.precision = blocks, precision.double()
        self.draws = {block.name: draws[block.name] for block in blocks}
        self.distinct_draws: int = len(self.draws[blocks[0].name])

    def mv(self, vectors: Vectors) -> Vectors:
        inner = total(vectors[name] @ z.T for name, z in self.draws.items()) / self.distinct_draws  # (n, S)
        return {name: inner @ z for name, z in self.draws.items()}

    def sample(self, count: int, generator: torch.Generator) -> Vectors:
        """Returns draws with random signs, or if n exceeds S, combinations `Zᵀε/√S`. Both have covariance Σ."""
        options: dict[str, Any] = {"generator": generator, "device": self.device}
        # E[εεᵀ] = I: the covariance of Zᵀε/√S given Z is ZᵀZ/S = Σ
        if count > self.distinct_draws:
            weights = torch.randn((count, self.distinct_draws), dtype=self.dtype, **options) / self.distinct_draws**0.5
            return {name: weights @ z for name, z in self.draws.items()}
        # a random row of Z with a random sign: mean 0, covariance ZᵀZ/S = Σ
        picked = torch.randperm(self.distinct_draws, **options)[:count]
        sign = 2 * torch.randint(2, (count, 1), **options).to(self.dtype) - 1
        return {name: sign * z[picked] for name, z in self.draws.items()}

    def diagonal(self) -> Vectors:
        return {name: z.square().mean(0) for name, z in self.draws.items()}

    def output_covariance(self, record: Record) -> Terms:
        """Returns the thin factor `J Zᵀ/√S` (B, R, S)."""
        return (FactoredTerm(record.jvp(self.draws) / self.distinct_draws**0.5),)

    def joint_output_covariance(self, record: Record, other: Record) -> Tensor:
        return cross_covariance(*of_both(lambda one: one.jvp(self.draws), record, other)) / self.distinct_draws

    def layer_block(self, name: str) -> LayerBlock:
        draws = self.draws[name].reshape(-1, *self.block(name).matrix_shape[1:])
        return FactorLayer(draws / len(draws) ** 0.5)

    def tensors(self) -> dict[str, Tensor]:
        assert self.precision is not None
        return {**prefixed("draws", self.draws), "precision": self.precision}

    def extra(self) -> dict[str, Any]:
        return {"count": self.distinct_draws}

    @classmethod
    def entries(cls, tangent: Tangent, extra: Mapping[str, Any]) -> dict[str, TensorSpec]:
        return {**prefixed("draws", rows_spec(tangent, extra["count"])), "precision": precision_spec(tangent)}

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: dict[str, Tensor], extra: dict[str, Any]) -> Draws:
        return cls(tangent.blocks, under("draws", tensors), tensors["precision"])
