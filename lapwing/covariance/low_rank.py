"""Subspace covariances: what ELLA, optimal subspaces, subsets, VaLLA and the dual form of Full have in common.

In the coordinates of `span.py`, with directions W̃ orthonormal in whitened weights and curvatures h on them:

    without residual   Σ = W̃ᵀ diag(1/(s h + 1)) W̃                        directions outside the span have variance 0
    with residual      Σ = Δ⁻¹ - W̃ᵀ diag(s h/(s h + 1)) W̃                 directions outside keep the prior

Any prior, scalar or per block, needs K x K work only: the span stays, the coordinates change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..contents import Entry, Unfit, check_json, is_count, is_positive, largest
from ..linalg import RESOLVED, cholesky
from ..tangent import Block, Record, Tangent, Vectors
from .base import LayerBlock, PrecisionCovariance, PriorCovariance, precision_entry
from .basis import Basis, ExplicitBasis, ImplicitBasis
from .coordinates import CoordinateBasis
from .output import Dense, Marginals, Term, Thin, across, distinct
from .span import Span
from .structures import FactorLayer

if TYPE_CHECKING:
    from typing_extensions import Self


BASES: dict[str, type[Basis]] = {cls.__name__: cls for cls in (CoordinateBasis, ExplicitBasis, ImplicitBasis)}
"""Class name -> class, for reading files."""


class _LayerWithResidual(LayerBlock):
    """One layer's prior variance less what the data took from it, F (K, O, I)."""

    def __init__(self, prior_variance: float, taken: Tensor) -> None:
        self._prior_variance, self._outputs, self._taken = prior_variance, taken.shape[1], FactorLayer(taken)

    def push(self, mean: Tensor, variance: Tensor | None, full: bool) -> Tensor:
        moment = mean.square().sum(-1)  # (B,), the trace of M
        if variance is not None:
            moment = moment + (variance if variance.ndim == 2 else variance.diagonal(dim1=-2, dim2=-1)).sum(-1)
        prior = (self._prior_variance * moment)[:, None].expand(-1, self._outputs)
        taken = self._taken.push(mean, variance, full)
        return torch.diag_embed(prior) - taken if full else (prior - taken).clamp_min(0)


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
        self._at = Span(basis, curvature, precision, rank) if span is None else span
        self._weights = 1 / (scale * self._at.values + 1)

    own: ClassVar[dict[str, Any]] = {}
    """What a structure's `extra()` holds beside this one's."""

    @property
    def held(self) -> int:
        """What a projection on the basis holds."""
        return self.basis.held

    @property
    def rank(self) -> int:
        """How many directions count."""
        return self._at.rank

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
        span = self._at.rescaled(precision) if same else None
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
        return self._at.log_det_ratio(precision, scale)

    def evidence_gap(self, precision: Tensor, scale: Tensor | float) -> Tensor:
        """Returns the trace of the curvature outside the subspace."""
        return self._at.gap(precision, scale, self.traces)

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
        check_json(extra, {"scale": is_positive, "rank": is_count, "basis": basis, **cls.own}, "covariance/extra")
        kind, inner = BASES[extra["basis"]["class"]], extra["basis"]["extra"]
        parts = {f"basis/{name}": entry for name, entry in kind.entries(tangent, inner).items()}
        if extra["rank"] > inner["rank"] or (extra.get("rows") and kind is not ExplicitBasis):
            raise Unfit("its rank is not that of its basis")
        size, most = inner["rank"], largest(torch.float64, 1 / 4)
        return {
            **parts,
            "curvature": Entry((size, size), (torch.float64,), -most, most),
            "traces": Entry((len(tangent.blocks),), (torch.float64,), 0.0, most),
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


class LowRank(Subspace):
    """`Σ = W̃ᵀ diag(1/(s h + 1)) W̃`: the subspace alone. Arguments as for `Subspace`."""

    @property
    def record_dtype(self) -> torch.dtype | None:  # type: ignore[override]
        """float64 where the basis is implicit, which subtracts nearly equal numbers."""
        return torch.float64 if isinstance(self.basis, ImplicitBasis) else None

    def mv(self, vectors: Vectors) -> Vectors:
        """Returns `Σ v`."""
        return self._at.weighted(vectors, self._weights)

    def sample(self, count: int, generator: torch.Generator) -> Vectors:
        """Returns `W̃ᵀ √w ε` with ε in R^K."""
        shape = (count, len(self._weights))
        noise = torch.randn(shape, generator=generator, dtype=torch.float64, device=self._weights.device)
        return self.basis.combine((noise * self._weights.sqrt()) @ self._at.rotation.T)

    def diagonal(self) -> Vectors:
        """Returns the marginal variances."""
        return {n: (w.square() * self._weights[:, None].to(w.dtype)).sum(0) for n, w in self._at.directions().items()}

    def output_covariance(self, record: Record) -> tuple[Term, ...]:
        """Returns the thin factor `J W̃ᵀ √w` (B, R, K)."""
        return (Thin(self.factor(self.basis.project(record))),)

    def output_covariances(self, record: Record, candidates: Sequence[Self]) -> Iterable[tuple[Term, ...]]:
        """Projects J on the basis once for all candidates."""
        projected = self.basis.project(record)
        return ((Thin(candidate.factor(projected)),) for candidate in candidates)

    def factor(self, features: Tensor) -> Tensor:
        """Returns the thin factor `J W̃ᵀ √w` (B, R, k) from features `J Wᵀ` (B, R, K) on the basis."""
        root = self._at.rotation * self._weights.sqrt()  # (K, k)
        return features @ root.to(features.dtype)

    def joint_output_covariance(self, record: Record, other: Record) -> Tensor:
        """Returns the factors' products across samples."""
        root = self._weights.sqrt().to(record.dtype)
        factors = [self._at.project(one) * root for one in distinct(record, other)]
        return across(factors[0], factors[-1])

    def layer_block(self, name: str) -> LayerBlock:
        """Returns one block's covariance; correlations with other layers are left out."""
        rows = self._at.directions()[name]
        factor = rows * self._weights.sqrt()[:, None].to(rows.dtype)
        return FactorLayer(factor.reshape(-1, *self.block(name).matrix_shape[1:]))


class LowRankWithResidual(Subspace, PrecisionCovariance):
    """`Σ = Δ⁻¹ - W̃ᵀ diag(s h/(s h + 1)) W̃`: the prior outside the subspace. Arguments as for `Subspace`.

    It subtracts nearly equal numbers, so records are contracted in float64. Where the curvature lies in the span of
    known rows, `from_rows` makes it exact at every prior.
    """

    record_dtype = torch.float64
    own = {"rows": bool}  # noqa: RUF012 (never written)
    _rows: tuple[ExplicitBasis, Tensor] | None = None
    """U and M with `G = Uᵀ M U`, of which W and H were made for this prior, or None."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._removed = self.scale * self._at.values * self._weights
        self._delta = {block.name: delta for block, delta in zip(self.blocks, self.precision.tolist(), strict=True)}

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

        The span that holds all of G is `W = U Δ⁻¹`, for which `H = S M S` with `S = U Δ⁻¹ Uᵀ`.

        Args:
            blocks: the blocks.
            rows: U (K, P), linearly independent.
            curvature: M (K, K).
            traces: tr G of each block.
            precision: δ (n_blocks,).
            scale: s.
        """
        ratios = precision / precision[0]
        inner = rows.prior_gram(1 / ratios)
        basis = rows
        if not torch.equal(ratios, torch.ones_like(ratios)):
            basis = ExplicitBasis({n: u / r for (n, u), r in zip(rows.vectors.items(), ratios.tolist(), strict=True)})
        return cls(blocks, basis, inner @ curvature @ inner, traces, precision, scale)._with_rows(rows, curvature)

    def _with_rows(self, rows: ExplicitBasis, curvature: Tensor) -> Self:
        """Notes U and M while the covariance is being made."""
        self._rows = (rows, curvature)
        return self

    def with_prior(self, precision: Tensor, scale: float) -> Self:
        """Returns the covariance under another prior: K x K work on the same span, which only a new fit chooses anew.

        One made by `from_rows` follows the ratios between blocks at O(K P).
        """
        if self._rows is not None and not torch.equal(precision / precision[0], self.precision / self.precision[0]):
            return self.from_rows(self.blocks, *self._rows, self.traces, precision, scale)
        again = super().with_prior(precision, scale)
        return again if self._rows is None else again._with_rows(*self._rows)

    def log_det_ratio(self, precision: Tensor, scale: Tensor | float) -> Tensor:
        """Returns the log determinant on the subspace; outside it the posterior is the prior."""
        if self._rows is None or self._at.values_at(precision) is not None:
            return self._at.log_det_ratio(precision, scale)
        rows, curvature = self._rows
        root = cholesky(rows.prior_gram(1 / precision))
        eye = torch.eye(len(root), dtype=root.dtype, device=root.device)
        return 2 * cholesky(eye + scale * root.T @ curvature @ root).diagonal().log().sum()

    def rounded(self) -> bool:
        """Whether `s G` exceeds the prior precision by more than float64 sums resolve."""
        return bool((self._weights * RESOLVED < 1).any())

    def evidence_gap(self, precision: Tensor, scale: Tensor | float) -> Tensor:
        """Returns the trace of the curvature outside the subspace."""
        if self._rows is not None:
            return torch.zeros((), dtype=torch.float64, device=precision.device)
        return self._at.gap(precision, scale, self.traces)

    def mv(self, vectors: Vectors) -> Vectors:
        """Returns `Σ v`."""
        taken = self._at.weighted(vectors, self._removed)
        return {name: vector / self._delta[name] - taken[name] for name, vector in vectors.items()}

    def solve(self, vectors: Vectors) -> Vectors:
        """Returns `Δ v + Δ W̃ᵀ diag(s h) W̃ Δ v`."""
        scaled = {name: vector * self._delta[name] for name, vector in vectors.items()}
        added = self._at.weighted(scaled, self.scale * self._at.values)
        return {name: vector + added[name] * self._delta[name] for name, vector in scaled.items()}

    def sample(self, count: int, generator: torch.Generator) -> Vectors:
        """Returns `Δ^(-1/2) z + W̃ᵀ (√w - 1) W̃ Δ^(1/2) z`."""
        roots = {name: delta**0.5 for name, delta in self._delta.items()}
        noise = {
            block.name: torch.randn(
                (count, block.size), generator=generator, dtype=self.dtype, device=self._weights.device
            )
            for block in self.blocks
        }
        moved = self._at.weighted({n: z * roots[n] for n, z in noise.items()}, self._weights.sqrt() - 1)
        return {name: z / roots[name] + moved[name] for name, z in noise.items()}

    def diagonal(self) -> Vectors:
        """Returns the marginal variances."""
        return {
            name: 1 / self._delta[name] - (w.square() * self._removed[:, None].to(w.dtype)).sum(0)
            for name, w in self._at.directions().items()
        }

    def output_covariance(self, record: Record) -> tuple[Term, ...]:
        """Returns `J Δ⁻¹ Jᵀ - φ diag(s h/(s h + 1)) φᵀ`, `φ = J W̃ᵀ`, from one float64 record."""
        return self.output_covariances(record, [self])[0]

    def output_covariances(self, record: Record, candidates: Sequence[Self]) -> list[tuple[Term, ...]]:
        """Projects J on the basis, and takes each block's `J Jᵀ`, once for all candidates on the same basis."""
        factors = self._factors(record, candidates)
        totals = [-factor @ factor.mT for factor in factors]
        for block, gram in self._grams(record):
            for total, candidate in zip(totals, candidates, strict=True):
                total += gram / candidate._delta[block.name]
        return [(Dense(total),) for total in totals]

    def output_marginals(self, record: Record, candidates: Sequence[Self]) -> Iterable[Marginals]:
        """The same, to variances that are added up as they come."""
        totals = []
        for factor in self._factors(record, candidates):
            taken = Marginals.of(Thin(factor))
            totals.append(Marginals(-taken.plain, -taken.centred))
        for block, gram in self._grams(record):
            prior = Marginals.of(Dense(gram))
            for total, candidate in zip(totals, candidates, strict=True):
                total.plain.add_(prior.plain, alpha=1 / candidate._delta[block.name])
                total.centred.add_(prior.centred, alpha=1 / candidate._delta[block.name])
        return totals

    def _factors(self, record: Record, candidates: Sequence[Self]) -> Iterator[Tensor]:
        """Yields `φ √(s h/(s h + 1))` of each candidate, J projected once on a basis that consecutive ones share."""
        basis, projected = None, record.outputs
        for candidate in candidates:
            if candidate.basis is not basis:
                basis, projected = candidate.basis, candidate.basis.project(record)
            yield projected @ (candidate._at.rotation * candidate._removed.sqrt()).to(projected.dtype)

    def _grams(self, record: Record) -> Iterator[tuple[Block, Tensor]]:
        """Yields `J Jᵀ` (B, R, R) of each block."""
        for block in self.blocks:
            ones = torch.ones(block.size, dtype=record.dtype, device=self.device)
            yield block, record[block.name].weighted_gram(ones)

    def joint_output_covariance(self, record: Record, other: Record) -> Tensor:
        """The same across samples, with the NTK for the prior's part."""
        prior = 0
        for block in self.blocks:
            jacobians = [one[block.name] for one in distinct(record, other)]
            prior = prior + jacobians[0].gram(jacobians[-1]) / self._delta[block.name]
        factors = [self._at.project(one) for one in distinct(record, other)]
        return prior - across(factors[0] * self._removed.to(factors[0].dtype), factors[-1])

    def layer_block(self, name: str) -> LayerBlock:
        """Returns one block's covariance; correlations with other layers are left out."""
        rows = self._at.directions()[name]
        factor = rows * self._removed.sqrt()[:, None].to(rows.dtype)
        return _LayerWithResidual(1 / self._delta[name], factor.reshape(-1, *self.block(name).matrix_shape[1:]))

    def tensors(self) -> dict[str, Tensor]:
        """Returns the basis (or rows), the curvature on it, the traces and the prior."""
        if self._rows is None:
            return super().tensors()
        rows, curvature = self._rows
        return {**super().tensors(), **{f"basis/{n}": u for n, u in rows.tensors().items()}, "curvature": curvature}

    def extra(self) -> dict[str, Any]:
        """Adds whether the basis are rows that hold all of the curvature."""
        return {**super().extra(), "rows": self._rows is not None}

    @classmethod
    def _built(cls, basis: Basis, tangent: Tangent, tensors: dict[str, Tensor], extra: dict[str, Any]) -> Self:
        if not extra["rows"]:
            return super()._built(basis, tangent, tensors, extra)
        assert isinstance(basis, ExplicitBasis)
        curvature, traces, precision = (tensors[name] for name in ("curvature", "traces", "precision"))
        return cls.from_rows(tangent.blocks, basis, curvature, traces, precision, extra["scale"])
