"""A tangent in a file, as JSON: everything but the network and the memory budget. `TensorSpec`: a tensor in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import nn

from ..data.batches import Forward
from ..errors import LapwingError
from ..jacobian.blocks import Block
from ..network.call import Call
from ..network.eager import parameters_of
from ..network.gate import checked_memory, checked_network
from ..network.positions import Positions
from ..network.recording_plan import RecordingPlan
from .tangent import Tangent

FLOATS = torch.float32, torch.float64
"""Dtypes of stored sums and directions."""


class TensorSpec(NamedTuple):
    """Shape of a tensor in a file, None for any shape, and its permitted dtypes, empty for any dtype."""

    shape: tuple[int, ...] | None = None
    dtypes: tuple[torch.dtype, ...] = ()


def to_json(tangent: Tangent) -> dict[str, Any]:
    """Returns all fields except the network and the memory budget, as JSON."""
    data = {"blocks": [asdict(b) for b in tangent.blocks], "plan": tangent.plan.to_json(), "outputs": tangent.outputs,
            "reasons": [tangent.reasons.get(b.name, "") for b in tangent.blocks]}  # fmt: skip
    if tangent.positions.several:
        data["positions"] = tangent.positions.to_json()
    return data


def from_json(data: Mapping[str, Any], model: nn.Module, forward: Forward | None, memory: int | None) -> Tangent:
    """Rebuilds the tangent without running the network; raises if a parameter is missing or has another shape."""
    model = checked_network(model)
    memory = checked_memory(memory, model)
    named = parameters_of(model)
    layout = Positions.from_json(data["positions"]) if "positions" in data else None
    blocks = tuple(Block.from_json(block) for block in data["blocks"])
    for block in blocks:
        for name, shape in zip(block.parameters, block.shapes, strict=True):
            actual = tuple(named[name].shape) if name in named else "no such parameter"
            if actual != shape or not named[name].is_floating_point():
                remedy = "Build the network with the same options as in the fit."
                if f"module.{name}" in named:
                    remedy = "The fit was made without the wrapper: pass model.module."
                elif name.removeprefix("module.") in named and name.startswith("module."):
                    remedy = "The fit was made with a wrapped network: pass torch.nn.DataParallel(model)."
                raise LapwingError(
                    f"The posterior is over a parameter {name} {shape}, and {type(model).__name__} has {actual}. "
                    f"{remedy}"
                )
    plan = RecordingPlan.from_json(data["plan"], blocks)
    reasons = {block.name: reason for block, reason in zip(blocks, data["reasons"], strict=True) if reason}
    return Tangent(Call(model, forward, layout=layout), blocks, plan, reasons, data["outputs"], memory)
