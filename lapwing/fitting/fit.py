"""fit(): checks the options, reads the data, surveys the network, runs the passes of a method, and tunes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from .. import ranks
from ..covariance import Covariance, has_prior
from ..data import batches
from ..data.batches import Forward
from ..data.progress import show_progress
from ..display import warns_once
from ..errors import LapwingError
from ..likelihoods import Likelihood, P
from ..likelihoods.inferred import warn_of_misfit
from ..methods import DataSummary, FisherRoot, FitResult, Method, Problem
from ..network.entry import outside_modes
from ..posterior import Posterior
from ..tangent import LastLayer, Predicate
from ..tangent.retry import memory_errors
from ..tuning import BoundedEvidence, EarlyStopping, Refit, Training, Tuning, Validation
from .checkpoint import Checkpoint
from .checks import advice_on_memory, first_rows
from .default_method import chosen_and_checked, classifies
from .fingerprints import check_same_network
from .fit_data import FitData
from .options import DEFAULT_TUNING, FitOptions
from .result import checked, posteriors_of, tuned
from .runner import Runner, Stop
from .update import continued

log = logging.getLogger("lapwing")


@warns_once
@outside_modes
@ranks.across_ranks()
@memory_errors(
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
        method: structure of Σ and how to fit it. None chooses, and logs its choice: for classes or several labels KFAC
            over the last layer; for all other targets `Full` over all trained weights if that is cheap, KFAC over all
            up to a million, else KFAC over the last layer. A last layer with more than 1 000 outputs gets Diagonal, a
            frozen one KFAC over the trained layers. With `params`, None means KFAC.
        likelihood: "categorical", "gaussian" or an instance. None infers it from the dtype of the targets.
        params: parameters to treat. None means all trained ones if `method` is given.
        prior_precision: δ, in 1/weight²: a number, or {block or parameter pattern: number}. None tunes it.
        prior_mean: μ0: a number for all weights, or {parameter: tensor}, with 0 for the rest.
        prior: former posterior, for continual learning: `Σ⁻¹ = s G(new data) + Σ_former⁻¹`; for KFAC the factors add,
            an approximation (Ritter, Botev and Barber 2018). `model` is then a copy of its network that was trained
            further with `posterior.penalty(model)` in the loss. The former posterior decides all options except
            `sample_weights`, `forward`, `memory`, `checkpoint`, `every` and `progress`.
        tune: how to tune δ and σ² if they are not given. `BoundedEvidence()`, `Evidence()` and, for a regression,
            `Refit()` need no held-out data; `Validation(loader)` and `EarlyStopping(loader)` do. None means δ = 1 and
            σ² the mean squared residual.
        validation: held-out data, in any form that `loader` accepts, on which the network was not trained; a few
            hundred samples give the best calibration. `Validation` tunes δ, and σ² or the logit temperature of a
            classifier, on them. Excludes `tune`.
        data_size: N, if the loader yields only n of N training samples. G and the log likelihood are scaled by N/n.
        weight_decay: γ, which sets `δ = N γ`.
        temperature: τ in `Σ = (s G + Δ)⁻¹` with `s = N/(n σ² τ)`. A value above 1 widens the posterior.
        sample_weights: whether batches are `(x, y, w)`, or dicts with the key sample_weights, with weights w (B,) of at
            least 0. A weight multiplies Λ and log p(y|f) of its sample: 3 counts it three times, and 0 leaves it out. n
            and `data_size` count samples, not weights.
        forward: `forward(model, inputs)`, if `model(x)`, `model(*x)` and `model(**x)` are not the right call.
        memory: budget in bytes; None means 1 GiB, or an eighth of the GPU's memory if that is more. A fit uses up to
            twice this, plus the posterior, the activations, and 28 n² bytes for the Kronecker factor of n inputs.
        seed: seed of all random choices.
        checkpoint: path of a file from which a killed fit continues, to the same posterior: call `lw.fit` again with
            the same arguments, and a loader that repeats its order. The file is written after each pass, and within
            passes that sum over data once a minute or every `every` batches. The end of the fit removes it.
        every: number of batches between two writes of the checkpoint within a pass; None writes once a minute.
        progress: whether to show a bar; None shows it on a terminal and in a notebook.

    Returns:
        A posterior, which never changes.

    Raises:
        LapwingError: if an argument or the data cannot be used; the message says what to write.

    Cost: the method's passes over the data, each about 1 + C passes of the network, plus the tuning. The tuning costs
        more than the passes if there are many weights and few data: see `BoundedEvidence`. A regression with several
        outputs and an open noise variance needs one forward pass more: see `Gaussian`.

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
    options.check_same_on_ranks()
    file = None if options.checkpoint is None else Checkpoint(options.checkpoint, options.every)
    with show_progress(options.progress):
        if options.prior is not None:
            return checked(continued(options, options.prior, model, loader, file))
        data = FitData.of(options, model, loader)
        data.warn(options)
        setup = survey(options, data, file)
        if file is not None:  # it holds only the sums that the tuning needs, so a fit may continue with another tuning
            problem, likelihood = setup.problem, setup.problem.likelihood
            sums = [problem.traces_wanted, data.prefixes]
            file.open(data.training, options, problem.tangent, method=setup.method, likelihood=likelihood, tune=sums)
        with file or nullcontext():
            posterior = run_and_tune(setup)
        if options.data_size is None and data.training.expected_size is None:
            data.training.warn_of_unseen(setup.runner.size_if_known())
        data.warn_of_known_samples()
        return posterior


@dataclass(frozen=True)
class Setup:
    """A surveyed fit, before its passes."""

    options: FitOptions
    data: FitData
    method: Method  # the user's or the default
    problem: Problem  # network, likelihood and prior, as the method sees them
    runner: Runner


def survey(options: FitOptions, data: FitData, checkpoint: Checkpoint | None = None) -> Setup:
    """Surveys the network, chooses the method if the user named none, and checks that all parts and the memory fit."""
    runner = Runner(data.training, data.prefixes, options.data_size, checkpoint)
    samples = runner.size_if_known() or batches.size(data.inputs)
    method, shape, prior, reason = chosen_and_checked(data, options, runner.count, samples)
    tangent = shape.tangent
    data = data.with_residuals(tangent)
    advice = advice_on_memory(method, shape)
    if advice is not None:
        raise LapwingError(advice)
    if reason is not None:
        footprint = method.footprint(shape)
        assert footprint is not None  # every default method has one
        log.info(
            "%s The fit takes about %s forward passes of the data, without tuning, and the posterior keeps %s bytes; "
            "lw.plan(model, loader) shows more.", reason, f"{footprint.passes:,.0f}", f"{footprint.kept:,}",
        )  # fmt: skip
    if options.method is options.params is None and not any(part.requires_grad for part in data.model.parameters()):
        log.warning(
            "All weights of %s are frozen, so lapwing treats only the last layer. To choose this without a warning "
            "write params=lw.last_layer; for all weights write params=lw.matching('*').",
            type(data.model).__name__,
        )
    check_same_network(tangent.model, tangent.state())
    bound = data.tune is not None and data.tune.reads_evidence(not prior.fixed, data.likelihood.needs_noise)
    root = FisherRoot.of(tangent, data.likelihood, options.seed + ranks.rank())  # each rank draws its own columns
    problem = Problem(
        tangent=tangent, likelihood=data.likelihood, root=root, prior=prior, traces_wanted=bound,
        seed=options.seed, labels=runner.labels, count=runner.count, summary=runner.summary,
        temperature=options.temperature, data_size=options.data_size,
    )  # fmt: skip
    return Setup(options, data, method, problem, runner)


def run_and_tune(setup: Setup) -> Posterior:
    """Runs the passes of the method, and tunes what the user did not give; returns the checked posterior."""
    started = time.perf_counter()
    result = setup.runner.run(setup.method, setup.problem, _stop(setup))
    posterior, parts = posteriors_of(setup.runner, setup.method, setup.problem, result)
    if setup.options.method is None and setup.options.params is None:
        rule = "classes" if classifies(setup.data.likelihood, posterior.tangent) else "targets that are not classes"
        posterior = replace(posterior, method=replace(posterior.method, rule=rule))
    if "targets" in posterior.statistics:  # of Gaussian noise
        rows = first_rows(posterior.tangent, posterior.likelihood, setup.data.inputs, setup.data.targets)
        if rows is not None:
            warn_of_misfit(posterior.likelihood, *rows, posterior.statistics)
    tune, training = setup.data.tune, Training(setup.data.training, parts, setup.runner.count())
    before = time.perf_counter()
    if result.precision is not None or not has_prior(result.covariance):
        return checked(_with_prior_of_method(setup, posterior, training), parts)
    if tune is None:
        return checked(posterior if posterior.prior.fixed and posterior.noise_fixed else posterior.with_defaults())
    posterior = checked(tuned(tune, posterior, training), parts)
    log.info("Tuned in %.3g s of %.3g s.", (end := time.perf_counter()) - before, end - started)
    return posterior


def _stop(setup: Setup) -> Stop | None:
    """Returns the check that ends the curvature's pass, or None if the tuning needs the curvature of all data."""
    if not isinstance(setup.data.tune, EarlyStopping) or setup.data.tune.stop != "first fall":
        return None
    falls = setup.data.tune.falls()

    def stop(covariance: Covariance, summary: DataSummary) -> bool:
        result = FitResult(covariance, summary=summary)
        whole, parts = posteriors_of(setup.runner, setup.method, setup.problem, result)
        part = next(part for part in parts if part.samples == summary.samples)
        return ranks.on_first("early stopping", lambda: falls(part, whole))

    return stop


def _with_prior_of_method(setup: Setup, posterior: Posterior, training: Training) -> Posterior:
    """Returns the posterior of a method that chooses its own prior, with its logit temperature or noise tuned."""
    tune = setup.data.tune
    open_noise = not posterior.noise_fixed and not has_prior(posterior.covariance)
    open_numbers = open_noise or posterior.logit_temperature == 1 or posterior.likelihood.head_numbers
    if (isinstance(tune, Validation) and open_numbers) or (isinstance(tune, (BoundedEvidence, Refit)) and open_noise):
        return tuned(tune, posterior, training)
    if not setup.problem.prior.fixed and tune is not None and tune is not DEFAULT_TUNING:
        unused = "validation=" if setup.options.validation is not None else f"tune={type(tune).__name__}"
        log.warning("%s chooses its own prior: %s was not used.", type(setup.method).__name__, unused)
    return posterior
