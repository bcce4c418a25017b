"""A tangent in a file: everything but the network and the budget, as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import nn

from ..contents import Mismatch, check_json, is_count
from ..errors import LapwingError
from ..jacobian.blocks import Block
from ..network.batches import Forward
from ..network.eager import parameters_of
from ..network.gate import checked_memory, checked_network
from ..network.plan import Coverage, Plan
from ..network.positions import POSITIONS, Positions
from .tangent import Tangent

TANGENT = {
    "blocks": lambda blocks: type(blocks) is list and len(blocks) > 0, "plan": dict, "reasons": [str],
    "outputs": lambda outputs: is_count(outputs) and 0 < outputs < 2**31,
}  # fmt: skip
"""A tangent in a file."""


def to_json(tangent: Tangent) -> dict[str, Any]:
    """Returns everything but the network and the budget, as JSON."""
    data = {"blocks": [asdict(b) for b in tangent.blocks], "plan": tangent.plan.to_json(), "outputs": tangent.outputs,
            "reasons": [line.reason for line in tangent.coverage.lines]}  # fmt: skip
    if tangent.positions is not None:
        data["positions"] = {name: getattr(tangent.positions, name) for name in POSITIONS}
    return data


def from_json(data: Any, model: nn.Module, forward: Forward | None, memory: int | None) -> Tangent:
    """Returns the tangent around a network, which is not run.

    Raises:
        Mismatch: for JSON of another form, or of parts that do not belong together.
        LapwingError: if the network lacks one of the parameters, or has it in another shape.
    """
    memory = checked_memory(memory)
    model = checked_network(model)
    named = parameters_of(model)
    pattern = {**TANGENT, "positions": POSITIONS} if "positions" in data else TANGENT
    check_json(data, pattern, "tangent")
    if "positions" in data:
        forward = Positions(forward, **data["positions"])
        if forward.outputs != data["outputs"]:
            raise Mismatch("the outputs of a position are not those of the tangent")
    blocks = tuple(Block.from_json(block) for block in data["blocks"])
    names = [name for block in blocks for name in block.parameters]
    if not len(data["reasons"]) == len(blocks) == len({block.name for block in blocks}) or len(set(names)) < len(names):
        raise Mismatch("the blocks share names or parameters")
    for block in blocks:
        for name, shape in zip(block.parameters, block.shapes, strict=True):
            actual = tuple(named[name].shape) if name in named else "no such parameter"
            if actual != shape or not named[name].is_floating_point():
                raise LapwingError(
                    f"The posterior is over a parameter {name} {shape}, and {type(model).__name__} has {actual}. "
                    "Build the network with the same options as in the fit."
                )
    plan, report = Plan.from_json(data["plan"], blocks), Coverage.of(blocks, data["reasons"])
    return Tangent(model, forward, blocks, plan, report, data["outputs"], memory)
