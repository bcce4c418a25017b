"""fit(): runs a method's passes over the data, tunes what is None, and returns a posterior."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import ranks
from ..covariance import has_prior
from ..data import batches
from ..data.batches import Forward
from ..data.frames import as_loader
from ..data.loaders import WeightedLoader, check_progress, known_size, warn_of_unseen_samples
from ..data.progress import with_progress
from ..data.shares import joined_first_batch, share
from ..errors import check_flag
from ..likelihoods import Likelihood, resolve
from ..likelihoods.inferred import inferred_likelihood
from ..methods import KFAC, FisherRoot, FitShape, Method, Problem
from ..methods.problem import root_positions
from ..network.entry import outside_modes
from ..posterior import Posterior
from ..posterior.prior import Prior
from ..tangent import LastLayer, Predicate, Tangent
from ..tangent.retry import memory_errors
from ..tuning import BoundedEvidence, Training, Tuning, Validation
from .checkpoint import checkpoint_of
from .default_method import check_method, method_and_tangent, price
from .further import continued
from .memory_check import check_memory
from .options import DEFAULT_TUNING, check_data_size, check_fit, check_numbers, check_tuning
from .result import checked, posteriors_of, tuned
from .runner import Runner
from .same_fit import check_same_network, check_same_options
from .validation import check_held_out, first_held_out, with_all_weights, with_joined_data

log = logging.getLogger("lapwing")


@outside_modes
@ranks.across_ranks()
@memory_errors(
    "The fit",
    "Pass a smaller memory=..., or a method that needs less, such as lw.Diagonal(), or params=lw.last_layer. "
    "lw.plan(model, loader, method) says what a method needs.",
)
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
            (x, y) of tensors, NumPy arrays or pandas frames; or a map-style Dataset. Pairs and data sets are cut into
            batches of 100, in order. Arrays of floats take the weights' dtype; tensors do not.
        method: the structure of Σ and how it is fitted. Where `params` is None too, None means in a regression `Full`
            over all trained weights where that is cheap, KFAC over them where there are at most a million, and else
            KFAC of the last layer, as for a classifier. With `validation` a classifier has KFAC over all weights where
            that is cheap and held-out data prefer it. Where the last layer is frozen and others are trained, as with
            adapters, KFAC treats these. A last layer of more than 1 000 outputs has Diagonal. The log names it, its
            passes and its bytes. With other `params` None means KFAC.
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
    check_same_options({
        "method": method, "likelihood": likelihood, "params": params, "prior_precision": prior_precision,
        "prior_mean": prior_mean, "prior": getattr(prior, "method", prior), "tune": tune,
        "validation": validation is not None, "data_size": data_size, "weight_decay": weight_decay,
        "temperature": temperature, "sample_weights": sample_weights, "forward": forward, "memory": memory,
        "seed": seed, "checkpoint": checkpoint is not None,
    })  # fmt: skip
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
        return checked(continued(prior, model, loader, chosen_beside, sample_weights, forward, memory, file))
    compares = method is None and params is None and validation is not None
    check_method(method)
    check_numbers(prior_precision, weight_decay, temperature, data_size, seed)
    check_tuning(tune, validation)
    check_progress(progress)
    check_flag("lw.fit", "sample_weights", sample_weights)
    file, seed = checkpoint_of(checkpoint, every), int(seed)

    # the data
    data = as_loader(loader, model)
    loader = share(data)
    first = joined_first_batch(loader)
    inputs, targets = batches.split(batches.weighted(first) if sample_weights else first)
    if validation is not None:
        validation = as_loader(validation, model)
        tune, held_out = Validation(validation), first_held_out(validation, data, (inputs, targets))
    tune = None if tune is None else with_joined_data(tune, model)
    if isinstance(tune, Validation) and validation is not None:
        validation = tune.loader
    if data_size is not None:
        check_data_size(data_size, known_size(loader) or 0)
    training = WeightedLoader(loader, ranks.several()) if sample_weights else loader
    likelihood = inferred_likelihood(targets, training) if likelihood is None else resolve(likelihood)
    _log_limits_of_evidence(likelihood)
    if forward is None:
        _warn_of_own_tokens(inputs, targets, likelihood)
    prefixes = 0 if tune is None else tune.prefixes
    survey = partial(Tangent.survey, model, inputs, forward=forward, memory=memory, targets=targets)

    def started(method: Method | None, params: Predicate | LastLayer | None) -> tuple[Runner, Method, Problem]:
        """Returns what a fit by a method begins with, once the network and the prior are looked at."""
        runner = Runner(training, prefixes, data_size, file)
        method, tangent, reason = method_and_tangent(model, survey, method, params, likelihood, runner.count)
        least = runner.shown() or known_size(loader) or batches.size(inputs)
        shape = FitShape.of(tangent, likelihood, inputs, least)
        check_fit(method, shape, tune, inputs, validation is not None)
        check_memory(method, shape)
        if reason is not None:
            log.info("%s %s", reason, price(method, shape))
        precision = prior_precision if weight_decay is None else (data_size or runner.count()) * weight_decay
        prior = Prior.read(tangent, precision, prior_mean)
        check_same_network(tangent.model, tangent.state())
        traces = tune is not None and tune.reads_evidence(not prior.fixed, likelihood.needs_noise)
        return runner, method, Problem(
            tangent, likelihood, _root(tangent, likelihood, seed), prior, traces, seed, runner.labels, runner.count,
            runner.summary, float(temperature), data_size,
        )  # fmt: skip

    def fit_of_all_weights() -> Posterior:
        runner, method, problem = started(KFAC(), None)
        return _run(runner, training, method, problem, tune, held_out=True)

    runner, method, problem = started(method, params)
    if validation is not None:
        check_held_out(problem.tangent, likelihood, *held_out)
    drawn = runner.shown()
    if data_size is None:
        warn_of_unseen_samples(data, drawn)
    if file is not None:
        file.open(training, {
            "the network": problem.tangent.state(), "the parameters": problem.tangent.blocks, "the method": method,
            "the likelihood": likelihood, "the prior": problem.prior, "data_size": data_size,
            "temperature": temperature, "sample_weights": sample_weights, "forward": forward,
            "memory": problem.tangent.memory, "seed": seed, "the tuning": [problem.traces_wanted, prefixes],
        })  # fmt: skip
    with file or nullcontext():
        posterior = _run(runner, training, method, problem, tune, validation is not None)
        if data_size is None and drawn is None:
            warn_of_unseen_samples(data, runner.shown())
        if not compares or likelihood.logit_temperature is None:
            return posterior
        return with_all_weights(posterior, fit_of_all_weights, validation, inputs, runner.count())


def _run(
    runner: Runner, training: Iterable[Any], method: Method, problem: Problem, tune: Tuning | None, held_out: bool
) -> Posterior:
    """Goes through the passes of a method and tunes; returns the posterior.

    Args:
        runner: of the training data.
        training: the data.
        method: whose passes.
        problem: what the method may know.
        tune: the tuning; None for the defaults.
        held_out: whether it is by `validation=`.
    """
    start = time.perf_counter()
    result = runner.run(method, problem)
    whole, parts = posteriors_of(runner, method, problem, result)
    before, shown_data = time.perf_counter(), Training(training, parts, runner.count())
    if result.precision is not None or not has_prior(result.covariance):
        unused = "validation=" if held_out else f"tune={type(tune).__name__}"
        return checked(_with_prior_of_method(whole, method, tune, shown_data, unused, problem.prior.fixed))
    if tune is None:
        return checked(whole if whole.tuned else whole.with_defaults())
    posterior = checked(tuned(tune, whole, shown_data))
    log.info("Tuned in %.3g s of %.3g s.", (end := time.perf_counter()) - before, end - start)
    return posterior


def _log_limits_of_evidence(likelihood: Likelihood) -> None:
    """Logs what the evidence of this fit does not know."""
    if likelihood.plain is not likelihood:
        log.info(
            "%s weighs the loss, and no distribution of the targets has such a loss: its evidence is a pseudo-evidence",
            likelihood,
        )  # fmt: skip


def _warn_of_own_tokens(inputs: Any, targets: Any, likelihood: Likelihood) -> None:
    """Warns where the labels of a text that count are its own tokens, and not those that follow."""
    tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(tokens, Tensor) or not isinstance(targets, Tensor) or tokens.shape != targets.shape:
        return
    counted = likelihood.labelled(targets)
    own = tokens.to(targets.device) == targets
    if own.any() and (own if counted is None else own[counted]).all():
        log.warning(
            "The labels are the input_ids, so that each token is fitted to itself. For a causal language model, which "
            "predicts the token that follows, write lw.fit(model, NextTokens(loader)) with "
            "lapwing.integrations.huggingface.NextTokens."
        )


def _root(tangent: Tangent, likelihood: Likelihood, seed: int) -> FisherRoot:
    """Returns the root of the Fisher information; each rank draws its own columns."""
    generator = torch.Generator(tangent.device).manual_seed((seed + ranks.rank()) % 2**63)
    return FisherRoot(likelihood, tangent.outputs, generator, root_positions(tangent))


def _with_prior_of_method(
    whole: Posterior, method: Method, tune: Tuning | None, training: Training, unused: str, fixed: bool
) -> Posterior:
    """Returns the posterior of a method that chooses its own prior, the logit temperature or noise tuned beside it."""
    open_noise = not whole.noise_fixed and not has_prior(whole.covariance)
    if isinstance(tune, Validation) and (open_noise or whole.logit_temperature == 1):
        return tuned(tune, whole, replace(training, shown=None))
    if isinstance(tune, BoundedEvidence) and open_noise:
        return tuned(tune, whole, training)
    if not fixed and tune is not None and tune is not DEFAULT_TUNING:
        log.warning("%s chooses its own prior: %s was not used.", type(method).__name__, unused)
    return whole
