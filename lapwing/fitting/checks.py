"""Checks before the passes: method, network, likelihood, tuning and data go together, and the fit has the memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..data.inputs import Samples
from ..environment import memory_limit
from ..errors import LapwingError, shown
from ..likelihoods import Likelihood
from ..likelihoods.inferred import check_logits
from ..methods import KFAC, Diagonal, FitShape, Method
from ..methods.passes import Batch
from ..methods.prior import check_noise
from ..tangent import Tangent
from ..tuning import Tuning

FIRST = 256  # maximum number of samples of the first batch that show whether outputs suit the likelihood


def check_fit(method: Method, shape: FitShape, tune: Tuning | None, first: Samples, held_out: bool) -> None:
    """Raises if the parts of a fit do not go together; `first` is the first batch."""
    tangent, likelihood = shape.tangent, shape.likelihood
    method.check(tangent, likelihood)
    if likelihood.head_numbers and tangent.positions.several:
        raise _heads_at_positions(min(likelihood.head_numbers), type(tangent.model).__name__)
    if held_out and method.chooses_temperature:
        raise _tunes_itself(type(method).__name__)
    if tune is not None:
        tune.check(method, shape)
    if likelihood.activation is not None:
        rows = outputs_of_first_batch(tangent, likelihood, first)
        if rows is not None:
            check_logits(likelihood, *rows, next(iter(tangent.parameters.values())).dtype)
    check_noise(likelihood, tangent)
    for part in likelihood.regressions.values():
        if part.noise == "input" and not (part.needs_noise and tune is not None and tune.fits_noise):
            raise _noise_is_given(part, tune)


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


def outputs_of_first_batch(tangent: Tangent, likelihood: Likelihood, first: Samples) -> tuple[Tensor, Tensor] | None:
    """Returns outputs (n, C) of the first samples and their targets; None if the likelihood refuses the targets."""
    try:
        return check_batch(tangent, likelihood, first.take(slice(0, FIRST)))
    except LapwingError:  # the passes say why, with all targets of the batch
        return None


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
        refusals = [need.refusal(tangent.memory) for need in footprint.needs]
        return next((refusal for refusal in refusals if refusal is not None), None)
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
