"""Calls the network on inputs, returns a matrix of outputs (B, C), and explains errors of the network."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import JOINED, Forward, describe, short, size, tensors
from ..errors import LapwingError, is_out_of_memory
from ..jacobian.plain_functions import transformed
from .entry import network_precision
from .forward import NetworkForward
from .module_state import PreservedState, modules_of

LISTS = (
    "If samples are lists of numbers, let the data set return tensors: torch joins lists of T numbers into T tensors."
)
"""What to write if torch's collate function has made lists of tensors."""

OUTPUT_KEYS = "logits", "out"
"""Keys of the outputs in a returned dict, as Hugging Face and torchvision (segmentation) name them."""

INPUT_TYPES = "Tensor", "list", "tuple", "dict", "NoneType", "str"
"""Types of inputs and of their parts, whose missing attributes are the fault of the loader."""

_DIFFERENTIATING: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Networks that take gradients in their forward pass, for example to get forces. They run under `enable_grad`."""


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


def call(
    model: nn.Module, inputs: Any, forward: Forward | None = None, mode: AbstractContextManager | None = None
) -> Tensor:
    """Runs the network as `shaped_outputs` does, and returns a matrix (B, C), or (B, T C) with positions."""
    return NetworkForward.of(forward).matrix(shaped_outputs(model, inputs, forward, mode))


def shaped_outputs(
    model: nn.Module,
    inputs: Any,
    forward: Forward | None = None,
    mode: AbstractContextManager | None = None,
    state: PreservedState | None = None,
) -> Tensor:
    """Runs the network and returns its outputs (B, C), or outputs with positions in their own shape.

    Outputs (B,) become (B, 1). If the network returns an object, the outputs are its `.logits`; if it returns a dict,
    they are the entry of the first of `OUTPUT_KEYS`. Only the network runs in the context `mode`: a function mode would
    also see the checks of its outputs. `state` is the present state of the modules, if the caller has it.
    """
    forward, plain = NetworkForward.of(forward), not torch.is_grad_enabled() and not transformed()
    graph = plain and model in _DIFFERENTIATING
    try:
        with network_precision(), state or PreservedState(model), torch.enable_grad() if graph else nullcontext():
            with mode or nullcontext():
                returned = forward(model, inputs)
            out = output_tensor(returned)  # which may be the network's own attribute
        out = out.detach() if graph and isinstance(out, Tensor) else out
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        if plain and not graph and "does not require grad" in str(error):
            _DIFFERENTIATING.add(model)
            return shaped_outputs(model, inputs, forward, mode)
        if _blames_inputs(inputs, error):
            raise _refused(model, inputs, forward, error) from error
        raise
    if isinstance(out, Tensor) and out.ndim > 1 and not out.numel() and out.shape[0] == size(inputs) > 0:
        raise CallRefused(
            f"{type(model).__name__} returns {describe(out)}, which has no entries. Pass a network with at least one "
            "output for each sample.",
            f"it returns {describe(out)}",
        )
    positioned = isinstance(out, Tensor) and out.is_floating_point() and 3 <= out.ndim <= 5
    if positioned and out.shape[0] == size(inputs):
        if forward.positions is not None:
            return forward.finite(out, forward.positions.axis)
        raise OutputsWithPositions(
            f"The outputs of {type(model).__name__} have the shape {tuple(out.shape)} and must have the shape (batch, "
            "outputs) here. Fit them with lw.fit, which takes outputs with positions. To treat their mean, average "
            "over the positions in forward=.",
            out.shape,
        )
    if not positioned and (not isinstance(out, Tensor) or out.ndim != 2 or not out.is_floating_point()):
        found = describe(returned)
        if isinstance(out, Tensor) and out.ndim == 0:
            found += " (squeeze() also removes the batch of a single sample: write squeeze(-1))"
        entry = _entry_of_outputs(returned, size(inputs))
        line = f"inputs: {_how_called(inputs, forward, 'inputs')}{entry or '...'} to return one"
        raise CallRefused(
            f"{type(model).__name__} returns {found}, and must return a floating-point tensor of shape (batch, "
            "outputs), or with positions (batch, positions, outputs) or (batch, outputs, rows, columns). Pass "
            f"forward=lambda model, {line}.",
            f"it returns {found}",
        )
    if out.shape[0] != size(inputs):
        reason = f"{tuple(out.shape)} at {size(inputs)} samples"
        line = "Pass a single sample as x[None], or pass forward=lambda model, inputs: model(inputs)... to return them."
        several = any(leaf.ndim > 1 for leaf in tensors(inputs))  # not the entries of one sample
        raise CallRefused(
            f"The outputs of {type(model).__name__} have the shape {reason}, {describe(inputs)}, and must have one row "
            "for each sample, with the batch first in inputs and outputs. "
            f"{JOINED if out.shape[0] < size(inputs) and several else line}",
            f"its outputs have the shape {reason}",
        )
    return forward.finite(out)


def state_kept(model: nn.Module, inputs: Any, forward: Forward | None, tolerance: Tensor) -> list[str] | None:
    """Returns the attributes that make a second call give other outputs than the first; None if outputs are the same.

    Every other call restores them, so that it does not show what the network keeps, such as a hidden state.
    """
    with torch.no_grad(), network_precision(), PreservedState(model):
        before = {module: dict(vars(module)) for _, module in modules_of(model)}
        with torch.enable_grad() if model in _DIFFERENTIATING else nullcontext():
            first, second = (output_tensor(NetworkForward.of(forward)(model, inputs)) for _ in range(2))
        if first.shape == second.shape and torch.allclose(first, second, rtol=0.0, atol=float(tolerance)):
            return None
        paths = {prefix: (vars(module), before[module]) for prefix, module in modules_of(model) if module in before}
        return [prefix + name for prefix, (now, old) in paths.items() for name in now if now[name] is not old.get(name)]


def output_tensor(out: Any) -> Any:
    """Returns the tensor of outputs in the result of a network, (B,) as (B, 1), or None if there is no such tensor."""
    if not isinstance(out, Tensor):
        named = next((out[key] for key in OUTPUT_KEYS if key in out), None) if isinstance(out, Mapping) else None
        out = getattr(out, "logits", named)
    return out[:, None] if isinstance(out, Tensor) and out.ndim == 1 else out


def _entry_of_outputs(returned: Any, samples: int) -> str | None:
    """Returns the code that takes the outputs from what a network returns, such as `[0]`: the first floats (B, ...)."""
    if isinstance(returned, Mapping):
        entries = [(f"[{key!r}]", value) for key, value in returned.items()]
    elif isinstance(returned, (tuple, list)):
        entries = [(f"[{place}]", value) for place, value in enumerate(returned)]
    else:
        entries = [(f".{name}", value) for name, value in getattr(returned, "__dict__", {}).items()]
    floats = ((entry, x) for entry, x in entries if isinstance(x, Tensor) and x.is_floating_point() and x.ndim)
    return next((entry for entry, x in floats if len(x) == samples), None)


def _blames_inputs(inputs: Any, error: Exception) -> bool:
    """Whether an exception of the network is about its arguments, or about their types, shapes, dtypes and indices."""
    if isinstance(error, (LapwingError, NotImplementedError)) or is_out_of_memory(error):
        return False
    if isinstance(error, KeyError):
        return isinstance(inputs, Mapping) and error.args[0] not in inputs
    if isinstance(error, AttributeError):  # forward() expects tensors and gets a list, or expects a graph
        return any(str(error).startswith(f"'{kind}' object has no attribute") for kind in INPUT_TYPES)
    words = ("argument",) if isinstance(error, TypeError) else ("shape", "size", "type", "dimension", "index", "input")
    return any(word in str(error).lower() for word in words)


def _refused(model: nn.Module, inputs: Any, forward: Forward | None, error: Exception) -> CallRefused:
    """Returns the error for inputs that the network rejects, with the call and the remedy."""
    weight = next((value.dtype for value in model.parameters() if value.is_floating_point()), torch.float32)
    leaves = tensors(inputs)
    other = any(leaf.dtype != weight for leaf in leaves if leaf.is_floating_point() or len(leaves) == 1)
    if isinstance(error, TypeError):
        line = "Pass what this call takes, without targets, or forward=lambda model, inputs: model(...)."
        if isinstance(inputs, tuple) and len(inputs) == 2 == len(leaves):
            line = f"{line} A fit to batches (inputs, targets, weights) needs sample_weights=True."
        if "list" in str(error):
            line = f"{line} {LISTS}"
    elif isinstance(error, (AttributeError, KeyError)):
        line = "Pass inputs of the types and names that forward() uses, or make them: forward=lambda model, inputs: "
        line += f"model(...).{f' {LISTS}' if 'list' in str(error) else ''}"
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
        f"{type(model).__name__}, called as {_how_called(inputs, forward)} on {describe(inputs)}, raised {reason}. "
        f"{line}",
        f"it raised {reason}",
    )


def _how_called(inputs: Any, forward: Forward | None, name: str = "x") -> str:
    """Returns the call of the network as code; `name` is a tensor's name."""
    if NetworkForward.of(forward).users is not None:
        return "forward(model, inputs)"
    if isinstance(inputs, Mapping):
        return "model(**inputs)"
    return f"model({name})" if isinstance(inputs, Tensor) else "model(*inputs)"
