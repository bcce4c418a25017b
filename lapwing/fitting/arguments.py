"""Checks of the arguments of `fit`, before the network runs."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch

from ..errors import LapwingError, shown
from ..methods import KFAC, Method
from ..network.loaders import check_seed
from ..posterior.prior import is_positive
from ..tangent import LastLayer, Predicate, everything, last_layer
from ..tuning import Tuning


def method_and_params(method: Any, params: Any) -> tuple[Method, Predicate | LastLayer]:
    """Returns the method and the selection of parameters, with the defaults for what is None.

    Raises:
        LapwingError: for a method that is a class, a tensor, or anything else but a method.
    """
    if isinstance(method, type) and issubclass(method, Method):
        raise LapwingError(
            f"method={method.__name__} is the class. Pass an instance with its options: lw.{method.__name__}()."
        )
    if hasattr(method, "shape") and hasattr(method, "dtype"):
        raise LapwingError(
            f"lw.fit takes a loader and then a method, and the third argument is {shown(method)}. Write lw.fit(model, "
            "[(x, y)]) to fit on inputs x and targets y."
        )
    if method is not None and not isinstance(method, Method):
        raise LapwingError(
            f"method={shown(method)} is not a method. Pass lw.Full(), lw.Diagonal(), lw.KFAC(), lw.EKFAC(), "
            "lw.ELLA(rank=20, rows=200), lw.OptimalSubspace(rank=20), lw.SubsetOfWeights(size=100), lw.VaLLA(), "
            "lw.SubsetOfData(size=500), lw.SampledLLA() or lw.MeanField(): write method=lw.KFAC(). lw.SWAG is made by "
            "lw.SWAG.from_snapshots."
        )
    if params is None:
        params = last_layer if method is None else everything
    return method or KFAC(), params


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


def check_tuning(tune: Any) -> None:
    """Raises for a tuning that is none."""
    if tune is not None and not isinstance(tune, Tuning):
        raise LapwingError(
            f"tune={shown(tune)} is not a tuning. Pass lw.BoundedEvidence(), lw.Evidence(), lw.Validation(loader), "
            "lw.EarlyStopping(loader) or None: write tune=lw.BoundedEvidence()."
        )
    if torch.empty(0).is_meta:
        raise LapwingError(
            "torch's default device is meta, whose tensors hold no numbers. Call torch.set_default_device('cpu') first."
        )


def check_data_size(data_size: int, shown: int) -> None:
    """Raises for fewer training points than the loader shows."""
    if data_size < shown:
        raise LapwingError(
            f"data_size={data_size} is below the {shown} samples that the loader shows. Leave data_size out, or give "
            "the size of the whole training set."
        )
