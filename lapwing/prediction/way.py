"""The protocol of a way through the network, and the way that scales another way.

A way leads from a Gaussian over the weights to the latent distribution of the outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

from ..covariance import AnyLatent, Covariance
from ..data.inputs import Inputs
from ..errors import LapwingError, shown
from ..options import POSITIVE_OF_EACH, Options, Rule, required
from ..tangent import Tangent


class Way(Options, ABC):
    """A way through the network. Subclasses are frozen dataclasses of options, and accept every posterior."""

    @abstractmethod
    def latent(self, tangent: Tangent, covariance: Covariance, inputs: Inputs, joint: bool) -> AnyLatent:
        """Returns the latent distribution at one batch of inputs.

        Args:
            tangent: the network at the weights' mean.
            covariance: Σ of its treated weights.
            inputs: B samples. `inputs.spreads` are the variances of `lw.Uncertain` ones: a way that does not support
                them calls `tangent.check(inputs)`, which refuses them.
            joint: whether to keep covariances across inputs.
        """

    def fitted(self, tangent: Tangent, covariance: Covariance, inputs: Inputs) -> Way:
        """Returns the way with what it estimates at some inputs, such as correlations; here the way itself."""
        return self

    def width(self, outputs: int) -> int:
        """Returns the number of outputs that the latent has of C: all, unless the way selects some."""
        return outputs

    @property
    def tuned_as(self) -> str | None:
        """The kind of ways that one prior precision suits; None if a fit of the way itself makes it suit any."""
        return type(self).__name__


def checked_way(via: Any) -> Way:
    """Returns a way. Raises if it is something else."""
    if not isinstance(via, Way):
        line = "Write via=lw.Linearized(), lw.MonteCarlo(draws=50) or lw.Streamlined()."
        if hasattr(via, "shape"):
            line = "Pass several inputs of one call as one argument: posterior.predict((x, mask)), or a dict."
        raise LapwingError(f"via={shown(via)} is not a way through the network. {line}")
    return via


@dataclass(frozen=True)
class Scaled(Way):
    """`f(x) ~ N(m, s V)` if another way gives `N(m, V)`. Outputs f under draws of the weights become `m + √s (f - m)`.

    With `Linearized` this is the posterior `N(θ̂, s Σ)`. Other ways are not linear in Σ: for them `s V` is the result
    for `N(θ̂, s Σ)` to first order. The variance from uncertain inputs is scaled too, but not the noise of y.
    `lw.scale_factor` chooses s.

    Args:
        via: the way to scale, which determines the cost.
        factor: s, positive and finite; or C numbers, one for each output of a regression, which stand for a diagonal S:
            then the covariance is `√S V √S`.

    Raises:
        LapwingError: in predictions, if the factors are not C, or if the way selects outputs or they are logits.

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
    factor: float | tuple[float, ...] = field(metadata=required(POSITIVE_OF_EACH, "0.5"))
    tuned_as = None

    def latent(self, tangent: Tangent, covariance: Covariance, inputs: Inputs, joint: bool) -> AnyLatent:
        if isinstance(self.factor, tuple) and {len(self.factor), self.width(tangent.outputs)} != {tangent.outputs}:
            raise LapwingError(
                f"The network has {tangent.outputs} outputs, and via={shown(self)} has {len(self.factor)} factors for "
                f"{self.width(tangent.outputs)} of them. Pass one number, or one for each output and no outputs=."
            )
        return self.via.latent(tangent, covariance, inputs, joint).scaled(self.factor)

    def fitted(self, tangent: Tangent, covariance: Covariance, inputs: Inputs) -> Scaled:
        return replace(self, via=self.via.fitted(tangent, covariance, inputs))

    def width(self, outputs: int) -> int:
        return self.via.width(outputs)
