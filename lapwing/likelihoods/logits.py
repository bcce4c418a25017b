"""Likelihoods of logits, with a temperature for predictions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..covariance import AnyLatent
from ..errors import shown
from ..options import option, positive
from .base import Likelihood, NoiselessLikelihood
from .predictions import P
from .registry import options_of


@dataclass(frozen=True)
class LogitLikelihood(NoiselessLikelihood[P]):
    """A likelihood of logits. Predictions divide the mean of the logits by a temperature T and keep their covariance.

    An overconfident network has logits that are too large, and no covariance of the weights scales all of them down
    equally. The loss, the curvature and the evidence use T = 1.

    Args:
        logit_temperature: T, positive. If it is 1, held-out data choose it; any other number stays.
    """

    logit_temperature: float = option(1.0, positive(), write="1.5")

    def __repr__(self) -> str:
        """One line with the options, and with T if it is not 1."""
        options = {} if self.logit_temperature == 1 else {"logit_temperature": f"{self.logit_temperature:.4g}"}
        options |= {name: shown(value) for name, value in options_of(self).items()}
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in options.items())})"

    def with_logit_temperature(self, logit_temperature: float | None) -> Likelihood[P]:
        """Returns a likelihood of the same class with another T; None means 1."""
        return replace(self, logit_temperature=1.0 if logit_temperature is None else logit_temperature)

    def tempered(self, latent: AnyLatent) -> AnyLatent:
        """Returns the latent of predictions, with its mean divided by T."""
        return latent if self.logit_temperature == 1 else latent.tempered(self.logit_temperature)
