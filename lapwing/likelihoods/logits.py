"""Likelihoods of logits, with a temperature and an affine map for predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..covariance import AnyLatent, is_selected
from ..errors import LapwingError, shown
from ..options import Rule, number, option, positive
from .base import Likelihood, NoiselessLikelihood
from .links import Link
from .predictions import P
from .registry import options_of


def _is_map(value: Any) -> bool:
    rows = isinstance(value, (tuple, list)) and len(value) == math.isqrt(len(value)) * (math.isqrt(len(value)) + 1)
    return rows and all(map(number(-math.inf).accepts, value))


@dataclass(frozen=True)
class LogitLikelihood(NoiselessLikelihood[P]):
    """A likelihood of logits. Predictions divide the mean of the logits by a temperature T and keep their covariance.

    An overconfident network has logits that are too large, and no covariance of the weights scales all of them down
    equally. Then an affine map, if there is one, turns `N(m/T, S)` into `N(W m/T + b, W S Wᵀ)`. The loss, the curvature
    and the evidence use the network's own logits.

    Args:
        logit_temperature: T, positive. If it is 1, held-out data choose it; any other number stays.
        logit_map: C rows of W, each followed by its entry of b, C (C + 1) numbers; () means no map. Held-out data
            choose it with `lw.Validation(held_out, calibration="matrix")`.
    """

    logit_temperature: float = option(1.0, positive(), write="1.5")
    logit_map: tuple[float, ...] = option(
        (),
        Rule(_is_map, "C rows of C + 1 finite numbers as one tuple", lambda rows: tuple(map(float, rows))),
        write="(1.0, 0.0, 0.2, 0.0, 1.0, -0.2)",
        kw_only=True,
    )

    def __repr__(self) -> str:
        options = {} if self.logit_temperature == 1 else {"logit_temperature": f"{self.logit_temperature:.4g}"}
        options |= {name: shown(value) for name, value in options_of(self).items()}
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in options.items())})"

    def with_logit_temperature(self, logit_temperature: float | None) -> Likelihood[P]:
        """Returns a likelihood of the same class with another T; None means 1, without a map of the logits."""
        if logit_temperature is None:
            return replace(self, logit_temperature=1.0, logit_map=())
        return replace(self, logit_temperature=logit_temperature)

    def reads_covariance(self, link: Link) -> bool:
        return bool(self.logit_map) or super().reads_covariance(link)

    def tempered(self, latent: AnyLatent) -> AnyLatent:
        """Returns the latent of predictions: its mean divided by T, then the affine map."""
        latent = latent if self.logit_temperature == 1 else latent.tempered(self.logit_temperature)
        if not self.logit_map:
            return latent
        size, outputs = math.isqrt(len(self.logit_map)), latent.mean.shape[-1]
        if size != outputs and not is_selected(latent):
            raise LapwingError(
                f"The logit_map is for {size} outputs, and there are {outputs}. Pass {outputs} rows of {outputs + 1} "
                'numbers, or write lw.fit(..., tune=lw.Validation(held_out, calibration="matrix")).'
            )
        rows = latent.mean.new_tensor(self.logit_map).reshape(size, size + 1)
        return latent.mapped(rows[:, :-1], rows[:, -1])
