"""Kronecker-factored covariances as the paper approximates them: both factors shifted by the root of the precision."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ...covariance import Blockwise, Covariance, KroneckerBlock
from ...errors import LapwingError

_SHIFTED: weakref.WeakKeyDictionary[Covariance, Blockwise] = weakref.WeakKeyDictionary()


def seen(covariance: Covariance, kronecker: str) -> Covariance:
    """Returns the covariance that a program is built for, made once: itself for "exact", `shifted` for "shifted"."""
    if kronecker == "exact":
        return covariance
    if covariance not in _SHIFTED:
        _SHIFTED[covariance] = shifted(covariance)
    return _SHIFTED[covariance]


def shifted(covariance: Covariance) -> Blockwise:
    """Returns `(A + √δ I)⁻¹ ⊗ (Γ + √δ I)⁻¹` for each Kronecker-factored block (Streamlined Prediction, equation 10).

    In the place of `(A ⊗ Γ + δI)⁻¹`: the eigenvalues `(α_i + √δ)(γ_j + √δ)` of its inverse exceed `α_i γ_j + δ` by
    `√δ (α_i + γ_j)`, so no variance is larger. A and Γ share the scale of the curvature so that their mean eigenvalues
    agree.

    Raises:
        LapwingError: a posterior without Kronecker factors, or one whose eigenvalues are no products (EKFAC).

    Cost: time O(P).
    """
    found = isinstance(covariance, Blockwise) and [
        name for name, s in covariance.structures.items() if isinstance(s, KroneckerBlock)
    ]
    if not found or not isinstance(covariance, Blockwise):
        raise LapwingError(
            f"Asked for Streamlined(kronecker='shifted'), found a {type(covariance).__name__} without Kronecker "
            "factors; accepted are posteriors of lw.KFAC(): write via=lw.Streamlined()."
        )
    structures = dict(covariance.structures)
    for block, delta in zip(covariance.blocks, covariance.precision.tolist(), strict=True):
        structure = structures[block.name]
        if isinstance(structure, KroneckerBlock):
            alpha, gamma = _factors(structure.eigenvalues.double() * covariance.scale)
            moved = (gamma[..., :, None] + delta**0.5) * (alpha[..., None, :] + delta**0.5) - delta  # (G, O, I)
            moved = (moved / covariance.scale).to(structure.eigenvalues.dtype)
            structures[block.name] = KroneckerBlock(moved, structure.inputs, structure.outputs)
    return Blockwise(covariance.blocks, structures, covariance.precision, covariance.scale)


def _factors(products: Tensor) -> tuple[Tensor, Tensor]:
    """Returns α (G, I) and γ (G, O) with `γ_j α_i` the given products (G, O, I), and equal means."""
    rows, columns, mean = products.mean(-1), products.mean(-2), products.mean((-2, -1))
    root = mean.clamp_min(torch.finfo(products.dtype).tiny).sqrt()[..., None]
    gamma, alpha = rows / root, columns / root
    error = (gamma[..., :, None] * alpha[..., None, :] - products).abs().amax()
    if float(error) > 1e-4 * float(products.abs().amax()):
        raise LapwingError(
            "Asked for Streamlined(kronecker='shifted'), found eigenvalues that are no products of two factors', as "
            "EKFAC's; accepted are posteriors of lw.KFAC(): write via=lw.Streamlined()."
        )
    return alpha, gamma
