"""Gaussian likelihood for regression: one noise variance for all outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor

from ..covariance import AnyLatent
from ..errors import LapwingError, shown
from . import divergence
from .base import Likelihood
from .links import ExactLink, Link, at_least_float32
from .registry import register
from .regression_prediction import RegressionPrediction
from .targets import aligned_targets, check_real_targets


@register
@dataclass(frozen=True)
class Gaussian(Likelihood):
    """`y ~ N(f, σ² I)` with one σ² for all C outputs; Λ = I / σ², at unit noise I.

    Targets are (B, C), or (B,) when C = 1.

    Args:
        noise_variance: σ², a **variance** in squared units of y. A number is kept; None is tuned by `fit`.

    Raises:
        LapwingError: if `noise_variance` is not positive and finite.

    Example:
        >>> import torch
        >>> Gaussian(noise_variance=0.25).log_prob(torch.zeros(3, 1), torch.zeros(3)).shape
        torch.Size([3])
    """

    noise_variance: float | None = None
    name: ClassVar[str] = "gaussian"
    links: ClassVar[tuple[type[Link], ...]] = (ExactLink,)
    default_link: ClassVar[Link] = ExactLink()

    def __post_init__(self) -> None:
        """Checks the noise variance."""
        value = self.noise_variance
        number = isinstance(value, Real) and not isinstance(value, bool)
        if value is not None and not (number and 0.0 < value < math.inf):
            raise LapwingError(
                f"The noise variance of Gaussian is {shown(value)}. Pass a positive finite number: "
                "Gaussian(noise_variance=0.1), or Gaussian() to have it tuned."
            )
        if value is not None:
            object.__setattr__(self, "noise_variance", float(value))  # numpy's numbers are no JSON

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Checks real targets (B, C) or, when C = 1, (B,).

        Raises:
            LapwingError: for NaN or infinite targets, or a wrong shape, dtype or device.
        """
        check_real_targets("Gaussian", outputs.shape, outputs.device, targets)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns `-1/2 [‖y - f‖²/σ² + C log(2πσ²)]`, (B,).

        Raises:
            LapwingError: if σ² is not set, or shapes do not fit.
        """
        variance = self._set_noise("log_prob()")
        outputs = at_least_float32(outputs)
        squares = (aligned_targets("Gaussian", outputs, targets) - outputs).square().sum(-1)
        return -0.5 * (squares / variance + outputs.shape[-1] * math.log(2.0 * math.pi * variance))

    def statistics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Returns float64 sums: the number of values, `Σ (y - f)²` and `Σ y²`."""
        outputs = outputs.double()
        values = aligned_targets("Gaussian", outputs, targets)
        return {
            "count": torch.tensor(values.numel(), dtype=torch.float64, device=outputs.device),
            "squared_error": (values - outputs).square().sum(),
            "squared_target": values.square().sum(),
        }

    def log_likelihood(self, statistics: dict[str, Tensor], noise_variance: Tensor | None = None) -> Tensor:
        """Returns `-1/2 [Σ (y - f)²/σ² + count log(2πσ²)]`, a float64 scalar.

        Raises:
            LapwingError: if σ² is not set.
        """
        variance = self._set_noise("log_likelihood()") if noise_variance is None else noise_variance
        variance = torch.as_tensor(variance, dtype=torch.float64)
        constant = statistics["count"] * (2.0 * math.pi * variance).log()
        return -0.5 * (statistics["squared_error"] / variance + constant)

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Returns the identity at every input, (B, C, C), without copies."""
        batch, size = outputs.shape
        return torch.eye(size, dtype=outputs.dtype, device=outputs.device).expand(batch, size, size)

    def sampled_fisher_root(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Returns a standard normal column, (B, C, 1): the score of a drawn y at unit noise."""
        noise = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype, device=outputs.device)
        return noise.unsqueeze(-1)

    @property
    def curvature_scale(self) -> float:
        """1/σ².

        Raises:
            LapwingError: if σ² is not set.
        """
        return 1.0 / self._set_noise("curvature_scale")

    @property
    def needs_noise(self) -> bool:
        """Whether σ² is None."""
        return self.noise_variance is None

    def residual_variance(self, statistics: dict[str, Tensor]) -> float:
        """Returns the mean squared residual, and no less than rounding leaves of targets of this size."""
        rounding = 1e-12 * float(statistics["squared_target"] / statistics["count"]) or 1e-12
        return max(float(statistics["squared_error"] / statistics["count"]), rounding)

    def with_noise_variance(self, noise_variance: float | None) -> Gaussian:
        """Returns the likelihood, of the same class, with another σ²; None is "to be tuned"."""
        return replace(self, noise_variance=noise_variance)

    def predict(
        self, latent: AnyLatent, link: Link | None = None, generator: torch.Generator | None = None
    ) -> RegressionPrediction:
        """Returns the exact predictive: latent plus noise; `generator` is not used.

        Raises:
            LapwingError: if σ² is not set, or for any link but ExactLink.
        """
        self.choose_link(latent, link)
        return RegressionPrediction(latent, self._set_noise("predict()"))

    def integrals(self, outputs: int, alpha: float) -> tuple[type[Link], ...]:
        """Returns `ExactLink`: `log_power_mean` is in closed form, differentiable in σ² too."""
        return self.links

    def _power_mean(
        self, mean: Tensor, covariance: Tensor, targets: Tensor, alpha: float, noise_variance: Tensor | None, link: Link
    ) -> Tensor:
        """Returns `log_power_mean` in closed form: `divergence.gaussian_log_power_mean` has the formula."""
        noise = self._set_noise("log_power_mean()") if noise_variance is None else noise_variance
        mean, wide = at_least_float32(mean), mean.double()
        targets = aligned_targets("Gaussian", wide, targets)
        return divergence.gaussian_log_power_mean(wide, covariance.double(), targets, alpha, noise).to(mean.dtype)

    def _set_noise(self, asked: str) -> float:
        """Returns σ², refusing one that is still to be tuned."""
        if self.noise_variance is None:
            raise LapwingError(
                f"Gaussian {asked} needs a noise variance, and noise_variance=None is still to be tuned. Write "
                "Gaussian(noise_variance=0.1), or let fit() tune it."
            )
        return self.noise_variance
