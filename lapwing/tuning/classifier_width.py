"""The width of a classifier without held-out data: a bound on the cost of the spread on the training data."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ..posterior import Posterior
from .evidence import Training
from .held_out import SOME_POSITIONS, spread_costs
from .search import crossing, evenly
from .training_samples import spread_batches

log = logging.getLogger("lapwing")

CERTAIN_NLL = 0.05
"""NLL, in nats per training sample, below which the training labels show little about the calibration."""


def with_bounded_cost(
    posterior: Posterior, training: Training, samples: int, nats: float, decades: float, points: int
) -> Posterior:
    """Returns the posterior at the smallest prior precision, from its own up, whose spread costs at most `nats`.

    The arguments are the options of `BoundedEvidence`.
    """
    nll = -float(posterior.likelihood.log_likelihood(posterior.statistics)) / posterior.samples
    if nll < CERTAIN_NLL:
        log.warning(
            "%s has memorised its training labels, whose NLL is %.2g per sample: they cannot show how calibrated it "
            "is. For calibrated probabilities hold data out, and write lw.fit(model, loader, validation=held_out).",
            type(posterior.tangent.model).__name__, nll,
        )  # fmt: skip
    exponents = evenly(0.0, decades, points)
    costs = mean_costs([_raised(posterior, exponent) for exponent in exponents], training, samples)
    exponent = crossing(exponents, costs, nats)
    if exponent == 0:
        return posterior
    raised = _raised(posterior, exponent)
    lowest, chosen = float(posterior.prior.precision[0]), float(raised.prior.precision[0])
    log.info(
        "The spread at the evidence's prior precision %.3g costs %.3g nats per training sample: raised to %.3g",
        lowest, costs[0], chosen,
    )  # fmt: skip
    if exponent == exponents[-1]:
        log.warning(
            "BoundedEvidence of %s reached the end of its range, prior precision %.0e, where the spread still "
            "costs the training data %.1g nats per sample; BoundedEvidence(decades=%g) looks further.",
            posterior.method, chosen, costs[-1], decades + 4,
        )  # fmt: skip
    return raised


def mean_costs(candidates: Sequence[Posterior], training: Training, samples: int) -> list[float]:
    """Returns the cost of each candidate's spread, in nats per training sample; negative if the spread helps.

    The candidates are posteriors of one fit.
    """
    first = candidates[0]
    totals, count = spread_costs(candidates, spread_batches(training, number_of_inputs(first, samples), first))
    return (totals / max(count, torch.finfo(torch.float64).tiny)).tolist()


def number_of_inputs(posterior: Posterior, samples: int) -> int:
    """Returns the maximum number of inputs that are read for a number of samples, each of which may be a position."""
    positions = posterior.tangent.positions
    count = 16 * samples // min(positions.count, 1024)
    if not positions.direct:  # each position needs its own backward passes
        count = min(count, samples // min(positions.count, SOME_POSITIONS))
    return max(min(8, samples), count)


def _raised(posterior: Posterior, exponent: float) -> Posterior:
    """Returns the posterior at 10^exponent times its prior precision."""
    return posterior.at(posterior.prior.precision * 10**exponent, posterior.noise_variance)
