"""The default likelihood, which follows from the dtype of the targets, and a check that outputs are logits."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..data import batches
from ..errors import LapwingError
from ..linalg import doubled
from .base import Likelihood
from .bernoulli import Bernoulli
from .categorical import Categorical
from .gaussian import Gaussian

log = logging.getLogger("lapwing")

MAX_SAMPLES = 10_000
"""Maximum number of samples that decide whether floating-point targets are labels."""


def inferred_likelihood(targets: Any, loader: Iterable[Any] = ()) -> Likelihood:
    """Returns `Gaussian` for floating-point targets, `Categorical` for integers, and `Bernoulli` for bool.

    If the targets of the first batch may be labels, up to 10 000 samples of the next batches decide: a batch with the
    single real target 0.0 decides nothing. Raises if the targets are not a tensor, or are floats that are all 0 or 1,
    one-hot, or class probabilities.
    """
    if not isinstance(targets, Tensor):
        raise LapwingError(
            f"The targets are {batches.describe(targets)}, from which no likelihood follows. Pass a tensor of "
            "floats for likelihood='gaussian', integers for likelihood='categorical', bool for likelihood='bernoulli'."
        )
    if targets.dtype == torch.bool:
        return Bernoulli()
    if not targets.is_floating_point():
        return Categorical()
    _check_not_labels(targets, loader)
    return Gaussian()


def _check_not_labels(targets: Tensor, loader: Iterable[Any]) -> None:
    """Raises if floating-point targets are labels; stops at the first batch of real numbers."""
    binary = rows = True
    smallest, largest, count = 1.0, 0.0, 0
    for values in _targets(targets, loader):
        if not isinstance(values, Tensor) or values.is_meta:
            return
        values = values.cpu()
        binary = binary and bool(((values == 0) | (values == 1)).all())
        rows = rows and _sums_to_one(values, values.dtype)
        if not (binary or rows):
            return
        if values.numel():
            smallest, largest = min(smallest, float(values.min())), max(largest, float(values.max()))
            count += len(values) if values.ndim else 1
        if count >= MAX_SAMPLES:
            break
    dtype = str(targets.dtype).removeprefix("torch.")
    if rows:
        kind = "one-hot rows" if binary else "rows that sum to one, like class probabilities,"
        raise LapwingError(
            f"The targets are {kind} of shape {tuple(targets.shape)} in {dtype}. Give class numbers, y.argmax(1), for "
            "a classification, or pass likelihood='gaussian' for a regression."
        )
    if smallest < largest:  # only zeros, or only ones, decide nothing
        raise LapwingError(
            f"The targets are all 0 or 1 in {dtype}. Pass likelihood='bernoulli' for binary labels or "
            "likelihood='gaussian' for a regression. Class labels must be integers: y.long()."
        )


def _targets(first: Tensor, loader: Iterable[Any]) -> Iterator[Any]:
    """Yields the first targets without reading the loader, then the targets of every batch."""
    yield first
    for batch in loader:
        yield batches.split(batch)[1]


def check_logits(likelihood: Likelihood, outputs: Tensor, weights: torch.dtype) -> None:
    """Raises if the outputs are class probabilities instead of logits; warns if they may come from a sigmoid.

    Log-softmax outputs are accepted: they have the same probabilities and the same Fisher information as logits. About
    ten samples are enough. `weights`, the dtype of the network's weights, determines the rounding of the outputs.
    """
    if likelihood.activation == "softmax" and _sums_to_one(outputs, weights):
        raise LapwingError(
            f"The outputs of the network, of shape (batch, {outputs.shape[1]}), are probabilities that sum to one. The "
            f"{likelihood.name} likelihood applies the softmax itself and needs logits. Pass forward=lambda model, "
            "inputs: model[:-1](inputs) to leave out a softmax at the end of an nn.Sequential, or forward=lambda model,"
            " inputs: model(inputs).log()."
        )
    few = outputs.numel() < 16  # logits may lie between 0 and 1 by chance
    if likelihood.activation and not few and bool(((outputs > 0) & (outputs <= 1)).all()):
        log.warning(
            "The outputs of the network all lie between 0 and 1. The %s likelihood applies the %s itself and needs "
            "logits. If the network ends in a sigmoid, pass forward=lambda model, inputs: model(inputs).logit().",
            likelihood.name, likelihood.activation,
        )  # fmt: skip


def _sums_to_one(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether values (B, C), C > 1, are rows of class probabilities, up to the rounding of a dtype."""
    if values.ndim != 2 or values.shape[1] < 2:
        return False
    rounding = 1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-4
    values = doubled(values.detach())
    return bool((values >= 0).all()) and bool(((values.sum(1) - 1).abs() <= rounding).all())
