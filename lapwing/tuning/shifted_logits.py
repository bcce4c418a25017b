"""Finds out whether held-out labels prefer other constants in the logits, as after training on resampled data."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..data import batches
from ..posterior import Posterior
from .search import ascend

log = logging.getLogger("lapwing")

WORTH, MOST_OUTPUTS = 0.05, 20
"""Minimum gain of a shift, in nats per sample, and the maximum number of outputs: the warning shows each constant."""

LARGEST = 30.0
"""Largest size of a constant, and of the logarithm of the temperature."""


def warn_of_shift(posterior: Posterior, loader: Iterable[Any]) -> None:
    """Warns if a constant for each logit improves the held-out log likelihood, which no temperature can do.

    Twice the gain of all samples must exceed 10 + 3 C, which chance does not reach. Outputs with positions are not
    looked at. Cost: a forward pass.
    """
    likelihood, tangent = posterior.likelihood.plain, posterior.tangent
    if likelihood.activation is None or tangent.outputs > MOST_OUTPUTS or tangent.positions.several:
        return
    pairs = [batches.split(batch, tangent.device) for batch in loader]
    logits, labels = torch.cat([tangent.outputs_of(x).double() for x, _ in pairs]), torch.cat([y for _, y in pairs])
    counted = likelihood.labelled(labels)
    logits, labels = (logits, labels) if counted is None else (logits[counted], labels[counted])

    def score(point: Tensor) -> Tensor:
        """Returns the mean log likelihood of `f e^s + b` at the point (s, b), with a penalty for absent classes."""
        scores = likelihood.log_prob(logits * point[0].exp() + point[1:], labels)
        return scores.mean() - point.square().sum() / (50 * len(labels))

    start, most = logits.new_zeros(1 + tangent.outputs), [LARGEST] * (1 + tangent.outputs)
    scaled = ascend(lambda point: score(torch.cat([point, start[1:]])), start[:1], [-LARGEST], [LARGEST])
    best = ascend(score, start, [-bound for bound in most], most)
    gain = float(score(best) - score(torch.cat([scaled, start[1:]])))
    if gain > WORTH and 2 * len(labels) * gain > 10 + 3 * tangent.outputs:
        shift = best[1:] / best[0].exp()
        shift = shift - shift.mean() if likelihood.activation == "softmax" else shift
        log.warning(
            "A constant for each logit of %s gains %.2g nats per held-out sample, and validation= only divides the "
            "logits. If it was trained on resampled data or with weights of labels, leave the weights out of the "
            "likelihood, and write forward=lambda model, inputs: model(inputs) + torch.tensor(%s).",
            type(tangent.model).__name__, gain, [round(value, 2) for value in shift.tolist()],
        )  # fmt: skip
