"""The contents of a saved posterior: everything except the network, and fingerprints of the network's weights."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..covariance import COVARIANCES
from ..errors import LapwingError
from ..files import prefixed, write_safetensors
from ..likelihoods.registry import REGISTERED, options_of
from ..linalg import is_finite
from ..network.stamp import fingerprint
from ..tangent import Tangent
from ..tangent.stored import to_json

if TYPE_CHECKING:
    from .posterior import Posterior


def save(posterior: Posterior, path: str | os.PathLike[str]) -> None:
    """Writes a posterior to one file: see `Posterior.save`. Raises if `load` would refuse the contents, such as NaN."""
    kind = type(posterior.covariance)
    if COVARIANCES.get(kind.__name__) is not kind:
        raise LapwingError(
            f"The covariance class {kind.__name__} is not registered, so a file cannot name it. Decorate it with "
            "@lapwing.covariance.register_covariance."
        )
    tangent = posterior.tangent
    likelihood, state = posterior.likelihood, tangent.state()
    options = options_of(likelihood)
    if REGISTERED.get(likelihood.name) is not type(likelihood):  # `load` gets an instance of another class
        options = {name: value for name, value in options.items() if name == "logit_map"}
    tensors = prefixed("covariance", posterior.covariance.tensors()) | prefixed("prior_mean", posterior.prior.mean)
    tensors |= prefixed("statistics", posterior.statistics) | prefixed("history", posterior.history)
    tensors |= prefixed("weights", {name: fingerprint(value) for name, value in state.items()})
    for key, part in likelihood.regressions.items():
        place = "noise" if key is None else f"noise/{key}"
        tensors |= {} if part.input_noise is None else prefixed(place, part.input_noise.tensors)
    header = {
        "tangent": to_json(tangent),
        "covariance": {"class": kind.__name__, "extra": posterior.covariance.extra()},
        "likelihood": {
            "name": likelihood.name,
            "noise_variance": posterior.noise_variance,
            "logit_temperature": posterior.logit_temperature,
            "options": options,
            "heads": likelihood.head_numbers,
            "features": likelihood.features_read,
        },
        "given": {"prior_precision": posterior.prior.fixed, "noise_variance": posterior.noise_fixed},
        "samples": posterior.samples,
        "data_factor": posterior.data_factor,
        "temperature": posterior.temperature,
        "method": asdict(posterior.method),
        "forward": tangent.call.forward is not None,
        "columns": posterior.columns,
        "aim": None if posterior.aim is None else posterior.aim.to_json(),
        "dtypes": {name: str(value.dtype) for name, value in state.items()},
    }
    try:
        check_contents(tangent, tensors, header)
    except ValueError as error:
        raise LapwingError(
            f"The posterior cannot be saved, since {error}. Look at posterior.diagnose(), and fit again with other "
            "options."
        ) from error
    write_safetensors(path, tensors, header)


def check_contents(tangent: Tangent, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Raises a ValueError unless tensors are finite, of the right shapes and dtypes, and δ, σ², T and τ positive."""
    kind = COVARIANCES[header["covariance"]["class"]]
    described = kind.entries(tangent, header["covariance"]["extra"])
    for name, (shape, dtypes) in described.items():
        _check_tensor(f"covariance/{name}", tensors, shape, dtypes)
    for block in tangent.blocks:
        _check_tensor(f"prior_mean/{block.name}", tensors, (block.size,), (tangent.dtype,))
    for name, value in tensors.items():
        checked = not name.startswith(("weights/", "history/")) and value.is_floating_point()
        value = 1 / value if name.startswith("noise/") and name.endswith("/df") else value  # normal noise has df = inf
        if checked and not is_finite(value):
            raise ValueError(f"the tensor {name} holds NaN or infinite values")
    likelihood, precision = header["likelihood"], tensors.get("covariance/precision")
    if precision is not None and not (precision > 0).all():
        raise ValueError(f"a prior precision is {precision.min().item()}, which is not positive")
    numbers = {name: likelihood[name] for name in ("noise_variance", "logit_temperature")}
    for name, number in {**numbers, "temperature": header["temperature"]}.items():
        if number is not None and not number > 0:
            raise ValueError(f"the {name.replace('_', ' ')} is {number}, which is not positive")


def _check_tensor(
    name: str, tensors: dict[str, Tensor], shape: tuple[int, ...] | None, dtypes: tuple[torch.dtype, ...]
) -> None:
    if name not in tensors:
        raise ValueError(f"the tensor {name} is missing")
    value = tensors[name]
    if shape is not None and value.shape != shape:
        raise ValueError(f"the tensor {name} has shape {tuple(value.shape)} instead of {shape}")
    if dtypes and value.dtype not in dtypes:
        raise ValueError(f"the tensor {name} has the dtype {value.dtype} instead of {' or '.join(map(str, dtypes))}")
