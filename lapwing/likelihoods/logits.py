"""Likelihoods of logits, whose predictions have a temperature."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..covariance import AnyLatent
from ..errors import shown
from ..options import option, positive
from .base import Likelihood, NoiselessLikelihood
from .registry import options_of


@dataclass(frozen=True)
class LogitLikelihood(NoiselessLikelihood):
    """A likelihood of logits, whose predictions divide their mean by a temperature T and leave their covariance.

    A network that is too sure of its training data is so in its logits too, and no spread of the weights lowers all of
    them alike. The loss, and with it the curvature and the evidence, is that of T = 1.

    Args:
        logit_temperature: T. Held-out data choose it where it is 1; another number is kept.

    Raises:
        LapwingError: if `logit_temperature` is not positive and finite.
    """

    logit_temperature: float = option(1.0, positive(), write="1.5")

    def __repr__(self) -> str:
        """Names T where it is not 1."""
        options = {} if self.logit_temperature == 1 else {"logit_temperature": f"{self.logit_temperature:.4g}"}
        options |= {name: shown(value) for name, value in options_of(self).items()}
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in options.items())})"

    def with_logit_temperature(self, logit_temperature: float | None) -> Likelihood:
        """Returns the likelihood, of the same class, at another T, which is 1 where None."""
        return replace(self, logit_temperature=1.0 if logit_temperature is None else logit_temperature)

    def tempered(self, latent: AnyLatent) -> AnyLatent:
        """Returns the latent that predictions are made of: its mean is divided by T."""
        return latent if self.logit_temperature == 1 else latent.tempered(self.logit_temperature)
