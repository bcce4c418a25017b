"""Base classes of predictions: the distribution of y at B inputs, of labels or of real values.

B inputs, C outputs, S draws. All results except samples of labels are differentiable in the latent's mean and variance.
If a method draws and `generator` is None, it uses a new generator with seed 0 on the latent's device, so the same call
gives the same result. Pass a generator to get different draws.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch import distributions as dist
from typing_extensions import TypeVar

from ..data.frames import as_targets
from ..display import Displayed
from ..errors import LapwingError, check_choice, shown
from .targets import aligned_targets, check_target_shape

QUANTILE_DRAWS = 4096
"""Number of draws of y for quantiles and scores, or a quarter of it for more than 1 000 values."""

PRINTED = 4
"""Number of inputs, and of outputs of one input, that the text of a prediction shows."""

PSEUDO_WEIGHT = 0.25
"""Weight, in rows, of the pseudo-row with a uniform label that losses of held-out labels count.

Without it the temperature of highest likelihood is 0 if all held-out labels are right. A whole row softens a calibrated
network too much if there are about 20 held-out rows: benchmarks/README.md has the measurement.
"""


class Prediction(Displayed, ABC):
    """The distribution of y at B inputs. A new prediction extends `DiscretePrediction` or `RealPrediction`."""

    _internal = frozenset({"for_metrics", "point", "summary", "uncertainty", "pseudo_row"})

    _printed: ClassVar[tuple[str, ...]] = ()  # tensors (B, ...) of which `print` shows the first numbers

    def __str__(self) -> str:
        lines = [repr(self)]
        for name in self._printed:
            first = getattr(self, name).detach()[: PRINTED + 1].tolist()
            lines.append(f"  {name}: {_brief(first)[1:-1]}")
        return "\n".join(lines)

    if not TYPE_CHECKING:  # type checkers find such attributes themselves

        def __getattr__(self, name: str) -> Any:
            """Raises for a quantity of another kind of prediction, such as `interval` of classes, and lists its own."""
            if hasattr(type(self), name):
                return self.__getattribute__(name)  # its own error is shown
            own = ", ".join(part for part in dir(self) if not part.startswith("_"))
            raise AttributeError(f"{type(self).__name__} has no {name}. It has {own}.")

    @abstractmethod
    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns the log density (B,) of the targets (B, C), or (B,) for one output or for labels; checks them."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws y n times at every input; the first axis is n. None for the generator means seed 0."""

    @abstractmethod
    def distribution(self) -> dist.Distribution:
        """Returns the prediction as a `torch.distributions` object."""

    @property
    @abstractmethod
    def point(self) -> Tensor:
        """The single best y in the form of targets: the most probable class, or the mean."""

    @abstractmethod
    def uncertainty(self, score: str = "entropy") -> Tensor:
        """Returns one value per input, (B,), larger for less certain predictions."""

    @abstractmethod
    def summary(self) -> dict[str, Tensor]:
        """Returns the outputs of a deployed network by name, as functions of the latent's means and variances."""

    def pseudo_row(self, outputs: Tensor) -> Tensor | None:
        """Returns `PSEUDO_WEIGHT mean_c log p_c` (B,) over the labels c possible at outputs (B, C); None for real y."""
        return None

    def for_metrics(self, targets: Tensor) -> dict[str, Tensor]:
        """Returns the tensors for metrics by name, with rows in the order of the inputs; checks the targets.

        "sample" has the number of the input of each log probability; "entry" of other tensors, if they differ.
        """
        log_prob = self.log_prob(targets)
        return {"log_prob": log_prob, "sample": torch.arange(len(log_prob), device=log_prob.device)}


P = TypeVar("P", bound=Prediction, default=Any, covariant=True)
"""The class of a likelihood's predictions: `Likelihood` without brackets is one of any predictions."""


def _brief(value: Any) -> str:
    """Returns numbers and nested lists as text, at most `PRINTED` entries of each."""
    if not isinstance(value, list):
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"[{', '.join([*map(_brief, value[:PRINTED]), *['...'] * (len(value) > PRINTED)])}]"


class DiscretePrediction(Prediction):
    """The distribution of labels, given by probabilities."""

    _printed = "classes", "confidence"

    @property
    @abstractmethod
    def probs(self) -> Tensor:
        """Probabilities, (B, C)."""

    @property
    @abstractmethod
    def classes(self) -> Tensor:
        """The most probable labels, int64."""

    @property
    @abstractmethod
    def confidence(self) -> Tensor:
        """Probability of the most probable labels, (B,)."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """Returns the total uncertainty in nats, (B,)."""

    @property
    def point(self) -> Tensor:
        return self.classes

    def scaled(self, mean: Any = 0.0, std: Any = 1.0) -> NoReturn:
        raise LapwingError(
            f"scaled() is for predictions of real values, and {type(self).__name__} predicts labels, which have no "
            "units. Leave it out."
        )

    def uncertainty(self, score: str = "entropy") -> Tensor:
        """Returns the entropy, the mutual information, or 1 minus the confidence, (B,)."""
        check_choice("uncertainty", "score", score, ("entropy", "confidence", "mutual_information"))
        return 1 - self.confidence if score == "confidence" else getattr(self, score)()

    def summary(self) -> dict[str, Tensor]:
        return {"probabilities": self.probs}

    def for_metrics(self, targets: Tensor) -> dict[str, Tensor]:
        """Returns log probabilities (B,), class probabilities (B, C) and labels (B,)."""
        return {**super().for_metrics(targets), "probs": self.probs, "labels": targets}


class RealPrediction(Prediction):
    """The distribution of real values or counts, with a mean, variances and intervals."""

    _printed = "mean", "std"

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """Mean of y, (B, ...)."""

    @property
    @abstractmethod
    def epistemic_variance(self) -> Tensor:
        """Variance of y due to uncertain weights, (B, ...), which decreases with more data."""

    @property
    @abstractmethod
    def aleatoric_variance(self) -> Tensor:
        """Variance of y due to noise, (B, ...), which does not decrease with more data."""

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Returns the lower and upper end of the central interval that holds y with probability `level`, each (B, ...).

        The level is in (0, 1), for each output separately. The ends are the quantiles at `(1 - level)/2` and
        `(1 + level)/2`. Ends of discrete y are values that belong to the interval.
        """
        low, high = map(self._quantile, tails_of(level))
        return low, high

    def quantile(self, probability: float) -> Tensor:
        """Returns the smallest y with `P(Y <= y) >= probability`, (B, ...), for each output and a number in (0, 1).

        Quantiles, `pit` and `crps` are exact for mixtures of normals, quantiles and `pit` also for families with a
        distribution function. Otherwise they use 4 096 draws of y, or 1 024 for more than 1 000 values.
        """
        if not (isinstance(probability, Real) and 0.0 < probability < 1.0):
            raise LapwingError(
                f"The probability of quantile() is {shown(probability)}. Pass a number between 0 and 1: quantile(0.5)."
            )
        return self._quantile(float(probability))

    def pit(self, targets: Tensor) -> Tensor:
        """Returns the probability integral transform `P(Y <= y)` of each target, (B, ...); NaN for missing targets.

        It is uniform in [0, 1] over the targets if predictions of continuous y are calibrated.
        """
        y = self._targets(targets)
        missing = y.isnan()
        return torch.where(missing, torch.nan, self._below(torch.where(missing, self.mean.to(y), y))).to(self.mean)

    def crps(self, targets: Tensor) -> Tensor:
        """Returns the CRPS `E|Y - y| - 1/2 E|Y - Y'| = ∫ (F(t) - 1[t ≥ y])² dt` of each target, (B, ...), in y's unit.

        It is NaN for missing targets. Smaller is better (Gneiting and Raftery 2007).
        """
        return self._crps(self._targets(targets)).to(self.mean)

    def _quantile(self, probability: float) -> Tensor:
        place = probability * (len(self._sorted) - 1)
        low, high = self._sorted[math.floor(place)], self._sorted[math.ceil(place)]
        return high if self._is_discrete() else low + (place - math.floor(place)) * (high - low)

    def _below(self, y: Tensor) -> Tensor:
        return (self._sorted <= y).to(self.mean).mean(0)

    def _crps(self, y: Tensor) -> Tensor:
        count = len(self._sorted)
        ranks = torch.arange(1 - count, count, 2).to(self._sorted)
        return (self._sorted - y).abs().mean(0) - torch.tensordot(ranks, self._sorted, 1) / (count * (count - 1))

    @cached_property
    def _sorted(self) -> Tensor:
        """Draws of y, (N, B, ...), in rising order."""
        count = QUANTILE_DRAWS if self.mean.numel() <= 1000 else QUANTILE_DRAWS // 4
        return self._drawn(count).sort(0).values

    def _drawn(self, count: int) -> Tensor:
        return self.sample(count)

    def _targets(self, targets: Tensor) -> Tensor:
        """Returns the targets in the shape and dtype of the mean; checks them."""
        return self._aligned(targets, self.mean, check_target_shape)

    @property
    def variance(self) -> Tensor:
        """Total variance of y, epistemic plus aleatoric, (B, ...)."""
        return self.epistemic_variance + self.aleatoric_variance

    @property
    def std(self) -> Tensor:
        """Total standard deviation of y, (B, ...)."""
        return self.variance.sqrt()

    @property
    def point(self) -> Tensor:
        return self.mean

    def scaled(self, mean: Any = 0.0, std: Any = 1.0) -> ScaledPrediction:
        """Returns the prediction in the units of `mean + std * y`, for a network trained on standardised y.

        Its densities are in the new units too: `log p(mean + std y) = log p(y) - Σ_c log std_c`. Counts have no units.

        Args:
            mean: mean of the original targets: a number, or one for each output (C,) as a tensor, an array or a list.
            std: positive standard deviation of the original targets, in the same forms.

        Example:
            >>> import torch, lapwing as lw
            >>> x, y = torch.randn(50, 2), 100 + 20 * torch.randn(50, 1)
            >>> model = torch.nn.Linear(2, 1).eval()
            >>> posterior = lw.fit(model, (x, (y - y.mean()) / y.std()))
            >>> prediction = posterior.predict(x).scaled(y.mean(), y.std())
            >>> prediction.mean.shape, prediction.log_prob(y).shape
            (torch.Size([50, 1]), torch.Size([50]))
        """
        if self._is_discrete():
            raise LapwingError(
                f"scaled() is for predictions of real values, and this {type(self).__name__} predicts counts, which "
                "have no other unit. Leave it out."
            )
        shift, scale = (self._numbers_of(name, value) for name, value in (("mean", mean), ("std", std)))
        if not bool((scale > 0).all()):
            raise LapwingError("The std of scaled() is not positive everywhere. Pass a positive one for each output.")
        return ScaledPrediction(self, shift, scale)

    def transformed(self, function: Callable[[Tensor], Tensor]) -> RealPrediction:
        """Returns the prediction of a monotone function of each y: `transformed(torch.exp)` after a fit to log y.

        For `lw.Gaussian()`, also after `scaled`. Intervals map exactly, mean and variances are integrals over 65 nodes
        of f (or weight draws) and 65 of the noise, and `log_prob` has the Jacobian. The function gets all outputs
        (..., C), and may change some: `lambda y: torch.cat([y[..., :1].exp(), y[..., 1:]], -1)`.
        """
        raise LapwingError(
            f"transformed() is for predictions of lw.Gaussian(), not for {type(self).__name__}. Use draws: "
            "function(prediction.sample(4096))."
        )

    def __repr__(self) -> str:
        inputs, *outputs = self.mean.shape
        return f"{type(self).__name__}({inputs} inputs, {math.prod(outputs)} outputs)"

    def _is_discrete(self) -> bool:
        """Whether y has only discrete values, and so probabilities instead of a density."""
        return False

    def _aligned(self, targets: Any, like: Tensor, check: Callable[..., None], *options: Any) -> Tensor:
        """Returns targets in the shape, dtype and device of `like` (B, C), after a check of them."""
        name, targets = type(self).__name__, as_targets(targets, like.device)
        check(name, like.shape, like.device, targets, *options)
        return aligned_targets(name, like, targets)

    def _numbers_of(self, name: str, value: Any) -> Tensor:
        """Returns an argument of `scaled` as a tensor (C,), or () if the mean is (B,)."""
        outputs = self.mean.shape[1:]
        try:
            numbers = torch.as_tensor(value, dtype=self.mean.dtype, device=self.mean.device)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            numbers = None
        fits = numbers is not None and (numbers.numel() == 1 or numbers.shape == outputs[len(outputs) - numbers.ndim :])
        if numbers is None or not fits or not bool(numbers.isfinite().all()):
            raise LapwingError(
                f"The {name} of scaled() is {shown(value)}. Pass a finite number, or one for each output, of shape "
                f"{tuple(outputs)}."
            )
        return (numbers.reshape(()) if numbers.numel() == 1 else numbers).expand(outputs)

    def uncertainty(self, score: str = "entropy") -> Tensor:
        """Returns `½ Σ_c log(1 + epistemic / aleatoric)` as mutual information, else `½ Σ_c log variance`, (B,)."""
        ratio = self.epistemic_variance / self.aleatoric_variance.clamp_min(1e-30)
        logs = ratio.log1p() if score == "mutual_information" else self.variance.log()
        return 0.5 * logs[:, None].flatten(1).sum(1)

    def summary(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "variance": self.variance}

    def for_metrics(self, targets: Tensor) -> dict[str, Tensor]:
        """Returns log densities (B,), and means, deviations, ends of 90 % intervals, CRPS and targets, (B, ...).

        "output" has the number of the output of each of them. Predictions of continuous y also have the PIT. If some
        targets are missing, all but the log densities have one entry for each known target.
        """
        rows, (lower, upper), y = super().for_metrics(targets), self.interval(0.9), targets.reshape(self.mean.shape)
        entry = rows["sample"].reshape(-1, *[1] * (y.ndim - 1)).expand(y.shape)
        output = torch.arange(y[:1].numel(), device=y.device).repeat(len(y)).reshape(y.shape)
        values = {"mean": self.mean, "std": self.std, "lower": lower, "upper": upper, "y": y}
        values |= {"entry": entry, "output": output, "crps": self.crps(targets)}
        values |= {} if self._is_discrete() else {"pit": self.pit(targets)}
        known = ~y.isnan()
        if not bool(known.all()):
            values = {name: value[known] for name, value in values.items()}
        return {**rows, **values}


@dataclass(frozen=True, eq=False, repr=False)
class ScaledPrediction(RealPrediction):
    """A prediction of y in the units of `shift + scale * y`, with shift and scale (C,), or () for one of shape (B,)."""

    prediction: RealPrediction
    shift: Tensor
    scale: Tensor

    @property
    def mean(self) -> Tensor:
        return self._moved(self.prediction.mean)

    @property
    def epistemic_variance(self) -> Tensor:
        return self.scale.square() * self.prediction.epistemic_variance

    @property
    def aleatoric_variance(self) -> Tensor:
        return self.scale.square() * self.prediction.aleatoric_variance

    @property
    def covariance(self) -> Tensor:
        inner: Any = self.prediction
        return self.scale * inner.covariance * self.scale[:, None]

    def pit(self, targets: Tensor) -> Tensor:
        return self.prediction.pit(self._inner(targets)[0])

    def crps(self, targets: Tensor) -> Tensor:
        return self.scale * self.prediction.crps(self._inner(targets)[0])

    def _quantile(self, probability: float) -> Tensor:
        return self._moved(self.prediction.quantile(probability))

    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns the log density of the targets, (B,): `log p((y - shift) / scale) - Σ_c log scale_c`."""
        targets, logs = self._inner(targets)
        values = self.prediction.log_prob(targets)
        return values - logs.reshape(*values.shape, -1).sum(-1)

    def _inner(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `(y - shift) / scale`, and `log scale` at each known y; raises for targets of another size."""
        shape = self.prediction.mean.shape
        targets, logs = as_targets(targets, self.shift.device), self.scale.log().expand(shape)
        if not isinstance(targets, Tensor) or targets.numel() != shape.numel() or targets.shape[:1] != shape[:1]:
            self.prediction._targets(targets)  # raises
        dtype = torch.promote_types(targets.dtype, self.shift.dtype)
        moved = (targets.reshape(shape).to(dtype) - self.shift) / self.scale
        return moved.reshape(targets.shape), logs.masked_fill(moved.isnan(), 0.0)  # missing targets

    def transformed(self, function: Callable[[Tensor], Tensor]) -> RealPrediction:
        return self.prediction.transformed(lambda y: function(self._moved(y)))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self._moved(self.prediction.sample(n, generator))

    def distribution(self) -> dist.Distribution:
        """Returns a `torch.distributions.TransformedDistribution` with the shapes of the prediction's distribution."""
        base = self.prediction.distribution()
        shift, scale = self.shift, self.scale
        if shift.ndim and base.event_shape != shift.shape:  # a joint latent: all inputs and outputs in one event
            shift, scale = (values.expand(self.mean.shape).flatten() for values in (shift, scale))
        move = dist.AffineTransform(shift, scale, event_dim=len(base.event_shape))
        return dist.TransformedDistribution(base, [move])

    def __repr__(self) -> str:
        return f"ScaledPrediction({self.prediction!r})"

    def _moved(self, y: Tensor) -> Tensor:
        return self.shift + self.scale * y


def tails_of(level: float) -> tuple[float, float]:
    """Returns the probabilities of y below the two ends of a central interval; checks the level."""
    if not (isinstance(level, Real) and 0.0 < level < 1.0):
        raise LapwingError(f"The level of interval() is {shown(level)}. Pass a number between 0 and 1: interval(0.9).")
    return 0.5 - 0.5 * level, 0.5 + 0.5 * level
