"""Checks of labels and regression targets. Messages count the bad values, show the first, and say what to write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..data.batches import check_dense
from ..errors import LapwingError
from ..linalg import doubled


def which_count(labels: Tensor, ignored: int) -> Tensor | None:
    """Returns a mask of the labels that differ from `ignored`; None if all of them do, or if they are not integers."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_meta:
        return None
    mask = labels.long() != ignored
    return None if bool(mask.all()) else mask


def no_targets_error(which: str) -> LapwingError:
    """Returns the error for data of which no target counts."""
    return LapwingError(
        f"None of the {which} counts: there are none, or all of them are NaN or the ignore_index of the likelihood. "
        "Pass some known ones, or another likelihood=lw.Categorical(ignore_index=...)."
    )


def check_labels(
    name: str, outputs_shape: torch.Size, device: torch.device, labels: Tensor, ignored: int | None = None,
    soft: bool = False,
) -> None:  # fmt: skip
    """Checks integer class labels (B,) from 0 to C - 1 against outputs (B, C); the label `ignored` is accepted too.

    With `soft`, class probabilities (B, C) are accepted too: rows of numbers of at least 0 that sum to 1.
    """
    if soft and len(outputs_shape) == 2 and outputs_shape[1] > 1 and is_soft(outputs_shape, labels):
        _check_class_probabilities(name, outputs_shape, device, labels)
        return
    batch, classes = _batch_and_outputs(name, outputs_shape, device, labels, "labels")
    whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if whole and classes > 1 and labels.shape == (batch,):
        low, high = torch.stack(labels.long().aminmax()).tolist() if batch else (0, 0)  # one transfer from the device
        if 0 <= low <= high < classes or not bool(_outside(labels, classes, ignored).any()):
            return
    raise _labels_error(name, outputs_shape, labels, ignored)


def _outside(labels: Tensor, classes: int, ignored: int | None) -> Tensor:
    """Returns a mask of the labels that are no class and not `ignored`."""
    numbers = labels.long()
    bad = numbers != numbers.clamp(0, classes - 1)
    return bad if ignored is None else bad & (numbers != ignored)


def _labels_error(name: str, outputs_shape: torch.Size, labels: Tensor, ignored: int | None) -> LapwingError:
    """Returns the error for labels that `check_labels` refuses."""
    batch, classes = outputs_shape
    if name == "Ordinal":  # one output fewer than classes
        outputs_shape = torch.Size((batch, classes - 1))
    shape, dtype = tuple(labels.shape), labels.dtype
    if classes < 2:
        return LapwingError(
            f"{name} needs at least 2 outputs, one for each class. The outputs have shape {tuple(outputs_shape)}, "
            f"the labels {shape}. Write `likelihood='bernoulli'` for yes or no, `likelihood='gaussian'` for "
            "numbers, or give the network more outputs: `torch.nn.Linear(features, 2)`."
        )
    if shape != (batch,):
        whole = shape == (batch, classes) and not dtype.is_floating_point and not dtype.is_complex
        if shape == (batch, 1):
            line = "Write `y.squeeze(1)`"
        elif whole and bool(((labels == 0) | (labels == 1)).all() and (labels.sum(1) != 1).any()):
            line = "Write `likelihood='bernoulli'` for several labels that may hold at once"
        elif whole and bool((labels.long().abs() > 1).any()):
            line = "Write `likelihood='gaussian'` for numbers, or `likelihood='poisson'` for counts"
        elif shape == (batch, classes):
            integers = ".long()" if dtype == torch.bool else ""
            line = f"Write `y{integers}.argmax(1)` for one-hot labels or class probabilities"
        else:
            line = "Pass one label for each input, in the same order"
        return LapwingError(
            f"{name} accepts integer labels of shape ({batch},) for outputs of shape {tuple(outputs_shape)}. "
            f"The labels have shape {shape} and dtype {dtype}. {line}."
        )
    if dtype.is_floating_point and bool(labels.isnan().any()):
        bad = labels.isnan()
        return LapwingError(
            f"{name} accepts integer labels 0 to {classes - 1}, but {_where(bad, labels)} NaN. "
            "Drop those rows with `keep = ~y.isnan(); x, y = x[keep], y[keep].long()`."
        )
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        line = "Write `y.long()`"
        if dtype.is_floating_point:
            regression = 'Write `likelihood="gaussian"` for real targets'
            line = f'{line} (or, for regression, `likelihood="gaussian"`)' if _are_whole(labels) else regression
        return LapwingError(
            f"{name} accepts labels of an integer dtype from 0 to {classes - 1}. The labels have shape {shape} and "
            f"dtype {dtype}. {line}."
        )
    bad = _outside(labels, classes, ignored)
    first = "Write `y = y.long()` first. " if dtype in (torch.uint16, torch.uint32, torch.uint64) else ""
    return LapwingError(
        f"{name} accepts labels 0 to {classes - 1} for outputs of shape {tuple(outputs_shape)}, "
        f"but {_where(bad, labels)} outside. {first}{_range_line(name, labels.long(), bad, classes)}."
    )


def check_real_targets(
    name: str, outputs_shape: torch.Size, device: torch.device, targets: Tensor, missing: bool = False
) -> None:
    """Checks finite real targets (B, C), or (B,) if C = 1, against outputs (B, C); with `missing` NaN is accepted."""
    check_target_shape(name, outputs_shape, device, targets)
    shape, dtype = tuple(targets.shape), targets.dtype
    if dtype.is_complex or dtype == torch.bool:
        line = "y.real" if dtype.is_complex else "y.float()"
        raise LapwingError(
            f"{name} accepts targets of a real dtype. The targets have shape {shape} and dtype {dtype}. Write `{line}`."
        )
    bad = targets.isinf() if missing else ~targets.isfinite()
    if bool(bad.any()):
        keep = "y.isfinite()" if targets.dim() == 1 else "y.isfinite().all(1)"
        holes = ""
        if not missing and bool(targets.isnan().any()):
            holes = ", since this likelihood accepts no missing targets"
            likelihood = {"Regression": "Gaussian", "Heteroscedastic": "HeteroscedasticGaussian"}
            kind = likelihood.get(name.removesuffix("Prediction"), name)
            if kind in likelihood.values():
                holes = f", or write `lw.{kind}(missing=True)` if NaN marks a missing target"
        raise LapwingError(
            f"{name} accepts finite targets, but {_where(bad, targets)} NaN or infinite. "
            f"Drop those rows with `keep = {keep}; x, y = x[keep], y[keep]`{holes}."
        )


def check_counts(name: str, outputs_shape: torch.Size, device: torch.device, targets: Tensor) -> None:
    """Checks counts, whole numbers from 0 up as integers or floats, against outputs (B, C)."""
    check_real_targets(name, outputs_shape, device, targets)
    bad = (targets < 0) | (targets != targets.round() if targets.is_floating_point() else targets < 0)
    if bool(bad.any()):
        raise LapwingError(
            f"{name} accepts counts, whole numbers from 0 up, but {_where(bad, targets)} not counts. Write "
            '`likelihood="gaussian"` for real targets, or correct them.'
        )


def _are_whole(targets: Tensor) -> bool:
    """Whether all floats that are not NaN are whole numbers, like class labels."""
    return bool(((targets == targets.round()) | targets.isnan()).all())


def is_soft(outputs_shape: torch.Size, targets: Tensor) -> bool:
    """Whether targets are class probabilities: floats in the shape of the outputs (B, C)."""
    return isinstance(targets, Tensor) and targets.is_floating_point() and targets.shape == outputs_shape


def are_class_probabilities(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask (B,) of the rows (B, C) that are at least 0 and sum to 1, up to the rounding of a dtype."""
    rounding = 1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-4
    rows = doubled(rows.detach())
    return (rows >= 0).all(1) & ((rows.sum(1) - 1).abs() <= rounding)


def _check_class_probabilities(name: str, outputs_shape: torch.Size, device: torch.device, targets: Tensor) -> None:
    """Checks that class probabilities (B, C) are at least 0 and that rows sum to 1 up to rounding."""
    check_target_shape(name, outputs_shape, device, targets)
    bad = ~are_class_probabilities(targets, targets.dtype)
    if bool(bad.any()):
        raise LapwingError(
            f"{name} accepts integer labels, or class probabilities of shape {tuple(outputs_shape)} whose rows sum to "
            f"1. {int(bad.sum())} of {len(targets)} rows do not. Write `y.argmax(1)` for labels, or "
            "`y / y.sum(1, keepdim=True)`."
        )


def check_binary_targets(
    name: str, outputs_shape: torch.Size, device: torch.device, targets: Tensor, soft: bool, missing: bool
) -> None:
    """Checks targets of 0 and 1, with `soft` also numbers between them and with `missing` also NaN, against outputs."""
    check_target_shape(name, outputs_shape, device, targets)
    if targets.dtype == torch.bool:
        return
    if targets.dtype.is_complex:
        raise LapwingError(
            f"{name} accepts targets 0 and 1. The targets have shape {tuple(targets.shape)} and dtype {targets.dtype}. "
            "Write `y.real`."
        )
    bad = ~((targets >= 0) & (targets <= 1)) if soft else (targets != 0) & (targets != 1)
    if missing:
        bad &= ~targets.isnan()
    if not bool(bad.any()):
        return
    wrong = targets[bad]
    if soft:
        raise LapwingError(
            f"{name} accepts probabilities between 0 and 1, but {_where(bad, targets)} not. Write `y.clamp(0, 1)`."
        )
    if bool((targets.abs() == 1).all()):
        line = f"Write `y = (y + 1) {'/' if targets.is_floating_point() else '//'} 2` for targets of -1 and 1"
    elif bool(wrong.isnan().any()):
        keep = "~y.isnan()" if targets.dim() == 1 else "~y.isnan().any(1)"
        line = f"Drop rows with NaN: `keep = {keep}; x, y = x[keep], y[keep]`, or write `lw.Bernoulli(missing=True)`"
    elif bool(((wrong > 0) & (wrong < 1)).all()):
        line = "Write `y > 0.5` to turn probabilities into answers, or `lw.Bernoulli(soft_targets=True)`"
    elif targets.dtype.is_floating_point:
        line = 'Write `likelihood="gaussian"` for real targets'
    else:
        line = 'Write `likelihood="categorical"` for more than two classes, with one output for each'
    raise LapwingError(f"{name} accepts targets 0 and 1, but {_where(bad, targets)} neither. {line}.")


def aligned_targets(name: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns targets (B, C), or (B,) if C = 1, in the shape, device and dtype of outputs (B, C); never broadcasts."""
    if targets.shape != outputs.shape:
        check_target_shape(name, outputs.shape, outputs.device, targets)
    return targets.reshape(outputs.shape).to(outputs)


def known_targets(name: str, outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Returns 1 for known real targets and 0 for NaN, in the shape and dtype of outputs (B, C); None without a NaN."""
    if not bool(targets.isnan().any()):
        return None
    check_real_targets(name, outputs.shape, outputs.device, targets, missing=True)
    return (~targets.isnan()).reshape(outputs.shape).to(outputs.dtype)


def check_target_shape(name: str, outputs_shape: torch.Size, device: torch.device, targets: Tensor) -> None:
    """Raises unless the targets have one entry for each output: shape (B, C), or (B,) if C = 1."""
    batch, outputs = _batch_and_outputs(name, outputs_shape, device, targets, "targets")
    shape, dtype = tuple(targets.shape), targets.dtype
    if shape != (batch, outputs) and not (outputs == 1 and shape == (batch,)):
        if outputs > 1 and shape in ((batch,), (batch, 1)) and not dtype.is_floating_point:
            integers = "`y.long()` and " if dtype == torch.bool else ""
            line = f'Write {integers}`likelihood="categorical"` for class labels'
        elif outputs > 1 and shape in ((batch,), (batch, 1)) and _are_whole(targets):
            labels = "y.nan_to_num(-100).long()" if bool(targets.isnan().any()) else "y.long()"
            line = f"Write `{labels}` for class labels, or give the network one output, `torch.nn.Linear(features, 1)`"
        elif outputs > 1 and shape in ((batch,), (batch, 1)):
            line = "Give the network one output, `torch.nn.Linear(features, 1)`, or pass one target for each output"
        elif len(shape) > 0 and shape[0] == batch and targets.numel() == batch * outputs:
            line = f"Write `y.reshape(len(y), {outputs})`"
        elif shape == (outputs, batch):
            line = "Write `y.T`"
        else:
            line = "Pass one target for each output and input, in the same order"
        accepted = f"({batch}, 1) or ({batch},)" if outputs == 1 else f"({batch}, {outputs})"
        raise LapwingError(
            f"{name} accepts targets of shape {accepted} for outputs of shape {tuple(outputs_shape)}. "
            f"The targets have shape {shape} and dtype {dtype}. {line}."
        )


def _batch_and_outputs(
    name: str, outputs_shape: torch.Size, device: torch.device, targets: Tensor, word: str
) -> tuple[int, int]:
    """Returns B and C of the outputs, after the checks that labels and real targets share."""
    if not isinstance(targets, Tensor) or targets.device != device or len(outputs_shape) != 2:
        raise _unreadable(name, outputs_shape, device, targets, word)
    check_dense(targets, f"A tensor of the {word}")
    return outputs_shape[0], outputs_shape[1]


def _unreadable(name: str, outputs_shape: torch.Size, device: torch.device, targets: Any, word: str) -> LapwingError:
    if not isinstance(targets, Tensor):
        return LapwingError(
            f"{name} accepts {word} as a tensor. They are a {type(targets).__name__}. Write `torch.as_tensor(y)`."
        )
    if targets.device != device:
        return LapwingError(
            f"{name} accepts {word} on the device of the outputs, {device}. The {word} are on {targets.device}. "
            f'Write `y.to("{device}")`.'
        )
    return LapwingError(
        f"{name} accepts outputs of shape (B, C). The outputs have shape {tuple(outputs_shape)}, the {word} "
        f"{tuple(targets.shape)}. Write positions as rows, `f.reshape(-1, C)`, and reshape y in the same way."
    )


def _where(bad: Tensor, values: Tensor) -> str:
    """Returns a text with the number of bad values, shape, dtype and the first of them; an adjective must follow it."""
    first = tuple(bad.nonzero()[0].tolist())
    return (
        f"{int(bad.sum())} of {bad.numel()} values of shape {tuple(values.shape)} and dtype {values.dtype} "
        f"(the first at index {first[0] if len(first) == 1 else first}: {values[first].item()}) are"
    )


def _range_line(name: str, labels: Tensor, bad: Tensor, classes: int) -> str:
    """Returns the line to write for labels out of range, for the most common causes."""
    low, high = int(labels.min()), int(labels.max())
    wrong = labels[bad]
    ignores = name in ("Categorical", "ClassPrediction")
    if ignores and bool((wrong == -100).all()):
        return "Pass `likelihood=lw.Categorical(ignore_index=-100)` for labels that do not count"
    if low == 1 and high == classes:
        return "Write `y = y - 1` for labels that count from 1"
    if classes == 2 and bool((labels.abs() == 1).all()):
        return "Write `y = (y + 1) // 2` for labels of -1 and 1"
    ignored, one = "", int(wrong[0])
    if ignores and bool((wrong == one).all()) and one != classes:
        ignored = f", or pass `likelihood=lw.Categorical(ignore_index={one})` if that label does not count"
    if low >= 0:
        needed = high + (name != "Ordinal")
        line = f"Give the network {needed} outputs, `torch.nn.Linear(features, {needed})`"
        return line + (ignored or ", or correct the labels")
    return f"Drop those rows with `keep = (y >= 0) & (y < {classes}); x, y = x[keep], y[keep]`{ignored}"
