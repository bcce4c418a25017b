"""The default likelihood, which follows from the dtype of the targets, and checks that outputs fit their targets."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..data import batches
from ..data.inputs import Samples
from ..errors import LapwingError
from ..linalg import at_least_float32, doubled
from .base import Likelihood
from .bernoulli import Bernoulli
from .categorical import Categorical
from .gaussian import Gaussian
from .heteroscedastic import SQUARES
from .targets import aligned_targets, are_class_probabilities

log = logging.getLogger("lapwing")

MAX_SAMPLES = 10_000
"""Maximum number of samples that decide whether floating-point targets are labels."""

MIN_INFERRED = 16
"""Minimum number of outputs from which their kind is inferred."""

NONZERO_ERRORS = 3.0
"""Standard errors by which a mean must differ from 0."""

WORSE = 1.2
"""Mean squared residual, in variances of the targets, above which a network is worse than the mean."""

WORSE_LABELS = 1.5
"""NLL of training labels, in NLL of equal probabilities, above which they are not the labels of the training."""

HIGHER_RATES = 2.0
"""Mean of exp(f), in means of the counts, above which outputs f may be rates instead of their logarithms."""

LEAST_SQUARES = 0.5
"""Mean squared residual, in variances of the network, below which its outputs are not log variances."""

READINGS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "probabilities": (lambda f: f, "model(inputs).logit()"),
    "percentages": (lambda f: f / 100, "(model(inputs) / 100).logit()"),
    "log probabilities": (torch.exp, "-(-model(inputs)).expm1().log()"),
}
"""What outputs may be instead of logits -> the probabilities, and the logits as code."""


def inferred_likelihood(targets: Any, data: Iterable[Samples] = ()) -> Likelihood:
    """Returns `Gaussian` for floating-point targets, `Categorical` for integers, and `Bernoulli` for bool.

    If the targets of the first batch may be labels, up to 10 000 samples of the next batches decide. Raises if the
    targets are not a tensor, are floats that are all 0 or 1, or are one-hot or class probabilities.
    """
    if not isinstance(targets, Tensor):
        raise LapwingError(
            f"The targets are {batches.describe(targets)}, from which no likelihood follows. Pass a tensor of "
            "floats for likelihood='gaussian', integers for likelihood='categorical', bool for likelihood='bernoulli'."
        )
    if targets.dtype == torch.bool:
        if targets.ndim == 2 and targets.shape[1] > 1:
            _check_not_labels(targets, data)
        return Bernoulli()
    if not targets.is_floating_point():
        return Categorical()
    _check_not_labels(targets, data)
    return Gaussian(tails=None)


def _check_not_labels(targets: Tensor, data: Iterable[Samples]) -> None:
    """Raises if floats are labels, or bools are one-hot rows; stops at the first batch of which neither is true."""
    binary, rows = targets.is_floating_point(), True
    found: set[Any] = set()
    count = 0
    for values in _targets(targets, data):
        if not isinstance(values, Tensor) or values.is_meta:
            return
        values = values.cpu().float() if values.dtype == torch.bool else values.cpu()
        places = {0: values == 0, 1: values == 1, "NaN": values.isnan()}
        binary = binary and bool((places[0] | places[1] | places["NaN"]).all())
        rows = rows and _sums_to_one(values, values.dtype)
        if not (binary or rows):
            return
        found.update(value for value, mask in places.items() if bool(mask.any()))
        count += len(values) if values.ndim else 1
        if count >= MAX_SAMPLES:
            break
    dtype = str(targets.dtype).removeprefix("torch.")
    if rows:
        kind = "one-hot rows" if binary else "rows that sum to one, like class probabilities,"
        numbers, other = "y.argmax(1)", "likelihood='gaussian' for a regression"
        if targets.dtype == torch.bool:
            kind, numbers, other = "one-hot rows", "y.long().argmax(1)", "likelihood='bernoulli' for yes-or-no answers"
        raise LapwingError(
            f"The targets are {kind} of shape {tuple(targets.shape)} in {dtype}. Give class numbers, {numbers}, for a "
            f"classification, or pass {other}."
        )
    if {0, 1} <= found:  # only zeros, or only ones, decide nothing
        if "NaN" in found:
            raise LapwingError(
                f"The targets are all 0, 1 or NaN in {dtype}. Pass likelihood=lw.Bernoulli(missing=True) for binary "
                "labels, some of them missing, or likelihood=lw.Gaussian(missing=True) for a regression."
            )
        raise LapwingError(
            f"The targets are all 0 or 1 in {dtype}. Pass likelihood='bernoulli' for binary labels or "
            "likelihood='gaussian' for a regression. Class labels must be integers: y.long()."
        )


def _targets(first: Tensor, data: Iterable[Samples]) -> Iterator[Any]:
    """Yields the first targets without reading the data, then the targets of every batch."""
    yield first
    for samples in data:
        yield samples.targets


def check_logits(likelihood: Likelihood, outputs: Tensor, targets: Tensor, weights: torch.dtype) -> None:
    """Raises if outputs (B, C) are probabilities or percentages that sum to one; warns if they may be of a sigmoid.

    There is no warning if the targets are more likely by the sigmoid of the outputs than by the probabilities.
    Log-softmax outputs are accepted: they have the same probabilities and Fisher information as logits. `weights`, the
    dtype of the network's weights, determines the rounding of the outputs.
    """
    if likelihood.activation is None or outputs.numel() < MIN_INFERRED:  # few logits may be in [0, 1] by chance
        return
    outputs = at_least_float32(outputs)
    for kind, (probabilities, line) in READINGS.items():
        p = probabilities(outputs)
        low, high = torch.stack(p.aminmax()).tolist()  # one transfer from the device
        if low >= 0 and high <= 1 and _is_told(likelihood, outputs, targets, weights, kind, p, line):
            return


def _is_told(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, weights: torch.dtype, kind: str, p: Tensor, line: str
) -> bool:
    """Raises if the outputs are probabilities p of this kind; warns, and returns True, if they look like them."""
    found, likely = False, kind == "probabilities"
    if likelihood.activation == "softmax":
        found, line = kind != "log probabilities" and _sums_to_one(p, weights), line.replace("logit()", "log()")
    else:
        gain = likelihood.log_prob(p.logit(1e-6), targets) - likelihood.log_prob(outputs, targets)
        both = len(targets[~targets.isnan()].unique()) > 1
        likely = (both and _surely_positive(gain)) or (likely and not _surely_positive(-gain))
    what = f"are {kind} that sum to one" if found else f"look like {kind}"
    text = (
        f"The outputs of the network, of shape (batch, {outputs.shape[1]}), {what}. The {likelihood.name} "
        f"likelihood applies the {likelihood.activation} itself and needs logits. If the network is an "
        "nn.Sequential that ends in a softmax or sigmoid, pass forward=lambda model, inputs: "
        f"model[:-1](inputs), which leaves it out, or forward=lambda model, inputs: {line}."
    )
    if found:
        raise LapwingError(text)
    if likely:
        log.warning("%s", text)
    return likely


def _sums_to_one(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether values (B, C), C > 1, are rows of class probabilities, up to the rounding of a dtype."""
    return values.ndim == 2 and values.shape[1] > 1 and bool(are_class_probabilities(values, dtype).all())


def warn_of_misreading(likelihood: Likelihood, outputs: int, statistics: dict[str, Tensor]) -> None:
    """Warns if equal probabilities fit the labels much better than the network, or if outputs are not log variances.

    `statistics` are of all data.
    """
    if SQUARES in statistics and (ratio := float(statistics[SQUARES] / statistics["weight"])) < LEAST_SQUARES:
        log.warning(
            "The squared residuals are %.2g times the variances of the network, in the mean: HeteroscedasticGaussian "
            "reads means m and log variances. If the network gives variances v or standard deviations s, pass "
            "forward=lambda model, inputs: torch.cat([m, v.log()], 1), with v = s.square().", ratio,
        )  # fmt: skip
    logits = likelihood.activation is not None and "log_likelihood" in statistics
    if not logits or likelihood.plain is not likelihood:  # weights of the loss change its size
        return
    softmax = likelihood.activation == "softmax"
    equal = math.log(outputs) if softmax else outputs * math.log(2)
    nll = -float(statistics["log_likelihood"]) / max(1.0, float(statistics["weight"]))
    if nll > WORSE_LABELS * equal > 0:
        log.warning(
            "The training labels have an NLL of %.3g under the network, and of %.3g under equal probabilities: they "
            "are not what it was trained for. Compare y with %s: a loader may number the classes in another order.",
            nll, equal, "model(x).argmax(1)" if softmax else "model(x) > 0",
        )  # fmt: skip


def warn_of_misfit(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, statistics: dict[str, Tensor], which: str = "training"
) -> None:
    """Warns if outputs (B, C) are not means of their targets, or not logs of rates.

    `statistics` are of all targets, of Gaussian noise or of counts. `which` is "training" or "held-out" targets.
    """
    if "rates" in statistics:
        _warn_of_rates(doubled(outputs), targets)
        return
    known, sums = statistics["targets"]
    count = statistics["count"]
    variance = float((statistics["squared_target"] - (sums.square() / known.clamp_min(1)).sum()) / count)
    residual = float(statistics["squared_error"] / count)
    closer = _closer_function(outputs, targets) if which == "training" else None
    if closer is not None:
        log.warning(
            "The targets are %s, and %s of the outputs is closer to them than the outputs, which the %s likelihood "
            "takes for means (mean squared residual %.3g). If the network was trained for %s, pass %s.",
            *closer[:2], likelihood.name, residual, *closer[2:],
        )  # fmt: skip
    elif float(known.min()) >= MIN_INFERRED and residual > WORSE * variance:
        log.warning(
            "The network predicts the %s targets worse than their mean does: its mean squared residual is %.3g, "
            "and the variance of the targets is %.3g. Pass the targets in the units of the outputs (standardised, for "
            "example), %s.", which, residual, variance,
            "or the likelihood of the loss that trained the network, such as likelihood='poisson' for logs of rates"
            if which == "training" else "and inputs as in the training",
        )  # fmt: skip


def _warn_of_rates(outputs: Tensor, counts: Tensor) -> None:
    """Warns if outputs (B, C), of which Poisson takes the exponential, are themselves closer to the counts."""
    y = aligned_targets("Poisson", outputs, counts).to(outputs)
    f, y = outputs[~y.isnan()], y[~y.isnan()]
    rates, mean = float(f.exp().mean()), float(y.mean())
    nearer = _surely_positive(((y - f.exp()).abs() - (y - f).abs()).sign())
    if len(y) >= MIN_INFERRED and nearer and rates > HIGHER_RATES * mean:
        log.warning(
            "The outputs look like rates instead of their logarithms: the mean of exp(f) is %.3g, and of the counts "
            "%.3g. If the network was trained for rates, pass forward=lambda model, inputs: "
            "model(inputs).clamp_min(1e-6).log().", rates, mean,
        )  # fmt: skip


def _closer_function(outputs: Tensor, targets: Tensor) -> tuple[str, str, str, str] | None:
    """Returns the kind of the targets, the function of outputs that is closer to them, the loss, and what to pass."""
    f = doubled(outputs)
    y = aligned_targets("Gaussian", f, targets)
    f, y = f[~y.isnan()], y[~y.isnan()]
    if len(y) < MIN_INFERRED or not bool((y >= 0).all()) or float(y.min()) == float(y.max()):
        return None
    function, name, loss, line = torch.exp, "exp", "their logarithms", "forward=lambda model, x: model(x).exp()"
    kind = "positive"
    if bool((y == y.round()).all()):
        kind, loss, line = "counts", "logs of rates", "likelihood='poisson'"
    elif float(y.max()) <= 1:
        kind, function, name = "between 0 and 1", torch.sigmoid, "the sigmoid"
        loss, line = "logits", "likelihood=lw.Bernoulli(soft_targets=True)"
    before, after = (y - f).abs(), (y - function(f)).abs()
    closer = _surely_positive((before - after).sign()) or _surely_positive(before.square() - after.square())
    fits = float(after.square().mean()) <= WORSE * float(y.var())
    return (kind, name, loss, line) if closer and fits else None


def _surely_positive(values: Tensor) -> bool:
    """Whether the mean of values (N,) is above 0 by more than chance."""
    values = doubled(values)
    return len(values) > 1 and float(values.mean()) > NONZERO_ERRORS * float(values.std()) / len(values) ** 0.5
