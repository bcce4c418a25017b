"""fit(): checks the options, reads the data, surveys the network, runs the passes of a method, and tunes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from .. import ranks
from ..covariance import Covariance, has_prior
from ..data.batches import Forward
from ..data.data import check_data_size, warn_of_unseen
from ..data.progress import show_progress
from ..errors import LapwingError
from ..likelihoods import Likelihood, P
from ..likelihoods.inferred import warn_of_misfit, warn_of_misreading
from ..methods import DataSummary, FisherRoot, FitResult, Method, Problem
from ..network.stamp import Stamp
from ..posterior import MethodInfo, Posterior
from ..posterior.tuned import checked, tuned
from ..running.checkpoint import Checkpoint
from ..running.fingerprints import check_same_network
from ..running.runner import NoCheckpoint, Runner, Stop
from ..tangent import LastLayer, Predicate
from ..tangent.retry import entry
from ..tuning import Refit, Training, Tuning
from ..tuning.refit import is_cheap
from .choice import Choice, advice_on_memory, choose, log_default
from .continued import continued
from .fit_data import FitData
from .options import DEFAULT_TUNING, FitOptions

log = logging.getLogger("lapwing")


@entry(
    "The fit",
    "Pass a smaller memory=..., or a method that needs less, such as lw.Diagonal(), or params=lw.last_layer. "
    "lw.plan(model, loader, method) says what a method needs.",
)
def fit(
    model: nn.Module,
    loader: Any,
    method: Method | None = None,
    *,
    likelihood: str | Likelihood[P] | None = None,
    params: Predicate | LastLayer | None = None,
    prior_precision: float | Mapping[str, float] | None = None,
    prior_mean: float | Mapping[str, Tensor] = 0.0,
    prior: Posterior[P] | None = None,
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
) -> Posterior[P]:
    """Fits a Gaussian `N(θ̂, Σ)` over the weights of a trained network. The network does not change.

    If `torch.distributed` is initialised with several processes, each of them calls `lw.fit` with a loader of its share
    of the data. All of them return the posterior of the joined data: see docs/scaling.md.

    Args:
        model: trained network, in eval mode. Its outputs are (B, C), or have positions: (B, T, C), (B, C, H, W) or
            (B, C, D, H, W). Targets at positions are (B, T), (B, H, W), (B, D, H, W), or have the shape of the outputs.
        loader: training data: an iterable of (inputs, targets) batches that can be read several times, a pair (x, y) of
            tensors, NumPy arrays or pandas frames, or a map-style Dataset. Pairs and data sets are cut into batches of
            100, in order. Arrays of floats get the dtype of the weights; tensors keep theirs.
        method: structure of Σ and how to fit it. None chooses, and logs why: for classes or several labels KFAC over
            the last layer. For all other targets `Full` over all trained weights if that is cheap, KFAC over all if
            there are at most a million and at most 10 outputs, else KFAC over the last layer. All trained weights are
            treated if the last layer is frozen. A last layer with more than 1 000 outputs gets Diagonal. With `params`,
            None means KFAC, or this Diagonal.
        likelihood: a name such as "categorical", or an instance. None infers it from the dtype of the targets. For
            "gaussian", and for None with floats, residuals decide on the noise and its tails: see `Gaussian`.
        params: parameters to treat. None means all trained ones if `method` is given.
        prior_precision: δ, in 1/weight²: a number, or {block or parameter pattern: number}. None tunes it.
        prior_mean: μ0: a number for all weights, or {parameter: tensor}, with 0 for the rest.
        prior: former posterior, for continual learning: `Σ⁻¹ = s G(new data) + Σ_former⁻¹`; for KFAC the factors add,
            an approximation (Ritter, Botev and Barber 2018). `model` is then a copy of its network that was trained
            further with `posterior.penalty(model)` in the loss. The former posterior decides all options except
            `sample_weights`, `forward`, `memory`, `checkpoint`, `every` and `progress`.
        tune: how to tune δ and σ² if they are not given. `BoundedEvidence()`, `Evidence()` and, for a regression,
            `Refit()` need no held-out data; `Validation(loader)` and `EarlyStopping(loader)` do. The default is
            `BoundedEvidence()`, or `Refit()` for a small table. None means δ = 1 and σ² the mean squared residual.
        validation: held-out data, in any form that `loader` accepts, on which the network was not trained; a few
            hundred samples give the best calibration. `Validation` tunes δ on them, and the logit temperature of a
            classifier, or σ², the noise and the tails of a regression. Excludes `tune`.
        data_size: N, if the loader yields only n of N training samples. G and the log likelihood are scaled by N/n.
        weight_decay: γ, which sets `δ = N γ`.
        temperature: τ in `Σ = (s G + Δ)⁻¹` with `s = N/(n σ² τ)`. A value above 1 widens the posterior.
        sample_weights: whether batches are `(x, y, w)`, or dicts with the key sample_weights, with weights w (B,) of at
            least 0. A weight multiplies Λ and log p(y|f) of its sample: 3 counts it three times, and 0 leaves it out. n
            and `data_size` count samples, not weights. If σ² is tuned, other than by `Evidence`, only ratios of weights
            count: the temperature of the posterior is their mean.
        forward: `forward(model, inputs)`, if `model(x)`, `model(*x)` and `model(**x)` are not the right call.
        memory: budget in bytes; None means 1 GiB, or an eighth of the GPU's memory if that is more. A fit uses up to
            twice this, plus the posterior, the activations, and 28 D² bytes for the Kronecker factor of a layer with D
            inputs and its decomposition.
        seed: seed of all random choices.
        checkpoint: path of a file from which a killed fit continues, to the same posterior: call `lw.fit` again with
            the same arguments, and a loader that repeats its order. The end of the fit removes it.
        every: batches between two writes within a pass over data; None: a minute. Each pass ends with a write, too.
        progress: whether to show a bar; None shows it on a terminal and in a notebook.

    Returns:
        A posterior, which never changes.

    Raises:
        LapwingError: if an argument or the data cannot be used; the message says what to write.

    Cost: the method's passes over the data, each about 1 + C passes of the network, plus the tuning. The tuning costs
        more than the passes if there are many weights and few data: see `BoundedEvidence` and `Refit`. A regression
        with several outputs and an open noise variance needs one forward pass more: see `Gaussian`.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.randint(3, (32,))
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> lw.fit(model, [(x, y)]).predict(x).probs.shape
        torch.Size([32, 3])
    """
    options = FitOptions(
        method=method, likelihood=likelihood, params=params, prior_precision=prior_precision, prior_mean=prior_mean,
        prior=prior, tune=tune, validation=validation, data_size=data_size, weight_decay=weight_decay,
        temperature=temperature, sample_weights=sample_weights, forward=forward, memory=memory, seed=seed,
        checkpoint=checkpoint, every=every, progress=progress,
    )  # fmt: skip
    if ranks.several():
        options.check_same_on_ranks()
    file = NoCheckpoint() if options.checkpoint is None else Checkpoint(options.checkpoint, options.every)
    with show_progress(options.progress):
        if options.prior is None:
            fitted = _from_start(options, model, loader, file)
        else:
            fitted = continued(options, options.prior, model, loader, file), ()
        return checked(*fitted)  # over several processes also sends what rank 0 tuned


def _from_start(
    options: FitOptions, model: nn.Module, loader: Any, file: NoCheckpoint
) -> tuple[Posterior, tuple[Posterior, ...]]:
    """Returns the tuned posterior of a fit without a former one, and posteriors of the first parts of the data."""
    data = FitData.of(options, model, loader)
    choice = choose(options, model, data, data.training.count, data.training.expected_size or data.first.count)
    advice = advice_on_memory(choice.method, choice.shape)
    if advice is not None:
        raise LapwingError(advice)
    if choice.reason is not None:
        log_default(choice)
    prefixes = 0 if data.tune is None else data.tune.prefixes
    runner = Runner(data.training, prefixes, options.data_size, file)
    problem = _problem(options, choice, data)
    with file.opened(  # another tuning may continue the fit if it needs the same passes
        data.training, options.described, problem.tangent, method=choice.method, likelihood=problem.likelihood,
        tune=[problem.traces_wanted, prefixes],
    ):  # fmt: skip
        posterior, parts, count = _run_and_tune(options, choice, problem, data, runner)
    if options.data_size is None and isinstance(data.training.loader, DataLoader):
        warn_of_unseen(data.training.loader, count)
    data.warn(options, posterior, count)
    return posterior, parts


def _problem(options: FitOptions, choice: Choice, data: FitData) -> Problem:
    """Returns the inputs of the method, with noise ratios that the residuals show."""
    tangent, prior, tune = choice.shape.tangent, choice.prior, data.tune
    likelihood = data.likelihood
    if heads := likelihood.open_heads(tangent.outputs):
        likelihood = data.likelihood_by_residuals(tangent, heads)
    if ranks.several():
        check_same_network(tangent.model)
    given = prior.fixed and not likelihood.needs_noise
    evidence = tune is not None and tune.reads_evidence and not (given and tune is DEFAULT_TUNING)
    return Problem(
        tangent=tangent, likelihood=likelihood,
        root=FisherRoot.of(tangent, likelihood, options.seed + ranks.rank(), choice.shape.columns),  # own draws
        prior=prior, traces_wanted=evidence,
        seed=options.seed, temperature=options.temperature, data_size=options.data_size,
    )  # fmt: skip


def _run_and_tune(
    options: FitOptions, choice: Choice, problem: Problem, data: FitData, runner: Runner
) -> tuple[Posterior, tuple[Posterior, ...], int]:
    """Runs the passes of the method and tunes what is open; also returns the posteriors of first parts, and n."""
    started, method, tune = time.perf_counter(), choice.method, data.tune
    asked = tune is not None and tune is not DEFAULT_TUNING  # by tune= or validation=
    stop = None if tune is None or not tune.prefixes else _stop(choice, problem, tune, runner)
    result, count = runner.run(method, problem, stop), runner.count()
    posterior, parts = _posteriors_of(runner, choice, problem, result)
    if result.logit_temperature is None:  # otherwise the labels were held out, and their NLL may be large
        warn_of_misreading(posterior.likelihood, posterior.tangent.outputs, posterior.statistics)
    if posterior.statistics.keys() & {"targets", "rates"} and runner.first_rows is not None:  # of real values or counts
        warn_of_misfit(posterior.likelihood, *runner.first_rows, posterior.statistics)
    own_prior = result.precision is not None or not has_prior(result.covariance)
    if own_prior and (tune is None or not tune.tunes_own_prior(posterior)):
        if asked and not problem.prior.fixed:
            unused = "validation=" if options.validation is not None else f"tune={type(tune).__name__}"
            log.warning("%s chooses its own prior: %s was not used.", type(method).__name__, unused)
        return posterior, parts, count
    settled = posterior.prior.fixed and posterior.noise_fixed
    if tune is None:
        return posterior if settled else posterior.with_defaults(), parts, count
    if settled and not asked and not posterior.likelihood.regressions:
        return posterior, parts, count
    before = time.perf_counter()
    if not (asked or posterior.noise_fixed) and is_cheap(posterior, data.first, count):
        tune = Refit()
        log.info(
            "A fresh copy of the network is trained to measure its error on rows that it has not seen; "
            "tune=lw.BoundedEvidence() skips this."
        )
    posterior = tuned(tune, posterior, Training(data.training, parts, count))
    log.info("Tuned in %.3g s of %.3g s.", (end := time.perf_counter()) - before, end - started)
    return posterior, parts, count


def _posteriors_of(
    runner: Runner, choice: Choice, problem: Problem, result: FitResult
) -> tuple[Posterior, tuple[Posterior, ...]]:
    """Returns the posteriors of all data and of their first parts, at the δ, σ² and T of the method, before tuning."""
    tangent, likelihood, prior = result.tangent or problem.tangent, problem.likelihood, problem.prior
    if result.noise_variance is not None:
        likelihood = likelihood.with_noise_variance(result.noise_variance)
    if result.logit_temperature is not None:
        likelihood = likelihood.with_logit_temperature(result.logit_temperature)
    if result.precision is not None:
        prior = replace(prior, precision=result.precision, fixed=True)

    summary, factor = result.summary, result.data_factor
    assert summary is not None  # `Runner.run` sets it
    if problem.data_size is not None:
        check_data_size(problem.data_size, runner.count())
        factor *= problem.data_size / runner.count()
    every = [(summary.samples, result.covariance, summary.statistics, factor)]
    every += [(samples, *kept, 1.0) for samples, kept in runner.first_parts.items()]
    if len(every) > 1 and factor > 1:  # early stopping also tries the curvature of all data without N/n
        every.append((*every[0][:3], 1.0))
    posteriors = []
    for samples, covariance, statistics, part_factor in every:
        of_noise = likelihood if has_prior(covariance) else problem.likelihood  # σ² stays open if Σ cannot change
        dispersed, of_targets = likelihood.with_dispersion(statistics)
        temperature = of_targets if problem.temperature == 1 and has_prior(covariance) else problem.temperature
        method = replace(MethodInfo.of(choice.method), sample_weights=runner.weighted, rule=choice.rule)
        fitted = Posterior(
            tangent=tangent, covariance=covariance, likelihood=dispersed, prior=prior, statistics=statistics,
            samples=samples, data_factor=part_factor, temperature=temperature, method=method,
            noise_fixed=not of_noise.needs_noise, stamp=Stamp.of(tangent.model), history=result.history,
            columns=runner.columns,
        )  # fmt: skip
        settled = fitted.noise_fixed and has_prior(covariance)
        posteriors.append(fitted.at(prior.precision) if settled else fitted)
    return posteriors[0], tuple(posteriors[1:])


def _stop(choice: Choice, problem: Problem, tune: Tuning, runner: Runner) -> Stop | None:
    """Returns the check that ends the fit at one of the first parts, or None if the tuning needs all data."""
    falls = tune.falls()
    if falls is None:
        return None

    def stop(covariance: Covariance, summary: DataSummary) -> bool:
        factor = runner.count() / summary.samples
        result = FitResult(covariance, summary=summary, data_factor=factor)
        whole, parts = _posteriors_of(runner, choice, problem, result)
        part = next(part for part in parts if part.samples == summary.samples)
        return ranks.on_first("early stopping", lambda: falls(part, whole))

    return stop
