"""What `Posterior.diagnose` returns: a posterior in numbers, and the small report they print as."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Diagnosis:
    """What a posterior is, in numbers; prints as a small report.

    Attributes:
        method: the method and its options.
        weights: P.
        samples: n.
        prior_precision: δ, or None without a prior.
        noise_variance: σ².
        log_evidence: log Z in nats.
        effective_parameters: `Σ s λ/(s λ + δ)`, how many directions the data determined.
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

    def __str__(self) -> str:
        """The report."""
        lines = [f"{self.method} over {self.weights:,} weights, {self.samples:,} samples"]
        if self.prior_precision is not None:
            lines.append(f"prior precision {self.prior_precision}")
        if self.noise_variance is not None:
            lines.append(f"noise variance {self.noise_variance:.4g}")
        if self.log_evidence is not None:
            lines.append(f"log evidence {self.log_evidence:.2f}")
            lines.append(f"effective number of parameters {self.effective_parameters:.1f}")
        return "\n".join([*lines, self.coverage])
