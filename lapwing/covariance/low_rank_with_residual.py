"""`LowRankWithResidual`: a subspace covariance that keeps the prior outside the subspace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, Literal, Self

import torch
from torch import Tensor

from ..files import prefixed
from ..jacobian.jacobian import Reads
from ..linalg import RESOLVED, cholesky
from ..tangent import Block, Record, Vectors
from .base import register_covariance, same_ratios
from .basis import ExplicitBasis
from .layer_block import FactorLayer, LayerBlock
from .low_rank import Subspace
from .terms import DenseTerm, FactoredTerm, Terms, cross_covariance, of_both, standard_normal


@register_covariance
class LowRankWithResidual(Subspace):
    """`Σ = Δ⁻¹ - W̃ᵀ diag(s h/(s h + 1)) W̃`: the prior outside the subspace. Arguments as for `Subspace`.

    It subtracts nearly equal numbers, so records are contracted in float64. If `from_rows` built it, `rows` holds U and
    M with `G = Uᵀ M U`, and it is exact at every prior.
    """

    record_dtype = torch.float64
    full_rank = True

    def __init__(self, *arguments: Any, from_rows: tuple[ExplicitBasis, Tensor] | None = None) -> None:
        super().__init__(*arguments)
        self.rows = from_rows
        self._removed = self.scale * self._curvatures * self._weights
        self._delta = {block.name: delta for block, delta in zip(self.blocks, self.precision.tolist(), strict=True)}

    @property
    def continued_by(self) -> Literal["rows", "basis"]:  # type: ignore[override]
        return "basis" if self.rows is None else "rows"

    @classmethod
    def from_rows(
        cls,
        blocks: tuple[Block, ...],
        rows: ExplicitBasis,
        curvature: Tensor,
        traces: Tensor,
        precision: Tensor,
        scale: float,
    ) -> Self:
        """Builds the covariance of a curvature `G = Uᵀ M U`, exact at this prior and at any other.

        U (K, P) are linearly independent `rows`, and M (K, K) is `curvature`. The span of `W = U Δ⁻¹` holds all of G.
        On it, `H = D M D` with `D = U Δ⁻¹ Uᵀ`.
        """
        # 1. U (Δ/δ_1)⁻¹ Uᵀ = δ_1 D (K, K)
        ratios = precision / precision[0]
        inner = rows.prior_gram(1 / ratios)
        # 2. W = U (Δ/δ_1)⁻¹; with it H = W Uᵀ M U Wᵀ, W Uᵀ being the matrix of step 1
        basis = rows
        if not same_ratios(precision, torch.ones_like(precision)):
            basis = ExplicitBasis({n: u / r for (n, u), r in zip(rows.vectors.items(), ratios.tolist(), strict=True)})
        return cls(blocks, basis, inner @ curvature @ inner, traces, precision, scale, from_rows=(rows, curvature))

    def with_prior(self, precision: Tensor, scale: float) -> Self:
        """Returns the covariance under another prior on the same span. If its ratios change, `from_rows` runs again."""
        if self.rows is not None and not same_ratios(precision, self.precision):
            return self.from_rows(self.blocks, *self.rows, self.traces, precision, scale)
        again = super().with_prior(precision, scale)
        again.rows = self.rows
        return again

    def log_det_ratio(self, precision: Tensor, scale: Tensor | float) -> Tensor:
        """Returns the log determinant on the subspace; outside it the posterior is the prior."""
        if self.rows is None or self._curvatures_at(precision) is not None:
            return super().log_det_ratio(precision, scale)
        # with U Δ⁻¹ Uᵀ = L Lᵀ: logdet(I + s Δ⁻¹ Uᵀ M U) = logdet(I + s Lᵀ M L)
        rows, curvature = self.rows
        root = cholesky(rows.prior_gram(1 / precision))
        eye = torch.eye(len(root), dtype=root.dtype, device=root.device)
        return 2 * cholesky(eye + scale * root.T @ curvature @ root).diagonal().log().sum()

    def has_rounding_noise(self) -> bool:
        return bool((self._weights * RESOLVED < 1).any())

    def evidence_gap(self, precision: Tensor, scale: Tensor | float) -> Tensor:
        if self.rows is not None:
            return torch.zeros((), dtype=torch.float64, device=precision.device)
        return super().evidence_gap(precision, scale)

    def mv(self, vectors: Vectors) -> Vectors:
        removed = self._weighted(vectors, self._removed)
        return {name: vector / self._delta[name] - removed[name] for name, vector in vectors.items()}

    def precision_mv(self, vectors: Vectors) -> Vectors:
        """Returns `Δ v + Δ W̃ᵀ diag(s h) W̃ Δ v`."""
        # the inverse of Σ, since W̃ Δ W̃ᵀ = I and w = 1/(s h + 1)
        whole = {name: self._delta[name] * vector for name, vector in vectors.items()}
        added = self._weighted(whole, self.scale * self._curvatures)
        return {name: vector + self._delta[name] * added[name] for name, vector in whole.items()}

    def sample(self, count: int, generator: torch.Generator) -> Vectors:
        """Returns `Δ^(-1/2) z + W̃ᵀ (√w - 1) W̃ Δ^(1/2) z`."""
        # covariance Δ⁻¹ + W̃ᵀ (2 a + a²) W̃ with a = √w - 1, and 2 a + a² = w - 1 = -s h/(s h + 1)
        roots = {name: delta**0.5 for name, delta in self._delta.items()}
        like = self._weights.to(self.dtype)
        noise = {block.name: standard_normal((count, block.size), like, generator) for block in self.blocks}
        moved = self._weighted({n: z * roots[n] for n, z in noise.items()}, self._weights.sqrt() - 1)
        return {name: z / roots[name] + moved[name] for name, z in noise.items()}

    def diagonal(self) -> Vectors:
        return {name: 1 / self._delta[name] - removed for name, removed in self._squares(self._removed).items()}

    def output_covariances(self, record: Record, candidates: Sequence[Self], reads: Reads) -> list[Terms]:
        """Returns `J Δ⁻¹ Jᵀ - φ diag(s h/(s h + 1)) φᵀ` with `φ = J W̃ᵀ`, and forms `J Jᵀ` of each block once."""
        totals: list[Any] = []
        # 1. minus φ diag(s h/(s h + 1)) φᵀ of each candidate
        for factor in self._factors(record, candidates):
            matrix = reads == "covariances"
            totals.append(DenseTerm(-factor @ factor.mT) if matrix else FactoredTerm(factor).read(reads).scaled(-1.0))
        # 2. plus J_b J_bᵀ/δ_b of each block
        for block in self.blocks:
            ones = torch.ones(block.size, dtype=record.dtype, device=self.device)
            prior = DenseTerm(record[block.name].weighted_gram(ones)).read(reads)  # J Jᵀ
            for i, candidate in enumerate(candidates):
                totals[i] = totals[i] + prior.scaled(1 / candidate._delta[block.name])
        return [(total,) for total in totals]

    def _factors(self, record: Record, candidates: Sequence[Self]) -> Iterator[Tensor]:
        """Yields `φ √(s h/(s h + 1))` of each candidate. Consecutive candidates with one basis share the projection."""
        basis, projected = None, record.outputs
        for candidate in candidates:
            if candidate.basis is not basis:
                basis, projected = candidate.basis, candidate.basis.project(record)
            yield projected @ (candidate._rotation * candidate._removed.sqrt()).to(projected.dtype)

    def joint_output_covariance(self, record: Record, other: Record) -> Tensor:
        prior = 0
        for block in self.blocks:
            left, right = of_both(itemgetter(block.name), record, other)
            prior = prior + left.gram(right) / self._delta[block.name]
        left, right = of_both(lambda one: next(self._factors(one, [self])), record, other)
        return prior - cross_covariance(left, right)

    def layer_block(self, name: str) -> LayerBlock:
        factor = self._layer_rows(name, self._removed)
        prior = factor.new_tensor(1 / self._delta[name]).expand(factor.shape[1:])
        return FactorLayer(factor, prior, removed=True)

    def tensors(self) -> dict[str, Tensor]:
        if self.rows is None:
            return super().tensors()
        rows, curvature = self.rows
        return {**super().tensors(), **prefixed("basis", rows.tensors()), "curvature": curvature}

    def extra(self) -> dict[str, Any]:
        return {**super().extra(), "rows": self.rows is not None}

    @classmethod
    def _built(cls, extra: dict[str, Any], *parts: Any) -> Self:
        return cls.from_rows(*parts[:-1]) if extra["rows"] else super()._built(extra, *parts)
