"""Latents of outputs with positions: one Gaussian per position, in the shape of the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import TypeIs

from ..network.positions import Places
from .latent import BaseLatent, JointLatent, Latent, SelectedLatent
from .latent_draws import LatentDraws, LinearDraws


def _in_shape(name: str) -> Any:
    """Returns the property of the rows with this name, in the shape of the outputs or of their positions."""
    return property(lambda self: self.places.whole(getattr(self.rows, name)))


def _over_rows(name: str) -> Any:
    """Returns the method that changes the rows by their method of this name."""

    def method(self: LatentAtPositions, *arguments: Any, **options: Any) -> LatentAtPositions:
        return replace(self, rows=getattr(self.rows, name)(*arguments, **options))

    return method


@dataclass(frozen=True, repr=False)
class LatentAtPositions(BaseLatent):
    """`f_t(x) ~ N(mean, covariance)` for each position t, such as a token or a pixel.

    `mean`, `variance`, `centred_variance` (of the outputs minus their average at each position) and `standard_error`
    (of the variances, for `lw.Linearized(draws=...)`) have the shape of the outputs, such as (B, C, H, W). `covariance`
    has the covariances of the outputs at each position, such as (B, T, C, C) or (B, H, W, C, C).
    """

    rows: Latent | LatentDraws | LinearDraws  # of B T rows with C outputs each, as likelihoods and links read it
    places: Places  # positions of these rows in the outputs
    joint = False
    mean, variance, centred_variance = map(_in_shape, ("mean", "variance", "centred_variance"))
    covariance, standard_error = map(_in_shape, ("covariance", "standard_error"))
    scaled, tempered, mapped, compact = map(_over_rows, ("scaled", "tempered", "mapped", "compact"))
    without_wide_factors, with_checks = map(_over_rows, ("without_wide_factors", "with_checks"))

    @property
    def draws(self) -> Tensor | None:
        """Outputs under draws of the weights (S, ...), or None if the latent has no draws."""
        return None if self.rows.draws is None else self.places.whole(self.rows.draws, 1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws outputs (n, ...), independently per position unless the latent has draws. None means seed 0."""
        return self.places.whole(self.rows.sample(n, generator), 1)

    @staticmethod
    def concatenate(parts: Sequence[LatentAtPositions]) -> LatentAtPositions:
        """Joins the latents of consecutive batches with the same positions."""
        first = parts[0]
        kind: Any = type(first.rows)
        rows = kind.concatenate([part.rows for part in parts])
        places = replace(first.places, samples=sum(part.places.samples for part in parts))
        return LatentAtPositions(rows, places)


AnyLatent = Latent | JointLatent | LinearDraws | LatentDraws | LatentAtPositions


def has_positions(latent: AnyLatent) -> TypeIs[LatentAtPositions]:
    """Whether a latent has positions."""
    return isinstance(latent, LatentAtPositions)


def is_selected(latent: AnyLatent) -> TypeIs[SelectedLatent]:
    """Whether a latent is one of some of the outputs."""
    return isinstance(latent, SelectedLatent)


def has_factor(latent: AnyLatent) -> TypeIs[LinearDraws]:
    """Whether the covariance of a latent has the factor of its draws."""
    return isinstance(latent, LinearDraws)
