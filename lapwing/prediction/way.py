"""The protocol of a way through the network, and the way that scales another.

A way leads from a Gaussian over the weights to the latent distribution of the outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from ..covariance import AnyLatent, Covariance
from ..options import Options, Rule, positive, required
from ..tangent import Tangent


class Way(Options, ABC):
    """A way through the network; subclasses are frozen dataclasses of its options. Any way takes any posterior."""

    @abstractmethod
    def latent(self, tangent: Tangent, covariance: Covariance, inputs: Any, joint: bool) -> AnyLatent:
        """Returns the latent distribution at one batch of inputs.

        Args:
            tangent: the network at the weights' mean.
            covariance: Σ over its treated weights.
            inputs: B samples.
            joint: whether to keep covariances across inputs.
        """

    def width(self, outputs: int) -> int:
        """Returns how many of C outputs the latent has: all of them, unless the way selects some."""
        return outputs


@dataclass(frozen=True)
class Scaled(Way):
    """`f(x) ~ N(m, s V)` where another way has `N(m, V)`; draws of weights give outputs `m + √s (f - m)`.

    With `Linearized` it is the posterior `N(θ̂, s Σ)`. Other ways are not linear in Σ: there `s V` is what `N(θ̂, s Σ)`
    gives to first order. What uncertain inputs add is scaled too, noise of y is not. `lw.scale_factor` finds s.

    Args:
        via: the way to scale.
        factor: s, positive.

    Raises:
        LapwingError: for anything but a way, or a factor that is not positive and finite.

    Cost: the way's, and as many multiplications as its latent has numbers.

    Source: Li et al., Streamlining Prediction in Bayesian Deep Learning, section 4 (posterior approximations), without
    an equation; after the pseudo-count of Ritter et al. 2018.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> posterior = lw.fit(torch.nn.Linear(4, 3).eval(), [(x, y)], prior_precision=1.0)
        >>> half = posterior.latent(x, via=lw.Scaled(lw.Linearized(), 0.5))
        >>> torch.allclose(half.variance, 0.5 * posterior.latent(x).variance)
        True
    """

    via: Way = field(metadata=required(Rule(lambda value: isinstance(value, Way), "a way"), "lw.Streamlined()"))
    factor: float = field(metadata=required(positive(), "0.5"))

    def latent(self, tangent: Tangent, covariance: Covariance, inputs: Any, joint: bool) -> AnyLatent:
        """Returns the other way's latent, scaled."""
        return self.via.latent(tangent, covariance, inputs, joint).scaled(self.factor)

    def width(self, outputs: int) -> int:
        """Returns that of the other way."""
        return self.via.width(outputs)
