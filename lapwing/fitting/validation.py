"""Choice between the last layer and all weights of a classifier, by the held-out data of `validation=`."""

from __future__ import annotations

import logging
import math
from typing import Any

from .. import ranks
from ..errors import LapwingError
from ..posterior import Posterior
from ..tangent import Tangent, everything
from ..tuning.held_out import sample_scores
from .default_method import is_affordable_for_kfac

log = logging.getLogger("lapwing")

OUTPUTS = 20
"""Maximum number of outputs for which all weights are tried. A prediction needs a backward pass for each output."""

MULTIPLY_ADDS = 2**37
"""Maximum number of multiply-adds for the Jacobian rows of all samples: about ten seconds."""

GAIN = 2e-3
"""Minimum gain, in nats per held-out sample, for which all weights are preferred. Their predictions cost more."""


def all_weights(tangent: Tangent, inputs: Any, samples: int) -> Tangent | None:
    """Surveys all weights of a classifier; returns None if they cannot be treated or cost too much.

    Args:
        tangent: surveyed network, with the last layer treated.
        inputs: inputs of the first batch.
        samples: N.
    """
    if tangent.positions is not None:  # each position needs a backward pass per output
        return None
    try:
        whole = Tangent.survey(tangent.model, inputs, everything, tangent.forward, tangent.memory, warn=False)
    except LapwingError as error:  # frozen weights, quantized layers, ...
        log_impossible(error)
        return None
    if whole.parameters.keys() == tangent.parameters.keys():
        return None
    work = samples * whole.outputs * whole.plan.work(whole.blocks)
    if is_affordable_for_kfac(whole, OUTPUTS) and work <= MULTIPLY_ADDS:
        return whole
    log.info("Only the last layer is treated, since all %d weights cost too much.", whole.size)
    return None


def log_impossible(error: LapwingError) -> None:
    """Logs why all weights of a classifier cannot be treated."""
    log.info("Only the last layer is treated, since all trained weights cannot be: %s", error)


def preferred(last: Posterior, whole: Posterior, held_out: Any) -> Posterior:
    """Returns the posterior of a classifier's last layer, or of all weights if held-out data prefer it.

    All weights are preferred if their mean gain exceeds `GAIN` and the standard error of the mean gain.

    Args:
        last: posterior of the last layer.
        whole: posterior of all weights.
        held_out: held-out data; over several processes, the data of all processes, on rank 0.
    """

    def gain_of_all() -> tuple[float, float]:
        """Returns the mean gain in nats per held-out sample, and its standard error."""
        narrow, every = (sample_scores([one], lambda one: [one], held_out).flatten() for one in (last, whole))
        gain = every - narrow
        return float(gain.mean()), float(gain.std(correction=0)) / math.sqrt(len(gain))

    gain, deviation = ranks.on_first("all weights", gain_of_all)
    better = gain > max(GAIN, deviation)
    log.info(
        "%s treated: on held-out data all weights gain %.2g nats per sample, with a standard error of %.2g.",
        f"All {whole.tangent.size} weights are" if better else "Only the last layer is", gain, deviation,
    )  # fmt: skip
    return whole if better else last
