"""Checks that method, network, likelihood, tuning and data go together, before the passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..data import batches
from ..errors import LapwingError
from ..likelihoods import Likelihood
from ..likelihoods.inferred import check_logits
from ..methods import FitShape, Method
from ..posterior.prior import check_range
from ..tangent import Tangent
from ..tuning import Tuning

FIRST = 256
"""Maximum number of samples of the first batch that show whether outputs suit the likelihood."""


def check_fit(method: Method, shape: FitShape, tune: Tuning | None, inputs: Any, targets: Any, held_out: bool) -> None:
    """Raises if the method, the network, the likelihood and the tuning do not fit together.

    `inputs` and `targets` are those of the first batch, and `held_out` says whether the user passed `validation=`.
    """
    tangent, likelihood = shape.tangent, shape.likelihood
    method.check(tangent, likelihood)
    if held_out and method.chooses_temperature:
        name = type(method).__name__
        raise LapwingError(
            f"{name} tunes its temperature on the data of the fit, and validation= is not used. Write lw.fit(model, "
            f"held_out, lw.{name}())."
        )
    if tune is not None:
        tune.check(method, shape)
    if likelihood.activation is not None:
        rows = first_rows(tangent, likelihood, inputs, targets)
        if rows is not None:
            check_logits(likelihood, *rows, next(iter(tangent.parameters.values())).dtype)
    check_noise(likelihood, tangent)


def check_noise(likelihood: Likelihood, tangent: Tangent) -> None:
    """Raises if the dtype of the weights cannot express the noise variance."""
    if likelihood.noise_variance is not None:
        check_range("noise variance", torch.tensor(likelihood.noise_variance, dtype=torch.float64), tangent.dtype)


def first_rows(tangent: Tangent, likelihood: Likelihood, inputs: Any, targets: Any) -> tuple[Tensor, Tensor] | None:
    """Returns outputs (n, C) of the first samples and their targets; None if the likelihood refuses the targets."""
    part = slice(0, FIRST)
    try:
        return _checked_rows(tangent, likelihood, batches.take(inputs, part), targets[part])
    except LapwingError:  # the passes say why, with all targets of the batch
        return None


def check_batch(tangent: Tangent, likelihood: Likelihood, inputs: Any, targets: Any) -> None:
    """Raises if the network does not accept the inputs, or the likelihood does not accept their targets."""
    tangent.check(batches.split((inputs, targets), tangent.device)[0])
    _checked_rows(tangent, likelihood, inputs, targets)


def _checked_rows(tangent: Tangent, likelihood: Likelihood, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Returns outputs (n, C) and targets by position; raises if the likelihood does not accept the targets."""
    inputs, targets = batches.split((inputs, targets), tangent.device)
    outputs, positions = tangent.outputs_of(inputs), tangent.positions
    places = positions.places(len(targets), positions.sizes(outputs.shape))
    rows, targets = positions.rows(outputs), places.targets(targets, tangent.outputs)
    likelihood.check(rows, targets)
    return rows, targets
