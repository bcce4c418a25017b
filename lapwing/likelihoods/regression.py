"""Predictions of a regression: a latent plus independent normal or Student t noise, and monotone functions of y."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import torch
from torch import Tensor
from torch import distributions as dist

from ..covariance import AnyLatent, has_factor, is_selected
from ..covariance.terms import standard_normal
from ..errors import LapwingError, shown
from ..linalg import at_least_float32, cholesky, doubled, seeded
from .links import latent_nodes
from .mixtures import NormalsPrediction, bisected
from .predictions import RealPrediction
from .student import GaussianPlusNoise, noise_nodes, student_normals
from .targets import check_real_targets, check_target_shape

DOUBLINGS, INVERSE_HALVINGS = 60, 120
"""Number of steps that bracket the inverse of a function, from ±1 up to ±2^60, and that then halve the bracket."""


@dataclass(frozen=True, eq=False, repr=False)
class RegressionPrediction(NormalsPrediction):
    """Real outputs at B inputs: `y = f + √(r σ²) e`, with f from the latent and e independent over inputs and outputs.

    The noise e has variance 1: it is standard normal, or a Student t divided by its standard deviation. A Student t is
    computed as the mixture of 16 normals of `lapwing.likelihoods.student`. Weight draws give an equal mixture over the
    draws f_s. `aleatoric_variance` (B, C) is `r σ²`, the noise at each input.

    Args:
        latent: the latent over outputs.
        noise_variance: σ² of the posterior, in squared units of y.
        missing: whether a NaN target is missing.
        noise_ratios: r, factor of σ² at each output, (C,), or at each input and output, (B, C); None means ones.
        df: degrees of freedom ν of the Student t, at least 3; None means normal noise.
    """

    latent: AnyLatent
    noise_variance: float
    missing: bool = False
    noise_ratios: tuple[float, ...] | Tensor | None = None
    df: float | None = None

    @property
    def mean(self) -> Tensor:
        return at_least_float32(self.latent.mean)

    @property
    def epistemic_variance(self) -> Tensor:
        return at_least_float32(self.latent.variance)

    @property
    def aleatoric_variance(self) -> Tensor:
        return torch.zeros_like(self.mean) + self._noise

    @cached_property
    def _noise(self) -> Tensor:
        """The noise variance of each output (C,), or (B, C) of each input: for selected outputs, or ratios (B, C)."""
        mean = self.mean
        noise = mean.new_full((mean.shape[-1],), self.noise_variance)
        if self.noise_ratios is None:
            return noise
        ratios = torch.as_tensor(self.noise_ratios, dtype=noise.dtype, device=noise.device)
        if is_selected(self.latent):
            ratios = ratios.expand(len(mean), -1).gather(-1, self.latent.outputs)
        return noise * ratios

    def _quantile(self, probability: float) -> Tensor:
        if self.df is not None or self.latent.draws is not None:
            return super()._quantile(probability)
        sign = 1.0 if probability > 0.5 else -1.0
        return self.mean + sign * NormalDist().inv_cdf(max(probability, 1.0 - probability)) * self.std

    @property
    def _normals(self) -> tuple[Tensor, Tensor, Tensor]:
        draws = self.latent.draws
        weights, shape = (values.to(doubled(self.mean))[:, None, None, None] for values in student_normals(self.df))
        noise = shape * doubled(self._noise)  # (16, 1, B or 1, C)
        if draws is None:
            draws, noise = self.mean[None], noise + doubled(self.epistemic_variance)
        means, variances = torch.broadcast_tensors(doubled(draws), noise)  # (16, S or 1, B, C)
        weights = (weights / len(draws)).expand(*means.shape[:2], 1, 1)
        return means.flatten(0, 1), variances.flatten(0, 1), weights.flatten(0, 1)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns the log density of the targets for each input separately, (B,), in nats.

        `log N(y; m, Σ + σ² I)` with the (C, C) covariance of the outputs of one input. A joint latent does not couple
        inputs here: for the joint density write `distribution().log_prob(y.flatten())`. With Student t noise or missing
        targets, see `GaussianPlusNoise` for several outputs.

        Cost: O(B C³), or O(S B C) for S weight draws, or O(S² B C) for S linearised draws.
        """
        mean, draws = self.mean, self.latent.draws
        targets = self._targets(targets)
        if self.df is not None or self.missing:
            logs = self._law(joint=False).log_prob(targets if draws is None else targets[:, None])  # (B,) or (B, S)
            return logs if draws is None else logs.logsumexp(1) - math.log(len(draws))
        if draws is not None:
            each = dist.Normal(at_least_float32(draws), self._noise.sqrt(), validate_args=False)
            logs = each.log_prob(targets).sum(-1)  # (S, B)
            return logs.logsumexp(0) - math.log(len(draws))
        if mean.shape[-1] == 1:
            return dist.Normal(mean, self.std, validate_args=False).log_prob(targets).squeeze(-1)
        if has_factor(self.latent):
            columns = self.latent.factor.double()
            return self._low_rank(mean.double(), columns).log_prob(targets.double()).to(mean.dtype)
        factor = cholesky(self._noisy(self.latent.own_covariance.double()))  # (B, C, C)
        normal = dist.MultivariateNormal(mean.double(), scale_tril=factor, validate_args=False)
        return normal.log_prob(targets.double()).to(mean.dtype)

    def transformed(self, function: Callable[[Tensor], Tensor]) -> TransformedPrediction:
        return TransformedPrediction(self, function)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws y, (n, B, C): latent draws (joint across inputs if the latent is joint) plus independent noise."""
        generator = seeded(generator, self.latent.mean.device)
        latent = at_least_float32(self.latent.sample(n, generator))
        noise = self._noise.to(latent.dtype).sqrt() * standard_normal(latent.shape, latent, generator)
        if self.df is not None:
            weights, shape = (values.to(latent) for values in student_normals(self.df))
            kinds = torch.multinomial(weights, latent.numel(), replacement=True, generator=generator)
            noise = noise * shape.sqrt()[kinds].reshape(latent.shape)
        return latent + noise

    def distribution(self) -> dist.Distribution:
        """Returns y as a `torch.distributions` object with batch shape (B,) and event shape (C,).

        This is a Normal for one output, a MultivariateNormal for several, a LowRankMultivariateNormal for linearised
        draws, with Student t noise a `GaussianPlusNoise`, and for weight draws a mixture of these. A joint latent gives
        batch shape () and event shape (B·C,), inputs first.
        """
        mean = self.mean
        if self.latent.draws is not None:
            law = self._law(self.latent.joint)
            return dist.MixtureSameFamily(dist.Categorical(logits=law.loc.new_zeros(law.batch_shape)), law)
        if self.df is not None:
            return self._law(self.latent.joint)
        centre = mean.flatten() if self.latent.joint else mean  # (B·C,) or (B, C)
        if has_factor(self.latent):
            factor = at_least_float32(self.latent.factor)  # (B, C, S)
            return self._low_rank(centre, factor.reshape(*centre.shape, factor.shape[-1]))
        if mean.shape[-1] == 1 and not self.latent.joint:
            return dist.Independent(dist.Normal(mean, self.std), 1)
        covariance = at_least_float32(self.latent.covariance)
        covariance = covariance.reshape(*centre.shape, centre.shape[-1])  # (B·C, B·C) or (B, C, C)
        return dist.MultivariateNormal(centre, scale_tril=cholesky(self._noisy(covariance)))

    def summary(self) -> dict[str, Tensor]:
        tails = {} if self.df is None else {"df": torch.tensor(self.df, dtype=self.mean.dtype).to(self.mean.device)}
        return super().summary() | tails

    def __repr__(self) -> str:
        tails = "" if self.df is None else f", df={self.df:g}"
        return f"{super().__repr__()[:-1]}, noise_variance={self.noise_variance:g}{tails})"

    def _targets(self, targets: Tensor) -> Tensor:
        return self._aligned(targets, self.mean, check_real_targets, self.missing)

    def _law(self, joint: bool) -> GaussianPlusNoise:
        """Returns the law of y with batch shape (B,), or () if joint; weight draws append S to the batch shape."""
        latent, centre = self.latent, self.mean.flatten() if joint else self.mean
        weights, shape = (values.to(centre) for values in student_normals(self.df))
        noise = self._noise_like(centre)[..., None] * shape  # (B, C, 16) or (B·C, 16)
        if latent.draws is not None:
            centre = at_least_float32(latent.draws.flatten(1) if joint else latent.draws.transpose(0, 1))
            fixed = centre.new_zeros(centre.shape[-1], 1)
            return GaussianPlusNoise(centre, fixed, fixed.new_zeros(1, 1), noise if joint else noise[:, None], weights)
        if has_factor(latent):
            rows = at_least_float32(latent.factor).reshape(*centre.shape, -1)
            return GaussianPlusNoise(centre, rows, torch.eye(rows.shape[-1]).to(rows), noise, weights)
        covariance = latent.covariance if joint else latent.own_covariance if centre.shape[-1] > 1 else latent.variance
        covariance = at_least_float32(covariance).reshape(*centre.shape, -1)
        return GaussianPlusNoise(centre, torch.eye(centre.shape[-1]).to(centre), covariance, noise, weights)

    def _low_rank(self, mean: Tensor, factor: Tensor) -> dist.LowRankMultivariateNormal:
        """Returns `N(mean, F Fᵀ + σ² diag(r))`, with a density that needs only S x S matrices."""
        return dist.LowRankMultivariateNormal(mean, factor, self._noise_like(mean), validate_args=False)

    def _noisy(self, covariance: Tensor) -> Tensor:
        """Adds the noise variances to the diagonal of covariances (B, C, C) or (B·C, B·C)."""
        return covariance + self._noise_like(covariance[..., 0]).diag_embed()

    def _noise_like(self, values: Tensor) -> Tensor:
        """Returns the noise variances in the shape (B, C) or (B·C,) and the dtype of values."""
        return self._noise.to(values.dtype).expand(self.mean.shape).reshape(values.shape)


@dataclass(frozen=True, eq=False, repr=False)
class TransformedPrediction(RealPrediction):
    """The distribution of g(y) for a monotone function g of each output.

    Args:
        prediction: the prediction of y.
        function: g.
    """

    prediction: RegressionPrediction
    function: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        """Raises unless g is finite and monotone in each entry, within four standard deviations of the mean of y."""
        mean, std = doubled(self.prediction.mean).detach(), doubled(self.prediction.std).detach()
        y = torch.stack([mean + 0.25 * step * std for step in range(-16, 17)])
        moved = y.clone()
        moved[0, 0, 0] = y.max() + 1.0  # changes one entry of g(y) at most
        values, others = (self.function(some) if callable(self.function) else None for some in (y, moved))
        if not isinstance(values, Tensor) or not isinstance(others, Tensor) or values.shape != y.shape:
            problem = "does not return a tensor of the shape of y"
        elif not bool(values.to(self.prediction.mean.dtype).isfinite().all()):
            problem = f"is NaN or infinite in {self.prediction.mean.dtype} at some values of y"
        elif bool((values != others).flatten()[1:].any()):
            problem = "mixes outputs or inputs: if one y moves, another value changes"
        elif not bool((signs := values.diff(dim=0).sign()).min() * signs.max() >= 0) or not bool(signs.any()):
            problem = "is not monotone"
        else:
            return
        raise LapwingError(
            f"transformed({shown(self.function)}) {problem}, within four standard deviations of the mean. Pass a "
            "function that is finite and monotone there, or use draws: function(prediction.sample(4096))."
        )

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean of g(y), variance over f of its mean given f, and mean over f of its variance given f, (B, C)."""
        outputs, weights = map(doubled, latent_nodes(self.prediction.latent))
        std = doubled(self.prediction._noise).sqrt()
        first, second = torch.zeros_like(outputs), torch.zeros_like(outputs)
        for node, chance in zip(*noise_nodes(outputs, self.prediction.df), strict=True):  # of the noise
            values = self.function(outputs + std * node).nan_to_num(0.0, torch.inf, -torch.inf)  # far out
            first, second = first + chance * values, second + chance * values.square()
        mean = (weights * first).sum(0)
        epistemic, aleatoric = (first - mean).square(), (second - first.square()).clamp_min(0.0)
        moments = mean, (weights * epistemic).sum(0), (weights * aleatoric).sum(0)
        return tuple(moment.to(self.prediction.mean) for moment in moments)  # type: ignore[return-value]

    mean = property(lambda self: self._moments[0])
    epistemic_variance = property(lambda self: self._moments[1])
    aleatoric_variance = property(lambda self: self._moments[2])

    @cached_property
    def _rises(self) -> bool:
        """Whether g rises: it is monotone, in one direction for all outputs."""
        mean, four = self.prediction.mean, 4.0 * self.prediction.std
        return bool((self.function(mean + four) > self.function(mean - four)).any())

    def _quantile(self, probability: float) -> Tensor:
        """Returns the exact quantile: g of a quantile of y."""
        return self.function(self.prediction.quantile(probability if self._rises else 1.0 - probability))

    def _below(self, y: Tensor) -> Tensor:
        mean = doubled(self.prediction.mean)
        x = _Monotone(self.function).inv(y.to(mean))
        below = self.prediction.pit(x.nan_to_num().to(self.prediction.mean))
        below = below if self._rises else 1.0 - below
        return torch.where(x.isnan(), (y > self.function(mean)).to(below), below)  # NaN: beyond the range of g

    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns `log p(g⁻¹(t)) - Σ_c log |g'|` for targets t, (B,); -inf for a target beyond the range of g."""
        mean = self.prediction.mean
        g, targets = _Monotone(self.function), self._aligned(targets, doubled(mean), check_target_shape)
        y, missing = g.inv(targets), targets.isnan()
        beyond = y.isnan() & ~missing
        logs = self.prediction.log_prob(torch.where(beyond, doubled(mean), y).to(mean))
        slopes = torch.where(missing, 0.0, g.log_abs_det_jacobian(y, targets))
        four = 4.0 * doubled(self.prediction.std)
        flat = slopes.isneginf()
        for end in (doubled(mean) - four, doubled(mean) + four):  # such as 0 of relu: no y below it, but g reaches it
            flat |= beyond & (self.function(end) == targets)
        if bool(flat.any()):
            raise LapwingError(
                f"transformed({shown(self.function)}) is constant around {int(flat.sum())} of {flat.numel()} targets, "
                "where it has no density. Compare intervals, prediction.interval(0.9), or the CRPS of draws instead."
            )
        return torch.where(beyond.any(-1), -torch.inf, logs - slopes.sum(-1).to(logs))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.function(self.prediction.sample(n, generator))

    def distribution(self) -> dist.Distribution:
        """Returns a `torch.distributions.TransformedDistribution` with the shapes of the prediction's distribution."""
        return dist.TransformedDistribution(self.prediction.distribution(), [_Monotone(self.function)])


class _Monotone(dist.Transform):
    """A monotone function of each entry, with its inverse by bisection in float64; NaN beyond the function's range."""

    bijective, domain, codomain = True, dist.constraints.real, dist.constraints.real

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._call = function  # type: ignore[method-assign]

    @torch.no_grad()
    def _inverse(self, y: Tensor) -> Tensor:
        wide = doubled(y)
        low, high = torch.full_like(wide, -1.0), torch.ones_like(wide)
        sign = torch.where(self._call(high) > self._call(low), 1.0, -1.0)
        for _ in range(DOUBLINGS):
            low = torch.where(sign * self._call(low) < sign * wide, low, 2.0 * low)
            high = torch.where(sign * self._call(high) < sign * wide, 2.0 * high, high)
        found = (sign * self._call(low) < sign * wide) & (sign * self._call(high) >= sign * wide)
        _, high = bisected(lambda x: sign * self._call(x) < sign * wide, low, high, INVERSE_HALVINGS)
        return torch.where(found, high, torch.nan).to(y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(self._call(leaf).sum(), leaf)[0].abs().log()
