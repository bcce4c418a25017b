"""A posterior in words: the report that `Posterior.diagnose` returns, and the line that a posterior prints as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .posterior import Posterior


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


def summary(posterior: Posterior) -> str:
    """Returns what a posterior is in one line."""
    precision, parameters = posterior.prior_precision, list(posterior.tangent.parameters)
    names = ", ".join(parameters[:4]) + (f", ... {len(parameters)} parameters" if len(parameters) > 4 else "")
    facts = [repr(posterior.likelihood)]
    if isinstance(precision, float):
        facts.append(f"prior_precision={precision:.4g}")
    elif precision is not None:
        facts.append(f"prior_precision=one for each of {len(precision)} blocks")
    for name in ("data_factor", "temperature"):
        if getattr(posterior, name) != 1:
            facts.append(f"{name}={getattr(posterior, name):g}")
    return (
        f"<Posterior by {posterior.method} over {posterior.tangent.size:,} weights of "
        f"{type(posterior.model).__name__} ({names}), {posterior.samples:,} samples, {', '.join(facts)}>"
    )
