"""Posteriors from the results of methods: tuned, equal on all ranks, and checked."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from .. import ranks
from ..covariance import Covariance, has_prior, has_rank
from ..data.data import Data
from ..data.loaders import check_data_size
from ..errors import LapwingError
from ..linalg import is_finite
from ..methods import FitResult, Method, Problem
from ..network.stamp import Stamp
from ..posterior import MethodInfo, Posterior
from ..tangent.retry import retried
from ..tuning import Training, Tuning
from ..tuning.evidence import evenly_spaced_batches
from .checks import check_noise
from .runner import Runner

log = logging.getLogger("lapwing")


def posteriors_of(
    runner: Runner, method: Method, problem: Problem, result: FitResult
) -> tuple[Posterior, tuple[Posterior, ...]]:
    """Returns the posteriors of all data and of their first parts, at the δ, σ² and T of the method, before tuning."""
    tangent, likelihood, prior = result.tangent or problem.tangent, problem.likelihood, problem.prior
    if result.noise_variance is not None:
        likelihood = likelihood.with_noise_variance(result.noise_variance)
    if result.logit_temperature is not None:
        likelihood = likelihood.with_logit_temperature(result.logit_temperature)
    if result.precision is not None:
        prior = replace(prior, precision=result.precision, fixed=True)

    def posterior(covariance: Covariance, statistics: Mapping[str, Tensor], samples: int, factor: float) -> Posterior:
        given = likelihood if has_prior(covariance) else problem.likelihood
        fitted = Posterior(
            tangent=tangent, covariance=covariance, likelihood=likelihood, prior=prior, statistics=dict(statistics),
            samples=samples, data_factor=factor, temperature=problem.temperature,
            method=replace(MethodInfo.of(method), sample_weights=runner.weighted), noise_fixed=not given.needs_noise,
            stamp=Stamp.of(tangent.state()), history=result.history, columns=runner.columns,
        )  # fmt: skip
        settled = fitted.noise_fixed and has_prior(covariance)
        return fitted.at(prior.precision, likelihood.noise_variance) if settled else fitted

    summary, factor = result.summary, result.data_factor
    if summary is None:
        summary = runner.summary()
        if problem.data_size is None:  # the steps of a method may have ended before the data
            factor *= runner.count() / summary.samples
    if problem.data_size is not None:
        count = summary.samples if result.summary is None else runner.count()
        check_data_size(problem.data_size, count)
        factor *= problem.data_size / count
    whole = posterior(result.covariance, summary.statistics, summary.samples, factor)
    parts = [posterior(*kept, samples, 1.0) for samples, kept in runner.first_parts.items()]
    if parts and factor > 1:
        parts.append(posterior(result.covariance, summary.statistics, summary.samples, 1.0))
    return whole, tuple(parts)


def tuned(tune: Tuning, posterior: Posterior, training: Training) -> Posterior:
    """Returns the tuned posterior, over several processes on rank 0: see `checked`.

    Rank 0 tunes with training samples of all processes. Their held-out data are already there: see `joined_on_first`.
    """
    whole = training
    if ranks.several():
        limit, data, rows = tune.training_samples(posterior), training.loader, []
        if limit and isinstance(data, Data) and training.shown is not None:
            rows = list(evenly_spaced_batches(training, limit, posterior, data.before))
        rows = ranks.gathered_on_first("training data of the tuning", rows)
        whole = replace(training, loader=rows, chosen=True)
    best = posterior if ranks.rank() else retried(posterior.tangent, lambda: tune.tune(posterior, whole))
    numbers = ("prior_precision", "likelihood", "samples")
    if all(getattr(best, name) == getattr(posterior, name) for name in numbers):
        return best  # the user gave what the tuning could choose
    return replace(best, method=replace(best.method, tuning=repr(tune)))


def checked(posterior: Posterior, parts: Sequence[Posterior] = ()) -> Posterior:
    """Returns the posterior of rank 0; raises if it is not finite, and warns if some variances are rounding noise.

    `parts` are posteriors of the first samples. Rank 0 may have chosen one of them.
    """
    posterior = _as_on_first(posterior, parts)
    tensors = (*posterior.covariance.tensors().values(), *posterior.statistics.values())
    if not all(is_finite(values) for values in tensors):
        raise LapwingError(
            "The fit is not finite: sums of squared gradients or residuals exceed the range of "
            f"{posterior.tangent.dtype}. Scale the inputs and the targets to about 1, or fit the network in float64 "
            "with model.double()."
        )
    check_noise(posterior.likelihood, posterior.tangent)
    if posterior.covariance.has_rounding_noise():
        log.log(
            logging.WARNING if posterior.prior.fixed else logging.INFO,  # a tuning scored these very variances
            "The prior precision %.3g is too weak for the digits of %s: variances of %s in directions of least "
            "curvature are rounding noise. Pass a larger prior_precision=, or fit the network in float64 with "
            "model.double().",
            posterior.prior.precision.min().item(), posterior.tangent.dtype, posterior.method,
        )  # fmt: skip
    return posterior


def _as_on_first(posterior: Posterior, parts: Sequence[Posterior]) -> Posterior:
    """Returns the posterior with the values, the rank and the samples that rank 0 chose."""
    if not ranks.several():
        return posterior
    precision, likelihood, data, rank, method, aim = ranks.sent("the numbers that were tuned", (
        posterior.prior.precision.tolist(), posterior.likelihood, (posterior.samples, posterior.data_factor),
        getattr(posterior.covariance, "rank", None), posterior.method, posterior.aim,
    ))  # fmt: skip
    if not ranks.rank():
        return posterior
    chosen = next(one for one in (posterior, *parts) if (one.samples, one.data_factor) == data)
    if rank is not None and has_rank(chosen.covariance) and chosen.covariance.rank != rank:
        chosen = replace(chosen, covariance=chosen.covariance.with_rank(rank))
    chosen = replace(chosen, likelihood=likelihood, method=method, aim=aim)
    if has_prior(chosen.covariance):
        return chosen.at(chosen.prior.precision.new_tensor(precision), likelihood.noise_variance)
    return chosen
