"""Finds out whether held-out labels prefer other constants in the logits, as after training on resampled data."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..data import batches
from ..likelihoods import Likelihood
from ..posterior import Posterior

log = logging.getLogger("lapwing")

WORTH, MOST_OUTPUTS = 0.05, 20
"""Minimum gain of a shift, in nats per sample, and the maximum number of outputs: the warning shows each constant."""


def warn_of_shift(posterior: Posterior, loader: Iterable[Any]) -> None:
    """Warns if a constant for each logit improves the held-out log likelihood, which no temperature can do.

    Twice the gain of all samples must exceed 10 + 3 C, which chance does not reach. Outputs with positions are not
    looked at, and neither are likelihoods with weights of labels, for which the fit warns. Cost: a forward pass.
    """
    likelihood, tangent = posterior.likelihood, posterior.tangent
    if likelihood.activation is None or likelihood.label_weights is not None or tangent.outputs > MOST_OUTPUTS:
        return
    if tangent.positions.several:
        return
    pairs = [batches.split(batch, tangent.device) for batch in loader]
    logits, labels = torch.cat([tangent.outputs_of(x).double() for x, _ in pairs]), torch.cat([y for _, y in pairs])
    counted = likelihood.labelled(labels)
    logits, labels = (logits, labels) if counted is None else (logits[counted], labels[counted])
    shift, least = _best(likelihood, logits, labels, shifted=True)
    gain = _best(likelihood, logits, labels, shifted=False)[1] - least
    if gain > WORTH and 2 * len(labels) * gain > 10 + 3 * len(shift):
        shift = shift - shift.mean() if likelihood.activation == "softmax" else shift
        log.warning(
            "A constant for each logit of %s gains %.2g nats per held-out sample, and validation= only divides the "
            "logits. If it was trained on resampled data or with weights of labels, write "
            "forward=lambda model, inputs: model(inputs) + torch.tensor(%s).",
            type(tangent.model).__name__, gain, [round(value, 2) for value in shift.tolist()],
        )  # fmt: skip


def _best(likelihood: Likelihood, logits: Tensor, labels: Tensor, shifted: bool) -> tuple[Tensor, float]:
    """Returns the shift b (C,) of highest likelihood of `(f + b)/T` at the best T, and its loss; 0 unless `shifted`."""
    scale, shift = logits.new_zeros(()).requires_grad_(), logits.new_zeros(logits.shape[1]).requires_grad_(shifted)
    optimiser = torch.optim.LBFGS([scale, shift] if shifted else [scale], max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        penalty = (shift.square().sum() + scale.square()) / (50 * len(labels))  # classes may be absent
        value = penalty - likelihood.plain.log_prob(logits * scale.exp() + shift, labels).mean()
        value.backward()
        return value

    with torch.enable_grad():
        optimiser.step(loss)
        least = float(loss().detach())
    return (shift / scale.exp()).detach(), least
