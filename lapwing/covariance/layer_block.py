"""The covariance of one layer's weights, in the form in which streamlined prediction and `deploy` use it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from ..jacobian.jacobian import SLICE_BYTES
from .terms import DenseTerm, EigenTerm, Term


class LayerBlock(ABC):
    """The covariance of one layer's matrix weight (O, I), including the bias column."""

    def push(self, mean: Tensor, variance: Tensor | None, full: bool) -> Tensor:
        """Returns `Σ_ii' M_ii' Cov[W_ji, W_j'i']` with `M = E[a aᵀ]`, the (co)variance that the weights add to outputs.

        The input has the mean m (B, I), with a one appended for the bias. Its variances (B, I) or covariances (B, I, I)
        are added to `m mᵀ`. With `full`, returns covariances (B, O, O) instead of variances (B, O).
        """
        term = self.covariances(mean, variance)
        return term.dense() if full else term.variance()

    @abstractmethod
    def covariances(self, mean: Tensor, variance: Tensor | None) -> Term:
        """Returns `push` with covariances as a term, whose centred variances are as precise as possible."""

    def rotation(self) -> tuple[Tensor | None, Tensor] | None:
        """Returns V (G, I, Q) and s (G, O, Q) with `Var[W a]_j = Σ_q (Vᵀ a)_q² s_jq` for certain a, or None.

        V is None if it is the identity. Computed once, it saves the rotation of the outputs in each `push`.
        """
        return None


class DiagonalLayer(LayerBlock):
    """One layer's `diag(w)`, for variances w (G, O, I)."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    def covariances(self, mean: Tensor, variance: Tensor | None) -> EigenTerm:
        (weights,) = self._weights
        return EigenTerm(None, push_diagonal(weights, mean, variance, False))  # the outputs are independent

    def rotation(self) -> tuple[None, Tensor]:
        return None, self._weights


class KroneckerLayer(LayerBlock):
    """One layer's `(U_out ⊗ U_in) diag(w) (U_out ⊗ U_in)ᵀ`, for w (G, O, I)."""

    def __init__(self, inputs: Tensor | None, outputs: Tensor, weights: Tensor) -> None:
        self._inputs, self._outputs, self._weights = inputs, outputs, weights

    def covariances(self, mean: Tensor, variance: Tensor | None) -> EigenTerm:
        """Returns `U_out diag_j(Σ_i (U_inᵀ M U_in)_ii w_ji) U_outᵀ`, `M = m mᵀ + variance` (Streamlined, eq. 10)."""
        assert self._inputs is not None  # tokens have no moments
        basis = self._inputs[0]
        moment = (mean @ basis).square()  # `(U_inᵀ M U_in)_ii` (B, I)
        if variance is not None:  # (B, I), or covariances (B, I, I)
            more = variance @ basis.square() if variance.ndim == 2 else ((variance @ basis) * basis).sum(-2)
            moment = moment + more
        return EigenTerm(self._outputs[0], moment @ self._weights[0].T)

    def rotation(self) -> tuple[Tensor | None, Tensor]:
        return self._inputs, self._outputs.square() @ self._weights


class FactorLayer(LayerBlock):
    """One layer's `Σ_k F_k F_kᵀ`, `diag(D) + Σ_k F_k F_kᵀ`, or `diag(D) - Σ_k F_k F_kᵀ`: F (K, O, I), D (O, I)."""

    def __init__(self, factor: Tensor, variances: Tensor | None = None, removed: bool = False) -> None:
        self._factor, self._variances, self._removed = factor, variances, removed

    def push(self, mean: Tensor, variance: Tensor | None, full: bool) -> Tensor:
        rows, outputs, inputs = self._factor.shape
        fits = outputs * inputs <= max(rows, 4096)  # the matrix of 4096 weights has 64 MiB
        if variance is not None and variance.ndim == 3 and rows >= outputs and fits:
            # by the covariance matrix: O²I² products per sample, compared with K O I² by factors
            moment = (mean[:, :, None] * mean[:, None] + variance).flatten(1)  # (B, I I)
            matrix = self._matrix.to(mean.dtype)
            if full:
                pushed = (moment @ matrix.flatten(2).flatten(0, 1).T).unflatten(1, matrix.shape[:2])  # (B, O, O)
            else:
                pushed = moment @ matrix.diagonal().flatten(0, 1)  # (B, O)
        else:
            pushed = push_factor(self._factor.to(mean.dtype), mean, variance, full)
        if self._variances is None:
            return pushed
        diagonal = push_diagonal(self._variances.to(mean.dtype), mean, variance, full)
        if not self._removed:
            return diagonal + pushed
        return diagonal - pushed if full else (diagonal - pushed).clamp_min(0)

    def covariances(self, mean: Tensor, variance: Tensor | None) -> DenseTerm:
        centred = self._centred.push(mean, variance, False)
        if self._variances is not None:
            diagonal = push_diagonal(self._variances.to(mean.dtype), mean, variance, False)
            of_diagonal = EigenTerm(None, diagonal).centred_variance()
            centred = of_diagonal - centred if self._removed else of_diagonal + centred
        return DenseTerm(self.push(mean, variance, True), centred)

    @cached_property
    def _centred(self) -> FactorLayer:
        return FactorLayer(self._factor - self._factor.mean(1, keepdim=True))

    @cached_property
    def _matrix(self) -> Tensor:
        """The layer's covariance (O, O, I, I)."""
        rows = self._factor.flatten(1)
        _, outputs, inputs = self._factor.shape
        return (rows.T @ rows).reshape(outputs, inputs, outputs, inputs).transpose(1, 2).contiguous()


def push_diagonal(weights: Tensor, mean: Tensor, variance: Tensor | None, full: bool) -> Tensor:
    """Returns `LayerBlock.push` for variances w (O, I): `(m² + v) wᵀ` with the input's variances v."""
    moment = mean.square()
    if variance is not None:
        moment = moment + (variance if variance.ndim == 2 else variance.diagonal(dim1=-2, dim2=-1))
    pushed = moment @ weights.T  # (B, O)
    return torch.diag_embed(pushed) if full else pushed


def push_factor(factor: Tensor, mean: Tensor, variance: Tensor | None, full: bool) -> Tensor:
    """Returns `LayerBlock.push` for the covariance `Σ_k F_k F_kᵀ` of F (K, O, I), by slices of F."""
    covariances = full and variance is not None and variance.ndim == 3
    numbers = factor.shape[1] * (factor.shape[2] if covariances else 1) * mean.element_size()
    exported = torch.compiler.is_compiling()  # for any batch size, so the number of slices must not depend on it
    pushed = mean.new_zeros(())
    for rows in factor.split(max(1, len(factor) if exported else SLICE_BYTES // (numbers * mean.shape[0]))):
        means = torch.einsum("koi,bi->bko", rows, mean)
        pushed = pushed + (means.mT @ means if full else means.square().sum(1))
        if covariances:
            pushed = pushed + torch.einsum("bkoj,kpj->bop", torch.einsum("koi,bij->bkoj", rows, variance), rows)
    if variance is None or covariances:
        return pushed
    if full:
        return pushed + torch.einsum("koi,kpi,bi->bop", factor, factor, variance)
    if variance.ndim == 2:
        return pushed + variance @ factor.square().sum(0).T
    return pushed + torch.einsum("koi,koj,bij->bo", factor, factor, variance)
