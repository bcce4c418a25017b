"""Chooses the method of a fit if the user named none, and surveys the network.

`choose` also checks that the method, the network, the likelihood, the tuning and the data go together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.inputs import Samples
from ..environment import memory_limit
from ..errors import LapwingError, shown
from ..likelihoods import Likelihood
from ..linalg import check_range, double_device
from ..methods import KFAC, Batch, Diagonal, FitShape, Full, Method
from ..methods.prior import Prior
from ..network.eager import parameters_of
from ..network.gate import checked_network
from ..network.positions import EXACT_OUTPUTS
from ..network.probe import warn_of_idle
from ..tangent import LastLayer, Tangent, everything, last_layer
from ..tuning import Tuning
from ..tuning.leave_one_out import MAX_EXPLICIT_WEIGHTS, MAX_WEIGHTS
from .fit_data import FitData
from .options import FitOptions

log = logging.getLogger("lapwing")

FULL_NUMBERS = 2**20  # maximum entries of the basis or covariance of `Full`; a prediction reads them for each output
FULL_MULTIPLY_ADDS = 2**33  # maximum multiply-adds of a fit for which `Full` is the default: one to two seconds
KFAC_OUTPUTS = 10  # maximum outputs for KFAC over all weights: a fit and a prediction take a backward pass for each
FOR_ALL_WEIGHTS = "For all weights write lw.fit(model, loader, lw.KFAC())."


@dataclass(frozen=True)
class Choice:
    """The method of a fit, and the surveyed network that it treats."""

    method: Method
    shape: FitShape  # of the surveyed network, the likelihood and the data
    prior: Prior
    reason: str | None  # why this is the default, and how to choose another; None if the user named method or weights
    rule: str | None  # kind of targets, if its default was used; None if the user named method or weights


def default_method(tangent: Tangent, likelihood: Likelihood, samples: int) -> Method | None:
    """Returns the method for all weights and n samples; None for classes, or if all weights cost too much."""
    if classifies(likelihood, tangent):
        return None
    weights, rows = tangent.size, samples * tangent.width
    numbers = (weights if tangent.positions.several else min(weights, rows)) * weights  # `Full` is primal there
    fits = numbers <= min(FULL_NUMBERS, tangent.memory // 24) and rows * numbers <= FULL_MULTIPLY_ADDS
    if fits and tangent.contraction_dtype == torch.float64:
        return Full()
    # the tuning can read the Jacobian of all weights
    tunable = tangent.size <= MAX_WEIGHTS and tangent.plan.explicit_size <= MAX_EXPLICIT_WEIGHTS
    return KFAC() if tunable and tangent.width <= KFAC_OUTPUTS else None


def default_choice(
    model: nn.Module, likelihood: Likelihood, survey: Callable[..., Tangent], count: Callable[[], int]
) -> tuple[Method | None, Tangent | None, str]:
    """Returns the method, the tangent of all trained weights, and the reason; None and None for the last layer."""
    frozen: tuple[str, ...] = ()  # names of the last layer's parameters if only these are frozen
    trained = [parameter.requires_grad for parameter in parameters_of(checked_network(model)).values()]
    if any(trained) and not all(trained):
        layer = survey(params=last_layer, warn=False).parameters
        frozen = () if any(parameter.requires_grad for parameter in layer.values()) else tuple(layer)
    of_classes = f"KFAC over the last layer, the default for a {likelihood.name} likelihood. {FOR_ALL_WEIGHTS}"
    if not frozen and likelihood.activation == "softmax":  # saves the survey of all weights
        return None, None, of_classes
    try:
        tangent = survey(params=everything, warn=False)
    except LapwingError as error:  # frozen weights, quantized layers, ...
        survey(params=last_layer, warn=False)  # raises if the inputs are wrong
        return None, None, f"Only the last layer is treated, because all trained weights cannot be: {error}"
    if not frozen and classifies(likelihood, tangent):
        return None, None, of_classes
    method = default_method(tangent, likelihood, count())
    if method is not None:
        return method, tangent, (
            f"{method} over all {tangent.size} trained weights, the default for a regression of this size. For cheaper "
            "predictions write lw.fit(model, loader, lw.KFAC(), params=lw.last_layer)."
        )  # fmt: skip
    if frozen:  # as with LoRA
        return KFAC(), tangent, (
            f"KFAC over all {tangent.size} trained weights, the default if the last layer is frozen. For that "
            f"layer, {', '.join(frozen)}, write lw.fit(model, loader, lw.KFAC(), params=lw.last_layer)."
        )  # fmt: skip
    too_much = f"Only the last layer is treated, because all {tangent.size} weights cost too much. {FOR_ALL_WEIGHTS}"
    return None, None, too_much


def choose(
    options: FitOptions, model: nn.Module, data: FitData, count: Callable[[], int], samples: int, warn: bool = True
) -> Choice:
    """Chooses the method if the user named none, surveys the network, and checks that all parts go together.

    `count` returns the number of samples, and `samples` is a lower bound if counting needs a pass. By default a
    classifier gets its last layer: without held-out data the spread of all weights is too uncertain.
    """
    survey = partial(
        Tangent.survey, model, data.first.inputs, forward=options.forward, memory=options.memory,
        targets=data.first.targets, activation=data.likelihood.activation,
    )  # fmt: skip
    method, params, tangent, reason = options.method, options.params, None, None
    by_default = method is params is None
    if by_default:
        method, tangent, reason = default_choice(model, data.likelihood, survey, count)
    if tangent is None:
        if params is None:
            params = last_layer if method is None or method.treats_last_layer else everything
        tangent = survey(params=params, warn=warn)
    elif warn:
        warn_of_idle(tangent.model, tangent.reasons)  # as a survey for a named method does
    if method is None:
        method, reason = _kfac_or_diagonal(tangent.outputs, isinstance(params, LastLayer), reason)
    rule = None
    if by_default:
        rule = "classes" if classifies(data.likelihood, tangent) else "targets that are not classes"
    shape = FitShape.of(tangent, data.likelihood, data.first.inputs, samples)
    _check_fit(method, shape, data, options.validation is not None)
    precision, decay = options.prior_precision, options.weight_decay
    precision = precision if decay is None else (options.data_size or count()) * decay
    check_range("noise variance", data.likelihood.noise_variance, tangent.dtype)
    prior = Prior.read(tangent, precision, options.prior_mean)
    return Choice(method, shape, prior, reason, rule)


def _kfac_or_diagonal(outputs: int, last: bool, reason: str | None) -> tuple[Method, str | None]:
    """Returns KFAC, or Diagonal for a last layer of many outputs, and the reason; `last` means only that layer."""
    if not last or outputs <= EXACT_OUTPUTS:
        return KFAC(), reason
    return Diagonal(), (
        f"lw.Diagonal() is the default for a last layer of more than {EXACT_OUTPUTS} outputs: KFAC decomposes a matrix "
        f"of {outputs} rows for it. For KFAC write lw.fit(model, loader, lw.KFAC(), params=lw.last_layer)."
    )


def log_default(choice: Choice) -> None:
    """Logs a default with its cost, and warns if it treats a network whose weights are all frozen."""
    footprint, model = choice.method.footprint(choice.shape), choice.shape.tangent.model
    assert footprint is not None  # every default method has one
    log.info(
        "%s The fit takes about %s forward passes of the data, without tuning, and the posterior keeps %s bytes; "
        "lw.plan(model, loader) shows more.", choice.reason, f"{footprint.passes:,.0f}", f"{footprint.kept:,}",
    )  # fmt: skip
    if choice.rule is not None and not any(part.requires_grad for part in model.parameters()):
        log.warning(
            "All weights of %s are frozen, so lapwing treats only the last layer. To choose this without a warning "
            "write params=lw.last_layer; for all weights write params=lw.matching('*').", type(model).__name__,
        )  # fmt: skip


def classifies(likelihood: Likelihood, tangent: Tangent) -> bool:
    """Whether the default is the last layer because targets are classes or labels."""
    with double_device(tangent.device):  # for tensors in the function of `lw.FromDistribution`
        return likelihood.classifies(tangent.outputs)


def _check_fit(method: Method, shape: FitShape, data: FitData, validation: bool) -> None:
    """Raises if the parts of a fit do not go together; `validation` says whether `validation=` was given."""
    tangent, likelihood, tune = shape.tangent, shape.likelihood, data.tune
    method.check(tangent, likelihood)
    if likelihood.head_numbers and tangent.positions.several:
        raise _heads_at_positions(min(likelihood.head_numbers), type(tangent.model).__name__)
    if validation and method.chooses_temperature:
        raise _tunes_itself(type(method).__name__)
    if tune is not None:
        tune.check(method, shape)
    for part in likelihood.regressions.values():
        if part.noise == "input" and not (part.needs_noise and tune is not None and tune.fits_noise):
            raise _noise_is_given(part, tune)
    if data.held_out is not None:
        try:
            data.held_out.check_keys(likelihood)
            check_batch(tangent, likelihood, data.held_out.first)
        except LapwingError as error:
            raise LapwingError(f"The held-out data do not fit. {error}") from error


def _heads_at_positions(key: Any, model: str) -> LapwingError:
    return LapwingError(
        f"The outputs of {model} have positions, which heads of lw.Joint have not. Fit one head at a time: [(x, "
        f"y[{key!r}]) for x, y in loader], with forward=lambda model, x: model(x)[..., 0:2]."
    )


def _tunes_itself(method: str) -> LapwingError:
    return LapwingError(
        f"{method} tunes its temperature on the data of the fit, and validation= is not used. Write lw.fit(model, "
        f"held_out, lw.{method}())."
    )


def _noise_is_given(likelihood: Any, tune: Tuning | None) -> LapwingError:
    return LapwingError(
        "noise='input' needs an open noise variance, and a tuning that fits it to residuals. This fit has "
        f"noise_variance={shown(likelihood.noise_variance)} and tune={shown(tune)}. Leave both out, or write "
        "likelihood=lw.Gaussian(noise='input') and validation=held_out."
    )


def check_batch(tangent: Tangent, likelihood: Likelihood, samples: Samples) -> tuple[Tensor, Tensor]:
    """Returns outputs (n, C) and targets by position; raises if the network or the likelihood does not accept them."""
    samples = samples.to(tangent.device)
    tangent.check(samples.inputs)
    rows = Batch.of(tangent, samples).rows()
    likelihood.check(rows["outputs"], rows["targets"])
    return rows["outputs"], rows["targets"]


def advice_on_memory(method: Method, shape: FitShape) -> str | None:
    """Returns a sentence on the memory that is missing and what to use instead, or None if everything fits.

    A method without a footprint is not checked. On a CPU all memory that this process may use counts, since other
    processes may give theirs back. On a GPU the free memory counts.
    """
    tangent, footprint = shape.tangent, method.footprint(shape)
    if footprint is None:
        return None
    available, where = _available(tangent.device) if footprint.peak > tangent.memory else (tangent.memory, "")
    if footprint.peak <= available:
        return next((need.refusal(tangent.memory) for need in footprint.needs if need.bytes > tangent.memory), None)
    return _too_large(method, shape, footprint.peak, available, where)


def _too_large(method: Method, shape: FitShape, peak: int, available: int, where: str) -> str:
    """Returns the sentence for a method whose peak is above the available memory."""
    instead = "Treat fewer weights: write params=lw.last_layer."
    for other in (Diagonal(), KFAC()):
        least = other.footprint(shape).peak
        if least <= available:
            line = f"lw.{type(other).__name__}(){', params=lw.last_layer' * shape.tangent.treats_output_alone}"
            instead = f"Use {line}, which needs {least / 2**30:.3g} GiB."
    return (
        f"{shown(method)} needs {peak / 2**30:.3g} GiB for {shape.tangent.size} weights, and {where} "
        f"{available / 2**30:.3g} GiB. {instead}"
    )


def _available(device: torch.device) -> tuple[int, str]:
    """Returns the memory of a device in bytes, and its subject in a message."""
    if device.type != "cuda":
        return memory_limit(), "this process may use"
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached, "the GPU has free"
