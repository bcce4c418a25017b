"""Loads a saved posterior around the same trained network."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..covariance import COVARIANCES
from ..data.batches import Forward
from ..errors import LapwingError, is_out_of_memory, shown
from ..files import read_safetensors, reason, under
from ..likelihoods import Likelihood, P, resolve
from ..likelihoods.input_noise import InputNoise
from ..likelihoods.registry import REGISTERED
from ..linalg import double_device, placed
from ..methods.prior import Prior
from ..network.entry import outside_modes
from ..network.stamp import Stamp, fingerprint
from ..prediction import Aim
from ..tangent import Tangent
from ..tangent.stored import from_json
from .method_info import MethodInfo
from .posterior import Posterior
from .storage import check_contents


@outside_modes
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    likelihood: Likelihood[P] | None = None,
    forward: Forward | None = None,
    memory: int | None = None,
) -> Posterior[P]:
    """Reads a posterior written by `Posterior.save`, around the same trained network.

    Args:
        path: path of the file.
        model: the network with the weights of the fit, in eval mode.
        likelihood: the likelihood of the fit, if its class is not registered; otherwise None.
        forward: the same function as in `lw.fit`, or None if the fit had none.
        memory: memory budget in bytes; None as in `lw.fit`.

    Raises:
        LapwingError: if the file is damaged, comes from another program or has another format, or if the model has
            other weights.

    Cost: reading the file twice, and three sums over the network's weights. The network runs only for a subspace whose
        directions do not fit the memory budget.

    Example:
        >>> import pathlib, tempfile, torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> posterior = lw.fit(model, [(x, y)])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "posterior.safetensors"
        ...     posterior.save(path)
        ...     again = lw.load(path, model)
        >>> torch.equal(again.predict(x).probs, posterior.predict(x).probs)
        True
    """
    if isinstance(path, nn.Module) or not isinstance(path, (str, os.PathLike)):
        raise LapwingError(
            f"The first argument of lw.load is a {type(path).__name__}. Pass the path of a file, and then the network: "
            "write lw.load('posterior.safetensors', model)."
        )
    tensors, header = read_safetensors(path)
    if "checkpoint" in header:
        raise LapwingError(
            f"The file {path} is a checkpoint of a fit that has not ended, and holds no posterior yet. Call lw.fit "
            "with the same arguments and checkpoint= again, and save the posterior that it returns."
        )
    if "novelty" in header:
        raise LapwingError(f"The file {path} holds a detector of lw.novelty. Write lw.Novelty.load(path, model).")
    likelihood = None if likelihood is None else resolve(likelihood)
    try:
        return _rebuilt(path, tensors, header, model, likelihood, forward, memory)
    except Exception as error:  # the parts of a file may disagree in many ways
        if isinstance(error, LapwingError) or is_out_of_memory(error):
            raise
        raise LapwingError(
            f"The file {path} does not hold a posterior of this version: {reason(error)}. Save it again with "
            "posterior.save(path), or install a newer version of lapwing-torch."
        ) from error


def _rebuilt(
    path: str | os.PathLike[str],
    tensors: dict[str, Tensor],
    header: dict[str, Any],
    model: nn.Module,
    likelihood: Likelihood | None,
    forward: Forward | None,
    memory: int | None,
) -> Posterior:
    if header["forward"] != (forward is not None):
        raise LapwingError(
            f"The fit of {path} was made {'with' if forward is None else 'without'} forward=, and the network must be "
            f"called in the same way. Write lw.load(path, model{', forward=forward' if forward is None else ''})."
        )
    kind = header["covariance"]["class"]
    if kind not in COVARIANCES:
        raise LapwingError(
            f"The covariance of {path} has the class {shown(kind)}, which is not registered. Import the module that "
            "defines it before lw.load, or install a newer version of lapwing-torch."
        )
    tangent = from_json(header["tangent"], model, forward, memory)
    check_same(path, tangent, under("weights", tensors), header["dtypes"])
    check_contents(tangent, tensors, header)
    device = tangent.device
    stored = {name: placed(value, device) for name, value in under("covariance", tensors).items()}
    covariance = COVARIANCES[kind].from_tensors(tangent, stored, header["covariance"]["extra"])
    given = header["given"]
    means = under("prior_mean", tensors)
    mean = {block.name: means[block.name].to(device) for block in tangent.blocks}
    none = torch.zeros(len(tangent.blocks), dtype=torch.float64, device=double_device(device))
    prior = Prior(none if covariance.precision is None else covariance.precision, mean, given["prior_precision"])
    statistics = {name: placed(value, device) for name, value in under("statistics", tensors).items()}
    likelihood = _likelihood(path, header["likelihood"], likelihood, tensors)
    return Posterior(
        tangent.of_logits(likelihood.activation), covariance, likelihood, prior, statistics,
        header["samples"], header["data_factor"], header["temperature"], MethodInfo.from_json(header["method"]),
        given["noise_variance"], Stamp.of(tangent.model), under("history", tensors),
        tuple(map(tuple, header.get("columns", ()))), Aim.from_json(header.get("aim")),
    )  # fmt: skip


def _likelihood(
    path: str | os.PathLike[str], saved: dict[str, Any], likelihood: Likelihood | None, tensors: dict[str, Tensor]
) -> Likelihood:
    """Returns the user's likelihood, or else the one that the file names, with σ², T, noise and options of the file."""
    if likelihood is None and saved["name"] not in REGISTERED:
        raise LapwingError(
            f"The likelihood {saved['name']!r} of {path} is not registered. Import the module that registers it. If it "
            "has a function or tensors, which a file cannot hold, write lw.load(path, model, likelihood=likelihood)."
        )
    likelihood = likelihood or REGISTERED[saved["name"]]()
    if likelihood.name != saved["name"]:
        raise LapwingError(
            f"The fit of {path} had a {saved['name']} likelihood, not {shown(likelihood)}. Leave likelihood= out, or "
            "pass an instance of the class of the fit."
        )
    likelihood = likelihood.with_noise_variance(saved["noise_variance"])
    if saved["logit_temperature"] is not None:
        likelihood = likelihood.with_logit_temperature(saved["logit_temperature"])
    if saved.get("heads"):
        likelihood = likelihood.with_head_numbers(saved["heads"])  # type: ignore[attr-defined]
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in saved["options"].items()}
    fitted: Any = replace(likelihood, **options) if options else likelihood  # type: ignore[type-var]
    for key, part in fitted.regressions.items():
        place = "noise" if key is None else f"noise/{key}"
        noise: Any = {name: value for name, value in under(place, tensors).items() if "/" not in name}
        if noise:
            noise |= {name: float(noise[name]) for name in ("spread", "df")}
            part = replace(part, input_noise=InputNoise(**noise, layer=saved["features"]))
            fitted = fitted.with_regressions({key: part})
    return fitted


def check_same(
    path: str | os.PathLike[str], tangent: Tangent, prints: dict[str, Tensor], dtypes: dict[str, str]
) -> None:
    """Raises if a parameter or buffer of the network, treated or not, differs from the fit."""
    state, network = tangent.state(), type(tangent.model).__name__
    for name in (*prints, *state):
        if name not in prints or name not in state:
            raise LapwingError(
                f"Only {network if name in state else path} has {name!r}. Build the network with the same options as "
                "in the fit."
            )
        value, wanted = state[name], dtypes[name]
        what = f"{name} {tuple(value.shape)}"
        if str(value.dtype) != wanted:
            raise LapwingError(
                f"{what} of {network} has the dtype {value.dtype}, but had {wanted} in the fit of {path}. Write "
                f"model.to({wanted}), or fit again."
            )
        if not torch.allclose(fingerprint(value), prints[name], rtol=1e-6, atol=1e-12, equal_nan=True):
            raise LapwingError(
                f"{what} of {network} has other values than in the fit of {path}. Load the checkpoint of the fit into "
                "the model first."
            )
