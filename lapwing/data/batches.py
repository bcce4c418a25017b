"""Batches: splits pairs, dictionaries and Hugging Face batches into inputs and targets, and checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import LapwingError, shown
from ..linalg import is_finite

Forward = Callable[[nn.Module, Any], Any]
"""`forward(model, inputs)`, which replaces `model(inputs)`."""

LABEL_KEYS = ("labels", "label", "targets", "target", "y")

JOINED = (
    "If samples have sizes of their own (lists of tensors, packed sequences, bags, graphs), let the loader yield the "
    "numbers of samples, [(torch.arange(len(y)), y)], and pass forward=lambda model, numbers: "
    "model(join(numbers.tolist())), where your join(...) makes such a batch of them."
)
"""Remedy if the first dimension of the inputs does not hold the samples."""


def describe(value: Any) -> str:
    """Returns the structure and shapes of a value, for error messages: `tuple(Tensor (8, 3) float32, ...)`."""
    if isinstance(value, Tensor):
        return f"Tensor {'nested' if value.is_nested else tuple(value.shape)} {short(value.dtype)}"
    if isinstance(value, Mapping):
        named = [f"{key}={describe(item)}" for key, item in list(value.items())[:8]]
        return f"dict({', '.join(named)}{', ...' if len(value) > 8 else ''})"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}(" + ", ".join(describe(item) for item in list(value)[:4]) + ")"
    return f"{type(value).__name__}{' (pass its .toarray())' * hasattr(value, 'toarray')}"  # of SciPy


def check_dense(x: Tensor, subject: str) -> None:
    """Raises unless a tensor is dense and of numbers that torch computes with; `subject` names it in the message."""
    eight_bits = x.is_quantized or (x.is_floating_point() and x.dtype.itemsize == 1)
    if x.is_nested or x.is_meta or x.layout != torch.strided or eight_bits:
        raise LapwingError(
            f"{subject}, {describe(x)} with layout {x.layout} on {x.device}, is not a plain dense tensor. Pass "
            "one: x.to_dense() of a sparse tensor, x.to_padded_tensor(0.0) of a nested one, x.float() of 8 bits."
        )


def pair(batch: Any) -> tuple[Any, Any, tuple[str, ...]]:
    """Returns the inputs and the targets of a batch, unchecked, and the sorted keys of targets that are a dict."""
    inputs: Any
    label = next((key for key in LABEL_KEYS if key in batch), None) if isinstance(batch, Mapping) else None
    several = isinstance(batch, (tuple, list)) and len(batch) > 1
    if label is not None and len(batch) > 1:
        inputs, targets = {key: value for key, value in batch.items() if key != label}, batch[label]
    elif several and (isinstance(batch[-1], Tensor) or are_heads(batch[-1])):
        inputs, targets = batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
    else:
        raise _no_pair(batch)
    return (inputs, packed(targets), tuple(sorted(targets))) if are_heads(targets) else (inputs, targets, ())


def _no_pair(batch: Any) -> LapwingError:
    """Returns the error for a batch that does not show what its inputs and targets are."""
    heads = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
    if isinstance(heads, (tuple, list)) and heads and all(isinstance(targets, Tensor) for targets in heads):
        return LapwingError(
            f"A batch of the loader is {describe(batch)}, which does not show what its inputs and targets are. If "
            "each head of the network has a target, pass a dict of targets and likelihood=lw.Joint(...), or fit one "
            "head at a time: [(x, y[0]) for x, y in loader], with forward=lambda model, inputs: model(inputs)[...]."
        )
    keys = [key for key in batch if isinstance(key, str)] if isinstance(batch, Mapping) else []
    line = f"Write lw.batches(loader, inputs={keys[0]!r}, targets={keys[-1]!r}), or let" if len(keys) > 1 else "Let"
    return LapwingError(
        f"A batch of the loader is {describe(batch)}, which does not show what its inputs and targets are. {line} the "
        "loader yield (inputs, targets) pairs, with a tensor of targets (torch.as_tensor makes one of an array, and "
        "numpy.unique(y, return_inverse=True)[1] numbers names), or dicts with one of the keys "
        f"{', '.join(LABEL_KEYS)}. Inputs may be any tuple, list or dict of tensors if you "
        "pass forward=lambda model, inputs: model(...)."
    )


def are_heads(targets: Any) -> bool:
    """Whether targets are a dict from names of heads to tensors."""
    return isinstance(targets, Mapping) and bool(targets) and all(isinstance(y, Tensor) for y in targets.values())


def packed(targets: Mapping[str, Tensor]) -> Tensor:
    """Returns targets by key, (B,) or (B, k) for each, as floats (B, K), in the order of the sorted keys."""
    parts = [plain(targets[key]) for key in sorted(targets)]
    if any(part.ndim not in (1, 2) for part in parts) or len({len(part) for part in parts}) > 1:
        raise LapwingError(
            f"The targets of a batch are {describe(targets)}. Pass (B,) or (B, K) for each key, with the same B: heads "
            "of lw.Joint have no positions."
        )
    dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    return torch.cat([part.reshape(len(part), -1).to(parts[0].device, dtype) for part in parts], 1)


def inputs_of(batch: Any) -> Any:
    """Returns the inputs of a batch for prediction, without the labels of a pair or a dictionary."""
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in LABEL_KEYS}
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return batch[0]
    if isinstance(batch, (tuple, list)) and len(batch) > 1 and (isinstance(batch[-1], Tensor) or are_heads(batch[-1])):
        return plain(pair(batch)[0])
    raise LapwingError(
        f"A batch of the loader is {describe(batch)}, which does not show what its inputs are. Let the loader yield a "
        "tensor (torch.as_tensor(x) makes one), (inputs, targets) or a dict of tensors, or predict each batch with "
        "posterior.predict(x), where x may be any tuple or dict of tensors, such as (texts, torch.arange(len(texts))), "
        "if you pass forward=lambda model, inputs: model(...) to lw.fit."
    )


def is_loader(x: Any) -> bool:
    """Whether x is a loader (a list or another iterable of batches) and not one batch (a tensor, tuple or mapping)."""
    return not isinstance(x, (Tensor, Mapping, tuple, type)) and hasattr(x, "__iter__")


def is_array(x: Any) -> bool:
    """Whether x is an array, frame or series of another library, which converts itself to a NumPy array."""
    return not isinstance(x, (Tensor, type)) and (hasattr(x, "to_numpy") or hasattr(x, "__array__"))


def check_loader(loader: Any, purpose: str) -> None:
    """Raises unless an object is a loader. A list of tensors is not a loader."""
    one_batch = type(loader) in (tuple, list) and any(isinstance(part, Tensor) or is_array(part) for part in loader)
    other = isinstance(loader, (Tensor, Mapping, str, bytes, type)) or is_array(loader)
    if one_batch or other or not hasattr(loader, "__iter__"):
        raise _no_loader(loader, purpose)


def _no_loader(loader: Any, purpose: str) -> LapwingError:
    if hasattr(loader, "get_train_dataloader"):
        return LapwingError(
            f"{purpose} needs an iterable of (inputs, targets) batches, not a {type(loader).__name__}. Write "
            "lapwing.integrations.huggingface.fit_trainer(trainer), or pass trainer.get_train_dataloader()."
        )
    return LapwingError(
        f"{purpose} needs an iterable of (inputs, targets) batches, not {shown(loader)}. Write (x, y) for a data "
        "set of arrays or tensors, [(x, y)] for one batch, torch.utils.data.DataLoader(dataset, batch_size=100), "
        "or numpy.unique(y, return_inverse=True)[1] for labels that are names."
    )


def tree(inputs: Any) -> Any:
    """Returns inputs with a mapping, such as a batch of Hugging Face, as a dict: pytree looks into these only."""
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def tensors(inputs: Any) -> list[Tensor]:
    """Returns the tensors of a structure of inputs."""
    if isinstance(inputs, Tensor):
        return [inputs]
    return [leaf for leaf in pytree.tree_leaves(tree(inputs)) if isinstance(leaf, Tensor)]


def plain(inputs: Any, device: torch.device | None = None) -> Any:
    """Returns inputs as ordinary tensors on a device, or the same object if they already are. Every batch passes here.

    It copies tensors that were made in `torch.inference_mode()`, which autograd cannot record. It makes plain tensors
    of subclasses, such as images with metadata, for which some operations have no rule.
    """
    if not any(_is_subclass(x) or x.is_inference() or device not in (None, x.device) for x in tensors(inputs)):
        return inputs
    return pytree.tree_map(lambda x: _ordinary(x, device) if isinstance(x, Tensor) else x, tree(inputs))


def _is_subclass(x: Tensor) -> bool:
    """Whether a tensor has another class but the storage of a plain tensor. Nested tensors, for instance, have not."""
    return type(x) is not Tensor and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


def _ordinary(x: Tensor, device: torch.device | None) -> Tensor:
    x = x.as_subclass(Tensor) if _is_subclass(x) else x
    if device is not None and x.device != device:
        if x.is_meta:
            check_dense(x, "A tensor of the batch")
        x = x.to(device, non_blocking=device.type == "cuda")  # a copy to the CPU would not wait for the values
    return x.clone() if x.is_inference() else x


def copied(batch: Any) -> Any:
    """Returns a batch with copies of its tensors."""
    return pytree.tree_map(lambda leaf: plain(leaf).clone() if isinstance(leaf, Tensor) else leaf, tree(batch))


def short(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def check_outputs(outputs: Tensor, where: str) -> None:
    """Raises if outputs are NaN or infinite; `where` names their inputs."""
    if not is_finite(outputs):
        check_rows(~torch.isfinite(outputs).all(-1), where)


def check_rows(bad: Tensor, where: str) -> None:
    """Raises for the samples whose outputs are NaN or infinite, by their mask `bad` (B,)."""
    if bad.any():
        raise LapwingError(
            f"The outputs at {where} are NaN or infinite for {int(bad.sum())} of {len(bad)} samples (first: sample "
            f"{int(bad.nonzero()[0])}). A trained network gives finite outputs: check its weights and the scale of the "
            "inputs, or run it in float32 with model.float()."
        )
