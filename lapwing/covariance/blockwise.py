"""Block-diagonal covariances `(s G + Δ)⁻¹`, each block in the eigenbasis of its curvature's structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from ..jacobian.jacobian import DiagonalWeights, Reads, Weightings
from ..linalg import total
from ..tangent import Block, Record, Tangent, TensorSpec, Vectors
from .base import PriorCovariance, precision_spec, register_covariance
from .layer_block import LayerBlock
from .structures import DenseBlock, DiagonalBlock, KroneckerBlock, Structure
from .terms import Summand, Terms, add_term, of_both, standard_normal, turned_back

STRUCTURES: dict[str, type[Structure]] = {cls.kind: cls for cls in (DiagonalBlock, KroneckerBlock, DenseBlock)}
"""Kind -> class, to read files."""


@register_covariance
class Blockwise(PriorCovariance):
    """`Σ = blockdiag_b (s U_b diag(λ_b) U_bᵀ + δ_b I)⁻¹`, exact in the eigenbasis of each block's curvature."""

    full_rank = True
    keeps_outputs = True
    joins_layers = False
    continued_by = "blocks"

    def __init__(
        self, blocks: tuple[Block, ...], structures: Mapping[str, Structure], precision: Tensor, scale: float
    ) -> None:
        self.blocks, self.structures = blocks, structures
        self.precision, self.scale = precision, scale
        self._delta = {block.name: delta for block, delta in zip(blocks, precision.tolist(), strict=True)}

    def _weighting(self, name: str) -> DiagonalWeights:
        """Returns the weighting `1/(s λ + δ)` of one block, which is computed when it is first used."""
        delta, scale = self._delta[name], self.scale  # a closure over self would be a reference cycle
        values = self.structures[name].eigenvalues.flatten()
        return DiagonalWeights(values, lambda values: (scale * values).add_(delta).reciprocal_())

    @cached_property
    def _weightings(self) -> dict[str, DiagonalWeights]:
        return {name: self._weighting(name) for name in self.structures}

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        """`1/(s λ + δ)` of each block, in the shape of λ."""
        return {name: self._weightings[name].flat.view_as(s.eigenvalues) for name, s in self.structures.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_weights", "_weightings")}

    @property
    def correlated(self) -> list[bool]:
        return [self.structures[block.name].kind != DiagonalBlock.kind for block in self.blocks]

    def with_prior(self, precision: Tensor, scale: float) -> Blockwise:
        return Blockwise(self.blocks, self.structures, precision, scale)

    def log_det_ratio(self, precision: Tensor, scale: Tensor | float) -> Tensor:
        """Returns `Σ log(1 + s λ/δ)`. A block with many eigenvalues uses its condensed spectrum."""
        terms = []
        for block, delta in zip(self.blocks, precision, strict=True):
            points, weights = self.structures[block.name].spectrum
            logs = torch.log1p(scale * points / delta)
            terms.append(logs.sum() if weights is None else logs @ weights)
        return torch.stack(terms).sum()

    def has_rounding_noise(self) -> bool:
        values, least = [s.eigenvalues for s in self.structures.values()], min(self._delta.values()) / self.scale
        if torch.finfo(values[0].dtype).eps * float(get_total_norm(values, inf)) <= least:  # all blocks at once
            return False
        return any(s.has_rounding_noise(self._delta[name] / self.scale) for name, s in self.structures.items())

    def shares_contraction_with(self, other: PriorCovariance) -> bool:
        return isinstance(other, Blockwise) and other.structures is self.structures

    def _apply(self, vectors: Vectors, weights: Vectors) -> Vectors:
        return {
            name: structure.rotate(structure.rotate(vectors[name]) * weights[name], back=True)
            for name, structure in self.structures.items()
        }

    def mv(self, vectors: Vectors) -> Vectors:
        return self._apply(vectors, self._weights)

    def precision_mv(self, vectors: Vectors) -> Vectors:
        """Returns `U (s λ + δ) Uᵀ v`."""
        return self._apply(vectors, {name: 1 / weight for name, weight in self._weights.items()})

    def sample(self, count: int, generator: torch.Generator) -> Vectors:
        """Returns `U √w z`."""
        draws = {}
        for name, structure in self.structures.items():
            weights = self._weights[name]
            noise = standard_normal((count, *weights.shape), weights, generator)
            draws[name] = structure.rotate(noise.mul_(weights.sqrt()), back=True)
        return draws

    def diagonal(self) -> Vectors:
        return {name: structure.diagonal(self._weights[name]) for name, structure in self.structures.items()}

    def output_covariances(self, record: Record, candidates: Sequence[Blockwise], reads: Reads) -> list[Terms]:
        """Contracts each block once for all candidates. A single candidate keeps its weights for the next record."""
        terms: list[tuple[Summand, ...]] = [() for _ in candidates]
        for name, structure in self.structures.items():
            weightings: Weightings = (candidate._weighting(name) for candidate in candidates)
            if len(candidates) == 1:
                weightings = [candidates[0]._weightings[name]]
            for i, term in enumerate(structure.output_covariances(record[name], weightings, reads)):
                terms[i] = add_term(terms[i], term)
        return [*map(turned_back, terms)]

    def joint_output_covariance(self, record: Record, other: Record) -> Tensor:
        return total(
            structure.joint_output(*of_both(itemgetter(name), record, other), self._weights[name])
            for name, structure in self.structures.items()
        )

    def layer_block(self, name: str) -> LayerBlock:
        return self.structures[name].layer_block(self._weights[name], self.block(name).matrix_shape)

    def tensors(self) -> dict[str, Tensor]:
        parts = {f"{name}/{key}": value for name, s in self.structures.items() for key, value in s.tensors().items()}
        return {**parts, "precision": self.precision}

    def extra(self) -> dict[str, Any]:
        return {**super().extra(), "kinds": {name: s.kind for name, s in self.structures.items()}}

    @classmethod
    def entries(cls, tangent: Tangent, extra: Mapping[str, Any]) -> dict[str, TensorSpec]:
        parts = {
            f"{block.name}/{key}": spec
            for block in tangent.blocks
            for key, spec in STRUCTURES[extra["kinds"][block.name]].entries(block, tangent.dtype).items()
        }
        return {**parts, "precision": precision_spec(tangent)}

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: dict[str, Tensor], extra: dict[str, Any]) -> Blockwise:
        structures = {}
        for block in tangent.blocks:
            kind = STRUCTURES[extra["kinds"][block.name]]
            names = kind.entries(block, tangent.dtype)
            structures[block.name] = kind.from_tensors({name: tensors[f"{block.name}/{name}"] for name in names})
        return cls(tangent.blocks, structures, tensors["precision"], extra["scale"])
