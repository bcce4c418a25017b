"""Latents of outputs with positions: one Gaussian for each position, in the shape of the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..errors import LapwingError
from ..network.positions import Places

if TYPE_CHECKING:
    from .latent import Latent
    from .latent_draws import LatentDraws, LinearDraws


class Described:
    """A latent that prints as its kind and the shape of its moments, and not as tensors.

    Attributes:
        has_positions: whether it is a `LatentAtPositions`. Ask `has_positions(latent)`; likewise for the others.
        is_selected: whether it is a `SelectedLatent`, of some of the outputs.
        has_factor: whether it is `LinearDraws`, whose covariance has the factor of its draws.
    """

    has_positions: ClassVar[bool] = False
    is_selected: ClassVar[bool] = False
    has_factor: ClassVar[bool] = False

    def without_wide_factors(self: Any) -> Any:
        """Returns the latent with wide factors multiplied out; most have none."""
        return self

    def __repr__(self: Any) -> str:
        return f"{type(self).__name__}(mean and variance {tuple(self.mean.shape)})"


@dataclass(frozen=True, repr=False)
class LatentAtPositions(Described):
    """`f_t(x) ~ N(mean, covariance)` for each position t, such as a token or a pixel.

    Attributes:
        rows: the latent of B T rows with C outputs each, which likelihoods and links take.
        places: where these rows lie in the outputs.
    """

    rows: Latent | LatentDraws | LinearDraws
    places: Places
    joint = False
    has_positions = True

    @property
    def mean(self) -> Tensor:
        """Means, in the shape of the outputs, such as (B, C, H, W)."""
        return self.places.whole(self.rows.mean)

    @property
    def variance(self) -> Tensor:
        """Marginal variances, in the shape of the outputs."""
        return self.places.whole(self.rows.variance)

    @property
    def std(self) -> Tensor:
        """Marginal standard deviations, in the shape of the outputs."""
        return self.places.whole(self.rows.std)

    @property
    def centred_variance(self) -> Tensor:
        """Variances of the outputs minus their average at each position, in the shape of the outputs."""
        return self.places.whole(self.rows.centred_variance)

    @property
    def covariance(self) -> Tensor:
        """Covariances of each position's outputs, such as (B, T, C, C) or (B, H, W, C, C)."""
        return self.places.whole(self.rows.covariance)

    @property
    def draws(self) -> Tensor | None:
        """Outputs under draws of the weights (S, ...), where it is made of some."""
        return None if self.rows.draws is None else self.places.whole(self.rows.draws, 1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws outputs (n, ...), positions independent unless the latent is made of draws; seed 0 where None."""
        return self.places.whole(self.rows.sample(n, generator), 1)

    def scaled(self, factor: float) -> LatentAtPositions:
        """Returns the latent with its covariance times a number >= 0."""
        return replace(self, rows=self.rows.scaled(factor))

    def tempered(self, temperature: float) -> LatentAtPositions:
        """Returns the latent with its mean divided by a temperature; the covariance stays."""
        return replace(self, rows=self.rows.tempered(temperature))

    def compact(self, covariances: bool) -> LatentAtPositions:
        """Returns a detached float64 copy that keeps covariances, or variances alone."""
        return replace(self, rows=self.rows.compact(covariances))

    def without_wide_factors(self) -> LatentAtPositions:
        return replace(self, rows=self.rows.without_wide_factors())

    def with_checks(self) -> LatentAtPositions:
        """Returns the latent for the user: moments that are not finite are refused."""
        return replace(self, rows=self.rows.with_checks())

    @staticmethod
    def concatenate(parts: Sequence[LatentAtPositions]) -> LatentAtPositions:
        """Joins the latents of consecutive batches.

        Raises:
            LapwingError: for batches whose inputs differ in their positions.
        """
        first = parts[0]
        sizes = {part.places.sizes for part in parts}
        if len(sizes) > 1:
            raise LapwingError(
                f"The batches of the loader have outputs at {' and '.join(map(str, sorted(sizes)[:3]))} positions, "
                "which make no tensor. Predict each batch with posterior.predict(x)."
            )
        kind: Any = type(first.rows)
        rows = kind.concatenate([part.rows for part in parts])
        places = replace(first.places, samples=sum(part.places.samples for part in parts))
        return LatentAtPositions(rows, places)
