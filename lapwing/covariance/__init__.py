"""Covariances over the weights, and the latent Gaussians that they imply for the network's outputs.

Begin with `base.py` (the protocol), `terms.py` and `latent.py` (covariances and distributions of the outputs), then
`dense.py`, the simplest structure.
"""

from __future__ import annotations

from .base import COVARIANCES, Covariance, PriorCovariance, has_prior, register_covariance
from .basis import Basis, CoordinateBasis, ExplicitBasis, ImplicitBasis
from .blockwise import Blockwise
from .dense import DenseCovariance
from .latent import Factor, JointLatent, Latent, SelectedLatent, without_spread
from .latent_at_positions import AnyLatent, has_factor, has_positions, is_selected
from .latent_draws import LatentDraws, LinearDraws
from .layer_block import LayerBlock
from .low_rank import LowRank, Subspace, has_rank
from .low_rank_diagonal import Draws, LowRankPlusDiagonal
from .low_rank_with_residual import LowRankWithResidual
from .structures import DenseBlock, DiagonalBlock, KroneckerBlock, Structure
from .terms import Term

__all__ = [
    "COVARIANCES", "AnyLatent", "Basis", "Blockwise", "CoordinateBasis", "Covariance", "DenseBlock", "DenseCovariance",
    "DiagonalBlock", "Draws", "ExplicitBasis", "Factor", "ImplicitBasis", "JointLatent", "KroneckerBlock",
    "Latent", "LatentDraws", "LayerBlock", "LinearDraws", "LowRank", "LowRankPlusDiagonal", "LowRankWithResidual",
    "PriorCovariance", "SelectedLatent", "Structure", "Subspace", "Term", "has_factor",
    "has_positions", "has_prior", "has_rank", "is_selected", "register_covariance",
    "without_spread",
]  # fmt: skip
