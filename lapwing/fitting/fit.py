"""fit(): runs a method's passes over the data, tunes what is None, and returns a posterior."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from ..covariance import Covariance, PriorCovariance
from ..errors import LapwingError, shown
from ..likelihoods import Likelihood, resolve
from ..likelihoods.inferred import check_logits, inferred_likelihood
from ..linalg import is_finite
from ..methods import KFAC, SWAG, FisherRoot, Found, Method, Problem
from ..methods.passes import Seen
from ..network import batches
from ..network.batches import Forward
from ..network.eager import outside_modes
from ..network.loaders import check_progress, check_seed, first_batch, known_size, tell_unseen
from ..network.stamp import Stamp
from ..posterior import Posterior
from ..posterior.prior import Prior, check_range, is_positive
from ..tangent import LastLayer, Predicate, Tangent, everything, last_layer
from ..tuning import BoundedEvidence, Training, Tuning
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
        loader: the training data: an iterable of (inputs, targets) batches that can be gone through several times.
        method: the structure of Σ and how it is found; KFAC when None.
        likelihood: "categorical", "gaussian" or an instance; None infers it from the targets' dtype, and
            refuses floats that are labels all the same.
        params: which parameters to treat; None means the last layer where `method` is None, else everything.
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
            decomposed in float64, and the workspace of LAPACK 16 n²; tuning takes a number a candidate for each weight.
        seed: of every random choice.
        progress: show a bar; None shows one on a terminal.

    Returns:
        An immutable posterior.

    Raises:
        LapwingError: for bad input, in one sentence; nothing is left half-written.

    Cost: the method's passes over the data, each about 1 + C passes of the network; see the method. Then the tuning's,
        which exceeds that where there are many weights and few data: see `BoundedEvidence`.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.randint(3, (32,))
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> lw.fit(model, [(x, y)]).predict(x).probs.shape
        torch.Size([32, 3])
    """
    method, params = _method_and_params(method, params)
    _check_numbers(prior_precision, weight_decay, temperature, data_size, seed)
    _check_tuning(tune)
    check_progress(progress)
    seed = int(seed)
    first = first_batch(loader)
    if data_size is not None:
        _check_data_size(data_size, known_size(loader) or 0)
    inputs, targets = batches.split(first)
    likelihood = inferred_likelihood(targets, loader) if likelihood is None else resolve(likelihood)
    tangent = Tangent.survey(model, inputs, params, forward, memory)
    if likelihood.activation is not None:
        weight = next(iter(tangent.parameters.values()))
        some = batches.plain(batches.take(inputs, slice(0, 16)), tangent.device)
        check_logits(likelihood, tangent.outputs_of(some), weight.dtype)
    runner = Runner(loader, progress, 0 if tune is None else tune.prefixes, data_size)
    drawn = runner.shown()
    if data_size is None:
        tell_unseen(loader, drawn)
    if weight_decay is not None:
        prior_precision = (data_size or runner.count()) * weight_decay
    prior = Prior.read(tangent, prior_precision, prior_mean)
    _check_noise(likelihood, tangent)
    generator = torch.Generator(tangent.device).manual_seed(seed)
    root = FisherRoot(likelihood, tangent.outputs, generator)
    if tangent.outputs > root.columns:
        log.info("%d outputs: the Fisher information is sampled, one draw an input", tangent.outputs)
    traces = tune is not None and tune.reads_evidence(not prior.given, likelihood.needs_noise)
    problem = Problem(
        tangent, likelihood, root, prior, traces, seed, runner.labels, runner.count, runner.seen, float(temperature),
        data_size,
    )  # fmt: skip
    found = runner.run(method, problem)
    tangent = found.tangent or tangent
    given = prior.given
    if data_size is None and drawn is None:
        tell_unseen(loader, runner.shown())
    likelihood, prior = _settled(found, likelihood, prior)
    seen, size = runner.seen(), None if data_size is None else float(data_size)
    if data_size is not None:
        _check_data_size(data_size, seen.samples)
    if found.seen is not None:
        seen, size = found.seen, _size_for(found.seen, found.data_factor, runner.count(), data_size)
    elif data_size is None and not runner.whole:
        size = runner.count()

    def posterior(
        covariance: Covariance, statistics: Mapping[str, Tensor], samples: int, size: float | None
    ) -> Posterior:
        result = Posterior(
            tangent, covariance, likelihood, prior, dict(statistics), samples, 1.0 if size is None else size / samples,
            float(temperature), repr(method), not likelihood.needs_noise, Stamp.of(tangent.state()), found.history,
        )  # fmt: skip
        settled = result.noise_given and isinstance(covariance, PriorCovariance)
        return result.at(prior.precision, likelihood.noise_variance) if settled else result

    whole = posterior(found.covariance, seen.statistics, seen.samples, size)
    if found.precision is not None or not isinstance(found.covariance, PriorCovariance):
        if not given and tune is not None and tune is not DEFAULT_TUNING:
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
            f"The fit is not finite: sums of squared gradients or residuals exceed the range of "
            f"{posterior.tangent.dtype}. Scale the inputs and the targets to about 1, or fit the network in float64 "
            "with model.double()."
        )
    _check_noise(posterior.likelihood, posterior.tangent)
    if posterior.covariance.rounded():
        log.warning(
            "The curvature of %s spans more digits than its sums resolve beside a prior precision of %.3g: variances "
            "in directions that the data show least are rounding noise. Scale the inputs to about 1, raise the prior "
            "precision, or fit the network in float64 with model.double().",
            posterior.method, posterior.prior.precision.min().item(),
        )  # fmt: skip
    return posterior


def _check_noise(likelihood: Likelihood, tangent: Tangent) -> None:
    """Raises for a noise variance that the weights' dtype cannot express."""
    if likelihood.noise_variance is not None:
        check_range("noise variance", torch.tensor(likelihood.noise_variance, dtype=torch.float64), tangent.dtype)


def _size_for(seen: Seen, factor: float, shown: int, data_size: int | None) -> float | None:
    """Returns the data size that scales a chosen part of the data as its method and the user ask."""
    if data_size is not None:
        _check_data_size(data_size, shown)
    factor *= 1.0 if data_size is None else data_size / shown
    return None if factor == 1.0 else factor * seen.samples


def _check_data_size(data_size: int, shown: int) -> None:
    """Raises for fewer training points than the loader shows (case 15)."""
    if data_size < shown:
        raise LapwingError(
            f"Asked for data_size={data_size}, found {shown} samples in the loader; N must be at least as many: leave "
            "data_size out, or give the size of the whole training set."
        )


def _settled(found: Found, likelihood: Likelihood, prior: Prior) -> tuple[Likelihood, Prior]:
    """Returns likelihood and prior at what the method chose itself."""
    if found.noise_variance is not None:
        likelihood = likelihood.with_noise_variance(found.noise_variance)
    if found.precision is not None:
        prior = replace(prior, precision=found.precision, given=True)
    return likelihood, prior


def _method_and_params(method: Any, params: Any) -> tuple[Method, Predicate | LastLayer]:
    if isinstance(method, type) and issubclass(method, Method):
        raise LapwingError(
            f"Asked for method={method.__name__}, found the class; an instance with its options is needed: write "
            f"lw.{method.__name__}()."
        )
    if method is SWAG:
        method = SWAG()  # says how it is made
    if hasattr(method, "shape") and hasattr(method, "dtype"):
        raise LapwingError(
            f"lw.fit takes a loader and then a method, and the third argument is {shown(method)}. Write lw.fit(model, "
            "[(x, y)]) to fit on inputs x and targets y."
        )
    if method is not None and not isinstance(method, Method):
        raise LapwingError(
            f"Asked for method={shown(method)}; accepted are lw.Full(), lw.Diagonal(), lw.KFAC(), lw.EKFAC(), "
            "lw.ELLA(rank=20, rows=200), lw.OptimalSubspace(rank=20), lw.SubsetOfWeights(size=100), lw.VaLLA(), "
            "lw.SubsetOfData(size=500), lw.SampledLLA() and lw.MeanField(): write method=lw.KFAC()."
        )
    if params is None:
        params = last_layer if method is None else everything
    return method or KFAC(), params


def _check_numbers(
    prior_precision: Any, weight_decay: float | None, temperature: float, data_size: int | None, seed: Any
) -> None:
    """Raises for numbers out of range (case 15)."""
    numbers = {"weight_decay": weight_decay, "temperature": temperature}
    if not isinstance(prior_precision, Mapping):
        numbers["prior_precision"] = prior_precision
    for name, value in numbers.items():
        if not (is_positive(value) or (value is None and name != "temperature")):
            raise LapwingError(
                f"Asked for {name}={shown(value)}; a positive finite number is needed: write {name}="
                f"{1e-4 if name == 'weight_decay' else 1.0}, or leave it out."
            )
    if data_size is not None and not (is_positive(data_size) and isinstance(data_size, Integral)):
        raise LapwingError(
            f"Asked for data_size={shown(data_size)}; a whole number, the size of the training set, is needed: write "
            "data_size=len(dataset), or leave it out."
        )
    if prior_precision is not None and weight_decay is not None:
        raise LapwingError(
            f"Asked for prior_precision={prior_precision} and weight_decay={weight_decay}; one of them is accepted, "
            "since weight_decay sets the prior precision to N times itself: leave one out."
        )
    check_seed(seed)


def _check_tuning(tune: Any) -> None:
    """Raises for a tuning that is none (case 15)."""
    if tune is not None and not isinstance(tune, Tuning):
        raise LapwingError(
            f"Asked for tune={shown(tune)}; accepted are lw.BoundedEvidence(), lw.Evidence(), lw.Validation(loader), "
            "lw.EarlyStopping(loader) and None: write tune=lw.BoundedEvidence()."
        )
    if torch.get_default_device().type == "meta":
        raise LapwingError(
            "torch's default device is meta, whose tensors hold no numbers. Call torch.set_default_device('cpu') first."
        )
