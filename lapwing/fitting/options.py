"""Checks of what the user passes to `lw.fit` and `lw.plan`, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch

from ..data import batches
from ..data.loaders import check_seed
from ..errors import LapwingError, is_positive, shown
from ..likelihoods import Likelihood
from ..likelihoods.inferred import check_logits
from ..methods import FitShape, Method
from ..posterior.prior import check_range
from ..tangent import Tangent
from ..tuning import BoundedEvidence, Tuning

DEFAULT_TUNING = BoundedEvidence()
"""What tunes where the user says nothing: a method that chooses its own prior leaves it out without a warning."""


def check_numbers(
    prior_precision: Any, weight_decay: float | None, temperature: float, data_size: int | None, seed: Any
) -> None:
    """Raises for numbers out of range."""
    numbers = {"weight_decay": weight_decay, "temperature": temperature}
    if not isinstance(prior_precision, Mapping):
        numbers["prior_precision"] = prior_precision
    for name, value in numbers.items():
        if not (is_positive(value) or (value is None and name != "temperature")):
            raise LapwingError(
                f"{name}={shown(value)} is not a positive finite number. Write "
                f"{name}={1e-4 if name == 'weight_decay' else 1.0}, or leave it out."
            )
    if data_size is not None and not (is_positive(data_size) and isinstance(data_size, Integral)):
        raise LapwingError(
            f"data_size={shown(data_size)} is not a whole number, the size of the training set. Write "
            "data_size=len(dataset), or leave it out."
        )
    if prior_precision is not None and weight_decay is not None:
        raise LapwingError(
            f"prior_precision={prior_precision} and weight_decay={weight_decay} exclude each other, since weight_decay "
            "sets the prior precision to N times itself. Leave one out."
        )
    check_seed(seed)


def check_tuning(tune: Any, validation: Any) -> None:
    """Raises for a tuning that is none, and for one beside held-out data, which tune."""
    if tune is not None and not isinstance(tune, Tuning):
        raise LapwingError(
            f"tune={shown(tune)} is not a tuning. Pass lw.BoundedEvidence(), lw.Evidence(), lw.Validation(loader), "
            "lw.EarlyStopping(loader) or None: write tune=lw.BoundedEvidence()."
        )
    if validation is not None and not (tune is None or tune is DEFAULT_TUNING):
        raise LapwingError(
            f"validation= and tune={type(tune).__name__} exclude each other, since validation= tunes by "
            "lw.Validation(loader). Leave one of them out."
        )
    if torch.empty(0).is_meta:
        raise LapwingError(
            "torch's default device is meta, whose tensors hold no numbers. Call torch.set_default_device('cpu') first."
        )


def check_data_size(data_size: int, count: int) -> None:
    """Raises for N below the number of samples that the loader shows."""
    if data_size < count:
        raise LapwingError(
            f"data_size={data_size} is below the {count} samples that the loader shows. Leave data_size out, or give "
            "the size of the whole training set."
        )


def check_fit(method: Method, shape: FitShape, tune: Tuning | None, inputs: Any, held_out: bool) -> None:
    """Raises where method, network, likelihood and tuning do not go together, once the network is surveyed.

    Args:
        method: of the fit.
        shape: of the network and the likelihood.
        tune: the tuning; None where there is none.
        inputs: of the first batch.
        held_out: whether the tuning is by `validation=`.
    """
    tangent, likelihood = shape.tangent, shape.likelihood
    method.check(tangent, likelihood)
    if held_out and method.chooses_temperature:
        name = type(method).__name__
        raise LapwingError(
            f"{name} takes its temperature from the data of the fit, and validation= is not used. Write lw.fit(model, "
            f"held_out, lw.{name}())."
        )
    if tune is not None:
        tune.check(method, shape)
    _check_outputs(tangent, likelihood, inputs)
    check_noise(likelihood, tangent)


def check_noise(likelihood: Likelihood, tangent: Tangent) -> None:
    """Raises for a noise variance that the weights' dtype cannot express."""
    if likelihood.noise_variance is not None:
        check_range("noise variance", torch.tensor(likelihood.noise_variance, dtype=torch.float64), tangent.dtype)


def _check_outputs(tangent: Tangent, likelihood: Likelihood, inputs: Any) -> None:
    """Raises for outputs that are probabilities where the likelihood takes logits."""
    if likelihood.activation is not None:
        weight = next(iter(tangent.parameters.values()))
        outputs = tangent.outputs_of(batches.plain(batches.take(inputs, slice(0, 16)), tangent.device))
        rows = outputs if tangent.positions is None else tangent.positions.rows(outputs)
        check_logits(likelihood, rows, weight.dtype)
