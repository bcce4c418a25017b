"""The algebra of Jacobians: products, Kronecker factors and norms of blocks that are never formed.

It works on tensors, without a network, and imports `linalg`. Begin with `jacobian.py` (the contractions of every
block), then `outer.py` (`g aᵀ` at one position, and the sums A and Γ), `shared_outer.py` (its sum over positions) and
`layers/` (one file for each family). Layers from outside the package use these exports: docs/extending.md has one.
"""

from __future__ import annotations

from .blocks import Matrix
from .jacobian import BlockJacobian, Rows
from .layers import Use, register_reader
from .outer import Outer
from .shared_outer import SharedOuter

__all__ = ["BlockJacobian", "Matrix", "Outer", "Rows", "SharedOuter", "Use", "register_reader"]
