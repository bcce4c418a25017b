"""`lw.mixture`: an ensemble of posteriors, with one temperature from held-out data."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..covariance import has_prior
from ..data.data import Data, kept_batches
from ..data.frames import check_data
from ..data.inputs import Samples
from ..display import Displayed
from ..errors import LapwingError, shown
from ..files import replacing
from ..likelihoods import P
from ..likelihoods.ensemble import mixed
from ..likelihoods.prediction_at_positions import PredictionAtPositions
from ..methods.temperature_scaling import refined
from ..network.entry import full_precision, outside_modes
from ..options import Rule, check_argument
from ..posterior import Posterior
from ..prediction.aim import DEFAULT_AIM
from ..tuning.held_out import sample_scores
from ..tuning.search import evenly, pull

log = logging.getLogger("lapwing")

FACTORS = evenly(-1.0, 1.0, 41)
"""Candidates for log10 of the factor that `validation=` chooses."""

SEVERAL = Rule(
    lambda given: isinstance(given, (list, tuple)) and len(given) > 1 and all(isinstance(m, Posterior) for m in given),
    "a list of at least two posteriors",
)


@dataclass(frozen=True, repr=False, eq=False)
class Mixture(Displayed, Generic[P]):
    """An equal mixture of posteriors. `lw.mixture` makes it.

    Attributes:
        members: the posteriors.
    """

    members: tuple[Posterior[P], ...]

    def __repr__(self) -> str:
        return f"<Mixture of {len(self.members)} posteriors, the first of them {self.members[0]!r}>"

    @full_precision
    def predict(self, x: Any, *args: Any, **options: Any) -> P:
        """Returns the mean of the members' predictive distributions, with the arguments of `Posterior.predict`.

        The prediction has `.members`. For classes `.mutual_information()` is the sum of `.between_members()` and
        `.within_members()`; for a regression `.epistemic_variance` is the sum of `.variance_between_members` and
        `.variance_within_members`. The batches of a `DataLoader` stay in memory until all members have read them.
        """
        if isinstance(x, (DataLoader, Iterator)):
            x = list(kept_batches(x))
        return mixed(tuple(member.predict(x, *args, **options) for member in self.members))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the members by `Posterior.save` to a new folder: `member-0.safetensors` and so on.

        `lw.mixture([lw.load(f"{folder}/member-{n}.safetensors", model) for n, model in enumerate(models)])` reads them.

        Raises:
            LapwingError: if the folder exists or cannot be made, or if the weights of a network have changed. Then no
                folder is left.
        """
        try:
            Path(folder).mkdir()
            Path(folder).rmdir()  # the folder appears when it is complete
        except (OSError, TypeError, ValueError) as error:
            raise LapwingError(
                f"The folder {shown(folder)} cannot be made, or exists already. Pass the path of a new one: "
                "mixture.save('ensemble')."
            ) from error
        with replacing(folder) as new:
            new.mkdir()
            for number, member in enumerate(self.members):
                member.save(new / f"member-{number}.safetensors")


@outside_modes
def mixture(posteriors: Sequence[Posterior[P]], validation: Any = None) -> Mixture[P]:
    """Returns an ensemble of posteriors, which predicts the mean of their distributions: `p(y|x) = 1/M Σ_m p_m(y|x)`.

    Calibrated members make an underconfident mixture, because their disagreement adds to the uncertainty of each. With
    `validation=` one factor between 0.1 and 10 multiplies the logit temperatures of all members, also given ones. It
    maximises the log likelihood of the mixture on held-out data. For regressions it multiplies the covariances of y, or
    only the noise variances if a method has no prior.

    A plain network can be a member. For a classifier write `lw.fit(model, held_out, lw.TemperatureScaling())`; for a
    regression `lw.fit(model, loader, lw.Diagonal(), prior_precision=1e9)`, whose weights have next to no spread.

    Args:
        posteriors: at least two, with `lw.Categorical()`, `lw.Bernoulli()` or `lw.Gaussian()` and equal outputs.
        validation: held-out data in any form that `lw.fit` accepts; None keeps the members as they are.

    Raises:
        LapwingError: if the posteriors are not at least two that fit together, or if the held-out data are invalid.

    Cost: with held-out data, one pass over them for each member, and memory for a copy of them.

    Source: Lakshminarayanan, Pritzel and Blundell 2017, section 2.4; one temperature: Rahaman and Thiery 2021.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(64, 4), torch.arange(64) % 3
        >>> networks = [torch.nn.Linear(4, 3).eval() for _ in range(3)]
        >>> ensemble = lw.mixture([lw.fit(network, (x[:32], y[:32])) for network in networks], (x[32:], y[32:]))
        >>> ensemble.predict(x).between_members().shape
        torch.Size([64])
    """
    check_argument("lw.mixture", "posteriors", posteriors, SEVERAL, "[lw.fit(model, loader) for model in models]")
    kinds = [_kind(member) for member in posteriors]
    if len({*kinds}) > 1 or not kinds[0].startswith(("categorical", "bernoulli", "gaussian", "student_t")):
        raise LapwingError(
            f"The members of lw.mixture have {' and '.join(dict.fromkeys(kinds))}. Fit all of them to the same data, "
            "with likelihood=lw.Categorical(), lw.Bernoulli() or lw.Gaussian(), on one device."
        )
    for member in posteriors:
        member._check_network()
    if validation is None:
        return Mixture(tuple(posteriors))
    check_data(validation, "lw.mixture")
    held_out = list(Data.of(validation, posteriors[0]))
    # p(y) of the mixture is the mean of p_m(y); if y are class probabilities, the score is a lower bound
    scores = torch.stack([_scores(member, held_out) for member in posteriors])  # (M, K, N)
    row = scores.double().logsumexp(0).mean(-1).nan_to_num(-torch.inf)
    if posteriors[0].logit_temperature is None:  # scores of labels count a pseudo-row already
        outputs = posteriors[0].tangent.outputs
        row += torch.tensor([pull(exponent, outputs) for exponent in FACTORS]) / scores.shape[-1]
    factor = 10 ** refined(FACTORS, row.tolist(), int(row.argmax()))
    log.info("Held-out data multiply the temperature of the mixture by %.3g", factor)
    return Mixture(tuple(_changed(member, factor) for member in posteriors))


def _kind(member: Posterior) -> str:
    """Returns the properties that all members must share, as text."""
    tangent = member.tangent
    outputs = f"{tangent.outputs} outputs{' at each position' if tangent.positions.several else ''}"
    columns = "".join(f", columns {names}" for names in member.columns)
    return f"{member.likelihood.name} likelihoods of {outputs}{columns} on {tangent.device}"


def _scores(member: Posterior, held_out: Sequence[Samples]) -> Tensor:
    """Returns the log likelihoods of N held-out samples, or positions of a regression, at each of `FACTORS`, (K, N)."""
    if member.logit_temperature is not None:
        candidates = [_changed(member, 10**exponent) for exponent in FACTORS]
        scores = sample_scores([member], lambda _: candidates, held_out, aim=member.aim or DEFAULT_AIM)
        return scores[0, :, 0]
    parts = []
    for samples in held_out:
        prediction, scaled = member.predict(samples.inputs), has_prior(member.covariance)
        targets = samples.targets.to(member.tangent.device)
        rows = [_scaled(prediction, 10**exponent, scaled).log_prob(targets).flatten() for exponent in FACTORS]
        parts.append(torch.stack(rows))
    return torch.cat(parts, 1)


def _scaled(prediction: Any, factor: float, latent_too: bool) -> Any:
    """Returns a prediction of a regression with its noise variances, and its latent too, multiplied by a factor."""
    if isinstance(prediction, PredictionAtPositions):
        return PredictionAtPositions(_scaled(prediction.rows, factor, latent_too), prediction.latent)
    latent = prediction.latent.scaled(factor) if latent_too else prediction.latent
    return replace(prediction, latent=latent, noise_variance=factor * prediction.noise_variance)


def _changed(member: Posterior[P], factor: float) -> Posterior[P]:
    """Returns a member with its logit temperature, or its covariance of y, multiplied by a factor."""
    if member.logit_temperature is not None:
        return replace(member, likelihood=member.likelihood.with_logit_temperature(factor * member.logit_temperature))
    noise, fitted = factor * member.noise_variance, getattr(member.likelihood, "input_noise", None)
    known = has_prior(member.covariance)
    changed = member.at(member.prior.precision / factor, noise) if known else member.with_noise(noise)
    if fitted is None:
        return changed
    return replace(changed, likelihood=replace(changed.likelihood, input_noise=fitted.times(factor)))  # type: ignore[type-var]
