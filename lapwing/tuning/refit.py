"""Refit: the width of a regression by the error of a fresh copy of the network, for people without held-out data."""

from __future__ import annotations

import copy
import logging
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..covariance import has_prior
from ..data.inputs import Inputs, Samples
from ..errors import LapwingError
from ..methods import FitShape, Method
from ..network.call import output_tensor
from ..network.eager import parameters_of
from ..network.entry import outside_modes
from ..options import SEED, at_least, option
from ..posterior import Posterior
from ..posterior.tuned import Training, Tuning, evenly_spaced_batches
from ..tangent import Tangent
from .fitted_noise import rows_wanted
from .regression_width import SAMPLES, with_left_out_width
from .training_kernel import table_of

log = logging.getLogger("lapwing")

COPY_RATE, COPY_BATCH, LOOK = 1e-2, 128, 50  # Adam: step size, samples of a step, steps between looks at the error
PART = 0.2  # part of the samples that the copy is not trained on
FIRST_SPREAD = 0.3  # standard deviation of the copy's first outputs, for targets of standard deviation 1
TESTED_WEIGHTS = 40_000  # maximum number of trained weights of the networks that the method was measured on
DEFAULT_ROWS = 20_000  # maximum number of training samples for which it is the default


@dataclass(frozen=True)
class Refit(Tuning):
    """Prior precision and noise variance of a regression without held-out data, guarded by a fresh copy of the network.

    `BoundedEvidence` takes the width s of unseen targets from the linearised network. If training has fitted the
    features to noisy targets, s is too small, and nothing in the trained network shows this. So a copy with fresh
    weights (`reset_parameters` of each layer) is trained on four fifths of the samples, by Adam, until it fits them as
    well as the network fits all, for at most `steps` steps. A yardstick Y is the mean squared residual of the network,
    plus what the copy errs more on the other fifth, less a standard error, than on its own samples. If Y exceeds 1.3 s,
    it replaces s, so all variances are multiplied by Y/s, and lapwing warns. Otherwise the result equals the result of
    `BoundedEvidence`. The trained network and the global random numbers do not change.

    `lw.fit` uses it by default for regressions without held-out data if a copy is cheap: for tables (B, D) of floats of
    at most 20 000 rows, and at most 40 000 trained weights, all in layers with `reset_parameters`. It was measured on
    such MLPs and standardised tables. If no copy can be made, `tune=lw.Refit()` warns; for larger networks it logs.

    Args:
        samples: maximum number of training samples that the copy uses.
        steps: maximum number of steps of the training, each on 128 samples.
        seed: seed of the fresh weights and of the split.

    Raises:
        LapwingError: if an option is invalid, or if the likelihood has no open noise variance.

    Cost: the cost of `BoundedEvidence`, plus at most `steps` steps of training on 128 samples each: about two seconds
    of one CPU core for an MLP of 10 000 weights, and in proportion to the cost of a training step.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(64, 4), torch.randn(64, 1)
        >>> model = torch.nn.Linear(4, 1).eval()
        >>> lw.fit(model, [(x, y)], tune=lw.Refit(steps=100)).noise_variance > 0
        True
    """

    fits_noise: ClassVar[bool] = True
    samples: int = option(10_000, at_least(20))
    steps: int = option(1000, at_least(1))
    seed: int = option(0, SEED)

    def check(self, method: Method, shape: FitShape) -> None:
        if not shape.likelihood.needs_noise:
            raise LapwingError(
                "lw.Refit chooses the width of a regression with an open noise variance, and this fit has none. Leave "
                "tune out."
            )

    @outside_modes
    def tune(self, posterior: Posterior, training: Training = Training()) -> Posterior:  # noqa: B008 (frozen)
        residual = posterior.likelihood.residual_variance(posterior.statistics)
        if residual is None or posterior.noise_fixed:
            return posterior
        return with_left_out_width(posterior, residual, training, SAMPLES, self._error)

    def tunes_own_prior(self, posterior: Posterior) -> bool:
        return not posterior.noise_fixed and not has_prior(posterior.covariance)

    def training_samples(self, posterior: Posterior) -> int:
        return max(self.samples, rows_wanted(posterior))

    def _error(self, posterior: Posterior, training: Training) -> float | None:
        """Returns Y, or None if no fresh copy can be made."""
        model = posterior.tangent.model
        table = table_of(posterior, list(evenly_spaced_batches(training, self.samples, posterior)))
        with _own_random_numbers(posterior):
            torch.manual_seed(self.seed)
            fresh, kept = fresh_copy(model)
            if kept:  # or these numbers are the ones with which the network began
                fresh, kept = fresh_copy(model)
            if kept or table is None:
                log.warning(
                    "lw.Refit could not train a fresh copy of %s: %s. The width is as by lw.BoundedEvidence(), and "
                    "may be too narrow.", type(model).__name__,
                    "its inputs are not a table (B, D) of floats" if table is None else
                    f"reset_parameters does not change {', '.join(kept[:3])}",
                )  # fmt: skip
                return None
            if sum(p.numel() for p in fresh.parameters() if p.requires_grad) > TESTED_WEIGHTS:
                log.info("lw.Refit is untested for networks of more than %d trained weights", TESTED_WEIGHTS)
            with torch.enable_grad():
                residual = posterior.likelihood.residual_variance(posterior.statistics) or 0.0
                return error_of_copy(fresh, posterior.tangent, *table, self.steps, residual)


def is_cheap(posterior: Posterior, first: Samples, rows: int) -> bool:
    """Whether `Refit` is the default for a fit with an open σ²: a fresh copy of the network trains in seconds."""
    x, model = first.inputs.value, posterior.tangent.model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    regression = posterior.likelihood.residual_variance(posterior.statistics) is not None
    table = isinstance(x, Tensor) and x.ndim == 2 and x.is_floating_point()
    if not (regression and table and rows <= DEFAULT_ROWS and 0 < trained <= TESTED_WEIGHTS):
        return False
    with _own_random_numbers(posterior), suppress(LapwingError):  # of a network that cannot be copied
        return not fresh_copy(model)[1]
    return False


def _own_random_numbers(posterior: Posterior) -> AbstractContextManager[None]:
    """Returns a context in which random numbers do not change the global ones."""
    device = posterior.tangent.device
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def fresh_copy(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Returns a copy whose trained layers have fresh weights, and the trained parameters that did not change."""
    try:
        fresh = copy.deepcopy(model)
    except RuntimeError as error:
        raise LapwingError(
            f"lw.Refit cannot copy {type(model).__name__}: {str(error).splitlines()[0]} Let forward() keep no tensors, "
            "or detached ones, or write tune=lw.BoundedEvidence()."
        ) from error
    before = parameters_of(model)
    for module in fresh.modules():
        own = list(module.parameters(recurse=False))
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None and any(parameter.requires_grad for parameter in own):
            reset()
    kept = []
    with torch.no_grad():
        for name, parameter in parameters_of(fresh).items():
            if not parameter.requires_grad:
                parameter.copy_(before[name])
            elif torch.equal(parameter, before[name]):
                kept.append(name)
    return fresh, kept


def error_of_copy(
    model: nn.Module, tangent: Tangent, x: Tensor, y: Tensor, w: Tensor, steps: int, residual: float
) -> float | None:
    """Trains a fresh copy on most rows of `table_of`; returns Y from its mean squared error on the others.

    Y is `residual` plus the excess of the mean squared error on these rows, less its standard error, over the one on
    its own, where training ends once that is at most `residual`. So Y is small, and changes nothing, if an outlier is
    among the rows, or if the copy cannot learn what the network has, for instance without a bias. Constants shift and
    scale the outputs, so that the scale of the targets does not matter. Returns None if there are too few rows.
    """
    # 1. a fifth of the rows is held out
    count = max(1, round(PART * len(x)))
    held, seen = torch.randperm(len(x)).to(x.device).split([count, len(x) - count])
    if len(seen) < 2:
        return None
    call = replace(tangent.call, model=model)

    def outputs(some: Tensor) -> Tensor:
        return tangent.positions.rows(output_tensor(call(Inputs(x[some])))).reshape(len(some), -1).to(y)

    def look(some: Tensor) -> Tensor:
        model.eval()
        out = outputs(some).detach()  # with gradients, which the network itself may take
        model.train()
        return out

    def errors(some: Tensor) -> tuple[float, float]:  # mean squared error, and its standard error
        each, weight = (w[some] * (y[some] - factor * look(some)).square()).sum(1), w[some].sum(1)
        mean = each.sum() / weight.sum()
        return float(mean), float((each - mean * weight).norm() / weight.sum())

    w = w / (w[w > 0].mean() if w.any() else 1.0)
    # 2. mean and standard deviation of each target (C,)
    total = w.sum(0).clamp_min(torch.finfo(w.dtype).tiny)
    mean = (w * y).sum(0) / total
    scale = ((w * (y - mean).square()).sum(0) / total).sqrt()
    # 3. the factor (C,) with which the first outputs have `FIRST_SPREAD` of this deviation, and y moved to their mean
    first = look(held)
    spread = first.std(0, correction=0)
    factor = FIRST_SPREAD * scale / torch.where(spread > 0, spread, FIRST_SPREAD)
    y = y - mean + factor * first.mean(0)
    # 4. Adam on mean (y - factor f)², in units of the variance
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], COPY_RATE)
    for step in range(1, steps + 1):
        some = seen[torch.randint(len(seen), (min(COPY_BATCH, len(seen)),))]
        optimiser.zero_grad()
        loss = (w[some] * (y[some] - factor * outputs(some)).square()).mean() / float(scale.square().mean() or 1.0)
        loss.backward()
        optimiser.step()
        if step % LOOK == 0 and errors(seen)[0] <= residual:
            break
    unseen, deviation = errors(held)
    return residual + max(0.0, unseen - deviation - errors(seen)[0])
