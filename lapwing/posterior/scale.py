"""The factors of the sums over the samples of a fit: the one place that computes `N/(n σ² τ)`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Scale:
    """Factors of the likelihood and of the curvature, which are sums over samples at unit noise.

    The covariance is `(s G + Δ)⁻¹` with `s = of_curvature`, and the log joint is `k log p(y|θ) + log p(θ)` with
    `k = of_likelihood`.
    """

    samples: float  # n, number of samples in the sums; 1 for a mean over samples
    data_size: float  # N, number of samples of the whole data set; for `SubsetOfData` n N/n_loader
    temperature: float  # τ
    noise_variance: Any = None  # σ², a number or a scalar tensor; None counts as 1: there is no σ², or it is not known

    @property
    def of_likelihood(self) -> float:
        """`k = N/(n τ)`, the factor of the log likelihood: the weight of each of the n samples."""
        return self.data_size / self.samples / self.temperature

    @property
    def of_curvature(self) -> Any:
        """`s = N/(n σ² τ)`, the factor of the curvature at unit noise; a tensor if σ² is one."""
        return self.of_likelihood if self.noise_variance is None else self.of_likelihood / self.noise_variance

    @property
    def effective_samples(self) -> float:
        """`N/τ`, the sum of the weights of all samples in the log likelihood."""
        return self.data_size / self.temperature

    def at(self, noise_variance: Any) -> Scale:
        """Returns the scale at another noise variance."""
        return replace(self, noise_variance=noise_variance)
