"""Methods of the comparison, and the ways through which each predicts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing.covariance import AnyLatent, LatentDraws, without_spread
from lapwing.likelihoods import Likelihood
from lapwing.prediction import Way
from papers.common.data import Part, joined
from papers.common.device import clock
from papers.common.measure import timed
from papers.together.tasks import Task

WAYS: dict[str, Way] = {"GLM": lw.Linearized(), "sampling": lw.MonteCarlo(30), "streamlined": lw.Streamlined()}

POINTS = 100
"""Rows of J, or inducing points, of the methods that have them; weights of the subset of weights."""


@dataclass(frozen=True)
class Fitted:
    """A posterior, or the network alone, with what it cost.

    Attributes:
        likelihood: of the predictions.
        latent: inputs, way -> latent of the outputs.
        ways: ways that apply.
        seconds: processor seconds of the fit, with its tuning and with the training of further networks.
        bytes: of the saved posterior, with the weights of further networks.
        prior_precision: δ, if there is one for all weights.
    """

    likelihood: Likelihood
    latent: Callable[[Tensor, Way], AnyLatent]
    ways: Mapping[str, Way]
    seconds: float
    bytes: int
    prior_precision: float | None = None


def laplace(method: lw.Method | None, params: Any = None, held_out: bool = True) -> Callable[[Task], lw.Posterior]:
    """Returns a fit whose prior precision, and noise or temperature, come from the held-out data, or from none."""

    def fit(task: Task) -> lw.Posterior:
        options: dict[str, Any] = {"validation": task.val} if held_out else {}
        if not held_out and not task.regression:
            options["tune"] = lw.BoundedEvidence(nats=0.005)
        return lw.fit(task.model, task.loader, method, params=params, **options, **task.options)

    return fit


def alpha(task: Task) -> lw.Posterior:
    """Fits VaLLA by the α-divergence; held-out data stop it."""
    fit = lw.AlphaDivergence(steps=200, learning_rate=0.05, validation=task.val, every=50, patience=2)
    return lw.fit(task.model, task.loader, lw.VaLLA(POINTS, fit), **{**task.options, "tune": None})


def sampled(task: Task) -> lw.Posterior:
    """Fits sampled LLA with 32 draws, at the prior precision and noise variance that held-out data choose for KFAC."""
    kfac = laplace(lw.KFAC(), lw.everything)(task)
    options = {**task.options, "prior_precision": kfac.prior_precision, "tune": None}
    if task.regression:
        options["likelihood"] = lw.Gaussian(kfac.noise_variance)
    return lw.fit(task.model, task.loader, lw.SampledLLA(32), **options)


def mean_field(task: Task) -> lw.Posterior:
    """Fine-tunes the network by mean-field variational inference."""
    return lw.fit(task.model, task.loader, lw.MeanField(), **{**task.options, "tune": None})


def everything(method: lw.Method) -> Callable[[Task], lw.Posterior]:
    """Returns a fit of all weights, tuned by held-out data."""
    return laplace(method, lw.everything)


POSTERIORS: dict[str, Callable[[Task], lw.Posterior]] = {
    "recommended call": laplace(None),
    "default call, no held-out data": laplace(None, held_out=False),
    "KFAC, no held-out data": laplace(lw.KFAC(), lw.everything, held_out=False),
    "diagonal": everything(lw.Diagonal()),
    "KFAC": everything(lw.KFAC()),
    "EKFAC": everything(lw.EKFAC()),
    "last layer": laplace(lw.Full(), lw.last_layer),
    "ELLA": everything(lw.ELLA(20, POINTS)),
    "ELLA with residual": everything(lw.ELLA(20, POINTS, residual="prior")),
    "VaLLA, closed form": everything(lw.VaLLA(POINTS)),
    "VaLLA, natural gradients": everything(lw.VaLLA(POINTS, lw.NaturalGradient(steps=10))),
    "VaLLA, α-divergence": alpha,
    "optimal subspace": everything(lw.OptimalSubspace(20, rows=POINTS)),
    "optimal subspace with residual": everything(lw.OptimalSubspace(20, rows=POINTS, residual="prior")),
    "subset of weights": everything(lw.SubsetOfWeights(POINTS, by="magnitude")),
    "SWAG": Task.swag,
    "mean field, fine-tuned": mean_field,
    "IVON": Task.ivon,
    "sampled LLA": sampled,
}
"""Name -> fit. A regression table also has "full LLA" and "subset of data"."""

TABLES_ONLY: dict[str, Callable[[Task], lw.Posterior]] = {
    "full LLA": everything(lw.Full()),
    "subset of data": everything(lw.SubsetOfData(POINTS)),
}

NETWORKS = ("network", "temperature or noise", "ensemble of three")
TRAIN = ("SWAG", "IVON", "ensemble of three")
"""Methods that train, which tasks without `training` do not have."""


def names(trains: bool, regression: bool) -> list[str]:
    """Returns the methods of a task."""
    found = [*NETWORKS[:2], *POSTERIORS, *(TABLES_ONLY if regression else ()), NETWORKS[2]]
    return [name for name in found if trains or name not in TRAIN]


def fitted(name: str, task: Task) -> Fitted:
    """Fits a method and measures the fit."""
    if name in NETWORKS:
        return _networks(name, task, clock())
    return measured(task, {**POSTERIORS, **TABLES_ONLY}[name])


def measured(task: Task, fit: Callable[[Task], lw.Posterior]) -> Fitted:
    """Fits a posterior and measures the fit."""
    posterior, seconds = timed(partial(fit, task), clock)
    more = 0 if posterior.model is task.model else _weights(task)
    delta = posterior.prior_precision
    return Fitted(
        posterior.likelihood, lambda x, way: _latent(posterior, x, way), WAYS, seconds, _saved(posterior) + more,
        delta if isinstance(delta, float) else None,
    )  # fmt: skip


def _networks(name: str, task: Task, start: float) -> Fitted:
    """Returns the network, the network at one temperature or noise variance, or three networks as draws."""
    likelihood: Likelihood = lw.Gaussian(task.noise) if task.regression else lw.likelihoods.Categorical()
    models = [task.model]
    if name == "ensemble of three":
        models += [task.with_network(task.seed + 100 * i).model for i in (1, 2)]
    elif name == "temperature or noise":
        likelihood = tuned(likelihood, lambda x: without_spread(_outputs(task.model, x)), task.val)
    seconds = clock() - start

    def latent(x: Tensor, way: Way) -> AnyLatent:
        del way
        outputs = [_outputs(model, x) for model in models]
        return without_spread(outputs[0]) if len(models) == 1 else LatentDraws(torch.stack(outputs))

    return Fitted(likelihood, latent, {"one pass each": lw.Linearized()}, seconds, (len(models) - 1) * _weights(task))


def tuned(likelihood: Likelihood, latent: Callable[[Tensor], AnyLatent], val: list[Part]) -> Likelihood:
    """Returns the likelihood at the temperature, or the noise variance, of the highest held-out likelihood."""
    x, y = joined(val)
    return best(likelihood, latent(x), y, factors=(1.0,))[0]


RATIOS = (10 ** torch.linspace(-1.5, 1.5, 76)).tolist()
"""Candidates of the temperature of logits, or of the factor of the noise variance: one for each 10 %."""

FACTORS = (10 ** torch.linspace(-3, 3, 37)).tolist()
"""Candidates of the factor of the covariance."""

STARTS = (1e-3, 0.03, 1.0, 30.0)
"""Factors from which the search starts."""


def best(
    likelihood: Likelihood, latent: AnyLatent, y: Tensor, factors: Sequence[float] = FACTORS
) -> tuple[Likelihood, float]:
    """Returns the likelihood and the factor of the covariance with the highest likelihood of held-out targets.

    Temperature (or noise variance) and factor are searched in turns until neither changes, from several starts.
    """

    def at(ratio: float) -> Likelihood:
        noise = likelihood.noise_variance
        if noise is None:
            return likelihood.with_logit_temperature(ratio)
        return likelihood.with_noise_variance(noise * ratio)

    @cache
    def score(ratio: float, factor: float) -> float:
        return float(at(ratio).predict(latent.scaled(factor)).log_prob(y).mean())

    ends = []
    for factor in STARTS if len(factors) > 1 else factors:
        chosen, previous = (1.0, factor), None
        while chosen != previous:
            previous = chosen
            ratio = max((score(ratio, chosen[1]), ratio) for ratio in RATIOS)[1]
            chosen = ratio, max((score(ratio, factor), factor) for factor in factors)[1]
        ends.append(chosen)
    ratio, factor = max(ends, key=lambda end: score(*end))
    return at(ratio), factor


def _latent(posterior: lw.Posterior, x: Tensor, way: Way) -> AnyLatent:
    """Returns the latent of all inputs in one piece."""
    size = len(x) if isinstance(way, lw.MonteCarlo) else 250
    return posterior.latent([(part, torch.zeros(len(part))) for part in x.split(size)], via=way, progress=False)


@torch.no_grad()
def _outputs(model: torch.nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in x.split(250)])


def _weights(task: Task) -> int:
    """Returns the bytes of a network."""
    return sum(value.numel() * value.element_size() for value in task.model.state_dict().values())


def _saved(posterior: lw.Posterior) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.safetensors"
        posterior.save(path)
        return os.path.getsize(path)
