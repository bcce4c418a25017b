"""The tangent engine: a network seen through its Jacobian, contracted without forming it."""

from __future__ import annotations

from .anchors import Anchors
from .blocks import Block, Matrix, Vectors, join, split
from .chunk import Record
from .jacobian import BlockJacobian, Rows
from .network import Tangent, coverage
from .outer import Outer, SharedOuter
from .plan import Coverage
from .selection import LastLayer, Predicate, everything, last_layer, matching

__all__ = [
    "Anchors", "Block", "BlockJacobian", "Coverage", "LastLayer", "Matrix", "Outer", "Predicate", "Record", "Rows",
    "SharedOuter", "Tangent", "Vectors", "coverage", "everything", "join", "last_layer", "matching", "split",
]  # fmt: skip
