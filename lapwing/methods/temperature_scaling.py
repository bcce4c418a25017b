"""Temperature scaling: the network itself, with its logits divided by one number; the baseline of calibration."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..covariance import without_spread
from ..covariance.low_rank_diagonal import LowRankPlusDiagonal
from ..errors import LapwingError
from ..likelihoods import Likelihood, apply_weights
from ..linalg import doubled
from ..tangent import Tangent
from .footprint import FitShape, Footprint
from .passes import Batch, FitResult, Method, Passes, SumPass
from .problem import Problem
from .state import State

log = logging.getLogger("lapwing")

TEMPERATURE_GRID = torch.linspace(-2.0, 2.0, 161, dtype=torch.float64)  # candidates for log10 T


def refined(points: Sequence[float], scores: Sequence[float], at: int) -> float:
    """Returns the top of the parabola through the best point of a grid and its neighbours, or the point at an edge."""
    if at in (0, len(points) - 1):
        return points[at]
    left, middle, right = scores[at - 1 : at + 2]
    # b + a x + c x² through x = -1, 0, 1 has its top at -a/(2c): a = (right - left)/2, 2c = left - 2 middle + right
    shift = 0.5 * (left - right) / min(left - 2 * middle + right, -1e-300)  # in grid steps
    return points[at] + (points[1] - points[0]) * max(-0.5, min(0.5, shift))


def warn_of_end(temperature: float, of: str) -> None:
    """Warns that the best logit temperature is the end of the range."""
    log.warning(
        "The best temperature of %s is %.3g, the end of the range. %s", of, temperature,
        "The outputs hardly differ between the classes: check that the network returns logits." if temperature < 1
        else "The logits do not predict the classes: check the inputs, the network and the order of the labels.",
    )  # fmt: skip


@dataclass(frozen=True)
class TemperatureScaling(Method):
    """Certain weights, and the logit temperature T > 0 of highest likelihood. Fit it to held-out data.

    `lw.fit(model, held_out, lw.TemperatureScaling())` returns a posterior of variance 0, for `lw.compare`. Its classes
    and its accuracy are the network's. It divides all logits by the same number, so it detects out-of-distribution
    inputs no better than the network.

    T is the best of 161 candidates from 0.01 to 100, refined by a parabola through its neighbours (NLL to 1e-5 nats).
    The likelihood counts a quarter of a row more, with a uniform label, because n rows that are all right show an error
    of about 1/n at best. A given `logit_map` applies to the divided logits.

    Raises:
        LapwingError: if the fit is a regression, which has no logits.

    Cost: one forward pass over the data.

    Source: Guo et al., On Calibration of Modern Neural Networks, equation 9.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> scaled = lw.fit(model, [(x, y)], lw.TemperatureScaling())
        >>> torch.allclose(scaled.predict(x).probs, (model(x) / scaled.logit_temperature).softmax(-1), atol=1e-6)
        True
    """

    treats_last_layer: ClassVar[bool] = True
    can_change_prior: ClassVar[bool] = False
    chooses_temperature: ClassVar[bool] = True

    def check(self, tangent: Tangent, likelihood: Likelihood) -> None:
        if likelihood.logit_temperature is None:
            raise LapwingError(
                f"TemperatureScaling is for classifiers: it divides logits, and the {likelihood.name} likelihood has "
                "none. For a regression write lw.fit(model, loader, validation=held_out)."
            )

    def passes(self, problem: Problem) -> Passes:
        state = yield _Scores(problem)
        scores = state.sums + state.uniform / state.weight  # the pseudo-row of PSEUDO_WEIGHT
        at = int(scores.argmax())
        chosen = refined(TEMPERATURE_GRID.tolist(), scores.tolist(), at)
        if at in (0, len(scores) - 1):
            warn_of_end(10**chosen, "TemperatureScaling")
        covariance = LowRankPlusDiagonal(problem.tangent.blocks, problem.block_zeros(), problem.block_zeros(0))
        return FitResult(covariance, logit_temperature=10**chosen)

    def footprint(self, shape: FitShape) -> Footprint:
        kept = shape.stored(LowRankPlusDiagonal, {"rank": 0, "prior": False})
        return Footprint(kept, kept + shape.batch * shape.activations, 1.0)


@dataclass
class LogLikelihoods(State):
    """Sums over data: log likelihoods of the candidates (K,), of pseudo-rows (K,), and weights ()."""

    sums: Tensor
    uniform: Tensor
    weight: Tensor


class _Scores(SumPass[LogLikelihoods]):
    """Sums the log likelihood at every candidate."""

    label = "temperatures"

    def __init__(self, problem: Problem) -> None:
        self._likelihood = problem.likelihood.plain

    def init(self) -> LogLikelihoods:
        zeros = torch.zeros_like(TEMPERATURE_GRID)
        return LogLikelihoods(zeros, zeros.clone(), zeros[0].clone())

    def update(self, state: LogLikelihoods, batch: Batch) -> None:
        rows = batch.rows()
        outputs, targets, weights = rows["outputs"], rows["targets"], rows["weights"]
        self._likelihood.check(outputs, targets)
        counted = self._likelihood.labelled(targets)
        every = torch.ones(len(outputs)).to(outputs) if counted is None else counted.to(outputs)
        every = apply_weights(every, weights)
        state.weight += doubled(every).sum().cpu()
        for k, exponent in enumerate(TEMPERATURE_GRID.tolist()):
            prediction = self._likelihood.with_logit_temperature(10**exponent).predict(without_spread(outputs))
            state.sums[k] += apply_weights(doubled(prediction.log_prob(targets)), every).sum().cpu()
            uniform = prediction.pseudo_row(outputs)
            state.uniform[k] += apply_weights(doubled(uniform), every).sum().cpu()
