"""Bernoulli likelihood for yes or no: a sigmoid of each output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..covariance import AnyLatent
from . import divergence
from .base import NoiselessLikelihood
from .bernoulli_prediction import BernoulliPrediction
from .links import BinaryLink, Link, Probit, Quadrature, SampledLink, at_least_float32
from .registry import register
from .targets import aligned_targets, check_binary_targets, check_target_shape


@register
@dataclass(frozen=True)
class Bernoulli(NoiselessLikelihood):
    """`y_c ~ Bernoulli(σ(f_c))`, independently for each of C outputs; Λ = diag(p(1 - p)).

    One output for a question with two answers, several for several labels at once. Targets are 0 and 1, as bool,
    integers or floats, (B, C), or (B,) when C = 1.

    Example:
        >>> import torch
        >>> Bernoulli().log_prob(torch.zeros(3, 1), torch.tensor([True, False, True])).shape
        torch.Size([3])
    """

    name: ClassVar[str] = "bernoulli"
    links: ClassVar[tuple[type[Link], ...]] = (Quadrature, Probit, SampledLink)
    default_link: ClassVar[Link] = Quadrature()
    activation: ClassVar[str | None] = "sigmoid"

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Checks targets of 0 and 1, (B, C) or, when C = 1, (B,).

        Raises:
            LapwingError: for other values, or a wrong shape or device.
        """
        check_binary_targets("Bernoulli", outputs.shape, outputs.device, targets)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns `Σ_c log σ(±f_c)`, plus where y_c = 1, (B,)."""
        outputs = at_least_float32(outputs)
        return F.logsigmoid(self._signs(outputs, targets) * outputs).sum(-1)

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Returns `diag(√(p(1 - p)))`, (B, C, C)."""
        logits = at_least_float32(outputs)
        return torch.diag_embed((0.5 * (F.logsigmoid(logits) + F.logsigmoid(-logits))).exp()).to(outputs.dtype)

    def sampled_fisher_root(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Returns `y - p` for answers y drawn from p, (B, C, 1)."""
        probs = at_least_float32(outputs).sigmoid()
        return (torch.bernoulli(probs.detach(), generator=generator) - probs).unsqueeze(-1).to(outputs.dtype)

    def predict(
        self, latent: AnyLatent, link: Link | None = None, generator: torch.Generator | None = None
    ) -> BernoulliPrediction:
        """Returns probabilities of yes, exact by quadrature, or by the link asked for; weight draws are averaged.

        Args:
            latent: Gaussian over the logits, or logits under weight draws.
            link: `Quadrature()`, `Probit()` or `SampledLink()`; only the last for weight draws.
            generator: Source of randomness for `SampledLink`; None means seed 0.

        Returns:
            The prediction.

        Raises:
            LapwingError: for a link that does not fit.
        """
        chosen = cast("BinaryLink", self.choose_link(latent, link))
        return BernoulliPrediction(chosen.log_odds(latent, generator), latent, chosen)

    def integrals(self, outputs: int, alpha: float) -> tuple[type[Link], ...]:
        """Returns `Quadrature` for one output or α = 0, and `SampledLink`.

        The expectation of a product over correlated outputs is not a product, unless α is 0.
        """
        return (Quadrature, SampledLink) if outputs == 1 or alpha == 0 else (SampledLink,)

    def _power_mean(
        self, mean: Tensor, covariance: Tensor, targets: Tensor, alpha: float, noise_variance: Tensor | None, link: Link
    ) -> Tensor:
        """Returns `log_power_mean` by quadrature."""
        nodes = cast("Quadrature", link).nodes
        mean = at_least_float32(mean)
        signed = self._signs(mean, targets) * mean
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        return divergence.binary_log_power_mean(signed, variance, alpha, nodes).sum(-1).to(mean.dtype)

    @staticmethod
    def _signs(outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns 1 where the answer is yes and -1 where it is no, (B, C)."""
        return 2.0 * aligned_targets("Bernoulli", outputs, targets, check_target_shape) - 1.0
