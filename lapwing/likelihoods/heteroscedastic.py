"""Regression with noise that the network predicts: outputs are means and log variances."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch import distributions as dist

from ..covariance import AnyLatent
from ..covariance.terms import standard_normal
from ..errors import LapwingError
from ..linalg import at_least_float32, doubled, seeded
from .base import NoiselessLikelihood, apply_weights
from .links import ExactLink, Link
from .mixtures import NORMAL_NODES, REACH, NormalsPrediction, mixture_of, normal_nodes
from .quadrature import LEAST_VARIANCE
from .registry import register_likelihood
from .targets import aligned_targets, check_real_targets, known_targets

log = logging.getLogger("lapwing")

LOG_STEP, WIDEST_LOG, FARTHEST_LOG = 0.6, 50.0, 700.0
"""Largest step between nodes of a log variance s, for √Var[s] up to this; largest |s|, near the end of float64."""

UNSEEN_LOG = 4.0
"""√Var[s] above which predictions warn: `E[exp s]` comes from s that lie about Var[s] above its mean."""

SQUARES = "squared_standardised"  # the statistic that shows whether outputs are log variances


@register_likelihood
@dataclass(frozen=True)
class HeteroscedasticGaussian(NoiselessLikelihood["HeteroscedasticPrediction"]):
    """`y_k ~ N(m_k, exp(s_k))` for outputs (B, 2K), first K means m and then K log variances s; Λ = diag(exp(-s), 1/2).

    `torch.nn.GaussianNLLLoss` trains such a network, if exp is applied to its log variances. Targets are (B, K), or
    (B,) if K = 1. No noise variance is tuned: the network predicts it.

    Args:
        missing: whether a NaN target is missing; it has no effect on fit, tuning and `log_prob`.

    Λ is the Fisher information, which is positive for every residual; the Hessian is not. Immer et al. 2023, Effective
    Bayesian Heteroscedastic Regression with Deep Neural Networks, use natural parameters as outputs instead.

    Example:
        >>> import torch
        >>> HeteroscedasticGaussian().log_prob(torch.zeros(3, 2), torch.zeros(3)).shape
        torch.Size([3])
    """

    missing: bool = False
    name: ClassVar[str] = "heteroscedastic"
    left_out_decides: ClassVar[Literal["noise", "spread"] | None] = "spread"
    links: ClassVar[tuple[type[Link], ...]] = (ExactLink,)
    one_output_per_target: ClassVar[bool] = False

    def target_shape(self, outputs: int) -> tuple[int, ...]:
        return (outputs // 2,)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        mean, _ = _mean_and_log_variance(outputs)
        check_real_targets("HeteroscedasticGaussian", mean.shape, outputs.device, targets, self.missing)

    def target_weights(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Returns 0 for both outputs of a missing y and 1 for both of a known y, (B, 2K); None for ones."""
        mean, _ = _mean_and_log_variance(outputs)
        known = known_targets("HeteroscedasticGaussian", mean, targets) if self.missing else None
        return None if known is None else torch.cat([known, known], -1).to(outputs.dtype)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns `-1/2 Σ_k [(y - m)² exp(-s) + s + log 2π]` over the known y, (B,)."""
        mean, log_variance = _mean_and_log_variance(outputs)
        residual = aligned_targets("HeteroscedasticGaussian", mean, targets) - mean
        known = ~residual.isnan()
        squares = torch.where(known, residual, 0.0).square() * (-log_variance).exp()
        return -0.5 * (known * (squares + log_variance + math.log(2.0 * math.pi))).sum(-1)

    def statistics(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the sums of `log p(y|f)`, and of the mean of `(y - m)² exp(-s)` over K targets, missing ones as 0."""
        _, log_variance = _mean_and_log_variance(doubled(outputs))
        squares = (self.residuals(outputs, targets).square() * (-log_variance).exp()).nan_to_num(0.0).mean(-1)
        return {**super().statistics(outputs, targets, weights), SQUARES: apply_weights(squares, weights).sum()}

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns y - m in float64, (B, K); NaN for a missing target."""
        mean, _ = _mean_and_log_variance(doubled(outputs))
        return aligned_targets("HeteroscedasticGaussian", mean, targets.to(mean.device)) - mean

    def ratios(self, like: Tensor) -> Tensor:
        return _mean_and_log_variance(like)[1].exp()

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Returns `diag(exp(-s/2), 1/√2)`, (B, 2K, 2K)."""
        return torch.diag_embed(self._roots(outputs))

    def fisher_parts(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns `(exp(-s), 1/2)`, (B, 2K), and None."""
        return self._roots(outputs).square(), None

    def predict(
        self, latent: AnyLatent, link: Link | None = None, generator: torch.Generator | None = None
    ) -> HeteroscedasticPrediction:
        """Returns the distribution of y: moments in closed form, the rest by quadrature; `generator` is not used."""
        self.choose_link(latent, link)
        return HeteroscedasticPrediction(latent, self.missing)

    def at_features(self, prediction: Any, features: Tensor | None) -> Any:
        """Returns the prediction; warns if `E[exp s]` is decided by log variances s that will not be seen."""
        if prediction.latent.draws is None and not torch.compiler.is_compiling():  # an export cannot look at values
            far = (prediction.latent.variance.chunk(2, -1)[1] > UNSEEN_LOG**2).any(-1)
            if bool(far.any()):
                log.warning(
                    "The log variances of %d of %d inputs have standard deviations above %g, so their std and variance "
                    "rest on noise of less than 3e-5 probability. Read interval(0.9) there, or pass validation= or a "
                    "larger prior_precision= to lw.fit.", int(far.sum()), far.numel(), UNSEEN_LOG,
                )  # fmt: skip
        return prediction

    def _roots(self, outputs: Tensor) -> Tensor:
        """Returns the diagonal of the root, (B, 2K)."""
        mean, log_variance = _mean_and_log_variance(outputs)
        return torch.cat([(-0.5 * log_variance).exp(), torch.full_like(mean, 0.5**0.5)], -1).to(outputs.dtype)


def _mean_and_log_variance(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the two halves of outputs (B, 2K), each (B, K); raises if the outputs have another shape."""
    count = outputs.shape[-1] if outputs.ndim else 1
    if outputs.ndim != 2 or count % 2:
        raise LapwingError(
            "HeteroscedasticGaussian needs a mean and a log variance for each target, outputs of shape (B, 2K). "
            f"The outputs have shape {tuple(outputs.shape)}. Give the network twice as many outputs as there are "
            f"targets: `torch.nn.Linear(features, {2 * count})`."
        )
    mean, log_variance = at_least_float32(outputs).chunk(2, -1)
    return mean, log_variance


@dataclass(frozen=True, eq=False, repr=False)
class HeteroscedasticPrediction(NormalsPrediction):
    """Real outputs with uncertain noise at B inputs: `∫ N(y; m, exp(s)) N(m, s) dm ds`, one y_k at a time.

    Mean and variances are exact. The density is a mixture of Gaussians over 65 or more nodes of s: m given s, plus
    noise. Weight draws give an equal mixture over the draws. The K targets of one input are assumed independent.
    """

    latent: AnyLatent
    missing: bool = False

    @property
    def mean(self) -> Tensor:
        return at_least_float32(self.latent.mean).chunk(2, -1)[0]

    @property
    def epistemic_variance(self) -> Tensor:
        """Variance of m, (B, K)."""
        return at_least_float32(self.latent.variance).chunk(2, -1)[0]

    @property
    def aleatoric_variance(self) -> Tensor:
        """Mean of the noise variance, `E[exp(s)] = exp(mean + variance/2)`, (B, K)."""
        draws = self.latent.draws
        if draws is not None:
            return at_least_float32(draws).chunk(2, -1)[1].exp().mean(0)
        mean, variance = at_least_float32(self.latent.mean), at_least_float32(self.latent.variance)
        return (mean + 0.5 * variance).chunk(2, -1)[1].exp()

    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns the log density of the targets (B, K), summed over the known targets of one input, (B,)."""
        mean, targets = self.mean, doubled(self._targets(targets))
        known = ~targets.isnan()
        means, variances, weights = self._normals
        squares = (torch.where(known, targets, doubled(mean)) - means).square() / variances
        logs = -0.5 * (squares + (2.0 * math.pi * variances).log()) + weights.log()
        return torch.where(known, logs.logsumexp(0), 0.0).sum(-1).to(mean)

    def _targets(self, targets: Tensor) -> Tensor:
        return self._aligned(targets, self.mean, check_real_targets, self.missing)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws y, (n, B, K): latent draws (joint across inputs if the latent is joint) plus independent noise."""
        generator = seeded(generator, self.latent.mean.device)
        mean, log_variance = at_least_float32(self.latent.sample(n, generator)).chunk(2, -1)
        return mean + (0.5 * log_variance).exp() * standard_normal(mean.shape, mean, generator)

    def distribution(self) -> dist.Distribution:
        """Returns a mixture of Normals for each target, with batch shape (B,) and event shape (K,)."""
        means, variances, weights = self._normals
        return mixture_of(dist.Normal, weights, means, variances.sqrt())

    @cached_property
    def _normals(self) -> tuple[Tensor, Tensor, Tensor]:
        """Means and variances (S, B, K) of the components and their weights (S, 1, 1), in float64."""
        draws = self.latent.draws
        if draws is not None:
            mean, log_variance = draws.double().chunk(2, -1)
            noise = log_variance.clamp(-FARTHEST_LOG, FARTHEST_LOG).exp()
            return mean, noise, mean.new_full((len(mean), 1, 1), 1.0 / len(mean))
        mean, log_variance = self.latent.mean.double().chunk(2, -1)
        count, covariance = mean.shape[-1], self.latent.own_covariance.double()
        variance, spread = covariance.diagonal(dim1=-2, dim2=-1).chunk(2, -1)
        # 1. b = Cov[m, s]/√Var[s] (B, K): with s at z deviations, m has the mean m + b z and the variance Var[m] - b²
        std = (spread + LEAST_VARIANCE).sqrt()
        slope = covariance.diagonal(count, -2, -1) / std  # change of m per standard deviation of s
        # 2. the nodes z (S, 1, 1) for the largest √Var[s]; the CRPS is an integral over s up to about z = √Var[s]/4
        widest = min(float(std.detach().max()), WIDEST_LOG) if len(std) else 0.0
        reach = max(REACH, 3.0 + 0.25 * widest)
        z, weights = normal_nodes(mean, int(max(NORMAL_NODES, 2.0 * reach * widest / LOG_STEP + 2.0)), reach)
        # 3. plus the noise e^s at the nodes z (S, B, K)
        noise = (log_variance + std * z).clamp(-FARTHEST_LOG, FARTHEST_LOG).exp()
        return mean + slope * z, noise + (variance - slope.square()).clamp_min(0.0), weights
