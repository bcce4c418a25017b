"""Checks that method, network, likelihood, tuning and data go together, before the passes."""

from __future__ import annotations

from typing import Any

import torch

from ..data import batches
from ..errors import LapwingError
from ..likelihoods import Likelihood
from ..likelihoods.inferred import check_logits
from ..methods import FitShape, Method
from ..posterior.prior import check_range
from ..tangent import Tangent
from ..tuning import Tuning


def check_fit(method: Method, shape: FitShape, tune: Tuning | None, inputs: Any, held_out: bool) -> None:
    """Raises if the method, the network, the likelihood and the tuning do not fit together.

    `inputs` are those of the first batch, and `held_out` says whether the user passed `validation=`.
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
    _check_outputs(tangent, likelihood, inputs)
    check_noise(likelihood, tangent)


def check_noise(likelihood: Likelihood, tangent: Tangent) -> None:
    """Raises if the dtype of the weights cannot express the noise variance."""
    if likelihood.noise_variance is not None:
        check_range("noise variance", torch.tensor(likelihood.noise_variance, dtype=torch.float64), tangent.dtype)


def _check_outputs(tangent: Tangent, likelihood: Likelihood, inputs: Any) -> None:
    """Raises if the outputs are probabilities but the likelihood expects logits."""
    if likelihood.activation is not None:
        weight = next(iter(tangent.parameters.values()))
        outputs = tangent.outputs_of(batches.plain(batches.take(inputs, slice(0, 16)), tangent.device))
        check_logits(likelihood, tangent.positions.rows(outputs), weight.dtype)


def check_batch(tangent: Tangent, likelihood: Likelihood, inputs: Any, targets: Any) -> None:
    """Raises if the network does not accept the inputs, or the likelihood does not accept their targets."""
    inputs, targets = batches.split((inputs, targets), tangent.device)
    tangent.check(inputs)
    outputs, positions = tangent.outputs_of(inputs), tangent.positions
    places = positions.places(len(targets), positions.sizes(outputs.shape))
    likelihood.check(positions.rows(outputs), places.targets(targets, tangent.outputs))
