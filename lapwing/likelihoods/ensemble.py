"""Predictions of an ensemble, the equal mixture `p(y) = 1/M Σ_m p_m(y)` of the predictions of its M members.

The latent of the mixture has one draw for each member: logits of its probabilities, or its mean (M, B, C).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..covariance import LatentDraws, is_selected
from ..errors import LapwingError
from .bernoulli import BernoulliPrediction
from .categorical import ClassPrediction
from .families import MixturePrediction
from .links import SampledLink
from .mixtures import NormalsPrediction
from .prediction_at_positions import PredictionAtPositions
from .regression import RegressionPrediction
from .student import GaussianPlusNoise

NEARLY_NORMAL = 1e6
"""Degrees of freedom of members with normal noise in the `distribution()` of an ensemble with Student t noise."""


@dataclass(frozen=True, eq=False, repr=False)
class _Ensemble:
    """An ensemble of classifiers, whose latent holds one draw for each member."""

    members: tuple[Any, ...] = ()

    def between_members(self) -> Tensor:
        """Returns the entropy minus the mean entropy of the members, (B,) in nats: how much they disagree."""
        return super().mutual_information()  # type: ignore[misc]

    def within_members(self, *args: Any, **options: Any) -> Tensor:
        """Returns the mean of the members' mutual information, (B,) in nats, with the same arguments."""
        return torch.stack([member.mutual_information(*args, **options) for member in self.members]).mean(0)

    def mutual_information(self, *args: Any, **options: Any) -> Tensor:
        """Returns `between_members() + within_members()`, (B,): the epistemic part of the entropy in nats."""
        return self.between_members() + self.within_members(*args, **options)


@dataclass(frozen=True, eq=False, repr=False)
class ClassMixture(_Ensemble, ClassPrediction):
    """The mean of the class probabilities of an ensemble."""


@dataclass(frozen=True, eq=False, repr=False)
class BernoulliMixture(_Ensemble, BernoulliPrediction):
    """The mean of the probabilities of yes of an ensemble. The outputs are assumed independent."""


@dataclass(frozen=True, eq=False)
class RegressionMixture(NormalsPrediction, MixturePrediction):
    """The mixture of the predictions of an ensemble of regressions.

    The variance is the sum of `aleatoric_variance`, `variance_within_members` and `variance_between_members`.
    """

    members: tuple[RegressionPrediction, ...] = ()

    @property
    def latent(self) -> LatentDraws:
        """The means of the members, as draws (M, B, C)."""
        return LatentDraws(torch.stack([member.mean for member in self.members]))

    @property
    def variance_between_members(self) -> Tensor:
        """Variance over members of their means, (B, C)."""
        return self.latent.draws.var(0, correction=0)

    @property
    def variance_within_members(self) -> Tensor:
        """Mean over members of their epistemic variances, (B, C)."""
        return torch.stack([member.epistemic_variance for member in self.members]).mean(0)

    @property
    def epistemic_variance(self) -> Tensor:
        """`variance_between_members + variance_within_members`, (B, C)."""
        return self.variance_between_members + self.variance_within_members

    @property
    def aleatoric_variance(self) -> Tensor:
        """Mean over members of their noise variances, (B, C)."""
        return torch.stack([member.aleatoric_variance for member in self.members]).mean(0)

    @property
    def covariance(self) -> Tensor:
        """Mean over members of their covariances plus the covariance of their means, (B, C, C)."""
        moved = (self.latent.draws - self.mean).movedim(0, -1)  # (B, C, M)
        within = torch.stack([member.covariance for member in self.members]).mean(0)
        return within + moved @ moved.mT / len(self.members)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns the log density of the targets of each input, (B,), over the known targets if some are missing."""
        logs = torch.stack([member.log_prob(targets) for member in self.members])
        return logs.logsumexp(0) - math.log(len(logs))

    @property
    def _normals(self) -> tuple[Tensor, Tensor, Tensor]:
        parts = zip(*(member._normals for member in self.members), strict=True)
        means, variances, weights = (torch.cat(values) for values in parts)
        return means, variances, weights / len(self.members)


def mixed(members: tuple[Any, ...]) -> Any:
    """Returns the equal mixture of predictions of the same inputs, in their shape if they have positions."""
    first = members[0]
    if isinstance(first, list):  # a prediction for each batch of unequal lengths
        return [mixed(batch) for batch in zip(*members, strict=True)]
    if isinstance(first, PredictionAtPositions):
        rows = mixed(tuple(member.rows for member in members))
        return PredictionAtPositions(rows, replace(first.latent, rows=rows.latent))
    if isinstance(first, RegressionPrediction):
        if any(is_selected(member.latent) for member in members):
            raise LapwingError(
                "The members of a mixture may select different outputs by lw.Linearized(outputs=...). Leave outputs= "
                "out: write mixture.predict(x)."
            )
        # the laws of the members have batch shape (B, M), or one entry for each of their weight draws
        tails = any(member.df is not None for member in members)
        laws = [replace(one, df=(one.df or NEARLY_NORMAL) if tails else None)._law(joint=False) for one in members]
        join: Any = torch.stack if first.latent.draws is None else torch.cat
        parts = (join(values, 1) for values in zip(*(law.parts for law in laws), strict=True))
        return RegressionMixture(GaussianPlusNoise(*parts), members)
    if isinstance(first, ClassPrediction):
        latent = LatentDraws(torch.stack([member.log_probs for member in members]))
        return ClassMixture(SampledLink().log_probs(latent), latent, first.link, first.ignore_index, members=members)
    latent = LatentDraws(torch.stack([member.log_odds for member in members]))
    odds = SampledLink().log_odds(latent)
    return BernoulliMixture(odds, latent, first.link, first.soft_targets, first.missing, members)
