"""Predictions: the distribution of y, as observed. Class probabilities and real values.

B inputs, C outputs, S draws. Everything is differentiable in the latent's mean and variance (samples of labels aside).
Where randomness is needed and ``generator`` is None, a generator with seed 0 is made on the latent's device: the same
call gives the same answer, so pass a generator of your own for fresh draws.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Integral, Real
from statistics import NormalDist

import torch
from torch import Tensor
from torch import distributions as dist

from lapwing import linalg
from lapwing.errors import LapwingError, shown
from lapwing.likelihoods.links import LatentLike, Link, at_least_float32, draw_chunks, seeded, weight_draws
from lapwing.likelihoods.mixtures import mixture_log_density, mixture_quantile
from lapwing.likelihoods.targets import aligned_targets, check_labels, check_real_targets
from lapwing.network import batches


class Prediction(ABC):
    """The distribution of y at B inputs."""

    @abstractmethod
    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the log density of the targets at every input, (B,)."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw y n times at every input; the first axis is n."""

    @abstractmethod
    def distribution(self) -> dist.Distribution:
        """Return the prediction as a ``torch.distributions`` object."""


@dataclass(frozen=True, eq=False, repr=False)
class ClassPrediction(Prediction):
    """Class probabilities at B inputs.

    Args:
        log_probs: Log probabilities, (B, C).
        latent: The latent they come from, for `mutual_information` and joint samples.
        link: The link that made them.
    """

    log_probs: Tensor
    latent: LatentLike
    link: Link

    @property
    def probs(self) -> Tensor:
        """Class probabilities, (B, C)."""
        return self.log_probs.exp()

    @property
    def confidence(self) -> Tensor:
        """Probability of the likeliest class, (B,)."""
        return self.log_probs.amax(-1).exp()

    @property
    def classes(self) -> Tensor:
        """The likeliest class, int64 (B,)."""
        return self.log_probs.argmax(-1)

    def entropy(self) -> Tensor:
        """Return the total uncertainty ``-Σ_c p_c log p_c`` in nats, (B,)."""
        return _entropy(self.log_probs)

    def mutual_information(self, draws: int = 512, generator: torch.Generator | None = None) -> Tensor:
        """Return the epistemic part of the entropy, ``H[E p] - E H[p]`` in nats, (B,).

        The information between the label and the weights (BALD; Houlsby et al. 2011, equation 2), from latent draws f
        with ``p = softmax(f)``; the mean is that of the draws, not the link's, so that the result is never negative.
        Accumulated in float64. From S draws it is biased downwards by O(1/S).

        Args:
            draws: Number of draws; a latent that holds weight draws gives all of its own instead.
            generator: Source of randomness; None means seed 0.

        Returns:
            Mutual information, (B,), between 0 and `entropy` of the averaged draws. Time O(draws B C).

        Raises:
            LapwingError: if ``draws`` is below 1.
        """
        check_count("mutual_information", "draws", draws)
        total, entropies, count = None, torch.zeros((), dtype=torch.float64, device=self.log_probs.device), 0
        for chunk in draw_chunks(self.latent, draws, generator):
            logs = torch.log_softmax(chunk.double(), -1)  # (s, B, C)
            part = logs.logsumexp(0)
            total = part if total is None else torch.logaddexp(total, part)
            entropies = entropies + _entropy(logs).sum(0)
            count += len(chunk)
        assert total is not None
        information = _entropy(total - math.log(count)) - entropies / count
        return information.clamp_min(0.0).to(self.log_probs.dtype)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the log probability of integer labels (B,), one input at a time, (B,).

        Args:
            targets: Labels, (B,).

        Returns:
            Log probabilities, (B,).

        Raises:
            LapwingError: for labels of a wrong shape, dtype or range.
        """
        targets = batches.plain(targets, self.log_probs.device)
        check_labels("ClassPrediction.log_prob", self.log_probs.shape, self.log_probs.device, targets)
        return self.log_probs.gather(-1, targets.long()[:, None]).squeeze(-1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw labels, int64 (n, B).

        Inputs are independent and follow `probs`. From a joint latent the logits are drawn jointly first, so that
        labels of related inputs agree as they should; their frequencies are then those of `SampledLink`.

        Args:
            n: Number of draws.
            generator: Source of randomness; None means seed 0.

        Returns:
            Labels, (n, B).

        Raises:
            LapwingError: if ``n`` is below 1.
        """
        check_count("sample", "n", n, 2 * len(self.log_probs))
        generator = seeded(generator, self.log_probs.device)
        if not self.latent.joint:
            return torch.multinomial(self.probs.detach(), n, replacement=True, generator=generator).T
        probs = at_least_float32(self.latent.sample(n, generator)).detach().softmax(-1)  # (n, B, C)
        labels = torch.multinomial(probs.flatten(0, 1), 1, generator=generator)  # (n·B, 1)
        return labels.reshape(probs.shape[:2])

    def distribution(self) -> dist.Categorical:
        """Return ``torch.distributions.Categorical`` with batch shape (B,)."""
        return dist.Categorical(logits=self.log_probs)

    def __repr__(self) -> str:
        """Show sizes and link rather than numbers."""
        inputs, classes = self.log_probs.shape
        return f"ClassPrediction({inputs} inputs, {classes} classes, link={self.link})"


@dataclass(frozen=True, eq=False, repr=False)
class RegressionPrediction(Prediction):
    """Real outputs at B inputs: the latent plus independent Gaussian noise.

    A latent that holds weight draws makes an equal mixture of Gaussians, ``1/S Σ_s N(f_s, σ² I)``; then `log_prob` and
    `interval` are those of the mixture, and `mean` and `variance` its moments.

    Args:
        latent: The latent over outputs.
        noise_variance: σ², in squared units of y.
    """

    latent: LatentLike
    noise_variance: float

    @property
    def mean(self) -> Tensor:
        """Mean of y, (B, C)."""
        return at_least_float32(self.latent.mean)

    @property
    def epistemic_variance(self) -> Tensor:
        """Variance of the latent, (B, C): it shrinks with data."""
        return at_least_float32(self.latent.variance)

    @property
    def aleatoric_variance(self) -> Tensor:
        """Variance of the noise, (B, C): it does not."""
        return torch.full_like(self.mean, self.noise_variance)

    @property
    def variance(self) -> Tensor:
        """Total variance of y, epistemic plus aleatoric, (B, C)."""
        return self.epistemic_variance + self.noise_variance

    @property
    def std(self) -> Tensor:
        """Total standard deviation of y, (B, C)."""
        return self.variance.sqrt()

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return the central interval that holds y with probability ``level``, one output at a time.

        Exact: Gaussian quantiles, or for weight draws those of the mixture by bisection.

        Args:
            level: Probability in (0, 1).

        Returns:
            Lower and upper ends, each (B, C).

        Raises:
            LapwingError: if ``level`` is not in (0, 1).
        """
        check_level(level)
        draws = self._draws()
        if draws is None:
            half = NormalDist().inv_cdf(0.5 + 0.5 * level) * self.std
            return self.mean - half, self.mean + half
        tail = 0.5 * (1.0 - level)
        return mixture_quantile(draws, self.noise_variance, tail), mixture_quantile(
            draws, self.noise_variance, 1.0 - tail
        )

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the log density of the targets, one input at a time, (B,).

        ``log N(y; m, Σ + σ² I)`` with the (C, C) covariance of the outputs of one input. Inputs are never coupled, also
        not from a joint latent: for the joint density write ``distribution().log_prob(y.flatten())``.

        Args:
            targets: y, (B, C), or (B,) when C = 1.

        Returns:
            Log densities, (B,), in nats. Cost O(B C³), or O(S B C) for S weight draws.

        Raises:
            LapwingError: for targets of a wrong shape or dtype, or not finite.
        """
        mean, draws = self.mean, self._draws()
        targets = batches.plain(targets, mean.device)
        check_real_targets("RegressionPrediction.log_prob", mean.shape, mean.device, targets)
        targets = aligned_targets("RegressionPrediction.log_prob", mean, targets)
        if draws is not None:
            return mixture_log_density(draws, self.noise_variance, targets)
        if mean.shape[-1] == 1:
            return dist.Normal(mean, self.std, validate_args=False).log_prob(targets).squeeze(-1)
        factor = linalg.cholesky(self._noisy(self._blocks().double()))  # (B, C, C)
        normal = dist.MultivariateNormal(mean.double(), scale_tril=factor, validate_args=False)
        return normal.log_prob(targets.double()).to(mean.dtype)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw y, (n, B, C): latent draws (joint across inputs where the latent is) plus fresh noise.

        Args:
            n: Number of draws.
            generator: Source of randomness; None means seed 0.

        Returns:
            Draws, (n, B, C).

        Raises:
            LapwingError: if ``n`` is below 1.
        """
        check_count("sample", "n", n, self.latent.mean.numel())
        generator = seeded(generator, self.latent.mean.device)
        latent = at_least_float32(self.latent.sample(n, generator))
        noise = torch.randn(latent.shape, generator=generator, dtype=latent.dtype, device=latent.device)
        return latent + math.sqrt(self.noise_variance) * noise

    def distribution(self) -> dist.Distribution:
        """Return y as a ``torch.distributions`` object.

        Returns:
            Batch shape (B,), event shape (C,): a Normal for one output, a MultivariateNormal for several, a mixture for
            weight draws. From a joint latent batch shape () and event shape (B·C,), inputs first.
        """
        mean, draws = self.mean, self._draws()
        if draws is not None:
            centres = draws.flatten(1) if self.latent.joint else draws.transpose(0, 1)  # (S, B·C) or (B, S, C)
            noise = torch.full_like(centres, math.sqrt(self.noise_variance))
            weights = dist.Categorical(logits=torch.zeros_like(centres[..., 0]))
            return dist.MixtureSameFamily(weights, dist.Independent(dist.Normal(centres, noise), 1))
        if self.latent.joint:
            size = mean.numel()
            covariance = at_least_float32(self.latent.covariance).reshape(size, size)  # (B, C, B, C) -> (B·C, B·C)
            return dist.MultivariateNormal(mean.flatten(), scale_tril=linalg.cholesky(self._noisy(covariance)))
        if mean.shape[-1] == 1:
            return dist.Independent(dist.Normal(mean, self.std), 1)
        return dist.MultivariateNormal(mean, scale_tril=linalg.cholesky(self._noisy(self._blocks())))

    def __repr__(self) -> str:
        """Show sizes and noise rather than tensors."""
        inputs, outputs = self.latent.mean.shape
        return f"RegressionPrediction({inputs} inputs, {outputs} outputs, noise_variance={self.noise_variance:g})"

    def _draws(self) -> Tensor | None:
        """Return weight draws in at least float32, or None."""
        draws = weight_draws(self.latent)
        return None if draws is None else at_least_float32(draws)

    def _blocks(self) -> Tensor:
        """Return the latent covariance of every input, (B, C, C)."""
        covariance = at_least_float32(self.latent.covariance)
        return covariance.diagonal(dim1=0, dim2=2).movedim(-1, 0) if self.latent.joint else covariance

    def _noisy(self, covariance: Tensor) -> Tensor:
        """Add σ² I."""
        eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
        return covariance + self.noise_variance * eye


def _entropy(log_probs: Tensor) -> Tensor:
    """Return the entropy in nats over the last axis."""
    return -(log_probs.exp() * log_probs).sum(-1)


def check_level(level: float) -> None:
    """Refuse what is no probability between 0 and 1."""
    if not (isinstance(level, Real) and 0.0 < level < 1.0):
        raise LapwingError(f"interval() accepts a level between 0 and 1, found {shown(level)}; write interval(0.9).")


def check_count(asked: str, name: str, count: int, numbers: int = 0) -> None:
    """Refuse what is no whole number, fewer than one draw, or more draws of so many numbers than memory holds."""
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
        raise LapwingError(
            f"{asked}() needs a whole number of draws, at least 1, found {name}={shown(count)}; write "
            f"{asked}({name}=512)."
        )
    linalg.check_memory(f"{asked}({count})", count, numbers)
