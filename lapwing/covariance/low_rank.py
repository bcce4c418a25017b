"""Subspace covariances: what ELLA, optimal subspaces, subsets, VaLLA and the dual form of Full have in common.

In the coordinates of `span.py`, with directions W̃ orthonormal in whitened weights and curvatures h on them:

    without residual   Σ = W̃ᵀ diag(1/(s h + 1)) W̃                        directions outside the span have variance 0
    with residual      Σ = Δ⁻¹ - W̃ᵀ diag(s h/(s h + 1)) W̃                 directions outside keep the prior

Any prior, scalar or per block, needs K x K work only: the span stays, the coordinates change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..contents import Entry, Mismatch, check_json, is_count, is_positive, largest
from ..tangent import Block, Record, Tangent, Vectors
from .base import LayerBlock, PriorCovariance, precision_entry, register
from .basis import Basis, ExplicitBasis, ImplicitBasis
from .coordinates import CoordinateBasis
from .factor_layer import FactorLayer
from .span import Span
from .terms import FactoredTerm, Term, cross_covariance, unique

if TYPE_CHECKING:
    from typing_extensions import Self


BASES: dict[str, type[Basis]] = {cls.__name__: cls for cls in (CoordinateBasis, ExplicitBasis, ImplicitBasis)}
"""Class name -> class, for reading files."""


class Subspace(PriorCovariance):
    """What both structures share: a basis, the curvature on it, and the prior.

    Args:
        blocks: the blocks.
        basis: W.
        curvature: H = W G Wᵀ (K, K) at unit noise, float64.
        traces: tr G of each block (n_blocks,), float64, for the lower bound of the evidence.
        precision: δ (n_blocks,).
        scale: s.
        rank: how many of the leading directions count; all when None.
        span: the diagonalised span at this prior, where it is known.
    """

    def __init__(
        self,
        blocks: tuple[Block, ...],
        basis: Basis,
        curvature: Tensor,
        traces: Tensor,
        precision: Tensor,
        scale: float,
        rank: int | None = None,
        span: Span | None = None,
    ) -> None:
        self.blocks, self.basis, self.curvature, self.traces = blocks, basis, curvature, traces
        self.precision, self.scale = precision, scale
        self._span = Span(basis, curvature, precision, rank) if span is None else span
        self._weights = 1 / (scale * self._span.values + 1)

    further_extra: ClassVar[dict[str, Any]] = {}
    """Patterns of what a subclass adds to `extra()`."""

    @property
    def scratch_per_row(self) -> int:
        """That of a projection on the basis."""
        return self.basis.scratch_per_row

    @property
    def rank(self) -> int:
        """How many directions count."""
        return self._span.rank

    def is_contracted_with(self, other: PriorCovariance) -> bool:
        """Whether both have the same basis: J is projected on it once for all priors, ranks and curvatures."""
        return isinstance(other, Subspace) and other.basis is self.basis

    def with_rank(self, rank: int) -> Self:
        """Returns the covariance on the first directions alone, K x K work."""
        return type(self)(
            self.blocks, self.basis, self.curvature, self.traces, self.precision, self.scale, min(rank, self.basis.rank)
        )

    def with_prior(self, precision: Tensor, scale: float) -> Self:
        """Returns the covariance on the same span under another prior, K x K work; only a new fit chooses it anew."""
        same = torch.equal(precision / precision[0], self.precision / self.precision[0])
        span = self._span.rescaled(precision) if same else None
        return type(self)(self.blocks, self.basis, self.curvature, self.traces, precision, scale, self.rank, span)

    @property
    def dtype(self) -> torch.dtype:
        """That of the directions."""
        return self.basis.dtype

    @property
    def device(self) -> torch.device:
        """That of the curvature."""
        return self.curvature.device

    def log_det_ratio(self, precision: Tensor, scale: Tensor | float) -> Tensor:
        """Returns the log determinant on the subspace; outside it the posterior has no curvature."""
        return self._span.log_det_ratio(precision, scale)

    def evidence_gap(self, precision: Tensor, scale: Tensor | float) -> Tensor:
        """Returns the trace of the curvature outside the subspace."""
        return self._span.gap(precision, scale, self.traces)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the basis, the curvature on it, the traces and the prior."""
        basis = {f"basis/{name}": tensor for name, tensor in self.basis.tensors().items()}
        return {**basis, "curvature": self.curvature, "traces": self.traces, "precision": self.precision}

    def extra(self) -> dict[str, Any]:
        """Returns the scale, the rank and the kind of basis."""
        basis = {"class": type(self.basis).__name__, "extra": self.basis.extra()}
        return {"scale": self.scale, "rank": self.rank, "basis": basis}

    @classmethod
    def entries(cls, tangent: Tangent, extra: Any) -> dict[str, Entry]:
        """The basis, the curvature on it, the traces and δ."""
        basis = {"class": frozenset(BASES), "extra": dict}
        check_json(
            extra, {"scale": is_positive, "rank": is_count, "basis": basis, **cls.further_extra}, "covariance/extra"
        )
        kind, inner = BASES[extra["basis"]["class"]], extra["basis"]["extra"]
        parts = {f"basis/{name}": entry for name, entry in kind.entries(tangent, inner).items()}
        if extra["rank"] > inner["rank"] or (extra.get("rows") and kind is not ExplicitBasis):
            raise Mismatch("its rank is not that of its basis")
        size, bound = inner["rank"], largest(torch.float64, 1 / 4)
        return {
            **parts,
            "curvature": Entry((size, size), (torch.float64,), -bound, bound),
            "traces": Entry((len(tangent.blocks),), (torch.float64,), 0.0, bound),
            "precision": precision_entry(tangent),
        }

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: dict[str, Tensor], extra: dict[str, Any]) -> Self:
        """Rebuilds the covariance."""
        parts = {k.removeprefix("basis/"): v for k, v in tensors.items() if k.startswith("basis/")}
        basis = BASES[extra["basis"]["class"]].from_tensors(tangent, parts, extra["basis"]["extra"])
        return cls._built(basis, tangent, tensors, extra)

    @classmethod
    def _built(cls, basis: Basis, tangent: Tangent, tensors: dict[str, Tensor], extra: dict[str, Any]) -> Self:
        curvature, traces, precision = (tensors[name] for name in ("curvature", "traces", "precision"))
        return cls(tangent.blocks, basis, curvature, traces, precision, extra["scale"], extra["rank"])


@register
class LowRank(Subspace):
    """`Σ = W̃ᵀ diag(1/(s h + 1)) W̃`: the subspace alone. Arguments as for `Subspace`."""

    @property
    def record_dtype(self) -> torch.dtype | None:  # type: ignore[override]
        """The basis's."""
        return self.basis.record_dtype

    def mv(self, vectors: Vectors) -> Vectors:
        """Returns `Σ v`."""
        return self._span.weighted(vectors, self._weights)

    def sample(self, count: int, generator: torch.Generator) -> Vectors:
        """Returns `W̃ᵀ √w ε` with ε in R^K."""
        shape = (count, len(self._weights))
        noise = torch.randn(shape, generator=generator, dtype=torch.float64, device=self._weights.device)
        return self.basis.combine((noise * self._weights.sqrt()) @ self._span.rotation.T)

    def diagonal(self) -> Vectors:
        """Returns the marginal variances."""
        return {n: (w.square() * self._weights[:, None].to(w.dtype)).sum(0) for n, w in self._span.directions().items()}

    def output_covariance(self, record: Record) -> tuple[Term, ...]:
        """Returns the thin factor `J W̃ᵀ √w` (B, R, K)."""
        return (FactoredTerm(self.factor(self.basis.project(record))),)

    def output_covariances(self, record: Record, candidates: Sequence[Self]) -> Iterable[tuple[Term, ...]]:
        """Projects J on the basis once for all candidates."""
        projected = self.basis.project(record)
        return ((FactoredTerm(candidate.factor(projected)),) for candidate in candidates)

    def factor(self, features: Tensor) -> Tensor:
        """Returns the thin factor `J W̃ᵀ √w` (B, R, k) from features `J Wᵀ` (B, R, K) on the basis."""
        root = self._span.rotation * self._weights.sqrt()  # (K, k)
        return features @ root.to(features.dtype)

    def joint_output_covariance(self, record: Record, other: Record) -> Tensor:
        """Returns the products of the factors of all pairs of samples."""
        root = self._weights.sqrt().to(record.dtype)
        factors = [self._span.project(one) * root for one in unique(record, other)]
        return cross_covariance(factors[0], factors[-1])

    def layer_block(self, name: str) -> LayerBlock:
        """Returns one block's covariance; correlations with other layers are left out."""
        rows = self._span.directions()[name]
        factor = rows * self._weights.sqrt()[:, None].to(rows.dtype)
        return FactorLayer(factor.reshape(-1, *self.block(name).matrix_shape[1:]))
