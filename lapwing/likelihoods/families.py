"""Mixtures of any family of `torch.distributions`, and its densities and distribution functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch import distributions as dist

from ..data.frames import as_targets
from ..errors import LapwingError, is_out_of_memory, shown
from ..linalg import check_draws, doubled, seeded, seeded_torch
from .mixtures import HALVINGS
from .predictions import Prediction, RealPrediction

MOMENT_DRAWS = 64
"""Number of draws of y from each component if the family has no mean or variance."""

LARGEST, CANCELLING = 1e12, ("total_count", "df", "df1", "df2", "concentration", "concentration0", "concentration1")
"""Largest value of these parameters at which float64 has digits of a log density: it is a difference of log Γ."""

QUANTILE_DOUBLINGS = 128
"""Maximum number of doublings of the bracket of a quantile."""


def crossing(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Returns where a rising function is 0 within brackets, by secants and halvings in turn.

    A search ends where the function is 0 but for rounding of values near 1, or where the bracket is as narrow as that.
    """
    eps = torch.finfo(low.dtype).eps
    ends = function(low), function(high)
    found, best = (torch.where(ends[0].abs() < ends[1].abs(), *pair) for pair in ((low, high), ends))
    for step in range(2 * HALVINGS):
        middle = 0.5 * (low + high)
        if step % 2 == 0:
            secant = low - ends[0] * (high - low) / (ends[1] - ends[0])
            middle = torch.where((low < secant) & (secant < high), secant, middle)
        value = function(middle)
        below, closer = value < 0, value.abs() <= best.abs()
        found, best = torch.where(closer, middle, found), torch.where(closer, value, best)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        ends = torch.where(below, value, ends[0]), torch.where(below, ends[1], value)
        narrow = high - low <= eps * torch.maximum(low.abs(), high.abs())
        if bool((narrow | (best.abs() <= 4 * eps) | best.isnan()).all()):
            break
    return found


@dataclass(frozen=True, eq=False)
class MixturePrediction(RealPrediction):
    """An equal mixture over draws of any `torch.distributions` family, which a new likelihood can return.

    Angles in radians, of a VonMises, are read within π of their circular mean. A variance is `2 - 2 |E[exp(iy)]|`, and
    the ends of an arc may be beyond ±π.

    Args:
        components: distribution of y under each draw, with batch shape (B, S). Labels, which have no mean, are a
            `ClassPrediction.mixture` instead.
        density: function from targets to log densities (B, S), for targets that are not values of the family, such as
            (time, ended) of a time that may be censored. Then only `log_prob` reads targets.
        precise: the components in float64, which `log_prob` reads; None means `components`. Components with a count or
            a concentration above `LARGEST` have the density 0: torch computes them as differences of larger numbers.
    """

    components: dist.Distribution
    density: Callable[[Tensor], Tensor] | None = field(default=None, repr=False, kw_only=True)
    precise: dist.Distribution | None = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        components = self.components
        labels = isinstance(components, dist.Categorical)
        if labels or not isinstance(components, dist.Distribution) or len(components.batch_shape) < 2:
            raise LapwingError(
                "MixturePrediction needs a distribution of numbers, of batch shape (inputs, draws). This is "
                f"{shown(components)}, of batch shape {tuple(getattr(components, 'batch_shape', ()))}. Pass, for "
                "example, torch.distributions.Normal(mean, std) with tensors (inputs, draws). For labels return "
                "lapwing.likelihoods.ClassPrediction.mixture(probs), with class probabilities (inputs, draws, classes)."
            )

    mean = property(lambda self: self._moments[0])
    epistemic_variance = property(lambda self: self._moments[1])
    aleatoric_variance = property(lambda self: self._moments[2])

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean of y, variance over draws of its mean, and mean over draws of its variance, (B, ...)."""
        try:
            means, variances = self.components.mean, self.components.variance
        except NotImplementedError:  # such as a TransformedDistribution: from draws of y
            y = self._sampled(MOMENT_DRAWS)
            means, variances = y.mean(0), y.var(0)
        vectors = resultants(self.components)
        if vectors is None:
            return means.mean(1), means.var(1, correction=0), variances.mean(1)
        length, whole = vectors.abs().mean(1), vectors.mean(1)
        spread = (length - whole.abs()).clamp_min(0.0)
        return whole.angle().to(means), (2.0 * spread).to(means), (2.0 - 2.0 * length).to(means)

    def _unrolled(self, y: Tensor) -> Tensor:
        """Returns angles within π of their circular mean, and other y as they are."""
        turn = 2.0 * math.pi
        return y if resultants(self.components) is None else y - turn * ((y - self.mean) / turn).round()

    def for_metrics(self, targets: Tensor) -> dict[str, Tensor]:
        if self.density is not None:  # no target has a residual
            return Prediction.for_metrics(self, targets)
        return super().for_metrics(self._targets(targets))

    def _drawn(self, count: int) -> Tensor:
        """Returns draws of y, (N, B, ...), as many of each component."""
        return self._unrolled(self._of_components(count))

    def _of_components(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Returns at least `count` draws of y, (N, B, ...), as many of each component."""
        y = self._sampled(math.ceil(count / self.components.batch_shape[1]), generator)
        return y.movedim(2, 1).flatten(0, 1)  # (n, B, S, ...)

    def _is_discrete(self) -> bool:
        try:
            return getattr(self.components.support, "is_discrete", False)
        except NotImplementedError:  # the family defines no support
            return False

    def _quantile(self, probability: float) -> Tensor:
        """Returns a quantile from the mixture's distribution function, searched from Cantelli's bounds if they exist.

        Draws of y replace it if the family is discrete, or for values whose distribution function is unknown.
        """
        if self._is_discrete():
            return super()._quantile(probability)
        widest = math.sqrt(max(probability, 1.0 - probability) / min(probability, 1.0 - probability))

        def excess(y: Tensor) -> Tensor:
            return self._distribution_function(y) - probability

        with torch.no_grad():
            mean, width = self.mean.nan_to_num(0.0, 0.0, 0.0), widest * self.std
            width = torch.where(width.isfinite() & (width > 0), width, 1.0)
            low, high = mean - width, mean + width
            try:
                for _ in range(QUANTILE_DOUBLINGS):
                    ends = excess(low), excess(high)
                    short, flat = ends[0] >= 0, ends[1] < 0
                    if not bool((short | flat).any()):
                        break
                    width = 2.0 * width
                    low, high = torch.where(short, low - width, low), torch.where(flat, high + width, high)
                unknown = (ends[0] + ends[1]).isnan()
                bound = getattr(self._marginal.support, "lower_bound", None)
                if isinstance(bound, (int, float)) and bound == 0:  # quantiles may be far below the mean
                    tiny = torch.full_like(high, torch.finfo(high.dtype).tiny)
                    found = crossing(lambda log: excess(log.exp()), tiny.log(), high.maximum(tiny).log()).exp()
                else:
                    found = crossing(excess, low, high)
            except (NotImplementedError, ValueError):  # ValueError: some families check more than their support
                return super()._quantile(probability)
        return torch.where(unknown, super()._quantile(probability), found) if bool(unknown.any()) else found

    def _below(self, y: Tensor) -> Tensor:
        try:
            return self._distribution_function(y.to(self.mean))
        except (NotImplementedError, ValueError):
            return super()._below(y)

    def _distribution_function(self, y: Tensor) -> Tensor:
        return distribution_function(self._marginal, y.unsqueeze(1)).mean(1)

    @property
    def _marginal(self) -> Any:
        """The distribution of each output, with batch shape (B, S, ...)."""
        marginal: Any = self.components
        while isinstance(marginal, dist.Independent):
            marginal = marginal.base_dist
        return (
            dist.Normal(marginal.mean, marginal.stddev) if isinstance(marginal, dist.MultivariateNormal) else marginal
        )

    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns the log density of the targets, (B,); -inf outside the support."""
        if self.density is None:
            y = self._targets(targets).unsqueeze(1)
            if self.precise is None:
                logs = log_density(self.components, y)
            else:
                logs = log_density(self.precise, doubled(y))
                logs = torch.where(has_large_parameter(self.precise), -torch.inf, logs)
        else:
            logs = self.density(as_targets(targets, self.mean.device))
        return logs.nan_to_num(-torch.inf, torch.inf, -torch.inf).logsumexp(1) - math.log(logs.shape[1])

    def _targets(self, targets: Tensor) -> Tensor:
        """Returns the targets in the shape of the mean, angles within π of it; raises if they have another size."""
        count, _, *rest = self.components.batch_shape + self.components.event_shape
        targets, shape = as_targets(targets, _device_of(self.components)), (count, *rest)
        if targets.numel() != math.prod(shape) or targets.shape[:1] != shape[:1]:
            raise LapwingError(
                f"{type(self).__name__} needs one target for each value of shape {shape}. "
                f"The targets have shape {tuple(targets.shape)}. Write `y.reshape{shape}`. Only log_prob reads others, "
                "such as (time, ended), and needs their density=: see docs/extending.md."
            )
        return self._unrolled(targets.reshape(shape))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws y, (n, B, ...): n of equally many draws from each component, in random order."""
        check_draws("sample", "n", n, self.mean.numel())
        generator = seeded(generator, self.mean.device)
        y = self._of_components(n, generator)
        return y[torch.randperm(len(y), generator=generator, device=y.device)[:n]]

    def _sampled(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws n times from each component, with a seed from the generator."""
        device = _device_of(self.components)
        seed = torch.randint(2**62, (), generator=seeded(generator, device), device=device)
        with seeded_torch(int(seed), device):
            return _draws(self.components, n)

    def distribution(self) -> dist.MixtureSameFamily:
        """Returns a `torch.distributions.MixtureSameFamily` with batch shape (B,)."""
        weights = torch.zeros(self.components.batch_shape, device=_device_of(self.components))
        return dist.MixtureSameFamily(dist.Categorical(logits=weights), self.components)


def _draws(family: dist.Distribution, count: int) -> Tensor:
    """Returns draws. Angles of a VonMises follow Best and Fisher 1979, and only rejected angles are drawn again."""
    if isinstance(family, dist.Independent):
        return _draws(family.base_dist, count)
    if not isinstance(family, dist.VonMises):
        y = family.sample((count,))
        return y if y.is_floating_point() else y.float()  # such as rankings
    kappa = doubled(family.concentration).clamp_min(1e-9).expand(count, *family.batch_shape).flatten()
    ratio = (1.0 + (1.0 + 4.0 * kappa.square()).sqrt()) / (2.0 * kappa)
    angles, left = torch.empty_like(kappa), torch.arange(len(kappa), device=kappa.device)
    while len(left):
        first, second, third = torch.rand(3, len(left), dtype=kappa.dtype, device=kappa.device)
        z, r = (math.pi * first).cos(), ratio[left]
        cosine = (1.0 + r * z) / (r + z)
        c = kappa[left] * (r - cosine)
        angles[left] = (third - 0.5).sign() * cosine.clamp(-1.0, 1.0).acos()
        left = left[(c * (2.0 - c) <= second) & ((c / second).log() + 1.0 < c)]
    return (angles.view(count, *family.batch_shape).to(family.loc) + family.loc + math.pi) % (2.0 * math.pi) - math.pi


def log_density(family: Any, y: Tensor) -> Tensor:
    """Returns `log p(y)` under a distribution, -inf outside its support; each part of a mixture has its own support."""
    if isinstance(family, dist.Independent):
        logs = log_density(family.base_dist, y)
        return logs.reshape(*logs.shape[: logs.ndim - family.reinterpreted_batch_ndims], -1).sum(-1)
    if isinstance(family, dist.MixtureSameFamily):
        logs = log_density(family.component_distribution, y.unsqueeze(-1 - len(family.event_shape)))
        return (logs + family.mixture_distribution.logits.log_softmax(-1)).logsumexp(-1)
    try:
        with validation(False):
            logs = family.log_prob(y)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, LapwingError) or is_out_of_memory(error):
            raise
        raise LapwingError(
            f"The log_prob of {type(family).__name__} raised {type(error).__name__} ({error}) at values of shape "
            f"{tuple(y.shape)}. It must accept targets, and draws of its sample(), of batch_shape + event_shape. For "
            "targets of another form, such as (time, ended), write a likelihood: see docs/extending.md."
        ) from error
    try:
        inside = family.support.check(y)
        if type(family) is dist.TransformedDistribution:  # torch checks the support of the transform only
            x = dist.ComposeTransform(family.transforms).inv(y)
            inside = inside & family.base_dist.support.check(x)  # type: ignore[union-attr]
        inside = inside if inside.ndim == logs.ndim else inside.flatten(logs.ndim).all(-1)  # a check of each number
        return torch.where(inside, logs, -torch.inf)
    except NotImplementedError:  # the family defines no support
        return logs


def has_large_parameter(family: Any) -> Tensor:
    """Whether a member of a batch of distributions has one of the parameters `CANCELLING` above `LARGEST`."""
    if isinstance(family, dist.Independent):
        return has_large_parameter(family.base_dist).flatten(-family.reinterpreted_batch_ndims).any(-1)
    if isinstance(family, dist.MixtureSameFamily):
        return has_large_parameter(family.component_distribution).any(-1)
    if isinstance(family, dist.TransformedDistribution):
        return has_large_parameter(family.base_dist).reshape(family.batch_shape)
    large = torch.zeros(family.batch_shape, dtype=torch.bool, device=_device_of(family))
    for name in CANCELLING:
        value = getattr(family, name, None)
        if isinstance(value, Tensor):
            above = value > LARGEST
            large = large | (above.any(-1) if value.ndim > len(family.batch_shape) else above)
    return large


def distribution_function(family: Any, y: Tensor) -> Tensor:
    """Returns `P(Y <= y)` under a distribution of numbers: also for y outside its support, where torch has no value."""
    if isinstance(family, dist.MixtureSameFamily):
        parts = distribution_function(family.component_distribution, y.unsqueeze(-1))
        return (family.mixture_distribution.probs * parts).sum(-1)
    support = family.support
    with validation(False):
        if type(family) is dist.TransformedDistribution:  # torch checks the support of the transform only
            move = dist.ComposeTransform(family.transforms)
            below = distribution_function(family.base_dist, move.inv(y))
            below = torch.where(torch.as_tensor(move.sign, device=y.device) > 0, below, 1.0 - below)
        else:
            below = family.cdf(y)
    return torch.where(support.check(y), below, (y >= getattr(support, "upper_bound", torch.inf)).to(below))


def resultants(family: Any) -> Tensor | None:
    """Returns `E[exp(iy)]` of angles y, complex, for each member of a batch; None for other families."""
    if isinstance(family, dist.VonMises):
        return torch.polar(1.0 - doubled(family.variance), doubled(family.loc))
    if isinstance(family, dist.Independent):
        return resultants(family.base_dist)
    if isinstance(family, dist.MixtureSameFamily):
        parts, events = resultants(family.component_distribution), len(family.event_shape)
        weights = family.mixture_distribution.probs[(..., *[None] * events)]
        return None if parts is None else (weights * parts).sum(-1 - events)
    return None


@contextmanager
def validation(on: bool) -> Iterator[None]:
    """Turns torch's checks of parameters and values of distributions on or off within a block."""
    before = dist.Distribution._validate_args
    dist.Distribution.set_default_validate_args(on)
    try:
        yield
    finally:
        dist.Distribution.set_default_validate_args(before)


def _device_of(family: dist.Distribution) -> torch.device:
    """Returns the device of the first parameter of a distribution, which may wrap others."""
    parts = vars(family).values()
    found = (part.device for part in parts if isinstance(part, Tensor))
    return next(found, None) or _device_of(next(part for part in parts if isinstance(part, dist.Distribution)))
