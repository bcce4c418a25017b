"""What `lw.fit` does with `validation=`: held-out data tune, and choose between the last layer and all weights."""

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
"""All weights are tried where there are at most so many outputs: a prediction takes a backward pass for each."""

MULTIPLY_ADDS = 2**37
"""And where the rows of all samples take at most so many: some ten seconds."""

GAIN = 2e-3
"""All weights must gain so many nats a held-out sample, since their predictions cost more."""


def all_weights(tangent: Tangent, inputs: Any, samples: int) -> Tangent | None:
    """Returns all weights of a classifier where they are tried beside the last layer; None where they are not.

    Args:
        tangent: of the last layer.
        inputs: of the first batch.
        samples: N.
    """
    if tangent.positions is not None:  # each takes a backward pass an output
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
    log.info("The last layer alone is treated, since all %d weights cost too much.", whole.size)
    return None


def log_impossible(error: LapwingError) -> None:
    """Logs why all weights of a classifier cannot be treated."""
    log.info("The last layer alone is treated, since all trained weights cannot be: %s", error)


def preferred(last: Posterior, whole: Posterior, held_out: Any) -> Posterior:
    """Returns the posterior of a classifier's last layer, or of all weights if held-out data prefer it.

    All weights are preferred if their mean gain exceeds `GAIN` and the standard error of the mean gain.

    Args:
        last: posterior of the last layer.
        whole: posterior of all weights.
        held_out: held-out data; over several processes, those of all processes on rank 0.
    """

    def gain_of_all() -> tuple[float, float]:
        """Returns the mean gain in nats per held-out sample, and its standard error."""
        narrow, every = (sample_scores([one], lambda one: [one], held_out).flatten() for one in (last, whole))
        gain = every - narrow
        return float(gain.mean()), float(gain.std(correction=0)) / math.sqrt(len(gain))

    gain, deviation = ranks.on_first("all weights", gain_of_all)
    better = gain > max(GAIN, deviation)
    log.info(
        "%s is treated: on held-out data all weights gain %.2g nats a sample, with a standard error of %.2g.",
        f"All of {whole.tangent.size} weights" if better else "The last layer alone", gain, deviation,
    )  # fmt: skip
    return whole if better else last
