"""Regression: the Gaussian likelihood, one noise variance for all outputs, and its predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributions as dist

from ..covariance import AnyLatent, LinearDraws, SelectedLatent
from ..errors import LapwingError, check_flag, shown
from ..linalg import check_draws, cholesky, seeded
from ..network import batches
from .base import Integrals, Likelihood, apply_weights, numbers_of, register
from .links import ExactLink, Link, at_least_float32
from .predictions import RealPrediction, check_level
from .targets import aligned_targets, check_real_targets


@register
@dataclass(frozen=True, repr=False)
class Gaussian(Likelihood):
    """`y ~ N(f, σ² I)` with one σ² for all C outputs; Λ = I / σ², at unit noise I.

    Targets are (B, C), or (B,) when C = 1. With ratios r the noise variance of output c is `r_c σ²`, and
    `Λ = diag(1/r)` at unit noise: several numbers for `noise_variance` are kept as their mean σ² and r.

    Args:
        noise_variance: σ², a **variance** in squared units of y. A number is kept, and so are C numbers, one an output;
            None is tuned by `fit`.
        noise_ratios: r, one positive number an output: outputs of other units, or of known relative accuracy. σ² may
            still be tuned. None for ones.
        missing: whether NaN stands for a target that is missing: it counts nowhere, in fit, tuning and `log_prob`.

    Raises:
        LapwingError: if `noise_variance` is not positive and finite.

    Example:
        >>> import torch
        >>> Gaussian(noise_variance=0.25).log_prob(torch.zeros(3, 1), torch.zeros(3)).shape
        torch.Size([3])
    """

    noise_variance: float | None = None
    missing: bool = False
    noise_ratios: Any = None
    name: ClassVar[str] = "gaussian"
    links: ClassVar[tuple[type[Link], ...]] = (ExactLink,)
    default_link: ClassVar[Link] = ExactLink()
    selects_outputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        value, line = self.noise_variance, "Gaussian(noise_variance=[0.1, 0.5]), one for each output"
        if isinstance(value, (list, tuple)) or getattr(value, "ndim", False):
            several = numbers_of("Gaussian", "noise_variance", value, line)
            assert several is not None
            if self.noise_ratios is not None:
                raise LapwingError(
                    f"Gaussian has {len(several)} noise variances and noise_ratios, and the former imply the latter. "
                    f"Leave noise_ratios out: {line}."
                )
            value = sum(several) / len(several)
            object.__setattr__(self, "noise_variance", value)
            object.__setattr__(self, "noise_ratios", [one / value for one in several])
        check_flag("Gaussian", "missing", self.missing)
        line = "Gaussian(noise_ratios=[1.0, 5.0]), one for each output"
        object.__setattr__(self, "noise_ratios", numbers_of("Gaussian", "noise_ratios", self.noise_ratios, line))
        number = isinstance(value, Real) and not isinstance(value, bool)
        if value is not None and not (number and 0.0 < value < math.inf):
            raise LapwingError(
                f"The noise variance of Gaussian is {shown(value)}. Pass a positive finite number: "
                "Gaussian(noise_variance=0.1), or Gaussian() to have it tuned."
            )
        if value is not None:
            object.__setattr__(self, "noise_variance", float(value))  # numpy's numbers are no JSON

    def __repr__(self) -> str:
        """Names σ², and `missing` where it is on."""
        option = ", missing=True" if self.missing else ""
        if self.noise_ratios is not None:
            option += f", noise_ratios={shown(tuple(float(f'{ratio:.4g}') for ratio in self.noise_ratios))}"
        return f"{type(self).__name__}(noise_variance={self.noise_variance}{option})"

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Checks real targets (B, C) or, when C = 1, (B,)."""
        check_real_targets("Gaussian", outputs.shape, outputs.device, targets, self.missing)
        self.ratios(outputs)

    def ratios(self, like: Tensor) -> Tensor:
        """Returns r (C,), in the dtype of outputs (..., C) and on their device.

        Raises:
            LapwingError: for another number of outputs.
        """
        if self.noise_ratios is None:
            return super().ratios(like)
        if len(self.noise_ratios) != like.shape[-1]:
            raise LapwingError(
                f"Gaussian has noise variances of {len(self.noise_ratios)} outputs, and the outputs have shape "
                f"{tuple(like.shape)}. Pass one for each of {like.shape[-1]} outputs."
            )
        return like.new_tensor(self.noise_ratios)

    def target_weights(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Returns 0 where y is missing and 1 elsewhere, (B, C); None for ones."""
        if not self.missing or not bool(targets.isnan().any()):
            return None
        self.check(outputs, targets)
        return (~aligned_targets("Gaussian", at_least_float32(outputs), targets).isnan()).to(outputs.dtype)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns `-1/2 Σ_c [(y - f)²/(r σ²) + log(2π r σ²)]`, (B,).

        Raises:
            LapwingError: if σ² is not set, or shapes do not fit.
        """
        variance = self._set_noise("log_prob()")
        outputs = at_least_float32(outputs)
        noise = variance * self.ratios(outputs)
        residual, volume = _known_residuals(outputs, aligned_targets("Gaussian", outputs, targets), noise)
        return -0.5 * ((residual.square() / noise).sum(-1) + volume)

    def statistics(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
        """Returns float64 sums, each sample times its weight: the number of values, `Σ (y - f)²/r` and `Σ y²/r`.

        With ratios `Σ log r` too.
        """
        outputs = outputs.double()
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
        return {name: (v if weights is None else apply_weights(v, weights)).sum() for name, v in sums.items()}

    def log_likelihood(self, statistics: dict[str, Tensor], noise_variance: Tensor | None = None) -> Tensor:
        """Returns `-1/2 [Σ (y - f)²/σ² + count log(2πσ²)]`, a float64 scalar.

        Raises:
            LapwingError: if σ² is not set.
        """
        variance = self._set_noise("log_likelihood()") if noise_variance is None else noise_variance
        variance = torch.as_tensor(variance, dtype=torch.float64)
        constant = statistics["count"] * (2.0 * math.pi * variance).log() + statistics.get("log_ratio", 0.0)
        return -0.5 * (statistics["squared_error"] / variance + constant)

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Returns `diag(1/√r)`, the identity without ratios, at every input, (B, C, C), without copies."""
        batch, size = outputs.shape
        root = torch.eye(size, dtype=outputs.dtype, device=outputs.device)
        if self.noise_ratios is not None:
            root = root * self.ratios(outputs).rsqrt()
        return root.expand(batch, size, size)

    def sampled_fisher_root(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Returns a standard normal column, (B, C, 1): the score of a drawn y at unit noise."""
        noise = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype, device=outputs.device)
        return (noise * self.ratios(outputs).rsqrt()).unsqueeze(-1)

    @property
    def curvature_scale(self) -> float:
        """1/σ².

        Raises:
            LapwingError: if σ² is not set.
        """
        return 1.0 / self._set_noise("curvature_scale")

    @property
    def needs_noise(self) -> bool:
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
        if self.noise_ratios is not None and not isinstance(latent, SelectedLatent):
            self.ratios(latent.mean)
        return RegressionPrediction(latent, self._set_noise("predict()"), self.missing, self.noise_ratios)

    def integrals(self, outputs: int, alpha: float) -> Integrals:
        """Returns `ExactLink`: `log_power_mean` is in closed form, differentiable in σ² too."""
        return {ExactLink: self._exact_power_mean}

    def _exact_power_mean(
        self,
        link: ExactLink,
        mean: Tensor,
        covariance: Tensor,
        targets: Tensor,
        alpha: float,
        noise_variance: Tensor | None,
        generator: torch.Generator | None,
    ) -> Tensor:
        """Returns `1/α log E[N(y; f, σ²I)^α]` for f ~ N(m, K). Time O(B C³).

        `-C/2 log 2πσ² - 1/(2α) logdet(I + αK/σ²) - 1/2 rᵀ(σ²I + αK)⁻¹r` with r = y - m, and at α = 0
        `-C/2 log 2πσ² - tr(K)/(2σ²) - rᵀr/(2σ²)`.
        """
        variance = self._set_noise("log_power_mean()") if noise_variance is None else noise_variance
        wide, dtype = mean.double(), at_least_float32(mean).dtype
        noise = torch.as_tensor(variance, dtype=wide.dtype, device=wide.device) * self.ratios(wide)
        aligned = aligned_targets("Gaussian", wide, targets)
        residual, volume = _known_residuals(wide, aligned, noise)
        residual, constant = residual / noise.sqrt(), -0.5 * volume
        covariance = _known_covariance(covariance.double(), aligned) / (noise * noise[:, None]).sqrt()  # of y/√noise
        if alpha == 0:
            spread = covariance.diagonal(dim1=-2, dim2=-1).sum(-1) + residual.square().sum(-1)
            return (constant - 0.5 * spread).to(dtype)
        covariance = 0.5 * (covariance + covariance.mT)
        values = torch.linalg.eigvalsh(covariance)  # negative ones are rounding; log1p keeps tiny α's digits
        eye = torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
        factor = cholesky(eye + alpha * covariance)
        white = torch.linalg.solve_triangular(factor, residual[..., None], upper=False)[..., 0]  # (B, C)
        stretch = torch.log1p((alpha * values).clamp_min(-0.5)).sum(-1) / alpha
        return (constant - 0.5 * stretch - 0.5 * white.square().sum(-1)).to(dtype)

    def _set_noise(self, caller: str) -> float:
        """Returns σ², refusing one that is still to be tuned."""
        if self.noise_variance is None:
            raise LapwingError(
                f"Gaussian {caller} needs a noise variance, and noise_variance=None is still to be tuned. Write "
                "Gaussian(noise_variance=0.1), or let fit() tune it."
            )
        return self.noise_variance


@dataclass(frozen=True, eq=False, repr=False)
class RegressionPrediction(RealPrediction):
    """Real outputs at B inputs: the latent plus independent Gaussian noise.

    A latent that holds weight draws makes an equal mixture of Gaussians, `1/S Σ_s N(f_s, σ² I)`; then `log_prob` and
    `interval` are those of the mixture, and `mean` and `variance` its moments.

    Args:
        latent: The latent over outputs.
        noise_variance: σ², in squared units of y.
        missing: Whether NaN stands for a target that is missing.
        noise_ratios: r (C,), what multiplies σ² at each output; None for ones.
    """

    latent: AnyLatent
    noise_variance: float
    missing: bool = False
    noise_ratios: tuple[float, ...] | None = None

    @property
    def mean(self) -> Tensor:
        return at_least_float32(self.latent.mean)

    @property
    def epistemic_variance(self) -> Tensor:
        """Variance of the latent, (B, C): it shrinks with data."""
        return at_least_float32(self.latent.variance)

    @property
    def aleatoric_variance(self) -> Tensor:
        """Variance of the noise, (B, C): it does not."""
        return torch.zeros_like(self.mean) + self._noise

    @cached_property
    def _noise(self) -> Tensor:
        """The noise variance of each output (C,), or (B, k) of k outputs that were selected at each input."""
        mean = self.mean
        noise = mean.new_full((mean.shape[-1],), self.noise_variance)
        if self.noise_ratios is None:
            return noise
        ratios = noise.new_tensor(self.noise_ratios)
        return noise * (ratios[self.latent.outputs] if isinstance(self.latent, SelectedLatent) else ratios)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Returns the central interval that holds y with probability `level`, one output at a time.

        Exact: Gaussian quantiles, or for weight draws those of the mixture by bisection.

        Args:
            level: Probability in (0, 1).

        Returns:
            Lower and upper ends, each (B, C).

        Raises:
            LapwingError: if `level` is not in (0, 1).
        """
        check_level(level)
        draws = self._draws()
        if draws is None:
            half = NormalDist().inv_cdf(0.5 + 0.5 * level) * self.std
            return self.mean - half, self.mean + half
        tail = 0.5 * (1.0 - level)
        low, high = (mixture_quantile(draws, self._noise, p) for p in (tail, 1.0 - tail))
        return low, high

    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns the log density of the targets, one input at a time, (B,).

        `log N(y; m, Σ + σ² I)` with the (C, C) covariance of the outputs of one input. Inputs are never coupled, also
        not from a joint latent: for the joint density write `distribution().log_prob(y.flatten())`.

        Args:
            targets: y, (B, C), or (B,) when C = 1.

        Returns:
            Log densities, (B,), in nats. Cost O(B C³), or O(S B C) for S weight draws, O(S² B C) for S linearised ones.

        Raises:
            LapwingError: for targets of a wrong shape or dtype, or not finite.
        """
        mean, draws = self.mean, self._draws()
        targets = batches.plain(targets, mean.device)
        check_real_targets("RegressionPrediction.log_prob", mean.shape, mean.device, targets, self.missing)
        targets = aligned_targets("RegressionPrediction.log_prob", mean, targets)
        if draws is not None:
            return mixture_log_density(draws, self._noise, targets)
        if mean.shape[-1] == 1:
            values = dist.Normal(mean, self.std, validate_args=False).log_prob(
                targets.nan_to_num() if self.missing else targets
            )
            return (torch.where(targets.isnan(), 0.0, values) if self.missing else values).squeeze(-1)
        if isinstance(self.latent, LinearDraws) and not self.missing:
            columns = self.latent.factor.double()
            return self._low_rank(mean.double(), columns).log_prob(targets.double()).to(mean.dtype)
        blocks, holes = self._blocks().double(), torch.zeros(())
        if self.missing:  # those of zero residual and no variance but σ², whose density is divided out
            noise = self._noise
            residual, volume = _known_residuals(mean, targets, noise)
            blocks, targets = _known_covariance(blocks, targets), mean + residual
            holes = 0.5 * ((2.0 * math.pi * noise).log().sum(-1) - volume)
        factor = cholesky(self._noisy(blocks))  # (B, C, C)
        normal = dist.MultivariateNormal(mean.double(), scale_tril=factor, validate_args=False)
        return (normal.log_prob(targets.double()) + holes).to(mean.dtype)

    def for_metrics(self, targets: Tensor) -> dict[str, Tensor]:
        """Returns what metrics compare, by name; of targets that may be missing one row for each that is known."""
        values = super().for_metrics(targets)
        if not self.missing:
            return values
        known = ~values["y"].isnan()
        return {name: value if name == "log_prob" else value[known] for name, value in values.items()}

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws y, (n, B, C): latent draws (joint across inputs where the latent is) plus fresh noise.

        Args:
            n: Number of draws.
            generator: Source of randomness; None means seed 0.

        Returns:
            Draws, (n, B, C).

        Raises:
            LapwingError: if `n` is below 1.
        """
        check_draws("sample", "n", n, self.latent.mean.numel())
        generator = seeded(generator, self.latent.mean.device)
        latent = at_least_float32(self.latent.sample(n, generator))
        noise = torch.randn(latent.shape, generator=generator, dtype=latent.dtype, device=latent.device)
        return latent + self._noise.to(latent.dtype).sqrt() * noise

    def distribution(self) -> dist.Distribution:
        """Returns y as a `torch.distributions` object.

        Returns:
            Batch shape (B,), event shape (C,): a Normal for one output, a MultivariateNormal for several, a
            LowRankMultivariateNormal for linearised draws, a mixture for weight draws. From a joint latent batch shape
            () and event shape (B·C,), inputs first.
        """
        mean, draws = self.mean, self._draws()
        if draws is not None:
            centres = draws.flatten(1) if self.latent.joint else draws.transpose(0, 1)  # (S, B·C) or (B, S, C)
            noise = (
                self._noise.to(centres.dtype).sqrt().repeat(centres.shape[-1] // len(self._noise)).expand_as(centres)
            )
            weights = dist.Categorical(logits=torch.zeros_like(centres[..., 0]))
            return dist.MixtureSameFamily(weights, dist.Independent(dist.Normal(centres, noise), 1))
        if isinstance(self.latent, LinearDraws):
            factor = at_least_float32(self.latent.factor)
            return (
                self._low_rank(mean.flatten(), factor.flatten(0, 1))
                if self.latent.joint
                else self._low_rank(mean, factor)
            )
        if self.latent.joint:
            size = mean.numel()
            covariance = at_least_float32(self.latent.covariance).reshape(size, size)  # (B, C, B, C) -> (B·C, B·C)
            return dist.MultivariateNormal(mean.flatten(), scale_tril=cholesky(self._noisy(covariance)))
        if mean.shape[-1] == 1:
            return dist.Independent(dist.Normal(mean, self.std), 1)
        return dist.MultivariateNormal(mean, scale_tril=cholesky(self._noisy(self._blocks())))

    def __repr__(self) -> str:
        inputs, outputs = self.latent.mean.shape
        return f"RegressionPrediction({inputs} inputs, {outputs} outputs, noise_variance={self.noise_variance:g})"

    def _draws(self) -> Tensor | None:
        """Returns weight draws in at least float32, or None."""
        draws = self.latent.draws
        return None if draws is None else at_least_float32(draws)

    def _low_rank(self, mean: Tensor, factor: Tensor) -> dist.LowRankMultivariateNormal:
        """Returns `N(mean, F Fᵀ + σ² diag(r))`, whose density takes S x S matrices alone."""
        noise = self._noise_of_each(mean).expand_as(mean)
        return dist.LowRankMultivariateNormal(mean, factor, noise, validate_args=False)

    def _blocks(self) -> Tensor:
        """Returns the latent covariance of every input, (B, C, C)."""
        covariance = at_least_float32(self.latent.covariance)
        return covariance.diagonal(dim1=0, dim2=2).movedim(-1, 0) if self.latent.joint else covariance

    def _noisy(self, covariance: Tensor) -> Tensor:
        """Adds the noise of each output, of each input and output where the covariance is of all of them."""
        return covariance + self._noise_of_each(covariance).diag_embed()

    def _noise_of_each(self, values: Tensor) -> Tensor:
        """Returns the noise variances in the dtype of values (..., C), or again and again for values (..., B·C)."""
        noise = self._noise.to(values.dtype)
        copies = values.shape[-1] // noise.shape[-1]
        return noise if copies == 1 else noise.repeat(copies)


_HALVINGS = 60  # a float64 bracket shrinks below its rounding in 53


def mixture_log_density(draws: Tensor, noise_variance: Tensor | float, targets: Tensor) -> Tensor:
    """Returns `log 1/S Σ_s N(y; f_s, diag σ²)` for every input.

    Args:
        draws: Component means f, (S, B, C).
        noise_variance: σ², one number or (C,).
        targets: y, (B, C).

    Returns:
        Log densities, (B,).
    """
    noise = torch.as_tensor(noise_variance, dtype=draws.dtype, device=draws.device).expand(draws.shape[-1])
    residual, volume = _known_residuals(draws, targets, noise)
    squares = (residual.square() / noise).sum(-1)  # (S, B, C) -> (S, B)
    return torch.logsumexp(-0.5 * squares, 0) - 0.5 * volume - math.log(len(draws))


def _known_residuals(outputs: Tensor, targets: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Returns y - f (..., B, C), 0 where y (B, C) is NaN, and `Σ log 2πσ²` of the others (B,), for σ² (C,)."""
    known = ~targets.isnan()
    return torch.where(known, targets, outputs) - outputs, (known * (2.0 * math.pi * noise).log()).sum(-1)


def _known_covariance(covariance: Tensor, targets: Tensor) -> Tensor:
    """Returns covariances (B, C, C), 0 in rows and columns where y (B, C) is NaN."""
    known = (~targets.isnan()).to(covariance.dtype)
    return covariance * known[:, :, None] * known[:, None, :]


def mixture_quantile(
    draws: Tensor, variance: Tensor | float, probability: float, weights: Tensor | None = None
) -> Tensor:
    """Returns the quantile of every output's mixture `Σ_s w_s N(f_s, σ_s²)` by bisection of its distribution function.

    The quantile lies between the smallest and the largest of the components' quantiles, which brackets it. A final
    Newton step from the detached root makes the result differentiable in the draws (implicit function theorem).

    Args:
        draws: Component means f, (S, B, C).
        variance: σ², one number, or (S, B, C).
        probability: Level p of the quantile, in (0, 1).
        weights: w (S, 1, 1), which add to 1; None for 1/S.

    Returns:
        Quantiles, (B, C). Time O(60 S B C).
    """
    means = draws.double()
    scale = torch.as_tensor(variance, dtype=means.dtype, device=means.device).sqrt()

    def average(values: Tensor) -> Tensor:
        return values.mean(0) if weights is None else (weights * values).sum(0)

    with torch.no_grad():
        ends = means + scale * NormalDist().inv_cdf(probability)
        low, high = ends.amin(0), ends.amax(0)
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            below = average(torch.special.ndtr((middle - means) / scale)) < probability
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        root = 0.5 * (low + high)
        standard = (root - means) / scale
        density = average(torch.exp(-0.5 * standard.square()) / scale) / math.sqrt(2.0 * math.pi)
        density = density.clamp_min(torch.finfo(density.dtype).tiny)
    excess = average(torch.special.ndtr((root - means) / scale)) - probability
    step = excess / density
    smallest = scale.detach().amin(0) if scale.ndim else scale
    limit = (high - low).detach() + 1e-9 * smallest  # between far-apart components the density is 0 and Newton leaps
    return (root - step + (step - step.clamp(-limit, limit)).detach()).to(draws.dtype)
