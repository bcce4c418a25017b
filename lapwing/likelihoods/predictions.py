"""What all predictions offer: the distribution of y at B inputs, of labels or of real values.

B inputs, C outputs, S draws. Everything is differentiable in the latent's mean and variance (samples of labels aside).
Where randomness is needed and `generator` is None, a generator with seed 0 is made on the latent's device: the same
call gives the same answer, so pass a generator of your own for fresh draws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from numbers import Integral, Real

import torch
from torch import Tensor
from torch import distributions as dist

from .. import linalg
from ..errors import LapwingError, shown


class Prediction(ABC):
    """The distribution of y at B inputs. A new one extends `DiscretePrediction` or `RealPrediction`."""

    @abstractmethod
    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns the log density of the targets at every input, (B,)."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws y n times at every input; the first axis is n."""

    @abstractmethod
    def distribution(self) -> dist.Distribution:
        """Returns the prediction as a `torch.distributions` object."""

    @property
    @abstractmethod
    def point(self) -> Tensor:
        """The single y that stands for the prediction, in the form of targets: the likeliest class, or the mean."""

    @abstractmethod
    def uncertainty(self, score: str = "entropy") -> Tensor:
        """Returns one number for each input, (B,), that is larger where the prediction is less sure.

        Args:
            score: "entropy", or "confidence" for 1 minus the largest probability, where y is discrete.
        """

    @abstractmethod
    def summary(self) -> dict[str, Tensor]:
        """Returns what a deployed network returns, by name: plain functions of the latent's means and variances."""

    def for_metrics(self, targets: Tensor) -> dict[str, Tensor]:
        """Returns what metrics compare, by name, rows in the order of the inputs; checks the targets."""
        return {"log_prob": self.log_prob(targets)}


class DiscretePrediction(Prediction):
    """The distribution of labels: probabilities in place of a mean and a variance."""

    @property
    @abstractmethod
    def probs(self) -> Tensor:
        """Probabilities, (B, C)."""

    @property
    @abstractmethod
    def classes(self) -> Tensor:
        """The likeliest labels, int64."""

    @property
    @abstractmethod
    def confidence(self) -> Tensor:
        """Probability of the likeliest labels, (B,)."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """Returns the total uncertainty in nats, (B,)."""

    @property
    def point(self) -> Tensor:
        """The likeliest labels, as `classes`."""
        return self.classes

    def uncertainty(self, score: str = "entropy") -> Tensor:
        """Returns the entropy, or 1 minus the confidence, (B,)."""
        return self.entropy() if score == "entropy" else 1 - self.confidence

    def summary(self) -> dict[str, Tensor]:
        """Returns the probabilities."""
        return {"probabilities": self.probs}

    def for_metrics(self, targets: Tensor) -> dict[str, Tensor]:
        """Returns log probabilities (B,), class probabilities (B, C) and labels (B,)."""
        return {**super().for_metrics(targets), "probs": self.probs, "labels": targets}


class RealPrediction(Prediction):
    """The distribution of real values or counts: a mean, variances and intervals."""

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """Mean of y, (B, ...)."""

    @property
    @abstractmethod
    def epistemic_variance(self) -> Tensor:
        """Variance of y that comes from the weights, (B, ...): it shrinks with data."""

    @property
    @abstractmethod
    def aleatoric_variance(self) -> Tensor:
        """Variance of y that comes from noise, (B, ...): it does not shrink with data."""

    @abstractmethod
    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Returns the ends of the central interval that holds y with probability `level`, each (B, ...)."""

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
        """The mean."""
        return self.mean

    def uncertainty(self, score: str = "entropy") -> Tensor:
        """Returns the standard deviation of the first output, (B,), for every score."""
        return self.std.flatten(1)[:, 0] if self.std.ndim > 1 else self.std

    def summary(self) -> dict[str, Tensor]:
        """Returns the mean and the total variance."""
        return {"mean": self.mean, "variance": self.variance}

    def for_metrics(self, targets: Tensor) -> dict[str, Tensor]:
        """Returns log densities (B,); means, standard deviations, ends of 90 % intervals and targets (B, ...)."""
        lower, upper = self.interval(0.9)
        values = {"mean": self.mean, "std": self.std, "lower": lower, "upper": upper}
        return {**super().for_metrics(targets), **values, "y": targets.reshape(self.mean.shape)}


def check_level(level: float) -> None:
    """Raises where the level of an interval is not a number between 0 and 1."""
    if not (isinstance(level, Real) and 0.0 < level < 1.0):
        raise LapwingError(f"The level of interval() is {shown(level)}. Pass a number between 0 and 1: interval(0.9).")


def check_count(asked: str, name: str, count: int, numbers: int = 0) -> None:
    """Raises where a count is not a positive whole number, or where so many draws do not fit into memory."""
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
        raise LapwingError(
            f"{asked}({name}={shown(count)}) is not a number of draws. Pass a whole number of at least 1: "
            f"{asked}({name}=512)."
        )
    linalg.check_memory(f"{asked}({count})", count, numbers)
