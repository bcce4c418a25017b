"""Refit: the width of a regression by the error of a fresh copy of the network, for people without held-out data."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data import batches
from ..errors import LapwingError
from ..methods import FitShape, Method
from ..network.calling import output_tensor
from ..network.eager import parameters_of
from ..network.entry import outside_modes
from ..network.invoke import invoke
from ..options import SEED, at_least, option
from ..posterior import Posterior
from .evidence import Training, Tuning
from .regression_width import SAMPLES, inputs_read, with_left_out_width
from .training_kernel import joined, targets_of
from .training_samples import spread_batches

log = logging.getLogger("lapwing")

RATE, BATCH, LOOK = 1e-2, 128, 50
"""Step size of Adam, number of samples of a step, and number of steps between two looks at the error."""

PART = 0.2
"""Part of the samples that the copy is not trained on."""

FIRST_SPREAD = 0.3
"""Standard deviation of the outputs of the copy before its training, if the targets have a standard deviation of 1."""

TESTED_WEIGHTS = 40_000
"""Maximum number of trained weights of the networks that the method was measured on."""


@dataclass(frozen=True)
class Refit(Tuning):
    """Prior precision and noise variance of a regression without held-out data, guarded by a fresh copy of the network.

    `BoundedEvidence` takes the width s of unseen targets from the linearised network. If training has fitted the
    features to noisy targets, s is too small, and nothing in the trained network shows this. So a copy with fresh
    weights is trained on four fifths of the samples, by Adam, for `steps` steps. Its smallest mean squared error on the
    other fifth along the way, Y, is a yardstick: if Y exceeds 1.5 s and six mean squared residuals, Y replaces s, so
    all variances are multiplied by Y/s, and lapwing warns. Otherwise the result equals that of `BoundedEvidence`.

    The trained network and the global random numbers do not change. The copy is made by `reset_parameters` of each
    layer; without it for a trained layer, no copy is trained, and lapwing warns. It was measured on MLPs of at most
    40 000 weights on standardised tables; for other networks a log line says that it is untested.

    Args:
        samples: maximum number of training samples that the copy uses.
        steps: number of steps of the training, each on 128 samples.
        seed: seed of the fresh weights and of the split.

    Raises:
        LapwingError: if an option is invalid, or if the likelihood has no open noise variance.

    Cost: that of `BoundedEvidence`, and `steps` steps of training on 128 samples each: about two seconds of one CPU
    core for an MLP of 10 000 weights, and in proportion to the cost of a training step. No limit on time applies.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(64, 4), torch.randn(64, 1)
        >>> model = torch.nn.Linear(4, 1).eval()
        >>> lw.fit(model, [(x, y)], tune=lw.Refit(steps=100)).noise_variance > 0
        True
    """

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

    def training_samples(self, posterior: Posterior) -> int:
        return inputs_read(posterior, self.samples)

    def _error(self, posterior: Posterior, training: Training) -> float | None:
        """Returns Y, or None if no fresh copy can be made."""
        model = posterior.tangent.model
        with torch.random.fork_rng([posterior.tangent.device] if posterior.tangent.device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            fresh, kept = fresh_copy(model)
            if kept:
                log.warning(
                    "lw.Refit could not make a fresh copy of %s: reset_parameters does not change %s. The width is "
                    "that of lw.BoundedEvidence(), and may be too narrow.", type(model).__name__, ", ".join(kept[:3]),
                )  # fmt: skip
                return None
            weights = sum(p.numel() for p in fresh.parameters() if p.requires_grad)
            if weights > TESTED_WEIGHTS:
                log.info("lw.Refit is untested for networks of more than %d trained weights", TESTED_WEIGHTS)
            parts = list(spread_batches(training, inputs_read(posterior, self.samples), posterior))
            with torch.enable_grad():
                return smallest_error(fresh, posterior, parts, self.steps)


def fresh_copy(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Returns a copy whose trained layers have fresh weights, and the names of trained parameters that did not change.

    Frozen parameters keep their values.
    """
    fresh = copy.deepcopy(model)
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


def smallest_error(
    model: nn.Module, posterior: Posterior, parts: Sequence[batches.Weighted], steps: int
) -> float | None:
    """Trains a fresh copy on most samples; returns its smallest mean squared error on the others along the way.

    Its outputs are shifted and scaled by constants, so that the scale of the targets does not matter. Each output is in
    units of its noise ratio. Returns None if there are too few samples.
    """
    tangent = posterior.tangent
    rows = [targets_of(posterior, *part) for part in parts]
    inputs = joined(tuple(part.inputs for part in parts))
    ratios, (every, _, counts) = posterior.likelihood.ratios(rows[0][0]), map(torch.cat, zip(*rows, strict=True))
    total = counts.sum(0).clamp_min(torch.finfo(counts.dtype).tiny)
    mean = (counts * every).sum(0) / total
    scale = ((counts * (every - mean).square()).sum(0) / total).sqrt()
    weights = counts / ratios / float((scale.square() / ratios).mean() or 1.0)
    sizes = [len(every)] if len(inputs) == 1 else [len(y) for y, *_ in rows]
    pieces = []
    for piece, y, w, counted in zip(inputs, every.split(sizes), weights.split(sizes), counts.split(sizes), strict=True):
        count = batches.size(piece)
        order = torch.randperm(count).to(tangent.device)
        held, seen = order.split([max(1, round(PART * count)), count - max(1, round(PART * count))])
        if len(seen) > 1:
            pieces.append((piece, *(values.unflatten(0, (count, -1)) for values in (y, w, counted)), held, seen))
    if not pieces:
        return None

    def outputs(piece: Any, some: Tensor) -> Tensor:
        out = output_tensor(invoke(model, batches.take(piece, some), tangent.forward))
        out = tangent.positions.rows(out) if tangent.positions.several else out
        return out.reshape(len(some), -1, len(ratios)).to(every)

    def looks() -> list[Tensor]:
        model.eval()
        with torch.no_grad():
            found = [outputs(piece, held) for piece, *_, held, _ in pieces]
        model.train()
        return found

    first = torch.cat([out.flatten(0, 1) for out in looks()])
    spread = first.std(0, correction=0)
    factor = FIRST_SPREAD * scale / torch.where(spread > 0, spread, FIRST_SPREAD)
    pieces = [(piece, y - mean + factor * first.mean(0), *rest) for piece, y, *rest in pieces]
    held_out = float(sum(counted[held].sum() for *_, counted, held, _ in pieces))
    chances = torch.tensor([float(len(seen)) for *_, seen in pieces])
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], RATE)
    best = math.inf
    for step in range(1, steps + 1):
        piece, y, w, _, _, seen = pieces[int(chances.multinomial(1)) if len(pieces) > 1 else 0]
        some = seen[torch.randint(len(seen), (min(BATCH, len(seen)),))]
        optimiser.zero_grad()
        (w[some] * (y[some] - factor * outputs(piece, some)).square()).mean().backward()
        optimiser.step()
        if step % LOOK == 0 or step == steps:
            errors = [
                float((counted[held] * (y[held] - factor * out).square() / ratios).sum())
                for (_, y, _, counted, held, _), out in zip(pieces, looks(), strict=True)
            ]
            best = min(best, sum(errors) / held_out)
    return best
