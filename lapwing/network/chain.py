"""Gradients of plain multilayer perceptrons without autograd's backward pass: linear layers, element-wise in between.

There R cotangents go back by one matrix product a layer and one derivative an activation,
`g_k = (g_{k+1} W_{k+1}) ⊙ φ'`, which spares the batched backward pass its bookkeeping. Whether a recording is such a
chain is read off its graph, anew for every recording: all else (a skip connection, a normalisation, another layer) goes
through autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import Node

if TYPE_CHECKING:
    from .tracing import RecordedUse

ELEMENTWISE = frozenset(
    f"{name}Backward0"
    for name in (
        "Celu", "Clone", "Elu", "Gelu", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyRelu", "LogSigmoid", "Mish",
        "Relu", "Sigmoid", "Silu", "Softplus", "Tanh", "Threshold",
    )
)  # fmt: skip
"""Names of graph nodes whose gradient at an entry depends on that entry alone, for any saved values."""

EXACT = (torch.float32, torch.float64)
"""Half precision would be rounded twice, and overflow where an activation is off."""


def chain_gradients(outputs: Tensor, noted: Sequence[RecordedUse], u: Tensor | None) -> list[Tensor | None] | None:
    """Takes cotangents u (R, B, C), None for the C outputs themselves, back through a chain of linear layers.

    Returns:
        g (R, B, O) for each use in order, None for one whose output is f itself where `u` is None. None in all where
        this is not a chain. In memory the samples come first, as products sample by sample read them.

    Cost: time O(R B O I) a layer.
    """
    paths, above = [], outputs.grad_fn
    for use in reversed(noted):
        path = _path(above, use)
        if path is None:
            return None
        paths.append(path)
        above = use.source
    gradients: list[Tensor | None] = []  # (B, R, O)
    with torch.no_grad():
        g = None if u is None else u.transpose(0, 1)
        for later, use, path in zip((None, *reversed(noted)), reversed(noted), paths, strict=False):
            slope = _slope(path, use.out) if path else None
            if path and slope is None:
                return None
            g = _scaled(g, slope) if later is None else _pulled(g, later, slope)
            gradients.append(g)
    return [None if g is None else g.transpose(0, 1) for g in reversed(gradients)]


def _path(above: Node | None, use: RecordedUse) -> list[Node] | None:
    """Returns the element-wise nodes between a layer's output and what is above it, None where there are others."""
    weight = use.weight
    if not use.use.is_product or use.out.ndim != 2 or weight is None or use.out.dtype != weight.dtype:
        return None
    if weight.dtype not in EXACT or weight._version != use.versions[2]:
        return None
    path: list[Node] = []
    while above is not use.edge.node:
        if above is None or above.name() not in ELEMENTWISE:
            return None
        path.append(above)
        ((above, _),) = above.next_functions
    return path


def _slope(path: list[Node], out: Tensor) -> Tensor | None:
    """Returns φ' (B, O), by calling the nodes as the engine would: they take gradients of their outputs.

    None in the midst of another backward pass for chosen tensors, where a node that it does not need gives nothing.
    """
    slope: Tensor | None = torch.ones_like(out)
    for node in path:
        slope = None if slope is None else node(slope)  # type: ignore[operator]
    return slope


def _scaled(g: Tensor | None, slope: Tensor | None) -> Tensor | None:
    """Returns `g ⊙ φ'` (B, R, C) at the network's last layer, None for the identity."""
    if slope is None:
        return g
    return torch.diag_embed(slope) if g is None else g * slope.unsqueeze(1)


def _pulled(g: Tensor | None, use: RecordedUse, slope: Tensor | None) -> Tensor:
    """Returns `(g W) ⊙ φ'` (B, R, I) for the layer above, its g None where that is the identity."""
    matrix, weight = use.use.matrix(), use.weight
    assert matrix is not None
    assert weight is not None
    weight = weight.T if matrix.transposed else weight
    if g is None:  # the network's own (C, I)
        return weight.clone().expand(len(use.out), -1, -1) if slope is None else weight * slope.unsqueeze(1)
    pulled = g @ weight
    return pulled if slope is None else pulled.mul_(slope.unsqueeze(1))  # its memory is warm: a new tensor takes longer
