"""Equation 10: Kronecker-factored covariances with both factors shifted by the root of the prior precision."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lapwing import LapwingError, Posterior
from lapwing.covariance import Blockwise, Covariance, KroneckerBlock


def equation_10(posterior: Posterior) -> Posterior:
    """Returns a posterior of `lw.KFAC()` with `(Γ + √δ I)⁻¹ ⊗ (A + √δ I)⁻¹` in the place of `(Γ ⊗ A + δI)⁻¹`.

    It predicts by any way. Of what depends on the curvature itself, such as its evidence, it must not be asked.

    Raises:
        LapwingError: a posterior without Kronecker factors, or one whose eigenvalues are no products (EKFAC).
    """
    return replace(posterior, covariance=shifted(posterior.covariance))


def shifted(covariance: Covariance) -> Blockwise:
    """Returns `(Γ + √δ I)⁻¹ ⊗ (A + √δ I)⁻¹` for each Kronecker-factored block.

    The eigenvalues `(γ_j + √δ)(α_i + √δ)` of its inverse exceed `γ_j α_i + δ` by `√δ (α_i + γ_j)`, so no
    variance is larger than the exact one. A and Γ share the scale of the curvature so that their mean eigenvalues
    agree.

    Raises:
        LapwingError: a posterior without Kronecker factors, or one whose eigenvalues are no products (EKFAC).

    Cost: time O(P).
    """
    found = isinstance(covariance, Blockwise) and [
        name for name, s in covariance.structures.items() if isinstance(s, KroneckerBlock)
    ]
    if not found or not isinstance(covariance, Blockwise):
        raise LapwingError("The posterior has no Kronecker factors. Fit one by lw.KFAC().")
    structures = dict(covariance.structures)
    for block, delta in zip(covariance.blocks, covariance.precision.tolist(), strict=True):
        structure = structures[block.name]
        if isinstance(structure, KroneckerBlock):
            alpha, gamma = _factors(structure.eigenvalues.double() * covariance.scale)
            moved = (gamma[..., :, None] + delta**0.5) * (alpha[..., None, :] + delta**0.5) - delta  # (G, O, I)
            moved = (moved / covariance.scale).to(structure.eigenvalues.dtype)
            structures[block.name] = replace(structure, eigenvalues=moved)
    return Blockwise(covariance.blocks, structures, covariance.precision, covariance.scale)


def _factors(products: Tensor) -> tuple[Tensor, Tensor]:
    """Returns α (G, I) and γ (G, O) with `γ_j α_i` the given products (G, O, I), and equal means."""
    rows, columns, mean = products.mean(-1), products.mean(-2), products.mean((-2, -1))
    root = mean.clamp_min(torch.finfo(products.dtype).tiny).sqrt()[..., None]
    gamma, alpha = rows / root, columns / root
    error = (gamma[..., :, None] * alpha[..., None, :] - products).abs().amax()
    if float(error) > 1e-4 * float(products.abs().amax()):
        raise LapwingError("The eigenvalues are no products of those of two factors, as EKFAC's. Fit lw.KFAC().")
    return alpha, gamma
