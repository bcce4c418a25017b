"""A diagonal plus a low-rank matrix, `Σ = D + FᵀF`, without a prior: SWAG's, from the iterates of a training run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contents import FLOATS, Entry, check_json, is_count, largest
from ..jacobian.jacobian import Weighting
from ..linalg import total
from ..tangent import Block, Record, Tangent, Vectors
from .base import Covariance, FactorLayer, LayerBlock, precision_entry, register
from .structures import DiagonalBlock
from .terms import FactoredTerm, Term, add_term, cross_covariance, unique


class _Layer(LayerBlock):
    """One layer's variances D (P_block,) and rows of the factor F (K, O, I)."""

    def __init__(self, variances: Tensor, factor: Tensor) -> None:
        self._variances, self._shape, self._factor = variances, factor.shape[1:], FactorLayer(factor)

    def push(self, mean: Tensor, variance: Tensor | None, full: bool) -> Tensor:
        shape = self._shape[0], self._shape[1]
        diagonal = DiagonalBlock(self._variances).push(self._variances.to(mean.dtype), shape, mean, variance, full)
        return diagonal + self._factor.push(mean, variance, full)


@register
class LowRankPlusDiagonal(Covariance):
    """`Σ = D + FᵀF` with a diagonal D (P,) and a factor F (K, P) that crosses blocks.

    Args:
        blocks: the blocks.
        variances: D, not negative, (P_block,) a block.
        factor: F, (K, P_block) a block; K may be 0.
        precision: δ (n_blocks,) of the fit, if there was a prior.
    """

    def __init__(
        self, blocks: tuple[Block, ...], variances: Vectors, factor: Vectors, precision: Tensor | None = None
    ) -> None:
        self.blocks, self.precision = blocks, precision
        self.variances = {block.name: variances[block.name] for block in blocks}
        self.factor = {block.name: factor[block.name] for block in blocks}

    @property
    def rank(self) -> int:
        """K."""
        return len(self.factor[self.blocks[0].name])

    @property
    def full_rank(self) -> bool:  # type: ignore[override]
        """Whether all of D is positive."""
        return all(bool((variances > 0).all()) for variances in self.variances.values())

    def mv(self, vectors: Vectors) -> Vectors:
        """Returns `Σ v`. Time O(K P)."""
        inner = total(vectors[name] @ rows.T for name, rows in self.factor.items())  # (n, K)
        return {name: vectors[name] * self.variances[name] + inner @ rows for name, rows in self.factor.items()}

    def sample(self, count: int, generator: torch.Generator) -> Vectors:
        """Returns `√D z + Fᵀ ε`, with one ε in R^K for all blocks."""

        def normal(size: int) -> Tensor:
            return torch.randn((count, size), generator=generator, dtype=self.dtype, device=self.device)

        shared = normal(self.rank)
        return {
            name: normal(len(variances)) * variances.sqrt() + shared @ self.factor[name]
            for name, variances in self.variances.items()
        }

    def diagonal(self) -> Vectors:
        """Returns the marginal variances."""
        return {name: self.variances[name] + rows.square().sum(0) for name, rows in self.factor.items()}

    def output_covariance(self, record: Record) -> tuple[Term, ...]:
        """Returns `J D Jᵀ` layer by layer, matrices added up as they come, and the thin factor `J Fᵀ` (B, R, K)."""
        terms: tuple[Term, ...] = ()
        for name, variances in self.variances.items():
            weights = variances.to(record.dtype)
            (term,) = DiagonalBlock(weights).outputs_at(record[name], [Weighting(weights)])
            terms = add_term(terms, term)
        if not self.rank:
            return terms
        return (*terms, FactoredTerm(record.jvp(self.factor)))  # after the layers, whose gradients it then uses

    def joint_output_covariance(self, record: Record, other: Record) -> Tensor:
        """Returns the same for all pairs of samples."""
        matrix: Any = 0
        for name, d in self.variances.items():
            jacobians = [one[name] for one in unique(record, other)]
            matrix = matrix + jacobians[0].joint_weighted_gram(d.to(record.dtype), jacobians[-1])
        if self.rank:
            factors = [one.jvp(self.factor) for one in unique(record, other)]  # (B, R, K)
            matrix = matrix + cross_covariance(factors[0], factors[-1])
        return matrix

    def layer_block(self, name: str) -> LayerBlock:
        """Returns one block's covariance; correlations with other layers are left out."""
        return _Layer(self.variances[name], self.factor[name].reshape(-1, *self.block(name).matrix_shape[1:]))

    def tensors(self) -> dict[str, Tensor]:
        """Returns D and F by block, and δ if there is one."""
        variances = {f"variances/{name}": value for name, value in self.variances.items()}
        prior = {} if self.precision is None else {"precision": self.precision}
        return {**variances, **{f"factor/{name}": rows for name, rows in self.factor.items()}, **prior}

    def extra(self) -> dict[str, Any]:
        """Returns K, and whether there was a prior."""
        return {"rank": self.rank, "prior": self.precision is not None}

    @classmethod
    def entries(cls, tangent: Tangent, extra: Any) -> dict[str, Entry]:
        """D, not negative, and F, whose squares have finite sums, by block; δ if there is one."""
        check_json(extra, {"rank": is_count, "prior": bool}, "covariance/extra")
        bound = largest(tangent.dtype, 1 / 4)
        parts = {f"variances/{b.name}": Entry((b.size,), FLOATS, 0.0, bound**2) for b in tangent.blocks}
        parts |= {f"factor/{b.name}": Entry((extra["rank"], b.size), FLOATS, -bound, bound) for b in tangent.blocks}
        return {**parts, **({"precision": precision_entry(tangent)} if extra["prior"] else {})}

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: dict[str, Tensor], extra: dict[str, Any]) -> LowRankPlusDiagonal:
        """Rebuilds the covariance."""
        names = [block.name for block in tangent.blocks]
        variances, factor = ({name: tensors[f"{part}/{name}"] for name in names} for part in ("variances", "factor"))
        return cls(tangent.blocks, variances, factor, tensors.get("precision"))
