"""Regression: the Gaussian likelihood, and the noise of its predictions, which may depend on the input."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..covariance import AnyLatent, is_selected
from ..covariance.latent_at_positions import LatentAtPositions
from ..errors import LapwingError, shown
from ..linalg import at_least_float32, cholesky, double_device, doubled
from ..options import POSITIVE_NUMBERS, POSITIVE_OF_EACH, instance_of, option
from .base import Integrals, Likelihood, apply_weights
from .input_noise import InputNoise
from .links import ExactLink, Link
from .mixtures import known_residuals
from .registry import register_likelihood
from .regression import RegressionPrediction
from .targets import aligned_targets, check_real_targets, known_targets

ROUNDING = 1e-12
"""Minimum of the mean squared residual, as a fraction of the mean squared target."""
ALIKE, ALIKE_ERRORS = 4.0, 4.0
"""Ratio of the residual variances of two outputs, and its standard errors, up to which all outputs have one noise."""
MEMORISED = 1e-4
"""Minimum of a residual variance, as a fraction of the targets' variance: smaller ones show the end of the training."""
MOST_RATIOS = 200
"""Maximum number of outputs whose noise ratios are estimated."""


@register_likelihood
@dataclass(frozen=True, repr=False)
class Gaussian(Likelihood[RegressionPrediction]):
    """`y ~ N(f, σ² I)` with one σ² for all C outputs; Λ = I / σ², which is I at unit noise.

    Targets are (B, C), or (B,) if C = 1. With ratios r the noise variance of output c is `r_c σ²`, and `Λ = diag(1/r)`
    at unit noise. Several numbers for `noise_variance` are stored as their mean σ² and r.

    Args:
        noise_variance: σ², a **variance** in squared units of y: one number, or C numbers, one for each output. `fit`
            never changes given numbers, and tunes σ² if it is None.
        noise_ratios: r, one positive number for each output, for outputs in different units or of known relative
            accuracy. σ² may still be tuned. If both are None, a fit estimates r before the curvature, if the outputs'
            mean squared residuals surely differ by more than a factor of 4. It takes the residuals of the data in
            `validation=`, or else of the training data, in one more forward pass. Otherwise r is 1, and `validation=`
            may choose ratios after the fit, for outputs (B, T, C) as many as T C.
        missing: whether a NaN target is missing; it has no effect on fit, tuning and `log_prob`.
        noise: "constant" for a noise that is equal at all inputs; "input" for `log σ²(x) = b + wᵀφ(x)`, where φ are
            the inputs of the last treated layer, and a tuning fits b and w to residuals; None: the data decide.
        tails: "normal"; None: the data decide between normal noise and a Student t, as for `likelihood="gaussian"`.
            Noise and tails enter only predictions of y: Λ and the evidence keep σ².

    Raises:
        LapwingError: if `noise_variance` is not positive and finite. `lw.fit` refuses it with `noise="input"`.

    Example:
        >>> import torch
        >>> Gaussian(noise_variance=0.25).log_prob(torch.zeros(3, 1), torch.zeros(3)).shape
        torch.Size([3])
    """

    noise_variance: float | None = option(None, POSITIVE_OF_EACH, write="0.1")
    _: KW_ONLY
    missing: bool = False
    noise_ratios: Any = option(None, POSITIVE_NUMBERS, write="[1.0, 5.0]")
    noise: Literal["constant", "input"] | None = None
    tails: Literal["normal"] | None = "normal"
    input_noise: InputNoise | None = option(None, instance_of("the noise of a fitted likelihood", InputNoise))
    name: ClassVar[str] = "gaussian"
    links: ClassVar[tuple[type[Link], ...]] = (ExactLink,)
    selects_outputs: ClassVar[bool] = True
    has_closed_width: ClassVar[bool] = True
    by_name: ClassVar[dict[str, Any]] = {"tails": None}

    def __post_init__(self) -> None:
        super().__post_init__()
        several: Any = self.noise_variance
        if not isinstance(several, tuple):
            return
        if self.noise_ratios is not None:
            raise LapwingError(
                f"Gaussian has {len(several)} noise variances and noise_ratios, and the former imply the latter. Leave "
                "noise_ratios out: Gaussian(noise_variance=[0.1, 0.5]), one for each output."
            )
        mean = sum(several) / len(several)
        object.__setattr__(self, "noise_variance", mean)
        object.__setattr__(self, "noise_ratios", tuple(one / mean for one in several))

    def __repr__(self) -> str:
        text = ", missing=True" if self.missing else ""
        if self.noise_ratios is not None:
            text += f", noise_ratios={shown(tuple(float(f'{ratio:.4g}') for ratio in self.noise_ratios))}"
        text += "" if self.noise is None else f", noise={self.noise!r}"
        noise = self.noise_variance if self.noise_variance is None else float(f"{self.noise_variance:.4g}")
        text = f"{type(self).__name__}(noise_variance={noise}{text})"
        return text if self.input_noise is None else f"{text} with {self.input_noise}"

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        check_real_targets("Gaussian", outputs.shape, outputs.device, targets, self.missing)
        self.ratios(outputs)

    def ratios(self, like: Tensor) -> Tensor:
        """Returns r (C,), in the dtype of outputs (..., C) and on their device; raises if C does not fit."""
        if self.noise_ratios is None:
            return super().ratios(like)
        if len(self.noise_ratios) != like.shape[-1]:
            raise LapwingError(
                f"Gaussian has noise variances of {len(self.noise_ratios)} outputs, and the outputs have shape "
                f"{tuple(like.shape)}. Pass one for each of {like.shape[-1]} outputs, or known variances of rows by "
                "lw.fit(model, [(x, y, 1 / variance)], sample_weights=True, likelihood=lw.Gaussian(1.0)). (Those that "
                "validation= chose for each position serve predictions and lw.scale_factor(..., by='validation').)"
            )
        return like.new_tensor(self.noise_ratios)

    def target_weights(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Returns 0 for missing y and 1 for known y, (B, C); None for ones."""
        return known_targets("Gaussian", outputs, targets) if self.missing else None

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns `-1/2 Σ_c [(y - f)²/(r σ²) + log(2π r σ²)]`, (B,)."""
        variance = self._set_noise("log_prob()")
        outputs = at_least_float32(outputs)
        noise = variance * self.ratios(outputs)
        residual, volume = known_residuals(outputs, aligned_targets("Gaussian", outputs, targets), noise)
        return -0.5 * ((residual.square() / noise).sum(-1) + volume)

    def statistics(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
        """Returns weighted float64 sums: number of known y, `Σ (y - f)²/r`, `Σ y²/r`, and with ratios `Σ log r`.

        "targets" (2, C) has the number of known y and `Σ y/√r` of each output.
        """
        outputs = doubled(outputs)
        values = aligned_targets("Gaussian", outputs, targets)
        known = ~values.isnan()
        values = torch.where(known, values, outputs)
        ratios, counts = self.ratios(outputs), known.double()
        sums = {
            "count": counts,
            "squared_error": (values - outputs).square() / ratios,
            "squared_target": counts * values.square() / ratios,
        }
        if self.noise_ratios is not None:
            sums["log_ratio"] = counts * ratios.log()
        of_targets = torch.stack([counts, counts * values / ratios.sqrt()], 1)  # (B, 2, C)
        return {
            **{name: apply_weights(v, weights).sum() for name, v in sums.items()},
            "targets": apply_weights(of_targets, weights).sum(0),
        }

    def log_likelihood(self, statistics: dict[str, Tensor], noise_variance: Tensor | None = None) -> Tensor:
        """Returns `-1/2 [Σ (y - f)²/σ² + count log(2πσ²)]`, a float64 scalar."""
        variance = self._set_noise("log_likelihood()") if noise_variance is None else noise_variance
        variance = torch.as_tensor(variance, dtype=torch.float64)
        constant = statistics["count"] * (2.0 * math.pi * variance).log() + statistics.get("log_ratio", 0.0)
        return -0.5 * (statistics["squared_error"] / variance + constant)

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Returns `diag(1/√r)` for every input, (B, C, C), as an expanded view."""
        root = self.ratios(outputs).rsqrt().diag()
        return root.expand(len(outputs), *root.shape)

    def fisher_parts(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.ratios(outputs).reciprocal().expand_as(outputs), None

    def of_statistics(self, statistics: dict[str, Tensor]) -> Gaussian:
        return self if "log_ratio" in statistics else replace(self, noise_ratios=None)

    def open_heads(self, outputs: int) -> range:
        known = not self.needs_noise or self.noise_ratios is not None
        return range(0 if known or not 1 < outputs <= MOST_RATIOS else outputs)

    def heads(self, outputs: Tensor, targets: Tensor) -> Iterator[tuple[int, Gaussian, Tensor, Tensor]]:
        """Yields the index, the likelihood, the outputs (B, 1) and the targets (B, 1) of each output."""
        targets = aligned_targets("Gaussian", outputs, targets)
        for c in range(outputs.shape[-1]):
            yield c, self, outputs[:, c : c + 1], targets[:, c : c + 1]

    def with_residuals(self, statistics: Mapping[int, dict[str, Tensor]]) -> Gaussian:
        """Returns the likelihood with ratios of mean squared residuals, if these surely differ by more than `ALIKE`.

        An output whose targets are unknown or constant gets the largest ratio. The mean of the ratios is 1.
        """
        sums = {name: torch.stack([one[name] for one in statistics.values()]) for name in statistics[0]}  # (C, ...)
        counts, squares = sums["count"], sums["squared_target"] / sums["count"]
        variances = squares - (sums["targets"][:, 1, 0] / counts).square()
        known = variances > ROUNDING * squares  # False for NaN
        residuals = (sums["squared_error"] / counts).maximum(MEMORISED * variances)
        some = residuals[known]
        if len(some) < 2:
            return self
        ends = torch.stack([some.argmin(), some.argmax()])
        least = max(math.log(ALIKE), ALIKE_ERRORS * float((2 / counts[known][ends]).sum().sqrt()))
        if not float(some[ends].log().diff()) > least:
            return self
        residuals = torch.where(known, residuals, some.max())
        return replace(self, noise_ratios=tuple((residuals / residuals.mean()).tolist()))

    def residual_variance(self, statistics: dict[str, Tensor]) -> float:
        """Returns the mean squared residual, but at least `ROUNDING` times the mean squared target."""
        if not float(statistics["count"].sum()):
            raise LapwingError("None of the targets is known: all of them are NaN. Pass some that are not.")
        rounding = ROUNDING * float(statistics["squared_target"] / statistics["count"]) or ROUNDING
        return max(float(statistics["squared_error"] / statistics["count"]), rounding)

    def with_noise_variance(self, noise_variance: float | None) -> Gaussian:
        """Returns the likelihood at another σ², without the noise that a tuning has fitted for the present σ²."""
        same = noise_variance == self.noise_variance
        return self if same else replace(self, noise_variance=noise_variance, input_noise=None)

    @property
    def tails_to_fit(self) -> tuple[float | None, bool]:
        """ν of noise that a tuning fits (inf: normal; None: any), and whether one normal noise may stay."""
        return math.inf if self.tails == "normal" else None, True

    @property
    def regressions(self) -> dict[Any, Any]:  # type: ignore[override]
        return {None: self}

    @property
    def features_read(self) -> str | None:  # type: ignore[override]
        return None if self.input_noise is None else self.input_noise.layer

    def with_regressions(self, parts: Mapping[Any, Any]) -> Gaussian:
        return parts[None]

    def residuals(self, outputs: Tensor, targets: Any) -> Tensor:
        """Returns y - f in float64, (B, C); NaN for a missing target."""
        outputs = doubled(outputs)
        return aligned_targets("Gaussian", outputs, targets) - outputs

    def at_features(self, prediction: Any, features: Tensor | None) -> Any:
        """Returns the prediction with the variance σ²(x) and the tails that a tuning has fitted."""
        noise = self.input_noise
        if noise is None or features is None:
            return prediction
        latent, variance = prediction.latent, prediction.latent.variance
        if is_selected(latent):  # other outputs are not read
            variance = variance.new_zeros(len(variance), len(noise.offset)).scatter(1, latent.outputs, variance)
        noise = noise.to(double_device(features.device))  # from a file or another process it is on the CPU
        ratios = noise.variance(features, variance) / prediction.noise_variance  # (N, C)
        return replace(
            prediction, noise_ratios=ratios.to(prediction.mean), df=None if math.isinf(noise.df) else noise.df
        )

    def predict(
        self, latent: AnyLatent, link: Link | None = None, generator: torch.Generator | None = None
    ) -> RegressionPrediction:
        """Returns the exact predictive distribution, latent plus noise; `generator` is not used."""
        self.choose_link(latent, link)
        if self.noise_ratios is not None and not is_selected(latent):
            self.ratios(latent.mean)
        return RegressionPrediction(latent, self._set_noise("predict()"), self.missing, self.noise_ratios)

    def predict_positions(
        self, latent: LatentAtPositions, link: Link | None = None, generator: torch.Generator | None = None
    ) -> RegressionPrediction:
        """Returns the prediction (B T, C); r has C entries, or T C that `validation=` chose."""
        rows, ratios, positions = latent.rows, self.noise_ratios, latent.places.count
        outputs = rows.mean.shape[-1]
        if ratios is None or len(ratios) == outputs:
            return self.predict(rows, link, generator)
        if len(ratios) != positions * outputs:
            raise LapwingError(
                f"Held-out data chose the noise of {len(ratios)} outputs of a sample, and these inputs have "
                f"{positions} positions of {outputs} outputs. Pass inputs with as many positions, or fit with "
                f"likelihood=lw.Gaussian(noise_ratios={[1.0] * outputs}), which keeps one noise for all positions."
            )
        each = torch.tensor(ratios, dtype=torch.float64, device=rows.mean.device).reshape(positions, outputs)
        alike = replace(self, noise_ratios=None).predict(rows, link, generator)
        return replace(alike, noise_ratios=each.repeat(latent.places.samples, 1))

    def integrals(self, outputs: int, alpha: float) -> Integrals:
        """Returns `ExactLink`: `log_power_mean` has a closed form, which is differentiable in σ² too."""
        return {ExactLink: self._exact_power_mean}

    def _exact_power_mean(
        self, _: Link, mean: Tensor, covariance: Tensor, targets: Tensor, alpha: float, **options: Any
    ) -> Tensor:
        """Returns `1/α log E[N(y; f, σ²I)^α]` for f ~ N(m, K). Time O(B C³).

        `-C/2 log 2πσ² - 1/(2α) logdet(I + αK/σ²) - 1/2 rᵀ(σ²I + αK)⁻¹r` with r = y - m, and at α = 0
        `-C/2 log 2πσ² - tr(K)/(2σ²) - rᵀr/(2σ²)`.
        """
        variance = options["noise_variance"]
        variance = self._set_noise("log_power_mean()") if variance is None else variance
        wide, dtype = mean.double(), at_least_float32(mean).dtype
        noise = torch.as_tensor(variance, dtype=wide.dtype, device=wide.device) * self.ratios(wide)
        aligned = aligned_targets("Gaussian", wide, targets)
        residual, volume = known_residuals(wide, aligned, noise)
        roots = noise.sqrt()
        residual, constant = residual / roots, -0.5 * volume
        inverse = ~aligned.isnan() / roots  # 0 for a missing y
        covariance = covariance.double() * inverse[:, :, None] * inverse[:, None, :]  # of y/√noise
        if alpha == 0:
            spread = covariance.diagonal(dim1=-2, dim2=-1).sum(-1) + residual.square().sum(-1)
            return (constant - 0.5 * spread).to(dtype)
        covariance = 0.5 * (covariance + covariance.mT)
        values = torch.linalg.eigvalsh(covariance)  # negative values are rounding; log1p is exact for tiny α
        eye = torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
        factor = cholesky(eye + alpha * covariance)
        white = torch.linalg.solve_triangular(factor, residual[..., None], upper=False)[..., 0]  # (B, C)
        stretch = torch.log1p((alpha * values).clamp_min(-0.5)).sum(-1) / alpha
        return (constant - 0.5 * stretch - 0.5 * white.square().sum(-1)).to(dtype)

    def _set_noise(self, caller: str) -> float:
        """Returns σ²; raises if it is still to be tuned."""
        if self.noise_variance is None:
            raise LapwingError(
                f"Gaussian {caller} needs a noise variance, and noise_variance=None is still to be tuned. Write "
                "Gaussian(noise_variance=0.1), or let fit() tune it."
            )
        return self.noise_variance
