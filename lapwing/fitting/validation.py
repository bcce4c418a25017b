"""Choice between the last layer and all weights of a classifier, by the held-out data of `validation=`."""

from __future__ import annotations

import logging
import math
from typing import Any

from .. import ranks
from ..posterior import Posterior
from ..tangent import Tangent
from ..tuning.held_out import sample_scores
from .default_method import is_affordable_for_kfac

log = logging.getLogger("lapwing")

OUTPUTS = 20  # maximum number of outputs for which all weights are tried; a prediction needs a backward pass for each
MULTIPLY_ADDS = 2**37  # maximum number of multiply-adds for the Jacobian rows of all samples: about ten seconds
GAIN = 2e-3  # minimum gain, in nats per held-out sample, for which all weights are preferred: predictions cost more


def worth_trying(whole: Tangent, last: Tangent, samples: int) -> bool:
    """Whether to compare all weights with the last layer: there are more of them, and they do not cost too much."""
    if whole.parameters.keys() == last.parameters.keys():
        return False
    work = samples * whole.outputs * whole.plan.work(whole.blocks)
    if is_affordable_for_kfac(whole, OUTPUTS) and work <= MULTIPLY_ADDS:
        return True
    log.info("Only the last layer is treated, since all %d weights cost too much.", whole.size)
    return False


def preferred(last: Posterior, whole: Posterior, held_out: Any) -> Posterior:
    """Returns the posterior of a classifier's last layer, or of all weights if held-out data prefer it.

    All weights are preferred if their mean gain exceeds `GAIN` and the standard error of the mean gain. Over several
    processes rank 0 has the held-out data of all of them.
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
