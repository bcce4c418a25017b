"""What a batch is: pairs, dictionaries and Hugging Face batches in, an output matrix (B, C) out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .errors import LapwingError

Forward = Callable[[nn.Module, Any], Any]
LABEL_KEYS = ("labels", "label", "targets", "target", "y")


def describe(value: Any) -> str:
    """Names a value by its structure and shapes, for error messages: `tuple(Tensor (8, 3) float32, ...)`."""
    if isinstance(value, Tensor):
        return f"Tensor {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return "dict(" + ", ".join(f"{key}={describe(item)}" for key, item in value.items()) + ")"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}(" + ", ".join(describe(item) for item in list(value)[:4]) + ")"
    return type(value).__name__


def split(batch: Any) -> tuple[Any, Any]:
    """Separates what a loader yields into inputs and targets.

    Accepted: `(inputs, targets)`; `(input_1, ..., input_k, targets)`; a mapping with one of the keys labels, label,
    targets, target, y (Hugging Face batches included).

    Raises:
        LapwingError: case 14, a structure that is not one of these.
    """
    if isinstance(batch, Mapping):
        found = [key for key in LABEL_KEYS if key in batch]
        if found and len(batch) > 1:
            return {key: value for key, value in batch.items() if key != found[0]}, batch[found[0]]
    elif isinstance(batch, (tuple, list)) and len(batch) >= 2:
        inputs, targets = batch[:-1], batch[-1]
        if isinstance(targets, Tensor):
            return (inputs[0] if len(inputs) == 1 else tuple(inputs)), targets
    raise LapwingError(
        f"Asked to read inputs and targets from a batch, found {describe(batch)}; accepted are (inputs, targets), "
        f"(input_1, ..., targets) and a dict with one of the keys {', '.join(LABEL_KEYS)}. Let the loader yield "
        "(inputs, targets) pairs, where inputs may be anything if you pass forward=lambda model, inputs: model(...)."
    )


def inputs_of(batch: Any) -> Any:
    """Returns a batch's inputs for prediction: labels, where there are any, are dropped from pairs and dictionaries."""
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in LABEL_KEYS}
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return batch[0]
    return split(batch)[0]


def is_loader(x: Any) -> bool:
    """Tells a loader (a list or another iterable of batches) from one batch of inputs (a tensor, tuple or mapping)."""
    return not isinstance(x, (Tensor, Mapping, tuple)) and hasattr(x, "__iter__")


def _tree(inputs: Any) -> Any:
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def tensors(inputs: Any) -> list[Tensor]:
    """Lists the tensors in an input structure."""
    return [leaf for leaf in pytree.tree_leaves(_tree(inputs)) if isinstance(leaf, Tensor)]


def size(inputs: Any) -> int:
    """Returns B, the number of samples: the first dimension of the first tensor with one."""
    for leaf in tensors(inputs):
        if leaf.ndim:
            return leaf.shape[0]
    raise LapwingError(
        f"Asked for the number of samples of the inputs, found {describe(inputs)}; at least one tensor whose first "
        "dimension is the batch is needed: yield (inputs, targets) with inputs a tensor, tuple or dict of tensors."
    )


def take(inputs: Any, rows: slice | Tensor) -> Any:
    """Returns the samples `rows` of every tensor whose first dimension is the batch; the rest is passed on as it is."""
    count = size(inputs)

    def cut(leaf: Any) -> Any:
        return leaf[rows] if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == count else leaf

    return pytree.tree_map(cut, _tree(inputs))


def chunks(inputs: Any, length: int) -> Iterator[tuple[slice, Any]]:
    """Yields consecutive slices of at most `length` samples, with their inputs; whole batches are passed unsliced."""
    count = size(inputs)
    for start in range(0, count, length):
        rows = slice(start, min(start + length, count))
        yield rows, (inputs if rows == slice(0, count) else take(inputs, rows))


def call(model: nn.Module, inputs: Any, forward: Forward | None = None) -> Tensor:
    """Runs the network and returns its outputs as a matrix (B, C).

    Args:
        model: the network.
        inputs: a tensor `model(x)`, a tuple `model(*x)` or a mapping `model(**x)`.
        forward: replaces that call: `forward(model, inputs)`.

    Returns:
        Outputs (B, C); (B,) becomes (B, 1); `.logits` of a Hugging Face output is taken.

    Raises:
        LapwingError: case 14, inputs the model cannot be called with; case 5, outputs that are no (B, C) matrix.
    """
    if forward is not None:
        out = forward(model, inputs)
    elif isinstance(inputs, Tensor):
        out = model(inputs)
    elif isinstance(inputs, Mapping):
        out = model(**inputs)
    elif isinstance(inputs, (tuple, list)):
        out = model(*inputs)
    else:
        raise LapwingError(
            f"Asked to run {type(model).__name__} on inputs of type {type(inputs).__name__}; accepted are a tensor, a "
            "tuple or a dict of tensors. Pass forward=lambda model, inputs: model(...) to say how it is called."
        )
    if not isinstance(out, Tensor):
        out = getattr(out, "logits", out["logits"] if isinstance(out, Mapping) and "logits" in out else None)
    if isinstance(out, Tensor) and out.ndim == 1:
        out = out[:, None]
    if not isinstance(out, Tensor) or out.ndim != 2 or not out.is_floating_point():
        found = "no tensor and no .logits" if not isinstance(out, Tensor) else describe(out)
        raise LapwingError(
            f"Asked for outputs of {type(model).__name__} of shape (batch, outputs), found {found}; a floating-point "
            "matrix is needed. Pass forward=lambda model, inputs: model(inputs)... to return one (for sequences or "
            "images, flatten or pool the positions there)."
        )
    return out


def check_inputs(inputs: Any, like: Tensor, where: str) -> None:
    """Raises for NaN or infinite inputs (case 1) and for tensors on another device than the weights (case 7)."""
    for leaf in tensors(inputs):
        if leaf.device != like.device:
            raise LapwingError(
                f"Asked to run the model, whose weights are on {like.device}, found {where} on {leaf.device}; both must "
                f"be on one device: move the inputs with x.to('{like.device}')."
            )
        if leaf.is_floating_point() and not torch.isfinite(leaf).all():
            bad = (~torch.isfinite(leaf)).flatten(1).any(1) if leaf.ndim > 1 else ~torch.isfinite(leaf)
            first = int(bad.nonzero()[0]) if bad.ndim else 0
            raise LapwingError(
                f"Asked to use {where} of shape {tuple(leaf.shape)}, found NaN or infinite values in {int(bad.sum())} "
                f"samples (first: sample {first}); finite numbers are needed: drop or impute them, for instance "
                "x = x.nan_to_num()."
            )


def check_outputs(outputs: Tensor, where: str) -> None:
    """Raises for NaN or infinite outputs (case 2)."""
    if not torch.isfinite(outputs).all():
        bad = (~torch.isfinite(outputs)).any(-1)
        raise LapwingError(
            f"Asked for the outputs at {where}, found NaN or infinite values for {int(bad.sum())} of {len(bad)} samples "
            f"(first: sample {int(bad.nonzero()[0])}); the trained network must give finite outputs: check its weights "
            "and the scale of the inputs, or run it in float32 with model.float()."
        )
