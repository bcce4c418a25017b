"""fit(): runs a method's passes over the data, tunes what is None, and returns a posterior."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from ..covariance import Covariance, PriorCovariance
from ..errors import LapwingError, check_flag, is_positive, shown
from ..likelihoods import Likelihood, resolve
from ..likelihoods.inferred import check_logits, inferred_likelihood
from ..linalg import is_finite
from ..methods import KFAC, FisherRoot, FitResult, Method, Outline, Problem
from ..methods.problem import root_columns
from ..network import batches, ranks
from ..network.batches import Forward
from ..network.data import as_loader
from ..network.eager import outside_modes
from ..network.gate import sharded_modules
from ..network.loaders import (
    WeightedLoader,
    check_progress,
    check_seed,
    known_size,
    warn_of_unseen_samples,
)
from ..network.progress import expect, length_of, with_progress
from ..network.sharded import Head
from ..network.stamp import Stamp
from ..posterior import Posterior
from ..posterior.prior import Prior, check_range
from ..tangent import LastLayer, Predicate, Tangent
from ..tuning import BoundedEvidence, Training, Tuning, Validation
from .checkpoint import Checkpoint, checkpoint_of
from .default_method import default_fit, method_and_params
from .further import continued
from .plan import check_room
from .runner import Runner
from .sharded import check_last_layer, with_features
from .validation import check_held_out, validation_tuning, with_all_weights

log = logging.getLogger("lapwing")

DEFAULT_TUNING = BoundedEvidence()
"""What tunes where the user says nothing: a method that chooses its own prior leaves it out without a warning."""


@outside_modes
@ranks.across_ranks()
@with_progress
def fit(
    model: nn.Module,
    loader: Any,
    method: Method | None = None,
    *,
    likelihood: str | Likelihood | None = None,
    params: Predicate | LastLayer | None = None,
    prior_precision: float | Mapping[str, float] | None = None,
    prior_mean: float | Mapping[str, Tensor] = 0.0,
    prior: Posterior | None = None,
    tune: Tuning | None = DEFAULT_TUNING,
    validation: Any = None,
    data_size: int | None = None,
    weight_decay: float | None = None,
    temperature: float = 1.0,
    sample_weights: bool = False,
    forward: Forward | None = None,
    memory: int | None = None,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int | None = None,
    progress: bool | None = None,
) -> Posterior:
    """Fits a Gaussian `N(θ̂, Σ)` over the weights of a trained network, which is not touched.

    Where `torch.distributed` is initialised with several ranks, each of them calls it with a loader of its own share of
    the data, and all get the posterior of the joined data: docs/scaling.md.

    Args:
        model: the trained network, in eval mode. Outputs (B, C), or with positions: (B, T, C), (B, C, H, W) or
            (B, C, D, H, W), with targets (B, T), (B, H, W), (B, D, H, W), or of the shape of the outputs.
        loader: the training data: an iterable of (inputs, targets) batches that can be read several times; a pair
            (x, y) of tensors, NumPy arrays or pandas frames; a map-style Dataset; or a LightningDataModule. Pairs and
            data sets are cut into batches of 100, in order. Arrays of floats take the weights' dtype; tensors do not.
        method: the structure of Σ and how it is fitted. Where `params` is None too, None means in a regression `Full`
            over all trained weights where that is cheap, KFAC over them where there are at most a million, and else
            KFAC of the last layer, as for a classifier. With `validation` a classifier has KFAC over all weights where
            that is cheap and held-out data prefer it. The log names it. With `params` None means KFAC.
        likelihood: "categorical", "gaussian" or an instance; None infers it from the targets' dtype, and
            refuses floats that are labels all the same.
        params: which parameters to treat; None means everything that is trained where there is a method.
        prior_precision: δ, in 1/weight²: a number, or {block or parameter pattern: number}; None is tuned.
        prior_mean: μ0, a number for all weights or {parameter: tensor} (others 0).
        prior: a former posterior, for continual learning. Its data count on: `Σ⁻¹ = s G(new data) + Σ_former⁻¹`, at the
            weights of a copy of its network that was trained further, with `posterior.penalty(model)` in the loss. It
            decides all other options but `sample_weights`, `forward`, `memory`, `checkpoint` and `progress`. Exact for
            Full and Diagonal; of KFAC the factors add, an approximation (Ritter, Botev and Barber 2018).
        tune: how what is None is tuned: `BoundedEvidence()` and `Evidence()` without held-out data, with them
            `Validation(loader)` or `EarlyStopping(loader)`; None for δ = 1 and σ² the mean squared residual.
        validation: held-out data in any form of `loader`, that the network was not trained on. They tune by
            `Validation` what is None: δ, and σ² or a classifier's logit temperature. The best calibration needs them, a
            few hundred samples. In place of `tune`.
        data_size: N where the loader shows only n of N training points: G and the likelihood are scaled by N/n.
        weight_decay: γ, sets `δ = N γ`.
        temperature: τ, `Σ = (G/τ + Δ)⁻¹`; above 1 widens.
        sample_weights: whether the last entry of a batch, `(x, y, w)`, or the key sample_weights of a dict, is a weight
            (B,) of at least 0 for each sample: Λ and log p(y|f) are multiplied by it, in tuning over training data too.
            A weight of 3 is a sample shown three times, 0 one left out. n and `data_size` count samples, not weights.
        forward: `forward(model, inputs)` where `model(x)`, `model(*x)` or `model(**x)` does not do.
        memory: budget in bytes, 1 GiB when None; up to twice as much is held beside the posterior and the network's own
            activations. One layer is never cut: its Kronecker factor of n inputs takes 12 n² bytes while it is
            decomposed in float64, and the workspace of LAPACK 16 n²; tuning takes one number per candidate and weight.
        seed: of every random choice.
        checkpoint: the path of a file. Killed at any moment and called again with the same arguments, the fit goes on
            from there, to the same posterior: equal bit by bit on the same device, with as many threads. The loader
            must repeat its order. While the file is written one more of its tensors is in memory. When the
            fit has ended, it removes the file: save the posterior then.
        every: write the checkpoint after so many batches; None writes it at most once a minute.
        progress: show a bar; None shows one on a terminal or in a notebook.

    Returns:
        An immutable posterior.

    Raises:
        LapwingError: for bad input, says what is wrong and what to do; the network stays as it was.

    Cost: the method's passes over the data, each about 1 + C passes of the network; see the method. Then the tuning's,
        which exceeds that where there are many weights and few data: see `BoundedEvidence`. With `validation` and
        without a method a classifier is fitted twice, if it has at most 20 outputs.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.randint(3, (32,))
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> lw.fit(model, [(x, y)]).predict(x).probs.shape
        torch.Size([32, 3])
    """
    if prior is not None:
        others = {
            "method": method, "likelihood": likelihood, "params": params, "prior_precision": prior_precision,
            "validation": validation, "data_size": data_size, "weight_decay": weight_decay,
            "prior_mean": None if prior_mean == 0.0 else prior_mean, "tune": None if tune is DEFAULT_TUNING else tune,
            "temperature": None if temperature == 1.0 else temperature, "seed": seed or None,
        }  # fmt: skip
        chosen_beside = {name: value for name, value in others.items() if value is not None}
        check_flag("lw.fit", "sample_weights", sample_weights)
        check_progress(progress)
        file = checkpoint_of(checkpoint, every)
        return _checked(continued(prior, model, loader, chosen_beside, sample_weights, forward, memory, file))
    is_default = method is None and params is None
    method, params = method_and_params(method, params)
    _check_numbers(prior_precision, weight_decay, temperature, data_size, seed)
    _check_tuning(tune)
    check_progress(progress)
    check_flag("lw.fit", "sample_weights", sample_weights)
    inner = isinstance(checkpoint, Checkpoint)  # the fit of all weights after that of the last layer
    file = checkpoint if isinstance(checkpoint, Checkpoint) else checkpoint_of(checkpoint, every)
    start, seed = time.perf_counter(), int(seed)
    if sharded_modules(model):
        check_last_layer(method, params)
        model, loader, validation, tune = with_features(model, forward, loader, validation, tune, sample_weights)
        forward, is_default = None, False
    data = as_loader(loader, model)
    loader = ranks.share(data)
    first = ranks.joined_first_batch(loader)
    inputs, targets = batches.split(batches.weighted(first) if sample_weights else first)
    if validation is not None:
        validation = as_loader(validation, model, "val")
        other = None if tune is DEFAULT_TUNING else tune
        tune, held_out = validation_tuning(validation, other, data, (inputs, targets))
    if data_size is not None:
        _check_data_size(data_size, known_size(loader) or 0)
    training = WeightedLoader(loader, ranks.several()) if sample_weights else loader
    likelihood = inferred_likelihood(targets, training) if likelihood is None else resolve(likelihood)
    if likelihood.plain is not likelihood:
        log.info(
            "%s weighs the loss, and no distribution of the targets has such a loss: its evidence is a pseudo-evidence",
            likelihood,
        )  # fmt: skip
    if isinstance(model, Head) and likelihood.needs_noise and isinstance(tune, BoundedEvidence):
        log.warning(
            "The layers before the last are sharded, and the tuning of the noise takes them for fixed: what they have "
            "memorised of the targets is not seen. Pass held-out data: validation=(x_val, y_val)."
        )
    runner = Runner(training, 0 if tune is None else tune.prefixes, data_size, file)
    chosen = default_fit(model, inputs, likelihood, forward, memory, runner.count) if is_default else None
    method, tangent = chosen or (method, Tangent.survey(model, inputs, params, forward, memory, targets=targets))
    positions = tangent.positions
    drawn = runner.shown()
    check_room(method, Outline.of(tangent, inputs, drawn or batches.size(inputs)))
    if likelihood.activation is not None:
        weight = next(iter(tangent.parameters.values()))
        some = batches.plain(batches.take(inputs, slice(0, 16)), tangent.device)
        outputs = tangent.outputs_of(some)
        check_logits(likelihood, outputs if positions is None else positions.rows(outputs), weight.dtype)
    if validation is not None:
        check_held_out(tangent, likelihood, *held_out)
    if data_size is None:
        warn_of_unseen_samples(data, drawn)
    if weight_decay is not None:
        prior_precision = (data_size or runner.count()) * weight_decay
    read = Prior.read(tangent, prior_precision, prior_mean)
    _check_noise(likelihood, tangent)
    ranks.check_same_network(tangent.model, tangent.state())
    generator = torch.Generator(tangent.device).manual_seed((seed + ranks.rank()) % 2**63)  # each rank draws its own
    _, spread = root_columns(tangent)
    root = FisherRoot(likelihood, tangent.outputs, generator, spread)
    traces = tune is not None and tune.reads_evidence(not read.fixed, likelihood.needs_noise)
    problem = Problem(
        tangent, likelihood, root, read, traces, seed, runner.labels, runner.count, runner.summary, float(temperature),
        data_size,
    )  # fmt: skip
    if file is not None and not inner:
        file.open(training, {
            "the network": tangent.state(), "the parameters": tangent.blocks, "the method": method,
            "the likelihood": likelihood, "the prior": read, "data_size": data_size, "temperature": temperature,
            "sample_weights": sample_weights, "forward": forward, "memory": tangent.memory, "seed": seed,
            "the tuning": [traces, 0 if tune is None else tune.prefixes],
        })  # fmt: skip
    count = length_of(loader) or 0
    expect(method.expected_batches(count) + (0 if tune is None else tune.expected_batches(count)))
    with nullcontext() if file is None or inner else file:
        result = runner.run(method, problem)
        if result.logit_temperature is not None and validation is not None:
            raise LapwingError(
                f"{type(method).__name__} takes its temperature from the data of the fit, and validation= is not used. "
                f"Write lw.fit(model, held_out, lw.{type(method).__name__}())."
            )
        if data_size is None and drawn is None:
            warn_of_unseen_samples(data, runner.shown())
        whole, prefixes = _posteriors(runner, method, problem, result)
        if result.precision is not None or not isinstance(result.covariance, PriorCovariance):
            if isinstance(tune, Validation) and whole.logit_temperature == 1:
                return _checked(tune.tune(whole))  # chooses the logit temperature
            if not read.fixed and tune is not None and tune is not DEFAULT_TUNING:
                name = type(tune).__name__
                log.warning("%s chooses its own prior; tune=%s was not used", type(method).__name__, name)
            return _checked(whole)
        if tune is None:
            return _checked(whole if whole.tuned else whole.with_defaults())
        before = time.perf_counter()
        shown_data = Training(training, prefixes, runner.count())
        posterior = _checked(tangent.retried(lambda: tune.tune(whole, shown_data)))
        log.info("Tuned in %.3g s of %.3g s.", (end := time.perf_counter()) - before, end - start)
        if not is_default or validation is None or likelihood.logit_temperature is None:
            return posterior

        def fit_all() -> Posterior:
            again: Any = file
            return fit(
                model, loader, KFAC(), likelihood=likelihood, prior_precision=prior_precision, prior_mean=prior_mean,
                tune=tune, data_size=data_size, temperature=temperature, sample_weights=sample_weights,
                forward=forward, memory=memory, seed=seed, checkpoint=again, progress=progress,
            )  # fmt: skip

        return with_all_weights(posterior, fit_all, validation, inputs, runner.count())


def _posteriors(
    runner: Runner, method: Method, problem: Problem, result: FitResult
) -> tuple[Posterior, tuple[Posterior, ...]]:
    """Returns the posterior of all data, and those of its first parts, with the prior and noise that the method chose.

    Raises:
        LapwingError: for a data size below the number of samples that the loader shows.
    """
    tangent, likelihood, prior = result.tangent or problem.tangent, problem.likelihood, problem.prior
    if result.noise_variance is not None:
        likelihood = likelihood.with_noise_variance(result.noise_variance)
    if result.logit_temperature is not None:
        likelihood = likelihood.with_logit_temperature(result.logit_temperature)
    if result.precision is not None:
        prior = replace(prior, precision=result.precision, fixed=True)

    def posterior(covariance: Covariance, statistics: Mapping[str, Tensor], samples: int, factor: float) -> Posterior:
        fitted = Posterior(
            tangent, covariance, likelihood, prior, dict(statistics), samples, factor, problem.temperature,
            repr(method), not likelihood.needs_noise, Stamp.of(tangent.state()), result.history,
        )  # fmt: skip
        settled = fitted.noise_fixed and isinstance(covariance, PriorCovariance)
        return fitted.at(prior.precision, likelihood.noise_variance) if settled else fitted

    summary, factor = result.summary, result.data_factor
    if summary is None:
        summary = runner.summary()
        if problem.data_size is None and not runner.whole:
            factor = runner.count() / summary.samples
    if problem.data_size is not None:
        count = summary.samples if result.summary is None else runner.count()
        _check_data_size(problem.data_size, count)
        factor *= problem.data_size / count
    whole = posterior(result.covariance, summary.statistics, summary.samples, factor)
    parts = sorted(runner.prefixes().items())
    unscaled = parts if whole.data_factor > 1 else parts[:-1]  # all of the data is a part where `whole` is scaled
    return whole, tuple(posterior(*kept, samples, 1.0) for samples, kept in unscaled)


def _checked(posterior: Posterior) -> Posterior:
    """Returns the result of a fit, refused where it is not finite; warns where rounding decides some variances."""
    posterior = _agreed(posterior)
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


def _agreed(posterior: Posterior) -> Posterior:
    """Returns the posterior at the numbers of rank 0, from which those of another machine may differ by rounding."""
    tuned = posterior.prior.precision.tolist(), posterior.noise_variance, posterior.logit_temperature
    precision, noise, temperature = ranks.decided("the numbers that were tuned", tuned)
    if (precision, noise, temperature) == tuned or not isinstance(posterior.covariance, PriorCovariance):
        return posterior
    if temperature is not None:
        likelihood = posterior.likelihood.with_logit_temperature(temperature)
        posterior = replace(posterior, likelihood=likelihood)
    return posterior.at(posterior.prior.precision.new_tensor(precision), noise)


def _check_noise(likelihood: Likelihood, tangent: Tangent) -> None:
    """Raises for a noise variance that the weights' dtype cannot express."""
    if likelihood.noise_variance is not None:
        check_range("noise variance", torch.tensor(likelihood.noise_variance, dtype=torch.float64), tangent.dtype)


def _check_numbers(
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


def _check_tuning(tune: Any) -> None:
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


def _check_data_size(data_size: int, shown: int) -> None:
    if data_size < shown:
        raise LapwingError(
            f"data_size={data_size} is below the {shown} samples that the loader shows. Leave data_size out, or give "
            "the size of the whole training set."
        )
