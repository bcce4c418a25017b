"""Categorical likelihood for classification: softmax over the outputs, integer labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from ..covariance import AnyLatent, Latent
from ..covariance.terms import DenseTerm
from . import divergence
from .base import NoiselessLikelihood
from .class_prediction import ClassPrediction
from .links import (
    ClassLink,
    LaplaceBridge,
    Link,
    Probit,
    Quadrature,
    SampledLink,
    at_least_float32,
)
from .registry import register
from .targets import check_labels


@register
@dataclass(frozen=True)
class Categorical(NoiselessLikelihood):
    """`y ~ softmax(f)` with integer labels (B,) from 0 to C - 1; Λ = diag(p) - p pᵀ.

    Example:
        >>> import torch
        >>> Categorical().fisher_root(torch.zeros(4, 3)).shape
        torch.Size([4, 3, 3])
    """

    name: ClassVar[str] = "categorical"
    links: ClassVar[tuple[type[Link], ...]] = (Probit, LaplaceBridge, SampledLink)
    default_link: ClassVar[Link] = Probit()
    activation: ClassVar[str | None] = "softmax"

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Checks integer labels (B,) from 0 to C - 1.

        Raises:
            LapwingError: for NaN labels, or a wrong range, shape, dtype or device.
        """
        check_labels("Categorical", outputs.shape, outputs.device, targets)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns `f_y - log Σ_c exp f_c`, (B,)."""
        return torch.log_softmax(at_least_float32(outputs), -1).gather(-1, targets.long()[:, None]).squeeze(-1)

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Returns `(I - p 1ᵀ) diag(√p)`, (B, C, C): column k is √p_k (e_k - p)."""
        roots = (0.5 * torch.log_softmax(at_least_float32(outputs), -1)).exp()  # √p, above 0 where p is not
        root = torch.addcmul(torch.diag_embed(roots), roots.square()[:, :, None], roots[:, None, :], value=-1)
        return root.to(outputs.dtype)  # (B, C, C)

    def sampled_fisher_root(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Returns `e_y - p` for a label y drawn from p, (B, C, 1)."""
        probs = at_least_float32(outputs).softmax(-1)
        labels = torch.multinomial(probs.detach(), 1, generator=generator)  # (B, 1)
        return (torch.zeros_like(probs).scatter(-1, labels, 1.0) - probs).unsqueeze(-1).to(outputs.dtype)

    def predict(
        self, latent: AnyLatent, link: Link | None = None, generator: torch.Generator | None = None
    ) -> ClassPrediction:
        """Returns class probabilities by the probit link, or the one asked for; weight draws are averaged.

        Args:
            latent: Gaussian over the logits, or logits under weight draws.
            link: `Probit()`, `LaplaceBridge()` or `SampledLink()`; only the last for weight draws.
            generator: Source of randomness for `SampledLink`; None means seed 0.

        Returns:
            The prediction.

        Raises:
            LapwingError: for a link that does not fit.
        """
        chosen = cast("ClassLink", self.choose_link(latent, link))
        return ClassPrediction(chosen.log_probs(latent, generator), latent, chosen)

    def integrals(self, outputs: int, alpha: float) -> tuple[type[Link], ...]:
        """Returns `Quadrature` for two classes, `SampledLink`, and at α = 1 the closed forms of predictions.

        At α = 1 `log_power_mean` is the log predictive probability: `Probit()` and `LaplaceBridge()` give it
        without randomness, `Probit(marginal=True)` as in the VaLLA paper.
        """
        two: tuple[type[Link], ...] = (Quadrature,) if outputs == 2 else ()
        closed: tuple[type[Link], ...] = (Probit, LaplaceBridge) if alpha == 1 else ()
        return (*two, SampledLink, *closed)

    def _power_mean(
        self, mean: Tensor, covariance: Tensor, targets: Tensor, alpha: float, noise_variance: Tensor | None, link: Link
    ) -> Tensor:
        """Returns `log_power_mean` by quadrature for two classes, or by the closed form of a prediction."""
        mean, labels = at_least_float32(mean), targets.long()
        if isinstance(link, Quadrature):
            gap = (mean[:, 1] - mean[:, 0]) * (2 * labels - 1)
            variance = covariance.diagonal(dim1=-2, dim2=-1).sum(-1) - covariance[:, 0, 1] - covariance[:, 1, 0]
            return divergence.binary_log_power_mean(gap, variance.clamp_min(0.0), alpha, link.nodes).to(mean.dtype)
        latent = Latent(mean, (DenseTerm(covariance.to(mean.dtype)),))
        return cast("ClassLink", link).log_probs(latent).gather(-1, labels[:, None]).squeeze(-1)
