"""Checks of labels and regression targets: each failure is one sentence with counts, places and the line to write."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lapwing.network.batches import check_dense

from ..errors import LapwingError

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Integers that few operations of torch know."""


def check_labels(name: str, outputs_shape: torch.Size, device: torch.device, labels: Tensor) -> None:
    """Check integer class labels (B,) against outputs (B, C).

    Args:
        name: The likelihood's class name, for the message.
        outputs_shape: Shape of the outputs.
        device: Device of the outputs.
        labels: The labels to check.

    Raises:
        LapwingError: for a wrong shape, device or dtype, NaN labels, or labels outside 0 to C - 1.
    """
    batch, classes = _batch_and_outputs(name, outputs_shape, device, labels, "labels")
    shape, dtype = tuple(labels.shape), labels.dtype
    if classes < 2:
        raise LapwingError(
            f"{name} needs at least 2 outputs, found outputs of shape {tuple(outputs_shape)} for labels of shape "
            f"{shape}; for yes or no write `likelihood='bernoulli'`, for numbers `likelihood='gaussian'` and "
            "`y.float()`, else give the network one output a class, for two classes `torch.nn.Linear(features, 2)`."
        )
    if shape != (batch,):
        if shape == (batch, 1):
            line = "write `y.squeeze(1)`"
        elif shape == (batch, classes):
            line = "for one-hot labels or class probabilities write `y.argmax(1)`"
        else:
            line = "give one label an input, in the same order as the inputs"
        raise LapwingError(
            f"{name} accepts integer labels of shape ({batch},) for outputs of shape {tuple(outputs_shape)}, "
            f"found labels of shape {shape} and dtype {dtype}; {line}."
        )
    if dtype.is_floating_point and bool(labels.isnan().any()):
        bad = labels.isnan()
        raise LapwingError(
            f"{name} accepts integer labels 0 to {classes - 1}, but {_where(bad, labels)} NaN; "
            "drop those rows with `keep = ~y.isnan(); x, y = x[keep], y[keep].long()`."
        )
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        hint = ' (or, for regression, `likelihood="gaussian"`)' if dtype.is_floating_point else ""
        raise LapwingError(
            f"{name} accepts labels of an integer dtype from 0 to {classes - 1}, found all {batch} labels of shape "
            f"{shape} in {dtype}; write `y.long()`{hint}."
        )
    numbers = labels.long()
    bad = (numbers < 0) | (numbers >= classes)
    if bool(bad.any()):
        first = "after `y = y.long()`, " if dtype in UNSIGNED else ""
        raise LapwingError(
            f"{name} accepts labels 0 to {classes - 1} for outputs of shape {tuple(outputs_shape)}, "
            f"but {_where(bad, labels)} outside; {first}{_range_line(numbers, bad, classes)}."
        )


def check_real_targets(name: str, outputs_shape: torch.Size, device: torch.device, targets: Tensor) -> None:
    """Check real targets (B, C) against outputs (B, C); (B,) is accepted when C = 1.

    Args:
        name: The likelihood's class name, for the message.
        outputs_shape: Shape of the outputs.
        device: Device of the outputs.
        targets: The targets to check.

    Raises:
        LapwingError: for a wrong shape, device or dtype, or NaN or infinite targets.
    """
    check_target_shape(name, outputs_shape, device, targets)
    shape, dtype = tuple(targets.shape), targets.dtype
    if dtype.is_complex or dtype == torch.bool:
        line = "y.real" if dtype.is_complex else "y.float()"
        raise LapwingError(
            f"{name} accepts targets of a real dtype, found all {targets.numel()} values of shape {shape} in {dtype}; "
            f"write `{line}`."
        )
    bad = ~targets.isfinite()
    if bool(bad.any()):
        keep = "y.isfinite()" if targets.dim() == 1 else "y.isfinite().all(1)"
        raise LapwingError(
            f"{name} accepts finite targets, but {_where(bad, targets)} NaN or infinite; "
            f"drop those rows with `keep = {keep}; x, y = x[keep], y[keep]`."
        )


def check_binary_targets(name: str, outputs_shape: torch.Size, device: torch.device, targets: Tensor) -> None:
    """Check targets of 0 and 1, as bool, integers or floats, (B, C) against outputs (B, C); (B,) when C = 1.

    Args:
        name: The likelihood's class name, for the message.
        outputs_shape: Shape of the outputs.
        device: Device of the outputs.
        targets: The targets to check.

    Raises:
        LapwingError: for a wrong shape or device, complex or NaN targets, or values other than 0 and 1.
    """
    check_target_shape(name, outputs_shape, device, targets)
    if targets.dtype == torch.bool:
        return
    if targets.dtype.is_complex:
        raise LapwingError(
            f"{name} accepts targets 0 and 1, found all {targets.numel()} values of shape {tuple(targets.shape)} in "
            f"{targets.dtype}; write `y.real`."
        )
    bad = (targets != 0) & (targets != 1)
    if not bool(bad.any()):
        return
    wrong = targets[bad]
    if not targets.dtype.is_floating_point and bool((targets.abs() == 1).all()):
        line = "targets of -1 and 1 need `y = (y + 1) // 2`"
    elif bool((targets.abs() == 1).all()):
        line = "targets of -1 and 1 need `y = (y + 1) / 2`"
    elif bool(wrong.isnan().any()):
        keep = "~y.isnan()" if targets.dim() == 1 else "~y.isnan().any(1)"
        line = f"drop rows with NaN by `keep = {keep}; x, y = x[keep], y[keep]`"
    elif bool(((wrong > 0) & (wrong < 1)).all()):
        line = "probabilities in place of answers are not accepted, write `y > 0.5`"
    elif targets.dtype.is_floating_point:
        line = 'for real targets write `likelihood="gaussian"`'
    else:
        line = 'for more than two classes write `likelihood="categorical"` and give the network one output a class'
    raise LapwingError(f"{name} accepts targets 0 and 1, but {_where(bad, targets)} neither; {line}.")


def aligned_targets(
    name: str,
    outputs: Tensor,
    targets: Tensor,
    check: Callable[[str, torch.Size, torch.device, Tensor], None] = check_real_targets,
) -> Tensor:
    """Return targets in the shape, device and dtype of outputs (B, C), (B,) as (B, 1); never broadcasts.

    Args:
        name: The likelihood's class name, for the message.
        outputs: Network outputs, (B, C).
        targets: Targets, (B, C), or (B,) when C = 1.
        check: What refuses targets of another shape.

    Returns:
        Targets, (B, C).

    Raises:
        LapwingError: if the shapes do not fit.
    """
    if targets.shape != outputs.shape:
        check(name, outputs.shape, outputs.device, targets)
    return targets.reshape(outputs.shape).to(outputs)


def check_target_shape(name: str, outputs_shape: torch.Size, device: torch.device, targets: Tensor) -> None:
    """Refuse what is not one target an output: (B, C), or (B,) when C = 1."""
    batch, outputs = _batch_and_outputs(name, outputs_shape, device, targets, "targets")
    shape, dtype = tuple(targets.shape), targets.dtype
    if shape != (batch, outputs) and not (outputs == 1 and shape == (batch,)):
        if outputs > 1 and shape in ((batch,), (batch, 1)) and not dtype.is_floating_point:
            integers = "`y.long()` and " if dtype == torch.bool else ""
            line = f'for class labels write {integers}`likelihood="categorical"`'
        elif outputs > 1 and shape in ((batch,), (batch, 1)):
            line = "give the network one output, `torch.nn.Linear(features, 1)`, or one target an output"
        elif len(shape) > 0 and shape[0] == batch and targets.numel() == batch * outputs:
            line = f"write `y.reshape(len(y), {outputs})`"
        elif shape == (outputs, batch):
            line = "write `y.T`"
        else:
            line = "give one target an output and input, in the same order as the inputs"
        accepted = f"({batch}, 1) or ({batch},)" if outputs == 1 else f"({batch}, {outputs})"
        raise LapwingError(
            f"{name} accepts targets of shape {accepted} for outputs of shape {tuple(outputs_shape)}, "
            f"found targets of shape {shape} and dtype {dtype}; {line}."
        )


def _batch_and_outputs(
    name: str, outputs_shape: torch.Size, device: torch.device, targets: Tensor, word: str
) -> tuple[int, int]:
    """Return (B, C) of the outputs after the checks that labels and real targets share."""
    if not isinstance(targets, Tensor):
        raise LapwingError(
            f"{name} accepts {word} as a tensor, found {type(targets).__name__}; write `torch.as_tensor(y)`."
        )
    if targets.device != device:
        raise LapwingError(
            f"{name} accepts {word} on the device of the outputs, {device}, found {word} of shape "
            f'{tuple(targets.shape)} on {targets.device}; write `y.to("{device}")`.'
        )
    check_dense(targets, f"A tensor of the {word}")
    if len(outputs_shape) != 2:
        raise LapwingError(
            f"{name} accepts outputs of shape (B, C), found outputs of shape {tuple(outputs_shape)} and {word} of "
            f"shape {tuple(targets.shape)}; make positions rows with `f.reshape(-1, C)` and the same rows of y."
        )
    return outputs_shape[0], outputs_shape[1]


def _where(bad: Tensor, values: Tensor) -> str:
    """Say how many values are bad, of what shape and dtype, and where the first one is; ends before the adjective."""
    first = int(bad.flatten().to(torch.uint8).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), bad.shape))
    place = index[0] if len(index) == 1 else index
    return (
        f"{int(bad.sum())} of {bad.numel()} values of shape {tuple(values.shape)} and dtype {values.dtype} "
        f"(the first at index {place}: {values.flatten()[first].item()}) are"
    )


def _range_line(labels: Tensor, bad: Tensor, classes: int) -> str:
    """Say what to write for labels out of range, from the commonest causes."""
    low, high = int(labels.min()), int(labels.max())
    wrong = labels[bad]
    if bool((wrong == -100).all()):
        return "-100 marks ignored rows, so drop them with `keep = y != -100; x, y = x[keep], y[keep]`"
    if low == 1 and high == classes:
        return "labels that count from 1 need `y = y - 1`"
    if classes == 2 and bool((labels.abs() == 1).all()):
        return "labels of -1 and 1 need `y = (y + 1) // 2`"
    if low >= 0:
        return f"give the network {high + 1} outputs, `torch.nn.Linear(features, {high + 1})`, or correct the labels"
    return f"drop those rows with `keep = (y >= 0) & (y < {classes}); x, y = x[keep], y[keep]`"
