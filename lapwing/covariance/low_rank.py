"""Subspace covariances, which ELLA, optimal subspaces, subsets of weights, VaLLA and the dual form of Full use.

A subspace has a basis of K directions W (K, P), the curvature `H = W G Wᵀ` and the prior `D = W Δ Wᵀ`. The generalised
eigenpairs `H q = h D q` with `qᵀ D q = 1` are the columns of Q. They give directions `W̃ = Qᵀ W`, orthonormal in
whitened weights: `V = W̃ Δ^(1/2)`. A new prior keeps the span and changes the coordinates: K x K work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import TypeIs

from ..errors import LapwingError
from ..files import prefixed, under
from ..jacobian.jacobian import Reads
from ..linalg import cholesky, symmetric_eigen
from ..tangent import Block, Record, Tangent, TensorSpec, Vectors
from .base import Covariance, PriorCovariance, precision_spec, register_covariance, same_ratios
from .basis import Basis, CoordinateBasis, ExplicitBasis, ImplicitBasis
from .layer_block import FactorLayer, LayerBlock
from .terms import FactoredTerm, Terms, cross_covariance, of_both, standard_normal

BASES: dict[str, type[Basis]] = {cls.__name__: cls for cls in (CoordinateBasis, ExplicitBasis, ImplicitBasis)}
"""Class name -> class, to read files."""


class Subspace(PriorCovariance):
    """A subspace covariance: a basis W, the curvature H (K, K) on it at unit noise, and the prior.

    The first k = `rank` directions count. `traces` are tr G of each block, for the lower bound of the evidence. `eigen`
    holds h (k,), Q (K, k) with rows beyond k zero, and the precision at which they were computed.
    """

    continued_by = "basis"

    def __init__(
        self,
        blocks: tuple[Block, ...],
        basis: Basis,
        curvature: Tensor,
        traces: Tensor,
        precision: Tensor,
        scale: float,
        rank: int | None = None,
        eigen: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        self.blocks, self.basis, self.curvature, self.traces = blocks, basis, curvature, traces
        self.precision, self.scale = precision, scale
        self.rank, self.scratch_per_row = basis.rank if rank is None else rank, basis.scratch_per_row
        self._leading = curvature[: self.rank, : self.rank]  # of H, (k, k)
        self._eigen = eigen if eigen is not None and same_ratios(eigen[2], precision) else self._diagonalised()
        self._curvatures = self._eigen[0] * (self._eigen[2][0] / precision[0])  # h (k,)
        self._weights = 1 / (scale * self._curvatures + 1)

    def _diagonalised(self) -> tuple[Tensor, Tensor, Tensor]:
        # 1. D = L Lᵀ and L⁻¹ H L⁻ᵀ = U diag(h) Uᵀ (k, k)
        root = cholesky(self._prior(self.precision))  # D = L Lᵀ
        whitened = torch.linalg.solve_triangular(root, self._leading, upper=False)
        whitened = torch.linalg.solve_triangular(root, whitened.T, upper=False)
        values, rotation = symmetric_eigen(whitened)
        # 2. Q = L⁻ᵀ U: then Qᵀ D Q = I and H Q = D Q diag(h)
        rotation = torch.linalg.solve_triangular(root.T, rotation, upper=True)  # Q = L⁻ᵀ U
        return values, torch.nn.functional.pad(rotation, (0, 0, 0, self.basis.rank - self.rank)), self.precision

    def _prior(self, precision: Tensor) -> Tensor:
        return self.basis.prior_gram(precision)[: self.rank, : self.rank]

    @property
    def _rotation(self) -> Tensor:
        """Q at this prior, scaled from the stored Q, which all priors with the same ratios share."""
        _, rotation, at = self._eigen
        return rotation * (at[0] / self.precision[0]).sqrt()

    def _curvatures_at(self, precision: Tensor) -> Tensor | None:
        """Returns h (k,) at a prior with the same ratios between blocks, or None if the ratios differ."""
        same = same_ratios(precision, self.precision)
        return self._curvatures * (self.precision[0] / precision[0]) if same else None

    def _directions(self) -> Vectors:
        """Returns W̃: block name -> (k, P_block)."""
        return self.basis.combine(self._rotation.T)

    def _weighted(self, vectors: Vectors, weights: Tensor) -> Vectors:
        """Returns `W̃ᵀ diag(w) W̃ v`."""
        first = next(iter(vectors.values()))
        flat = {name: vector.reshape(-1, vector.shape[-1]) for name, vector in vectors.items()}
        # W v (n, K), then W̃ v = Qᵀ W v (n, k), times w, and back by W̃ᵀ = Wᵀ Q
        inner = self.basis.inner(flat)  # (n, K)
        rotation = self._rotation.to(inner)
        combined = self.basis.combine((inner @ rotation * weights.to(inner)) @ rotation.T)
        return {name: vector.reshape(*first.shape[:-1], -1) for name, vector in combined.items()}

    def _squares(self, weights: Tensor) -> Vectors:
        """Returns the diagonal of `W̃ᵀ diag(w) W̃`."""
        return {n: (w.square() * weights[:, None].to(w)).sum(0) for n, w in self._directions().items()}

    def _layer_rows(self, name: str, weights: Tensor) -> Tensor:
        """Returns the rows of `√w W̃` in one layer (k, O, I)."""
        rows = self._directions()[name]
        return (rows * weights.sqrt()[:, None].to(rows)).reshape(-1, *self.block(name).matrix_shape[1:])

    def shares_contraction_with(self, other: PriorCovariance) -> bool:
        """Whether both have the same basis: J is projected on it once for all priors, ranks and curvatures."""
        return isinstance(other, Subspace) and other.basis is self.basis

    def with_rank(self, rank: int) -> Self:
        parts = self.blocks, self.basis, self.curvature, self.traces
        return type(self)(*parts, self.precision, self.scale, min(rank, self.basis.rank))

    def with_prior(self, precision: Tensor, scale: float) -> Self:
        parts = self.blocks, self.basis, self.curvature, self.traces
        return type(self)(*parts, precision, scale, self.rank, self._eigen)

    @property
    def dtype(self) -> torch.dtype:
        return self.basis.dtype

    @property
    def device(self) -> torch.device:
        return self.curvature.device

    def log_det_ratio(self, precision: Tensor, scale: Tensor | float) -> Tensor:
        """Returns `Σ log(1 + s h)`, or the equal `logdet(D + s H) - logdet D` if h is not known."""
        if (values := self._curvatures_at(precision)) is not None:
            return torch.log1p(scale * values).sum()
        prior = self._prior(precision)
        with_data, without = cholesky(prior + scale * self._leading), cholesky(prior)
        return 2 * (with_data.diagonal().log() - without.diagonal().log()).sum()

    def evidence_gap(self, precision: Tensor, scale: Tensor | float) -> Tensor:
        """Returns `s [Σ_b tr(G_b)/δ_b - tr(D⁻¹ H)]`, the curvature outside the subspace; needs summed traces."""
        if self._leading.any() and not self.traces.any():
            raise LapwingError(
                "The lower bound of a subspace's evidence needs the trace of the curvature, which this fit did not "
                "sum. Fit with tune=lw.Evidence(). Add prior_precision=... to keep the prior."
            )
        # tr(D⁻¹ H) = Σ h
        if (values := self._curvatures_at(precision)) is not None:
            inside = values.sum()
        else:
            inside = torch.cholesky_solve(self._leading, cholesky(self._prior(precision))).diagonal().sum()
        return scale * ((self.traces / precision).sum() - inside).clamp_min(0)

    def tensors(self) -> dict[str, Tensor]:
        own = {"curvature": self.curvature, "traces": self.traces, "precision": self.precision}
        return {**prefixed("basis", self.basis.tensors()), **own}

    def extra(self) -> dict[str, Any]:
        basis = {"class": type(self.basis).__name__, "extra": self.basis.extra()}
        return {**super().extra(), "rank": self.rank, "basis": basis}

    @classmethod
    def entries(cls, tangent: Tangent, extra: Mapping[str, Any]) -> dict[str, TensorSpec]:
        kind, inner = BASES[extra["basis"]["class"]], extra["basis"]["extra"]
        parts = prefixed("basis", kind.entries(tangent, inner))
        curvature, per_block = TensorSpec((inner["rank"], inner["rank"]), (torch.float64,)), precision_spec(tangent)
        return {**parts, "curvature": curvature, "traces": per_block, "precision": per_block}

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: dict[str, Tensor], extra: dict[str, Any]) -> Self:
        kind, inner = BASES[extra["basis"]["class"]], extra["basis"]["extra"]
        basis = kind.from_tensors(tangent, under("basis", tensors), inner)
        numbers = (tensors[name] for name in ("curvature", "traces", "precision"))
        return cls._built(extra, tangent.blocks, basis, *numbers, extra["scale"], extra["rank"])

    @classmethod
    def _built(cls, extra: dict[str, Any], *parts: Any) -> Self:
        return cls(*parts)


def has_rank(covariance: Covariance) -> TypeIs[Subspace]:
    """Whether a covariance is a subspace that can be restricted to leading directions."""
    return isinstance(covariance, Subspace)


@register_covariance
class LowRank(Subspace):
    """`Σ = W̃ᵀ diag(1/(s h + 1)) W̃`: variance 0 outside the subspace. Arguments as for `Subspace`."""

    @property
    def record_dtype(self) -> torch.dtype | None:  # type: ignore[override]
        return self.basis.record_dtype

    def mv(self, vectors: Vectors) -> Vectors:
        return self._weighted(vectors, self._weights)

    def sample(self, count: int, generator: torch.Generator) -> Vectors:
        """Returns `W̃ᵀ √w ε` with ε in R^K."""
        noise = standard_normal((count, len(self._weights)), self._weights, generator)
        return self.basis.combine((noise * self._weights.sqrt()) @ self._rotation.T)

    def diagonal(self) -> Vectors:
        return self._squares(self._weights)

    def output_covariances(self, record: Record, candidates: Sequence[Self], reads: Reads) -> Iterable[Terms]:
        """Returns the thin factor `J W̃ᵀ √w` (B, R, K) of each candidate. J is projected once."""
        projected = self.basis.project(record)
        return ((FactoredTerm(candidate.factor(projected)).read(reads),) for candidate in candidates)

    def factor(self, features: Tensor) -> Tensor:
        """Returns the thin factor `J W̃ᵀ √w` (B, R, k) from features `J Wᵀ` (B, R, K) on the basis."""
        root = self._rotation * self._weights.sqrt()  # (K, k)
        return features @ root.to(features)

    def joint_output_covariance(self, record: Record, other: Record) -> Tensor:
        return cross_covariance(*of_both(lambda one: self.factor(self.basis.project(one)), record, other))

    def layer_block(self, name: str) -> LayerBlock:
        return FactorLayer(self._layer_rows(name, self._weights))
