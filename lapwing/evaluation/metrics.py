"""Metrics of predictions: pure functions from tensors to one number, computed in float64 on the CPU.

scikit-learn computes the AUROC (`pip install "lapwing-torch[eval]"`). Wrong shapes and values, and missing packages,
raise a `LapwingError` of one sentence.

N is the number of samples, C of classes or outputs. Every metric is a float64 tensor of shape () without a
gradient, and costs O(N C) time and memory; `auroc` and `aurc` also sort N values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..data.batches import check_dense
from ..errors import LapwingError, extra, shown
from ..linalg import doubled
from ..options import integer


def accuracy(probs: Tensor, labels: Tensor) -> Tensor:
    """Returns the fraction of samples whose most probable class, by probabilities (N, C), is the integer label (N,)."""
    probs, labels = checked_classes("accuracy", probs, labels)
    return doubled(probs.argmax(1) == labels).mean()


def nll(log_prob: Tensor) -> Tensor:
    """Returns the mean negative log-likelihood, `-1/N Σ_n log p(y_n | x_n)`, in nats.

    Takes log p(y_n | x_n), (N,), such as `prediction.log_prob(y)`; -inf is allowed and gives inf.
    """
    (log_prob,) = _entries("nll", (1,), (), log_prob=log_prob)
    bad = log_prob.isnan() | log_prob.isposinf()
    _refuse(bad, "nll needs log probabilities", "values of log_prob are NaN or +inf", "Leave such samples out.")
    return -log_prob.mean()


def brier(probs: Tensor, labels: Tensor) -> Tensor:
    """Returns the Brier score `1/N Σ_n Σ_c (p_nc - 1[c = y_n])²`, between 0 (best) and 2.

    Takes class probabilities p (N, C) and integer labels y (N,). Brier 1950 sums over classes, as here: for two classes
    the score is twice the score of the positive class.
    """
    probs, labels = checked_classes("brier", probs, labels)
    return (probs - torch.nn.functional.one_hot(labels, probs.shape[1])).square().sum(1).mean()


def expected_calibration_error(probs: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    """Returns the expected calibration error `Σ_b |B_b|/N · |accuracy(B_b) - confidence(B_b)|`.

    Takes class probabilities (N, C), whose rows sum to 1, and integer labels (N,) in 0..C-1. The bins
    `[b/bins, (b+1)/bins)` hold the samples by confidence, the largest probability; a confidence of exactly 1 belongs to
    the last bin.

    Example:
        >>> round(expected_calibration_error(torch.tensor([[0.8, 0.2], [0.8, 0.2]]), torch.tensor([0, 1])).item(), 4)
        0.3
    """
    probs, labels = checked_classes("expected_calibration_error", probs, labels)
    if not integer(1, 2**24).accepts(bins):
        raise LapwingError(
            f"expected_calibration_error sorts confidences into bins, and bins is {shown(bins)}. Pass an "
            "integer from 1 to 2**24: expected_calibration_error(probs, labels, bins=15)."
        )
    confidence, classes = probs.clamp_max(1.0).max(1)  # rounding may leave a sum above 1
    gaps = doubled(classes == labels) - confidence
    return (confidence * bins).long().clamp_max(bins - 1).bincount(gaps).abs().sum() / len(gaps)


def auroc(scores_in: Tensor, scores_out: Tensor) -> Tensor:
    """Returns `P(s_out > s_in) + 1/2 P(s_out = s_in)`, the area under the ROC curve of a detector of `out`.

    Takes finite scores of in-distribution samples (N_in,) and of out-of-distribution samples (N_out,). The latter are
    the positive class, so a score is an *uncertainty*, such as the entropy, the variance or 1 - confidence.

    Example:
        >>> auroc(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9])).item()  # 5 of 6 pairs in order
        0.8333333333333334
    """
    sklearn = extra("sklearn.metrics")
    (inside,) = _entries("auroc", (1,), scores_in=scores_in)
    (outside,) = _entries("auroc", (1,), scores_out=scores_out)
    is_out = torch.cat([torch.zeros_like(inside), torch.ones_like(outside)])
    area = sklearn.roc_auc_score(is_out, torch.cat([inside, outside]))
    return torch.tensor(float(area), dtype=torch.float64)


def aurc(uncertainty: Tensor, errors: Tensor) -> Tensor:
    """Returns the area under the risk-coverage curve: the mean error of the k most certain samples, averaged over k.

    Takes finite uncertainties (N,), such as `1 - prediction.confidence`, and the error of each sample (N,), such as 1
    for a wrong class and 0 for a right one. Samples of equal uncertainty count with their mean error, so their order
    does not matter. (Geifman and El-Yaniv 2017, Section 2.)

    Example:
        >>> round(aurc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.0, 0.0, 1.0])).item(), 4)  # (0 + 0 + 1/3) / 3
        0.1111
    """
    uncertainty, errors = _entries("aurc", (1,), uncertainty=uncertainty, errors=errors)
    return risks(uncertainty, errors).mean()


def risks(uncertainty: Tensor, errors: Tensor) -> Tensor:
    """Returns the mean error of the k most certain samples for k = 1..N, (N,); equal ones share their mean error."""
    values, group, counts = uncertainty.unique(return_inverse=True, return_counts=True)
    means = torch.zeros_like(values).index_add(0, group, errors) / counts
    return means.repeat_interleave(counts).cumsum(0) / torch.arange(1, len(errors) + 1)


def rmse(mean: Tensor, y: Tensor) -> Tensor:
    """Returns the root of the mean squared error over all samples and outputs, in the unit of y.

    Takes predictive means and targets of one shape, (N,) or (N, C).
    """
    mean, y = _entries("rmse", mean=mean, y=y)
    return (mean - y).square().mean().sqrt()


def crps_gaussian(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """Returns the continuous ranked probability score of Gaussian predictions, in the unit of y; smaller is better.

    `CRPS = ∫ (F(t) - 1[t ≥ y])² dt = s [ z (2Φ(z) - 1) + 2φ(z) - 1/√π ]` with `z = (y - m)/s` (Gneiting and Raftery
    2007, Section 4.2, with the sign turned), averaged over all samples and outputs. Takes predictive means, positive
    standard deviations of y, and targets, all of one shape, (N,) or (N, C).

    Example:
        >>> round(crps_gaussian(torch.zeros(1), torch.ones(1), torch.zeros(1)).item(), 4)
        0.2337
    """
    mean, std, y = _entries("crps_gaussian", mean=mean, std=std, y=y)
    line = "Pass the std of y, noise included: posterior.predict(x).std."
    _refuse(std <= 0, "crps_gaussian needs a positive std", "values are 0 or less", line)
    z = (y - mean) / std
    density = (-0.5 * z.square()).exp() / math.sqrt(2.0 * math.pi)
    return (std * (z * torch.erf(z * math.sqrt(0.5)) + 2.0 * density - 1.0 / math.sqrt(math.pi))).mean()


def interval_coverage(lower: Tensor, upper: Tensor, y: Tensor) -> Tensor:
    """Returns the fraction of targets with `lower ≤ y ≤ upper`, over all samples and outputs.

    Takes ends and targets of one shape, (N,) or (N, C). The ends may be infinite, and lower must not exceed upper.
    """
    lower, upper, y = _entries("interval_coverage", finite=("y",), lower=lower, upper=upper, y=y)
    line = "Write interval_coverage(*prediction.interval(0.9), y)."
    _refuse(~(lower <= upper), "interval_coverage needs lower <= upper", "intervals have another order or a NaN", line)
    return doubled((lower <= y) & (y <= upper)).mean()


def real_tensor(caller: str, name: str, value: Any) -> Tensor:
    """Returns an argument (a tensor, number, list or array) as a tensor of real numbers without a graph, or raises.

    `caller` is the function that the user called. `check_dense` must accept a tensor.
    """
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        tensor = None
    if tensor is not None:
        check_dense(tensor, f"The argument {name} of {caller}")
    if tensor is None or tensor.is_complex():
        raise LapwingError(f"{caller} needs a dense tensor of real numbers as {name}. {name} is {shown(value)}.")
    return tensor


def checked_classes(function: str, probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Checks probabilities (N, C) and labels (N,); returns them as float64 and int64 on the CPU."""
    probs, labels = real_tensor(function, "probs", probs), real_tensor(function, "labels", labels).cpu()
    half = probs.dtype in (torch.float16, torch.bfloat16)
    probs = probs.cpu().double()
    if probs.ndim != 2 or probs.shape[0] == 0 or probs.shape[1] < 2:
        raise LapwingError(
            f"{function} needs a probability for each class, and probs has shape {tuple(probs.shape)}. Pass shape "
            "(N, C) with N > 0 and C > 1: torch.stack([1 - p, p], dim=1) for one column p of two classes."
        )
    rows, classes = probs.shape
    whole = not labels.is_floating_point() and labels.dtype != torch.bool
    if labels.shape != (rows,) or not whole or not bool(((labels >= 0) & (labels < classes)).all()):
        values = f" from {labels.min()} to {labels.max()}" if labels.numel() else ""
        raise LapwingError(
            f"{function} needs labels of shape ({rows},) in 0..{classes - 1}, one for each row, and labels is "
            f"{shown(labels)}{values}. Pass labels.long(), or labels.argmax(1) for one-hot labels. Leave other labels "
            f"out: keep = (labels >= 0) & (labels < {classes})."
        )
    labels = labels.long()
    tolerance = 0.05 if half else 1e-3
    wrong = ~((probs >= 0.0).all(1) & (probs <= 1.0 + tolerance).all(1) & ((probs.sum(1) - 1.0).abs() <= tolerance))
    if wrong.any():
        first = int(wrong.nonzero()[0, 0])
        low, total = float(probs[first].min()), float(probs[first].sum())
        raise LapwingError(
            f"{function} needs probabilities, and {int(wrong.sum())} of {rows} rows of probs are not between 0 and 1 "
            f"with sum 1 (row {first} has minimum {low:.4g} and sum {total:.4g}). Pass logits.softmax(1) for logits."
        )
    return probs, labels


def _entries(
    function: str, axes: tuple[int, ...] = (1, 2), finite: tuple[str, ...] | None = None, **values: Tensor
) -> list[Tensor]:
    """Returns the values as float64 on the CPU, without a graph.

    Raises unless they have one shape, (N,) or (N, C) as `axes` says, and those in `finite` (None means all) are finite.
    """
    tensors = {name: real_tensor(function, name, value).cpu().double() for name, value in values.items()}
    shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in tensors.items())
    first = next(iter(tensors.values()))
    form = "(N,)" if axes == (1,) else "(N,) or (N, C)"
    if len({value.shape for value in tensors.values()}) > 1:
        raise LapwingError(
            f"{function} compares its arguments entry by entry, and their shapes differ: {shapes}. Pass one shape, "
            f"{form}, because nothing is broadcast: y[:, None] for a column of outputs."
        )
    if first.ndim not in axes or first.numel() == 0:
        raise LapwingError(
            f"{function} averages over samples, and the shape is {shapes}. Pass {form} with N > 0, such as "
            "values.flatten() for several positions in each sample."
        )
    for name in tensors if finite is None else finite:
        bad, line = ~tensors[name].isfinite(), f"Find them with (~{name}.isfinite()).nonzero()."
        _refuse(bad, f"{function} needs finite values", f"values of {name} are NaN or infinite", line)
    return list(tensors.values())


def _refuse(bad: Tensor, needs: str, found: str, line: str) -> None:
    """Raises if there are bad entries, with their number."""
    if bad.any():
        raise LapwingError(f"{needs}, and {int(bad.sum())} of {bad.numel()} {found}. {line}")
