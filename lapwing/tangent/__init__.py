"""The tangent engine: contractions of a network's Jacobian, which is never formed.

It connects `network` and `jacobian`. Begin with `tangent.py` (survey a network, record a batch), then `record.py`.
`lw.coverage` below reports which layer family treats each parameter of a network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..data import batches
from ..data.batches import Forward
from ..data.frames import with_tensors
from ..data.inputs import Inputs
from ..errors import LapwingError
from ..jacobian.blocks import Block, Matrix, Vectors, join, split
from ..jacobian.jacobian import BlockJacobian, Rows
from ..jacobian.outer import Outer
from ..jacobian.shared_outer import SharedOuter
from ..network.entry import outside_modes
from ..network.recording_plan import Coverage
from ..network.selection import LastLayer, Predicate, everything, last_layer, matching
from .anchors import Anchors
from .cotangents import EVERY_OUTPUT, Cotangents, FisherParts, RandomCotangents, Reading
from .record import Record
from .retry import MemoryNeed
from .stored import FLOATS, TensorSpec
from .tangent import Tangent


@outside_modes
def coverage(
    model: nn.Module, batch: Any, params: Predicate | LastLayer = everything, forward: Forward | None = None
) -> Coverage:
    """Reports which layer family treats each parameter, and why no family treats the rest.

    Args:
        model: a network in eval mode.
        batch: a batch of inputs, or a dict with inputs and targets as a loader yields it.
        params: which parameters.
        forward: as in `lw.fit`.

    Returns:
        A report that prints as a table.

    Raises:
        LapwingError: if the network or the batch is invalid.

    Cost: six to ten forward and at most four backward passes on four samples, and on all if four leave layers unused.

    Example:
        >>> import torch, lapwing as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3)).eval()
        >>> report = lw.coverage(model, torch.randn(8, 4))
        >>> [(line.block, line.weights, line.family) for line in report.lines]
        [('0', 25, 'linear'), ('1', 10, 'norm'), ('2', 18, 'linear')]
        >>> report.generic  # `print(report)` shows the whole table
        ()
    """
    inputs = Inputs.of(with_tensors(batches.inputs_of(batch) if isinstance(batch, Mapping) else batch, model))
    if inputs.samples == 0:
        raise LapwingError(f"The batch {inputs} has no samples. Pass one with at least one sample.")
    return Tangent.survey(model, inputs, params, forward).coverage


__all__ = [
    "EVERY_OUTPUT", "FLOATS", "Anchors", "Block", "BlockJacobian", "Cotangents", "Coverage", "FisherParts",
    "LastLayer", "Matrix", "MemoryNeed", "Outer", "Predicate", "RandomCotangents", "Reading", "Record", "Rows",
    "SharedOuter", "Tangent", "TensorSpec", "Vectors", "coverage", "everything", "join", "last_layer",
    "matching", "split",
]  # fmt: skip
