"""A subspace of the weights at one prior, in the coordinates in which prior and curvature are both diagonal.

A basis of K directions W (K, P), the curvature `H = W G Wᵀ` on it and the prior's `D = W Δ Wᵀ`. The generalised
eigenpairs `H q = h D q` with `qᵀ D q = 1` are the columns of Q. They give directions `W̃ = Qᵀ W`, orthonormal in
whitened weights: `V = W̃ Δ^(1/2)`. Of a basis that is ordered, the first k directions alone may count. The covariances
of `low_rank.py` are functions of all this.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ..errors import LapwingError
from ..linalg import cholesky, symmetric_eigen
from ..tangent import Record, Vectors
from .basis import Basis


class Span:
    """The first k directions of a basis, diagonalised: h (k,) and Q (K, k).

    Args:
        basis: W.
        curvature: H (K, K), float64.
        precision: δ (n_blocks,).
        rank: k, how many of the leading directions count; all when None.

    Attributes:
        values: h.
        rotation: Q, its rows beyond k zero.
    """

    def __init__(self, basis: Basis, curvature: Tensor, precision: Tensor, rank: int | None = None) -> None:
        self.basis, self.precision = basis, precision
        self.rank = basis.rank if rank is None else rank
        self.curvature = curvature[: self.rank, : self.rank]
        root = cholesky(self._prior(precision))  # D = L Lᵀ
        whitened = torch.linalg.solve_triangular(root, self.curvature, upper=False)
        whitened = torch.linalg.solve_triangular(root, whitened.T, upper=False)
        self.values, rotation = symmetric_eigen(whitened)
        rotation = torch.linalg.solve_triangular(root.T, rotation, upper=True)  # Q = L⁻ᵀ U
        self._rotation = torch.nn.functional.pad(rotation, (0, 0, 0, basis.rank - self.rank))
        self._rotation_scale = 1.0

    @property
    def rotation(self) -> Tensor:
        """Q, made of the one that all rescaled spans share."""
        return self._rotation if self._rotation_scale == 1.0 else self._rotation * self._rotation_scale

    def _prior(self, precision: Tensor) -> Tensor:
        return self.basis.prior_gram(precision)[: self.rank, : self.rank]

    def log_det_ratio(self, precision: Tensor, scale: Tensor | float) -> Tensor:
        """Returns `Σ log(1 + s h)` at any prior, as `logdet(D + s H) - logdet D` where h is not known there."""
        if (values := self.values_at(precision)) is not None:
            return torch.log1p(scale * values).sum()
        prior = self._prior(precision)
        with_data, without = cholesky(prior + scale * self.curvature), cholesky(prior)
        return 2 * (with_data.diagonal().log() - without.diagonal().log()).sum()

    def gap(self, precision: Tensor, scale: Tensor | float, traces: Tensor) -> Tensor:
        """Returns `s [Σ_b tr(G_b)/δ_b - tr(D⁻¹ H)]`, the curvature outside.

        Raises:
            LapwingError: if the fit did not sum the traces.
        """
        if self.curvature.any() and not traces.any():
            raise LapwingError(
                "The lower bound of a subspace's evidence needs the trace of the curvature, which this fit did not "
                "sum. Fit with tune=lw.Evidence(); prior_precision=... beside it keeps the prior."
            )
        if (values := self.values_at(precision)) is not None:
            inside = values.sum()
        else:
            inside = torch.cholesky_solve(self.curvature, cholesky(self._prior(precision))).diagonal().sum()
        return scale * ((traces / precision).sum() - inside).clamp_min(0)

    def values_at(self, precision: Tensor) -> Tensor | None:
        """Returns h (k,) at a prior of the same ratios between blocks, where it needs no gradient; else None."""
        if precision.requires_grad or not torch.equal(precision / precision[0], self.precision / self.precision[0]):
            return None
        return self.values * (self.precision[0] / precision[0])

    def project(self, record: Record) -> Tensor:
        """Returns `J W̃ᵀ` (B, R, k)."""
        return self.basis.project(record) @ self.rotation.to(record.dtype)

    def directions(self) -> Vectors:
        """Returns W̃, (k, P_block) a block."""
        return self.basis.combine(self.rotation.T)

    def weighted(self, vectors: Vectors, weights: Tensor) -> Vectors:
        """Returns `W̃ᵀ diag(w) W̃ v`."""
        dtype, first = self.basis.dtype, next(iter(vectors.values()))
        flat = {name: vector.reshape(-1, vector.shape[-1]) for name, vector in vectors.items()}
        inner = self.basis.inner(flat) @ self.rotation.to(dtype)  # (n, k)
        combined = self.basis.combine((inner * weights.to(dtype)) @ self.rotation.T.to(dtype))
        return {name: vector.reshape(*first.shape[:-1], -1) for name, vector in combined.items()}

    def rescaled(self, precision: Tensor) -> Span:
        """Returns the span at a prior precision of the same ratios between blocks, nothing decomposed again."""
        again = copy.copy(self)
        factor = float(self.precision[0] / precision[0])
        again.precision, again.values, again._rotation_scale = (
            precision,
            self.values * factor,
            self._rotation_scale * factor**0.5,
        )
        return again
