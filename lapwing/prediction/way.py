"""The protocol of a way through the network: from a Gaussian over the weights to the latent distribution of outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..covariance import AnyLatent, Covariance
from ..tangent import Tangent


class Way(ABC):
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
