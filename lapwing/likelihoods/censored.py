"""Censored regression: targets of which only an interval is known, such as the time of an event that has not come."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import reduce
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..covariance import AnyLatent
from ..data.frames import as_targets
from ..errors import LapwingError
from ..linalg import doubled
from ..options import number, option, positive
from .base import Likelihood, apply_weights
from .links import ExactLink, Link
from .predictions import Prediction
from .registry import register_likelihood
from .regression import RegressionPrediction
from .student import student_normals

EXPONENTS = torch.arange(-160, 161, dtype=torch.float64) / 20
"""Decimal logarithms of the candidates of σ²."""
LARGER = [k / 20 for k in range(1, 41)]
"""The same for the noise variance of predictions, over the one of the training data."""
ENDLESS = 1e8
"""Distance in standard deviations that stands for an infinite end."""


@register_likelihood
@dataclass(frozen=True, repr=False)
class Censored(Likelihood["CensoredPrediction"]):
    """`y ~ N(f, σ²)`, of which an interval is known: `log p = log N(y; f, σ²)`, or `log (Φ(b) - Φ(a))` if censored.

    a and b are the ends of the interval minus f, divided by σ. Targets are (lower, upper), (B, 2): equal if y is known,
    and with an infinite end if y is censored on one side. The network has one output. Train it with the loss
    `-lw.Censored().log_prob(model(x), y, log_noise.exp()).mean()`, and the weights together with `log_noise`: with a
    wrong σ² the outputs are biased. For times let y be their logarithm, and read predictions of the time by
    `prediction.transformed(torch.exp)`.

    With `df=4.0` the noise is a Student t of variance σ²: then a few very wrong times move outputs and σ² little. Train
    with `lw.Censored(df=4.0)` too. Densities and predictions use the mixture of 16 normals of `lw.StudentT`, and as
    there the curvature is for normal noise.

    The curvature of a sample is its observed information at σ², between 0 and `1/σ²`: a censored sample says less. With
    no `noise_variance` the σ² of highest likelihood counts, of the data in `validation=` or else of the training data,
    in one more forward pass; it has a relative error of up to 1 %. If the network has overfitted, predictions get a
    larger σ²: the one of highest likelihood for left-out known y, if the default tuning chooses the prior precision,
    or for held-out data. There is no noise model.

    Args:
        noise_variance: σ², a **variance** in squared units of y; None: the data decide.
        df: degrees of freedom ν of a Student t, at least 3; None: normal noise.
        fitted_noise: σ² of predictions that a fit has found.

    Raises:
        LapwingError: for targets of another shape or with lower > upper, and for several outputs.

    Source: Tobin 1958, Estimation of Relationships for Limited Dependent Variables, for one fixed limit.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y, end = torch.randn(60, 2), torch.randn(60), torch.rand(60)
        >>> known = torch.stack([y.minimum(end), torch.where(y > end, torch.inf, y)], 1)  # (lower, upper)
        >>> posterior = lw.fit(torch.nn.Linear(2, 1).eval(), (x, known), likelihood="censored")
        >>> posterior.predict(x).log_prob(known).shape
        torch.Size([60])
    """

    noise_variance: float | None = option(None, positive(), write="0.1")
    _: KW_ONLY
    df: float | None = option(None, number(3), write="4.0")
    fitted_noise: float | None = option(None, positive())
    name: ClassVar[str] = "censored"
    links: ClassVar[tuple[type[Link], ...]] = (ExactLink,)
    one_output_per_target: ClassVar[bool] = False
    left_out_decides: ClassVar[Literal["noise", "spread"] | None] = "noise"

    def __repr__(self) -> str:
        noise = self.fitted_noise or self.noise_variance
        tails = "" if self.df is None else f", df={self.df:g}"
        return f"Censored(noise_variance={noise if noise is None else float(f'{noise:.4g}')}{tails})"

    def target_shape(self, outputs: int) -> tuple[int, ...]:
        return (2,)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        _ends(outputs, targets)

    def log_prob(self, outputs: Tensor, targets: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Returns the log density of known y, and the log probability of the interval of a censored one, (B,).

        It is differentiable in the outputs and in σ² (), the noise variance; None means the likelihood's own.
        """
        noise = self._set_noise("log_prob()") if noise_variance is None else noise_variance
        return self._log_prob(outputs, targets, noise).to(outputs)

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns y - f in float64, (B, 1); NaN for a censored target."""
        ends = _ends(outputs, targets)
        return torch.where(ends[:, :1] == ends[:, 1:], ends[:, :1] - doubled(outputs), torch.nan)

    def target_weights(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the observed information `-σ² ∂²log p/∂f²` (B, 1) of normal noise: 1 for known y.

        `w = r² + (b φ(b) - a φ(a))/D` with `r = (φ(b) - φ(a))/D` and `D = Φ(b) - Φ(a)`.
        """
        a, b, known = _standardised(doubled(outputs), _ends(outputs, targets), self._set_noise("target_weights()"))
        log_mass = _log_mass(a, b)
        at_a, at_b = ((-0.5 * end.square() - 0.5 * math.log(2 * math.pi) - log_mass).exp() for end in (a, b))
        weights = (at_b - at_a).square() + b * at_b - a * at_a
        return torch.where(known, 1.0, weights.clamp(0, 1)).to(outputs)

    def statistics(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
        """Returns `{"log_likelihood": Σ w log p}`, or with an open σ² the sums for all candidates (K,)."""
        open_noise = self.noise_variance is None
        noise = 10 ** EXPONENTS.to(outputs.device)[:, None, None] if open_noise else self.noise_variance
        logs = self._log_prob(outputs, targets, noise)  # (B,) or (K, B)
        logs = logs.mT if open_noise else logs
        sums = apply_weights(logs, weights).sum(0)
        return {"log_likelihoods" if open_noise else "log_likelihood": sums}

    def log_likelihood(self, statistics: dict[str, Tensor], noise_variance: Tensor | None = None) -> Tensor:
        self.with_noise_variance(None if noise_variance is None else float(noise_variance))  # raises for another σ²
        return statistics["log_likelihood"]

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Returns ones (B, 1, 1): `target_weights` has the rest."""
        return torch.ones_like(outputs)[..., None]

    def residual_variance(self, statistics: dict[str, Tensor]) -> float | None:
        """Returns the candidate of highest likelihood, moved to the top of a parabola through its neighbours.

        Raises if it is the smallest or the largest candidate: then the targets do not determine σ².
        """
        if "log_likelihoods" not in statistics:
            return self.noise_variance
        sums = statistics["log_likelihoods"].cpu()
        at = int(sums.argmax())
        if at in (0, len(sums) - 1):
            raise LapwingError(
                "These censored targets do not determine the noise variance: the likelihood is highest at "
                f"{10 ** float(EXPONENTS[at]):.0e}, the end of the candidates. If all targets are censored, write "
                "likelihood=lw.Censored(noise_variance=0.1); else scale y to a standard deviation near 1."
            )
        before, top, after = sums[at - 1 : at + 2].tolist()
        bend = 2 * top - before - after
        step = 0.5 * (after - before) / bend if bend > 0 else 0.0
        return float(10 ** (EXPONENTS[at] + step * (EXPONENTS[1] - EXPONENTS[0])))

    def with_noise_variance(self, noise_variance: float | None) -> Censored:
        """Returns the likelihood with an open σ² closed, or for None a closed one opened; raises for another σ²."""
        if noise_variance is None or self.noise_variance in (None, noise_variance):
            fitted = None if noise_variance is None else self.fitted_noise
            return replace(self, noise_variance=noise_variance, fitted_noise=fitted)
        raise LapwingError(
            f"The curvature of censored targets depends on the noise variance, {self.noise_variance:.4g}. For another "
            f"one fit again with likelihood=lw.{replace(self, noise_variance=noise_variance, fitted_noise=None)}."
        )

    def open_heads(self, outputs: int) -> tuple[None, ...]:
        return (None,) if self.needs_noise else ()

    def heads(self, outputs: Tensor, targets: Tensor) -> Iterator[tuple[None, Censored, Tensor, Tensor]]:
        yield None, self, outputs, targets

    def with_residuals(self, statistics: Mapping[None, dict[str, Tensor]]) -> Censored:
        noise = self.residual_variance(statistics[None])
        return replace(self.with_noise_variance(noise), fitted_noise=noise)

    def noise_candidates(self) -> list[Censored]:
        """Returns larger noise variances of predictions, if data chose the present one."""
        if self.fitted_noise is None:
            return []
        return [replace(self, fitted_noise=self.fitted_noise * 10**exponent) for exponent in LARGER]

    def predict(
        self, latent: AnyLatent, link: Link | None = None, generator: torch.Generator | None = None
    ) -> CensoredPrediction:
        """Returns the distribution of y, censored or not: the latent plus noise."""
        self.choose_link(latent, link)
        return CensoredPrediction(latent, self.fitted_noise or self._set_noise("predict()"), df=self.df)

    def _log_prob(self, outputs: Tensor, targets: Tensor, noise: Any) -> Tensor:
        """Returns log probabilities in float64, (B,) or (K, B), as sums over the normals of the noise."""
        outputs, ends = doubled(outputs), _ends(outputs, targets)
        normals = zip(*(values.tolist() for values in student_normals(self.df)), strict=True)
        return reduce(torch.logaddexp, (_log_prob(outputs, ends, v * noise) + math.log(w) for w, v in normals))

    def _set_noise(self, call: str) -> float:
        if self.noise_variance is None:
            raise LapwingError(f"{call} of Censored needs a noise variance. Write lw.Censored(noise_variance=0.1).")
        return self.noise_variance


class CensoredPrediction(RegressionPrediction):
    """The distribution of y. `log_prob` also reads intervals (lower, upper); `pit` and `crps` need known y."""

    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns the log density of y (B, 1), or the log probability of intervals (B, 2), (B,), in nats."""
        targets = as_targets(targets, self.mean.device)
        if not isinstance(targets, Tensor) or targets.shape != (len(self.mean), 2):
            return super().log_prob(targets)
        means, variances, weights = self._normals  # (S, B, 1)
        return (weights[..., 0].log() + _log_prob(means, _ends(means, targets), variances)).logsumexp(0).to(self.mean)

    def for_metrics(self, targets: Tensor) -> dict[str, Tensor]:
        """Returns the log densities alone: an error of a censored target is unknown."""
        return Prediction.for_metrics(self, targets)


def _ends(outputs: Tensor, targets: Any) -> Tensor:
    """Returns the targets (B, 2) in float64; raises for other shapes, NaN, and lower ends above the upper ones."""
    rows = outputs.shape[-2]
    if outputs.shape[-1] != 1 or not isinstance(targets, Tensor) or targets.shape != (rows, 2):
        what = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
        raise LapwingError(
            f"Censored needs one output and targets (lower, upper) of shape ({rows}, 2). The outputs have shape "
            f"{tuple(outputs.shape)}, and the targets {what}. Write torch.stack([lower, upper], 1), with equal numbers "
            "for a known y and torch.inf for an upper end that is unknown."
        )
    ends = doubled(targets).to(outputs.device)
    wrong = ~(ends[:, 0] <= ends[:, 1]) | (ends[:, 0] == torch.inf) | (ends[:, 1] == -torch.inf)
    if bool(wrong.any()):
        first, line = int(wrong.nonzero()[0]), "Pass lower <= upper, and torch.inf for an upper end that is unknown."
        if bool(((ends == 0) | (ends == 1)).all(0).any()):  # a column of events
            line = "For (time, event) write torch.stack([time, torch.where(event == 1, time, torch.inf)], 1)."
        raise LapwingError(
            f"Censored: {int(wrong.sum())} of {rows} targets are no interval, the first at index {first}: "
            f"{ends[first].tolist()}. {line}"
        )
    return ends


def _standardised(outputs: Tensor, ends: Tensor, noise: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a and b of intervals (B, 2) at outputs (..., B, 1), and whether y is known, each (..., B, 1)."""
    scale = torch.as_tensor(noise, dtype=outputs.dtype, device=outputs.device).sqrt()
    known = ends[:, :1] == ends[:, 1:]
    a, b = (
        torch.where(end.isinf(), ENDLESS * end.sign(), (end.nan_to_num(posinf=0.0, neginf=0.0) - outputs) / scale)
        for end in ends.split(1, 1)  # inf / σ has no derivative by σ
    )
    return a, torch.where(known, a + 1, b), known  # a known y has no mass: any interval avoids NaN


def _log_mass(a: Tensor, b: Tensor) -> Tensor:
    """Returns `log (Φ(b) - Φ(a))` for a < b, by the tail that does not cancel."""
    right = a > 0
    a, b = torch.where(right, -b, a), torch.where(right, -a, b)
    whole = torch.special.log_ndtr(b)
    return whole + torch.log1p(-(torch.special.log_ndtr(a) - whole).exp())


def _log_prob(outputs: Tensor, ends: Tensor, noise: Any) -> Tensor:
    """Returns the normal log density or log probability of intervals (B, 2) at outputs (..., B, 1), (..., B)."""
    a, b, known = _standardised(outputs, ends, noise)
    density = -0.5 * (a.square() + torch.as_tensor(2 * math.pi * noise, dtype=a.dtype, device=a.device).log())
    return torch.where(known, density, _log_mass(a, b)).squeeze(-1)
