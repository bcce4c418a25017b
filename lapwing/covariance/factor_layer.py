"""One layer's covariance as a sum of outer products, `Σ_k F_k F_kᵀ`: what structures other than blocks give it as."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ..jacobian.jacobian import SLICE_BYTES
from .base import LayerBlock

MATRIX_SIDE = 4096
"""A layer with at most so many weights may have its covariance written out, 64 MiB, where that saves work."""


class FactorLayer(LayerBlock):
    """One layer's `Σ_k F_k F_kᵀ` for rows F (K, O, I)."""

    def __init__(self, factor: Tensor) -> None:
        self._factor = factor

    def push(self, mean: Tensor, variance: Tensor | None, full: bool) -> Tensor:
        rows, outputs, inputs = self._factor.shape
        fits = outputs * inputs <= max(rows, MATRIX_SIDE)
        if variance is not None and variance.ndim == 3 and rows >= outputs and fits:
            return self._push_matrix(mean, variance, full)
        return push_factor(self._factor.to(mean.dtype), mean, variance, full)

    @cached_property
    def _matrix(self) -> Tensor:
        """The layer's covariance (O, O, I, I)."""
        rows = self._factor.flatten(1)
        _, outputs, inputs = self._factor.shape
        return (rows.T @ rows).reshape(outputs, inputs, outputs, inputs).transpose(1, 2).contiguous()

    def _push_matrix(self, mean: Tensor, variance: Tensor, full: bool) -> Tensor:
        """Contracts the covariance with `M = m mᵀ + V`: O²I² products a sample, where the rows take K O I²."""
        moment = (mean[:, :, None] * mean[:, None] + variance).flatten(1)  # (B, I I)
        matrix = self._matrix.to(mean.dtype)
        if full:
            return (moment @ matrix.flatten(2).flatten(0, 1).T).unflatten(1, matrix.shape[:2])  # (B, O, O)
        return moment @ matrix.diagonal().permute(2, 0, 1).flatten(1).T  # (B, O)


def push_factor(factor: Tensor, mean: Tensor, variance: Tensor | None, full: bool) -> Tensor:
    """Returns `LayerBlock.push` for the covariance `Σ_k F_k F_kᵀ` of F (K, O, I), a slice of F at a time."""
    covariances = full and variance is not None and variance.ndim == 3
    numbers = mean.shape[0] * factor.shape[1] * (factor.shape[2] if covariances else 1)
    pushed = mean.new_zeros(())
    for rows in factor.split(max(1, SLICE_BYTES // (numbers * mean.element_size()))):
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
