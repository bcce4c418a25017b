"""The tangent engine: contractions of a network's Jacobian, which is never formed.

It connects `network` and `jacobian`. Begin with `tangent.py` (survey a network, record a batch), then `record.py`.
"""

from __future__ import annotations

from ..jacobian.blocks import Block, Matrix, Vectors, join, split
from ..jacobian.jacobian import BlockJacobian, Rows
from ..jacobian.outer import Outer
from ..jacobian.shared_outer import SharedOuter
from ..network.recording_plan import Coverage
from ..network.selection import LastLayer, Predicate, everything, last_layer, matching
from .anchors import Anchors
from .cotangents import EVERY_OUTPUT, Cotangents, FisherParts, RandomCotangents, Reading
from .coverage import coverage
from .record import Record
from .retry import MemoryNeed
from .stored import FLOATS, TensorSpec
from .tangent import Tangent

__all__ = [
    "EVERY_OUTPUT", "FLOATS", "Anchors", "Block", "BlockJacobian", "Cotangents", "Coverage", "FisherParts",
    "LastLayer", "Matrix", "MemoryNeed", "Outer", "Predicate", "RandomCotangents", "Reading", "Record", "Rows",
    "SharedOuter", "Tangent", "TensorSpec", "Vectors", "coverage", "everything", "join", "last_layer",
    "matching", "split",
]  # fmt: skip
