"""The Laplace evidence of a fit, its correction for the mode of the linearised model, and the report `Diagnosis`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..covariance import PriorCovariance
from ..data import batches
from ..data.data import Data
from ..display import Displayed
from ..errors import LapwingError
from ..likelihoods import Likelihood
from ..linalg import SLICE_NUMBERS, doubled, total
from ..methods.prior import Prior
from ..tangent import Tangent

if TYPE_CHECKING:
    from .posterior import Posterior


@dataclass(frozen=True)
class LogEvidence:
    """`log Z` of one fit as a function of the prior precision and the noise variance.

    `log Z = k log p(y|θ̂) - 1/2 (θ̂-μ0)ᵀΔ(θ̂-μ0) - 1/2 logdet(I + s Δ^(-1/2) G Δ^(-1/2))`, s = k/σ².
    """

    covariance: PriorCovariance  # Σ; only its curvature G is used
    likelihood: Likelihood
    statistics: dict[str, Tensor]  # sums over the data, from which log p(y|θ̂) follows at any noise variance
    weight: float  # k, the factor of the likelihood
    distance: Tensor  # `|θ̂ - μ0|²` of each block (n_blocks,)

    def __call__(
        self,
        precision: Tensor,
        noise_variance: Tensor | float | None,
        factor: Tensor | float = 1.0,
        lower_bound: bool = True,
    ) -> Tensor:
        """Returns `log Z` at δ (n_blocks,) and σ², a float64 scalar that is differentiable in every argument.

        `factor` multiplies all δ: its gradient needs only eigenvalues, and the gradient in `precision` may need a
        Cholesky factor. The `lower_bound` subtracts half the trace of the curvature outside a subspace.
        """
        noise = None if noise_variance is None else torch.as_tensor(noise_variance, dtype=torch.float64)
        fit = self.weight * self.likelihood.log_likelihood(self.statistics, noise)
        scale = (self.weight if noise is None else self.weight / noise) / factor
        value = fit - factor * (precision * self.distance).sum() / 2
        value = value - self.covariance.log_det_ratio(precision, scale).to(value) / 2
        return value - self.covariance.evidence_gap(precision, scale) / 2 if lower_bound else value


def squared_distance(tangent: Tangent, prior: Prior) -> Tensor:
    """Returns `|θ̂ - μ0|²`, the squared distance of each block's weights from the prior mean, (n_blocks,)."""
    distances = []
    for block in tangent.blocks:
        parts = (vector.split(SLICE_NUMBERS) for vector in (tangent.mean_of(block), prior.mean[block.name]))
        distances.append(total(doubled(x - y).square().sum() for x, y in zip(*parts, strict=True)))
    return torch.stack(distances)


def effective_parameters(covariance: PriorCovariance, prior: Prior) -> float:
    """Returns `Σ s λ/(s λ + δ)`, MacKay's γ: the derivative of the log determinant with respect to log s."""
    return float(covariance.effective_dimension(prior.precision, covariance.scale).sum())


def gain_at_linearised_mode(posterior: Posterior, loader: Iterable[Any], sample_weights: bool) -> Tensor:
    """Returns `1/2 gᵀΣg`, the evidence at the mode of the linearised model minus the evidence at θ̂."""
    # 1. the gradient g of `k log p(y|θ) + log p(θ)` at θ̂, (P_block,) by block, by one pass over the data
    tangent, dtype = posterior.tangent, posterior.covariance.dtype
    data = Data.of(loader, posterior, sample_weights)
    batches.check_loader(data.loader, "The evidence at the linearised mode")
    mean, count = tangent.mean(), 0
    gradient = {
        block.name: -delta * (mean[block.name] - posterior.prior.mean[block.name]).to(dtype)
        for block, delta in zip(tangent.blocks, posterior.prior.precision.tolist(), strict=True)
    }
    length = tangent.chunk_length(1, dtype)
    for samples in data:
        samples = samples.to(tangent.device)
        for rows, chunk in samples.inputs.chunks(length):
            labels = tangent.places_of(chunk).targets(samples.targets[rows], tangent.outputs)

            def score(outputs: Tensor, labels: Tensor = labels) -> Tensor:
                scores = posterior.likelihood.score(outputs.reshape(-1, tangent.outputs), labels)
                return scores.reshape_as(outputs).unsqueeze(-1)  # (B, C, 1), or (B, T C, 1)

            record = tangent.record(chunk, score, dtype)
            if samples.weights is not None:
                record = record.times(samples.weights[rows, None])
            count += record.samples
            for name in gradient:
                gradient[name] = gradient[name] + posterior.scale.of_likelihood * record[name].sum_rows()[0]
    if count != posterior.samples:
        raise LapwingError(
            f"The loader yields {count} samples, and the fit had {posterior.samples}. Pass the training data of the "
            "fit, in a loader that can be read more than once."
        )
    # 2. 1/2 gᵀΣg
    product = posterior.covariance.mv(gradient)
    return doubled(total((gradient[name] * product[name]).sum() for name in gradient)) / 2


@dataclass(frozen=True, repr=False)
class Diagnosis(Displayed):
    """Summary of a posterior in numbers; prints as a short report.

    Attributes:
        method: the method and its options.
        weights: P.
        samples: n.
        prior_precision: δ, or None if the covariance has no prior.
        noise_variance: σ², or None if the likelihood has none.
        log_evidence: log Z in nats, or None if it is not defined.
        effective_parameters: `Σ s λ/(s λ + δ)`, the number of directions that the data determine; None without a prior.
        coverage: the table of layer families.
    """

    method: str
    weights: int
    samples: int
    prior_precision: float | dict[str, float] | None
    noise_variance: float | None
    log_evidence: float | None
    effective_parameters: float | None
    coverage: str

    def __repr__(self) -> str:
        lines = [f"{self.method} over {self.weights:,} weights, {self.samples:,} samples"]
        delta = self.prior_precision
        if isinstance(delta, dict):
            lines.append("prior precision " + ", ".join(f"{name}: {value:.4g}" for name, value in delta.items()))
        elif delta is not None:
            lines.append(f"prior precision {delta:.4g}")
        if self.noise_variance is not None:
            lines.append(f"noise variance {self.noise_variance:.4g}")
        if self.log_evidence is not None:
            lines.append(f"log evidence {self.log_evidence:.2f}")
            lines.append(f"effective number of parameters {self.effective_parameters:.1f}")
        return "\n".join([*lines, self.coverage])
