"""PSD structures over the weights, and the latent Gaussian that they give at the network's outputs.

It imports `tangent`, `linalg`, `contents` and `errors`. Begin with `base.py` (what every structure can do) and
`output.py` (the latent Gaussian and the terms that it is a sum of), then `dense.py`, the plainest structure.
"""

from __future__ import annotations

from .base import Covariance, LayerBlock, PrecisionCovariance, PriorCovariance
from .basis import Basis, ExplicitBasis, ImplicitBasis
from .blockwise import Blockwise
from .coordinates import CoordinateBasis
from .dense import DenseCovariance
from .draws import Draws
from .latent import AnyLatent, JointLatent, Latent, LatentDraws
from .low_rank import LowRank, LowRankWithResidual, Subspace
from .low_rank_diagonal import LowRankPlusDiagonal
from .structures import DenseBlock, DiagonalBlock, KroneckerBlock, Structure
from .terms import Term

COVARIANCES: dict[str, type[Covariance]] = {
    cls.__name__: cls for cls in (Blockwise, DenseCovariance, Draws, LowRank, LowRankPlusDiagonal, LowRankWithResidual)
}
"""Class name -> class, for reading files."""

__all__ = [
    "COVARIANCES", "AnyLatent", "Basis", "Blockwise", "CoordinateBasis", "Covariance", "DenseBlock", "DenseCovariance",
    "DiagonalBlock", "Draws", "ExplicitBasis", "ImplicitBasis", "JointLatent", "KroneckerBlock", "Latent",
    "LatentDraws", "LayerBlock", "LowRank", "LowRankPlusDiagonal", "LowRankWithResidual",
    "PrecisionCovariance", "PriorCovariance", "Structure", "Subspace", "Term",
]  # fmt: skip
