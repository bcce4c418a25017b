"""fit(): runs a method's passes over the data, tunes what is None, and returns a posterior."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..covariance import Covariance, PriorCovariance
from ..errors import LapwingError
from ..likelihoods import Likelihood, resolve
from ..likelihoods.inferred import check_logits, inferred_likelihood
from ..linalg import is_finite
from ..methods import DataSummary, FisherRoot, FitResult, Method, Problem
from ..network import batches
from ..network.batches import Forward
from ..network.eager import outside_modes
from ..network.loaders import check_progress, first_batch, known_size, warn_of_unseen_samples
from ..network.stamp import Stamp
from ..posterior import Posterior
from ..posterior.prior import Prior, check_range
from ..tangent import LastLayer, Predicate, Tangent
from ..tuning import BoundedEvidence, Training, Tuning
from .arguments import check_data_size, check_numbers, check_tuning, method_and_params
from .default_method import default_fit
from .runner import Runner

log = logging.getLogger("lapwing")

DEFAULT_TUNING = BoundedEvidence()
"""What tunes where the user says nothing: a method that chooses its own prior leaves it out without a warning."""


@outside_modes
def fit(
    model: nn.Module,
    loader: Iterable[Any],
    method: Method | None = None,
    *,
    likelihood: str | Likelihood | None = None,
    params: Predicate | LastLayer | None = None,
    prior_precision: float | Mapping[str, float] | None = None,
    prior_mean: float | Mapping[str, Tensor] = 0.0,
    tune: Tuning | None = DEFAULT_TUNING,
    data_size: int | None = None,
    weight_decay: float | None = None,
    temperature: float = 1.0,
    forward: Forward | None = None,
    memory: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Posterior:
    """Fits a Gaussian `N(θ̂, Σ)` over the weights of a trained network, which is not touched.

    Args:
        model: the trained network, in eval mode. Outputs (B, C).
        loader: the training data: an iterable of (inputs, targets) batches that can be read several times.
        method: the structure of Σ and how it is fitted. Where `params` is None too, None means in a regression `Full`
            over all trained weights where that is cheap, KFAC over them where there are at most a million, and else
            KFAC of the last layer, as for a classifier. The log names it. With `params` None means KFAC.
        likelihood: "categorical", "gaussian" or an instance; None infers it from the targets' dtype, and
            refuses floats that are labels all the same.
        params: which parameters to treat; None means everything that is trained where there is a method.
        prior_precision: δ, in 1/weight²: a number, or {block or parameter pattern: number}; None is tuned.
        prior_mean: μ0, a number for all weights or {parameter: tensor} (others 0).
        tune: how what is None is tuned: `BoundedEvidence()` and `Evidence()` without held-out data, with them
            `Validation(loader)` or `EarlyStopping(loader)`; None for δ = 1 and σ² the mean squared residual.
        data_size: N where the loader shows only n of N training points: G and the likelihood are scaled by N/n.
        weight_decay: γ, sets `δ = N γ`.
        temperature: τ, `Σ = (G/τ + Δ)⁻¹`; above 1 widens.
        forward: `forward(model, inputs)` where `model(x)`, `model(*x)` or `model(**x)` does not do.
        memory: budget in bytes, 1 GiB when None; up to twice as much is held beside the posterior and the network's own
            activations. One layer is never cut: its Kronecker factor of n inputs takes 12 n² bytes while it is
            decomposed in float64, and the workspace of LAPACK 16 n²; tuning takes one number per candidate and weight.
        seed: of every random choice.
        progress: show a bar; None shows one on a terminal.

    Returns:
        An immutable posterior.

    Raises:
        LapwingError: for bad input, says what is wrong and what to do; the network stays as it was.

    Cost: the method's passes over the data, each about 1 + C passes of the network; see the method. Then the tuning's,
        which exceeds that where there are many weights and few data: see `BoundedEvidence`.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.randint(3, (32,))
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> lw.fit(model, [(x, y)]).predict(x).probs.shape
        torch.Size([32, 3])
    """
    is_default = method is None and params is None
    method, params = method_and_params(method, params)
    check_numbers(prior_precision, weight_decay, temperature, data_size, seed)
    check_tuning(tune)
    check_progress(progress)
    seed = int(seed)
    first = first_batch(loader)
    if data_size is not None:
        check_data_size(data_size, known_size(loader) or 0)
    inputs, targets = batches.split(first)
    likelihood = inferred_likelihood(targets, loader) if likelihood is None else resolve(likelihood)
    runner = Runner(loader, progress, 0 if tune is None else tune.prefixes, data_size)
    chosen = default_fit(model, inputs, likelihood, forward, memory, runner.count) if is_default else None
    method, tangent = chosen or (method, Tangent.survey(model, inputs, params, forward, memory))
    if likelihood.activation is not None:
        weight = next(iter(tangent.parameters.values()))
        some = batches.plain(batches.take(inputs, slice(0, 16)), tangent.device)
        check_logits(likelihood, tangent.outputs_of(some), weight.dtype)
    drawn = runner.shown()
    if data_size is None:
        warn_of_unseen_samples(loader, drawn)
    if weight_decay is not None:
        prior_precision = (data_size or runner.count()) * weight_decay
    prior = Prior.read(tangent, prior_precision, prior_mean)
    _check_noise(likelihood, tangent)
    generator = torch.Generator(tangent.device).manual_seed(seed)
    root = FisherRoot(likelihood, tangent.outputs, generator)
    if tangent.outputs > root.columns:
        log.info("%d outputs: the Fisher information is sampled, one draw per input", tangent.outputs)
    traces = tune is not None and tune.reads_evidence(not prior.given, likelihood.needs_noise)
    problem = Problem(
        tangent, likelihood, root, prior, traces, seed, runner.labels, runner.count, runner.summary, float(temperature),
        data_size,
    )  # fmt: skip
    result = runner.run(method, problem)
    tangent = result.tangent or tangent
    prior_fixed = prior.given
    if data_size is None and drawn is None:
        warn_of_unseen_samples(loader, runner.shown())
    likelihood, prior = _settled(result, likelihood, prior)
    summary, size = _part(runner, result, data_size)

    def posterior(
        covariance: Covariance, statistics: Mapping[str, Tensor], samples: int, size: float | None
    ) -> Posterior:
        fitted = Posterior(
            tangent, covariance, likelihood, prior, dict(statistics), samples, 1.0 if size is None else size / samples,
            float(temperature), repr(method), not likelihood.needs_noise, Stamp.of(tangent.state()), result.history,
        )  # fmt: skip
        settled = fitted.noise_given and isinstance(covariance, PriorCovariance)
        return fitted.at(prior.precision, likelihood.noise_variance) if settled else fitted

    whole = posterior(result.covariance, summary.statistics, summary.samples, size)
    if result.precision is not None or not isinstance(result.covariance, PriorCovariance):
        if not prior_fixed and tune is not None and tune is not DEFAULT_TUNING:
            log.warning("%s chooses its own prior; tune=%s was not used", type(method).__name__, type(tune).__name__)
        return _checked(whole)
    if tune is None:
        return _checked(whole if whole.tuned else whole.with_defaults())
    parts = sorted(runner.prefixes().items())
    unscaled = parts if whole.data_factor > 1 else parts[:-1]  # all of the data is a part where `whole` is scaled
    prefixes = tuple(posterior(*kept, samples, None) for samples, kept in unscaled)
    return _checked(tune.tune(whole, Training(loader, prefixes, runner.count())))


def _checked(posterior: Posterior) -> Posterior:
    """Returns the result of a fit, refused where it is not finite; warns where rounding decides some variances."""
    tensors = (*posterior.covariance.tensors().values(), *posterior.statistics.values())
    if not all(is_finite(values) for values in tensors):
        raise LapwingError(
            "The fit is not finite: sums of squared gradients or residuals exceed the range of "
            f"{posterior.tangent.dtype}. Scale the inputs and the targets to about 1, or fit the network in float64 "
            "with model.double()."
        )
    _check_noise(posterior.likelihood, posterior.tangent)
    if posterior.covariance.rounded():
        log.warning(
            "The curvature of %s spans more digits than its sums resolve beside a prior precision of %.3g: variances "
            "in directions of least curvature are rounding noise. Scale the inputs to about 1, raise the prior "
            "precision, or fit the network in float64 with model.double().",
            posterior.method, posterior.prior.precision.min().item(),
        )  # fmt: skip
    return posterior


def _check_noise(likelihood: Likelihood, tangent: Tangent) -> None:
    """Raises for a noise variance that the weights' dtype cannot express."""
    if likelihood.noise_variance is not None:
        check_range("noise variance", torch.tensor(likelihood.noise_variance, dtype=torch.float64), tangent.dtype)


def _part(runner: Runner, result: FitResult, data_size: int | None) -> tuple[DataSummary, float | None]:
    """Returns the summary of the samples that the curvature is of, and the N that it is scaled to; None for no scale.

    Raises:
        LapwingError: for a data size below the number of samples that the loader shows.
    """
    if result.summary is None:
        summary = runner.summary()
        if data_size is None:
            return summary, None if runner.whole else runner.count()
        check_data_size(data_size, summary.samples)
        return summary, float(data_size)
    factor = result.data_factor
    if data_size is not None:
        check_data_size(data_size, runner.count())
        factor *= data_size / runner.count()
    return result.summary, None if factor == 1.0 else factor * result.summary.samples


def _settled(result: FitResult, likelihood: Likelihood, prior: Prior) -> tuple[Likelihood, Prior]:
    """Returns likelihood and prior at what the method chose itself."""
    if result.noise_variance is not None:
        likelihood = likelihood.with_noise_variance(result.noise_variance)
    if result.precision is not None:
        prior = replace(prior, precision=result.precision, given=True)
    return likelihood, prior
