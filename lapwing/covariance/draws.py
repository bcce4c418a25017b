"""A covariance made of draws from the posterior itself, `Σ = (1/S) Σ_k z_k z_kᵀ`: as sampled LLA makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contents import FLOATS, Entry, check_json, is_count, largest
from ..linalg import total
from ..tangent import Block, Record, Tangent, Vectors
from .base import Covariance, FactorLayer, LayerBlock, precision_entry, register
from .terms import FactoredTerm, Term, cross_covariance, unique


@register
class Draws(Covariance):
    """`Σ = (1/S) Σ_k z_k z_kᵀ` of draws `z_k ~ N(0, Ψ)`, solved for at one prior, which cannot be changed.

    Args:
        blocks: the blocks.
        draws: z, (S, P_block) a block.
        precision: prior precision δ of each block (n_blocks,) that they were drawn at.
    """

    def __init__(self, blocks: tuple[Block, ...], draws: Vectors, precision: Tensor) -> None:
        self.blocks, self.precision = blocks, precision.double()
        self.draws = {block.name: draws[block.name] for block in blocks}

    @property
    def count(self) -> int:
        """S."""
        return len(self.draws[self.blocks[0].name])

    def mv(self, vectors: Vectors) -> Vectors:
        """Returns `Σ v`. Time O(S P)."""
        inner = total(vectors[name] @ z.T for name, z in self.draws.items()) / self.count  # (n, S)
        return {name: inner @ z for name, z in self.draws.items()}

    def sample(self, count: int, generator: torch.Generator) -> Vectors:
        """Returns draws themselves, each with a random sign, none twice; more than S are combined, `Zᵀε/√S`.

        Either way mean and covariance are 0 and Σ.
        """
        options: dict[str, Any] = {"generator": generator, "device": self.device}
        if count > self.count:
            weights = torch.randn((count, self.count), dtype=self.dtype, **options) / self.count**0.5
            return {name: weights @ z for name, z in self.draws.items()}
        picked = torch.randperm(self.count, **options)[:count]
        sign = 2 * torch.randint(2, (count, 1), **options).to(self.dtype) - 1
        return {name: sign * z[picked] for name, z in self.draws.items()}

    def diagonal(self) -> Vectors:
        """Returns the marginal variances."""
        return {name: z.square().mean(0) for name, z in self.draws.items()}

    def output_covariance(self, record: Record) -> tuple[Term, ...]:
        """Returns the thin factor `J Zᵀ/√S` (B, R, S)."""
        return (FactoredTerm(record.jvp(self.draws) / self.count**0.5),)

    def joint_output_covariance(self, record: Record, other: Record) -> Tensor:
        """Returns the products of the factors of all pairs of samples."""
        moved = [one.jvp(self.draws) for one in unique(record, other)]  # (B, R, S)
        return cross_covariance(moved[0], moved[-1]) / self.count

    def layer_block(self, name: str) -> LayerBlock:
        """Returns one block's covariance; correlations with other layers are left out."""
        draws = self.draws[name].reshape(-1, *self.block(name).matrix_shape[1:])
        return FactorLayer(draws / len(draws) ** 0.5)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the draws by block, and the prior they belong to."""
        assert self.precision is not None
        return {**{f"draws/{name}": z for name, z in self.draws.items()}, "precision": self.precision}

    def extra(self) -> dict[str, Any]:
        """Returns S."""
        return {"count": self.count}

    @classmethod
    def entries(cls, tangent: Tangent, extra: Any) -> dict[str, Entry]:
        """S draws a block, whose squares have finite sums, and δ."""
        check_json(extra, {"count": lambda count: is_count(count) and count > 0}, "covariance/extra")
        bound = largest(tangent.dtype, 1 / 4)
        draws = {f"draws/{b.name}": Entry((extra["count"], b.size), FLOATS, -bound, bound) for b in tangent.blocks}
        return {**draws, "precision": precision_entry(tangent)}

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: dict[str, Tensor], extra: dict[str, Any]) -> Draws:
        """Rebuilds the covariance."""
        draws = {block.name: tensors[f"draws/{block.name}"] for block in tangent.blocks}
        return cls(tangent.blocks, draws, tensors["precision"])
