"""Predictions of an ensemble, the equal mixture `p(y) = 1/M Σ_m p_m(y)` of the predictions of its M members.

The latent of the mixture has one draw for each member: logits of its probabilities, or its mean (M, B, C).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributions as dist

from ..covariance import LatentDraws, is_selected
from ..errors import LapwingError
from .bernoulli import BernoulliPrediction
from .categorical import ClassPrediction
from .links import SampledLink
from .mixtures import MixturePrediction
from .prediction_at_positions import PredictionAtPositions
from .predictions import Prediction
from .regression import RegressionPrediction


class _Ensemble:
    """An ensemble of classifiers. `field` names the log probabilities or log odds of a prediction."""

    field: ClassVar[str]
    members: tuple[Any, ...]

    def __init__(self, members: Sequence[Any]) -> None:
        latent = LatentDraws(torch.stack([getattr(member, self.field) for member in members]))
        given = {item.name: getattr(members[0], item.name) for item in fields(members[0])}
        super().__init__(**given | {self.field: getattr(SampledLink(), self.field)(latent), "latent": latent})
        object.__setattr__(self, "members", tuple(members))

    def between_members(self) -> Tensor:
        """Returns the entropy minus the mean entropy of the members, (B,) in nats: how much they disagree."""
        return super().mutual_information()  # type: ignore[misc]

    def within_members(self, *args: Any, **options: Any) -> Tensor:
        """Returns the mean of the members' mutual information, (B,) in nats, with the same arguments."""
        return torch.stack([member.mutual_information(*args, **options) for member in self.members]).mean(0)

    def mutual_information(self, *args: Any, **options: Any) -> Tensor:
        """Returns `between_members() + within_members()`, (B,): the epistemic part of the entropy in nats."""
        return self.between_members() + self.within_members(*args, **options)


class ClassMixture(_Ensemble, ClassPrediction):
    """The mean of the class probabilities of an ensemble."""

    field = "log_probs"


class BernoulliMixture(_Ensemble, BernoulliPrediction):
    """The mean of the probabilities of yes of an ensemble. The outputs are assumed independent."""

    field = "log_odds"


class RegressionMixture(MixturePrediction):
    """The mixture of the predictions of an ensemble of regressions.

    The variance is the sum of `aleatoric_variance`, `variance_within_members` and `variance_between_members`.
    """

    members: tuple[RegressionPrediction, ...]

    def __init__(self, members: Sequence[RegressionPrediction]) -> None:
        if any(is_selected(member.latent) for member in members):
            raise LapwingError(
                "The members of a mixture may select different outputs by lw.Linearized(outputs=...). Leave outputs= "
                "out: write mixture.predict(x)."
            )
        object.__setattr__(self, "members", tuple(members))

    @cached_property
    def components(self) -> dist.Distribution:
        """The Gaussians of the members with batch shape (B, M), or of their weight draws."""
        parts: list[Any] = [member.distribution() for member in self.members]
        if isinstance(parts[0], dist.MixtureSameFamily):  # S weight draws
            mean, std = (
                torch.cat([getattr(part.component_distribution, name) for part in parts], 1)
                for name in ("mean", "stddev")
            )
            return dist.Independent(dist.Normal(mean, std), 1)
        mean, std = (torch.stack([getattr(one, name) for one in self.members], 1) for name in ("mean", "std"))
        if mean.shape[-1] == 1:
            return dist.Independent(dist.Normal(mean, std), 1)
        return dist.MultivariateNormal(mean, torch.stack([part.covariance_matrix for part in parts], 1))

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

    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns the log density of the targets of each input, (B,); of the known ones if some may be missing."""
        logs = torch.stack([member.log_prob(targets) for member in self.members])
        return logs.logsumexp(0) - math.log(len(logs))


MIXTURES: dict[type, Any] = {
    ClassPrediction: ClassMixture, BernoulliPrediction: BernoulliMixture, RegressionPrediction: RegressionMixture,
}  # fmt: skip
"""Class of the members' predictions -> class of their mixture."""


def mixed(members: Sequence[Prediction]) -> Any:
    """Returns the equal mixture of predictions of the same inputs, in their shape if they have positions."""
    first = members[0]
    if isinstance(first, PredictionAtPositions):
        rows = mixed([member.rows for member in members])  # type: ignore[attr-defined]
        return PredictionAtPositions(rows, replace(first.latent, rows=rows.latent))
    return next(mixture for kind, mixture in MIXTURES.items() if isinstance(first, kind))(members)
