"""What `lw.fit` treats where neither a method nor parameters are named, by its price."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..errors import LapwingError
from ..likelihoods import Likelihood
from ..methods import KFAC, Diagonal, FitShape, Full, Method
from ..network.eager import parameters_of
from ..network.gate import checked_network
from ..network.positions import EXACT_OUTPUTS
from ..tangent import LastLayer, Predicate, Tangent, everything, last_layer
from ..tuning.leave_one_out import MAX_EXPLICIT_WEIGHTS, MAX_WEIGHTS

FULL_NUMBERS = 2**20
"""`Full` where its basis or its covariance has at most so many numbers: a prediction reads them for each output."""

FULL_MULTIPLY_ADDS = 2**33
"""`Full` where its fit takes at most so many: a second or two."""

KFAC_OUTPUTS = 10
"""KFAC where there are at most so many outputs: a fit and a prediction take a backward pass for each."""

FOR_ALL_WEIGHTS = "For all weights write lw.fit(model, loader, lw.KFAC())."
"""What the log says where the last layer alone is treated."""


def default_method(tangent: Tangent, likelihood: Likelihood, samples: int) -> Method | None:
    """Returns the method over all weights of a tangent, or None where they cost too much.

    Args:
        tangent: of all trained weights.
        likelihood: of the fit.
        samples: N.
    """
    if not _is_regression(likelihood):
        return None
    weights, rows = tangent.size, samples * tangent.outputs
    numbers = min(weights, rows) * weights
    fits = numbers <= min(FULL_NUMBERS, tangent.memory // 24) and rows * numbers <= FULL_MULTIPLY_ADDS
    if fits and tangent.contraction_dtype == torch.float64:
        return Full()
    return KFAC() if is_affordable_for_kfac(tangent, KFAC_OUTPUTS) else None


def is_affordable_for_kfac(tangent: Tangent, outputs: int) -> bool:
    """Whether KFAC may treat all weights unasked: at most as many as the tuning looks at, and so many outputs."""
    affordable = tangent.size <= MAX_WEIGHTS and tangent.explicit_size <= MAX_EXPLICIT_WEIGHTS
    return affordable and tangent.outputs <= outputs


def method_and_tangent(
    model: nn.Module, survey: Callable[..., Tangent], method: Method | None, params: Predicate | LastLayer | None,
    likelihood: Likelihood, count: Callable[[], int],
) -> tuple[Method, Tangent, str | None]:  # fmt: skip
    """Returns the method of a fit, the network with the weights that it treats, and what the log says of a default.

    That is which one was taken, why, and how to ask for another; None where the user named a method. Of a classifier
    the last layer is treated: without held-out data the spread of all its weights is not known well enough.

    Args:
        model: the network.
        survey: `Tangent.survey` of it, on the first batch.
        method: the user's, or None.
        params: the user's, or None.
        likelihood: of the fit.
        count: returns N.
    """
    reason = None
    if method is None and params is None:
        chosen = default_fit(model, survey, likelihood, count)
        if not isinstance(chosen, str):
            return chosen
        reason = chosen
    if params is None:
        params = last_layer if method is None or method.treats_last_layer else everything
    tangent = survey(params=params)
    if method is None and isinstance(params, LastLayer) and tangent.outputs > EXACT_OUTPUTS:
        reason = (
            f"lw.Diagonal() is the default for a last layer of more than {EXACT_OUTPUTS} outputs: KFAC decomposes a "
            f"matrix of {tangent.outputs} rows for it. For KFAC write lw.fit(model, loader, lw.KFAC(), "
            "params=lw.last_layer)."
        )
        method = Diagonal()
    return method or KFAC(), tangent, reason


def default_fit(
    model: nn.Module, survey: Callable[..., Tangent], likelihood: Likelihood, count: Callable[[], int]
) -> tuple[Method, Tangent, str] | str:
    """Returns the method and all trained weights, where they are the default, and why; else why the last layer is.

    They are in a regression where that is cheap, and wherever the last layer is frozen, as it is below adapters.
    """
    frozen = _frozen_last_layer(model, survey)
    if not frozen and not _is_regression(likelihood):
        return f"KFAC over the last layer, the default for a {likelihood.name} likelihood. {FOR_ALL_WEIGHTS}"
    try:
        tangent = survey(params=everything, warn=False)
    except LapwingError as error:  # frozen weights, quantized layers, ...
        survey(params=last_layer, warn=False)  # raises for what is wrong with inputs
        return f"The last layer alone is treated, since all trained weights cannot be: {error}"
    method = None if tangent.positions is not None else default_method(tangent, likelihood, count())
    if method is not None:
        return method, tangent, (
            f"{method} over all {tangent.size} trained weights, the default for a regression of this size. For cheaper "
            "predictions write lw.fit(model, loader, lw.KFAC(), params=lw.last_layer)."
        )  # fmt: skip
    if frozen:
        return KFAC(), tangent, (
            f"KFAC over all {tangent.size} trained weights, the default where the last layer is frozen. For that "
            f"layer, {', '.join(frozen)}, write lw.fit(model, loader, lw.KFAC(), params=lw.last_layer)."
        )  # fmt: skip
    return f"The last layer alone is treated, since all {tangent.size} weights cost too much. {FOR_ALL_WEIGHTS}"


def _frozen_last_layer(model: nn.Module, survey: Callable[..., Tangent]) -> tuple[str, ...]:
    """Returns the names of the last layer's parameters where they are frozen and others are trained, else none."""
    trained = [parameter.requires_grad for parameter in parameters_of(checked_network(model)).values()]
    if all(trained) or not any(trained):
        return ()
    layer = survey(params=last_layer, warn=False).parameters
    return () if any(parameter.requires_grad for parameter in layer.values()) else tuple(layer)


def price(method: Method, shape: FitShape) -> str:
    """Returns a sentence for the log: the length of the fit in forward passes, and the bytes of the posterior."""
    footprint = method.footprint(shape)
    assert footprint is not None  # every default method has one
    return (
        f"The fit takes about {footprint.passes:,.0f} forward passes of the data, without tuning, and the posterior "
        f"keeps {footprint.kept:,} bytes; lw.plan(model, loader) shows more."
    )


def _is_regression(likelihood: Likelihood) -> bool:
    """Whether a likelihood has a noise variance, set or open."""
    return likelihood.needs_noise or likelihood.noise_variance is not None
