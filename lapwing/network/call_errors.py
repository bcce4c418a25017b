"""Errors of a call of the network: inputs that it rejects, and results that are not outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import JOINED, Forward, describe, short
from ..data.inputs import Inputs
from ..errors import LapwingError, is_out_of_memory

LISTS = (
    "If samples are lists of numbers, let the data set return tensors: torch joins lists of T numbers into T tensors."
)
"""What to write if torch's collate function has made lists of tensors."""


class OutputsWithPositions(LapwingError):
    """Raised if outputs have positions, and no `Positions` says which dimension holds the classes."""

    def __init__(self, message: str, shape: torch.Size) -> None:
        super().__init__(message)
        self.shape = shape


class CallRefused(LapwingError):
    """Raised if the network rejects a batch, or gives no row per sample. `reason` is the end of a sentence about it."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def of_outputs(model: nn.Module, forward: Forward | None, inputs: Inputs, returned: Any, out: Any) -> LapwingError:
    """Returns the error for a result that the network `returned`, whose outputs `out` are not rows of the samples."""
    name, samples = type(model).__name__, inputs.samples
    floats = isinstance(out, Tensor) and out.is_floating_point()
    if not floats or not 2 <= out.ndim <= 5 or (len(out) == samples and not out.numel()):
        found = describe(returned)
        entry, *others = [*_entries_of_outputs(returned, samples), ""]
        line = f"inputs: {_how_called(inputs, forward, 'inputs')}{entry or '...'} to return one"
        if len(others) > 1:
            line += f", if the targets belong to it, and not to {' or '.join(others[:-1][:3])}"
        return CallRefused(
            f"{name} returns {found}, and must return a floating-point tensor of shape (batch, outputs), or with "
            "positions (batch, positions, outputs) or (batch, outputs, rows, columns). Pass forward=lambda model, "
            f"{line}.",
            f"it returns {found}",
        )
    if out.shape[0] != samples:
        reason = f"{tuple(out.shape)} at {samples} samples"
        line = "Pass a single sample as x[None], or pass forward=lambda model, inputs: model(inputs)... to return them."
        several = any(leaf.ndim > 1 for leaf in inputs.tensors) or any(inputs.shared)  # not the entries of one sample
        return CallRefused(
            f"The outputs of {name} have the shape {reason}, {inputs}, and must have one row for each "
            "sample, with the batch first in inputs and outputs. "
            f"{JOINED if out.shape[0] < samples and several else line}",
            f"its outputs have the shape {reason}",
        )
    return OutputsWithPositions(
        f"The outputs of {name} have the shape {tuple(out.shape)} and must have the shape (batch, outputs) here. Fit "
        "them with lw.fit, which takes outputs with positions. To treat their mean, average over the positions in "
        "forward=.",
        out.shape,
    )


def _entries_of_outputs(returned: Any, samples: int) -> list[str]:
    """Returns the code that takes floats (B, ...) from what a network returns, such as `[0]`, for each of them."""
    if isinstance(returned, Mapping):
        entries = [(f"[{key!r}]", value) for key, value in returned.items()]
    elif isinstance(returned, (tuple, list)):
        entries = [(f"[{place}]", value) for place, value in enumerate(returned)]
    else:
        entries = [(f".{name}", value) for name, value in getattr(returned, "__dict__", {}).items()]
    floats = ((entry, x) for entry, x in entries if isinstance(x, Tensor) and x.is_floating_point() and x.ndim)
    return [entry for entry, x in floats if len(x) == samples]


def blames_inputs(inputs: Inputs, error: Exception) -> bool:
    """Whether an exception of the network is about its arguments, or about their types, shapes, dtypes and indices."""
    if isinstance(error, NotImplementedError):
        return 'the required "forward" function' in str(error)
    if isinstance(error, LapwingError) or is_out_of_memory(error):
        return False
    if isinstance(error, KeyError):
        return isinstance(inputs.value, Mapping) and error.args[0] not in inputs.value
    if isinstance(error, AttributeError):  # forward() expects tensors and gets a list, or expects a graph
        kinds = "Tensor", "list", "tuple", "dict", "NoneType", "str"  # of inputs and of their parts
        return any(str(error).startswith(f"'{kind}' object has no attribute") for kind in kinds)
    said = str(error).lower()
    if isinstance(error, TypeError):  # also from tensors that are read as dicts or tuples
        return any(words in said for words in ("argument", "invalid data type", "indices must be", "subscriptable"))
    words = ("shape", "size", "type", "dimension", "index", "input", "offset", "unpack", "numpy() on tensor")
    return any(word in said for word in words)


def of_inputs(model: nn.Module, forward: Forward | None, inputs: Inputs, error: Exception) -> LapwingError:
    """Returns the error for inputs that the network rejects, with the call and the remedy."""
    if isinstance(error, NotImplementedError):
        return LapwingError(
            f"{type(model).__name__} has no forward(). Pass the module that has it, or say how it is called: "
            "forward=lambda model, inputs: model.network(inputs)."
        )
    if "numpy() on Tensor" in str(error):
        return LapwingError(
            f"{type(model).__name__} leaves torch in forward(), by numpy(), and gradients cannot follow. Write this "
            "step in functions of torch, or h.detach().numpy(): then only later layers count."
        )
    weight = next((value.dtype for value in model.parameters() if value.is_floating_point()), torch.float32)
    leaves = inputs.tensors
    other = any(leaf.dtype != weight for leaf in leaves if leaf.is_floating_point() or len(leaves) == 1)
    if isinstance(error, TypeError):
        line = "Pass what this call takes, without targets, or forward=lambda model, inputs: model(...)."
        if isinstance(inputs.value, Mapping):
            line = f"{line} Or name the parts of a batch: lw.batches(loader, inputs=..., targets=...)."
        if isinstance(inputs.value, tuple) and len(inputs.value) == 2 == len(leaves):
            line += (
                " If the third part of a batch holds weights, a fit needs sample_weights=True. For another third part "
                "write lw.batches(loader, inputs=lambda batch: batch[0], targets=lambda batch: batch[1])."
            )
        if "list" in str(error):
            line = f"{line} {LISTS}"
        elif any(inputs.shared):
            line = f"{line} {JOINED}"
    elif isinstance(error, (AttributeError, KeyError)):
        line = "Pass inputs of the types and names that forward() uses, or make them: forward=lambda model, inputs: "
        line += f"model(...).{f' {LISTS}' if 'list' in str(error) else ''}"
    elif "decoder_input_ids" in str(error):
        line = (
            "It also reads the tokens before each label, and the labels are only targets here. Let the batches hold "
            "decoder_input_ids: the labels moved by one place, after the start token."
        )
    elif other and "type" in str(error):
        line = f"Its weights have the dtype {short(weight)}. Pass inputs of the same dtype: write x.to({weight})"
        line += "." if leaves[0].is_floating_point() else f", or x.astype('{short(weight)}') of an array."
    else:
        line = (
            "Pass inputs of the shape and range that it was trained with, the batch first: check what the loader "
            "yields, and pass a single sample as x[None]."
        )
    reason = f"{type(error).__name__} ({str(error).strip().partition(chr(10))[0].rstrip('.')})"
    return CallRefused(
        f"{type(model).__name__}, called as {_how_called(inputs, forward)} on {inputs}, raised {reason}. {line}",
        f"it raised {reason}",
    )


def _how_called(inputs: Inputs, forward: Forward | None, name: str = "x") -> str:
    """Returns the call of the network as code; `name` is a tensor's name."""
    if forward is not None:
        return "forward(model, inputs)"
    if isinstance(inputs.value, Mapping):
        return "model(**inputs)"
    return f"model({name})" if isinstance(inputs.value, Tensor) else "model(*inputs)"
