"""The algebra of Jacobians: products, Kronecker factors and norms of blocks that are never formed.

It works on tensors alone and knows no network; it imports `linalg`. Begin with `jacobian.py`
(what every block can do), then `outer.py` (`g aᵀ` at one position), `shared_outer.py` (its sum over positions) and
`layers/` (one file a family).
What a layer from outside needs is exported here: docs/extending.md has an example.
"""

from __future__ import annotations

from .blocks import Matrix
from .jacobian import BlockJacobian, Rows
from .layers import Use, register
from .outer import Outer
from .shared_outer import SharedOuter

__all__ = ["BlockJacobian", "Matrix", "Outer", "Rows", "SharedOuter", "Use", "register"]
