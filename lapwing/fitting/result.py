"""From what a method returns to posteriors: with its numbers, agreed on by all ranks, and refused if not finite."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from ..covariance import Covariance, PriorCovariance
from ..errors import LapwingError
from ..linalg import is_finite
from ..methods import FitResult, Method, Problem
from ..network import ranks
from ..network.stamp import Stamp
from ..posterior import MethodInfo, Posterior
from ..tuning import Tuning
from .options import check_data_size, check_noise
from .runner import Runner

log = logging.getLogger("lapwing")


def posteriors_of(
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
        given = likelihood if isinstance(covariance, PriorCovariance) else problem.likelihood
        fitted = Posterior(
            tangent, covariance, likelihood, prior, dict(statistics), samples, factor, problem.temperature,
            MethodInfo.of(method), not given.needs_noise, Stamp.of(tangent.state()), result.history,
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
        check_data_size(problem.data_size, count)
        factor *= problem.data_size / count
    whole = posterior(result.covariance, summary.statistics, summary.samples, factor)
    parts = sorted(runner.prefixes().items())
    unscaled = parts if whole.data_factor > 1 else parts[:-1]  # all of the data is a part where `whole` is scaled
    return whole, tuple(posterior(*kept, samples, 1.0) for samples, kept in unscaled)


def with_tuning(before: Posterior, tuned: Posterior, tune: Tuning) -> Posterior:
    """Returns a tuned posterior that names its tuning; the same one if the tuning left it as it was."""
    return tuned if tuned is before else replace(tuned, method=replace(tuned.method, tuning=repr(tune)))


def checked(posterior: Posterior) -> Posterior:
    """Returns the result of a fit, refused where it is not finite; warns where rounding decides some variances."""
    posterior = _agreed(posterior)
    tensors = (*posterior.covariance.tensors().values(), *posterior.statistics.values())
    if not all(is_finite(values) for values in tensors):
        raise LapwingError(
            "The fit is not finite: sums of squared gradients or residuals exceed the range of "
            f"{posterior.tangent.dtype}. Scale the inputs and the targets to about 1, or fit the network in float64 "
            "with model.double()."
        )
    check_noise(posterior.likelihood, posterior.tangent)
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
    if (precision, noise, temperature) == tuned:
        return posterior
    if temperature is not None:
        likelihood = posterior.likelihood.with_logit_temperature(temperature)
        posterior = replace(posterior, likelihood=likelihood)
    if not isinstance(posterior.covariance, PriorCovariance):
        return posterior.with_noise(noise)
    return posterior.at(posterior.prior.precision.new_tensor(precision), noise)
