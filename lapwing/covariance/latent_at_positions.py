"""Latents of outputs with positions: one Gaussian per position, in the shape of the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..errors import LapwingError
from ..linalg import doubled, possible
from ..network.positions import Places
from .terms import standard_deviation

if TYPE_CHECKING:
    from .latent import Latent
    from .latent_draws import LatentDraws, LinearDraws


class Described:
    """A latent that prints as its kind and shape. Functions such as `has_positions(latent)` read its traits."""

    has_positions: ClassVar[bool] = False  # it is a `LatentAtPositions`
    is_selected: ClassVar[bool] = False  # it is a `SelectedLatent`, of some of the outputs
    has_factor: ClassVar[bool] = False  # it is `LinearDraws`, whose covariance has the factor of its draws

    if TYPE_CHECKING:  # what some latents have, for the code of users who asked for it

        @property
        def standard_error(self) -> Tensor: ...

        @property
        def outputs(self) -> Tensor: ...

    @property
    def std(self: Any) -> Tensor:
        """Marginal standard deviations, in the shape of the mean."""
        return standard_deviation(self.variance)

    def covariance_times(self: Any, vectors: Tensor) -> Tensor:
        """Returns the covariance of each input's outputs times a vector, (B, C). Covariances of inputs do not enter."""
        matrices = self.covariance.diagonal(dim1=0, dim2=2).movedim(-1, 0) if self.joint else self.covariance
        return torch.einsum("bcd,bd->bc", matrices, vectors)

    def tempered(self: Any, temperature: float) -> Any:
        """Returns the latent with its mean divided by a temperature and the same covariance."""
        return replace(self, mean=self.mean / temperature)

    def mapped(self: Any, matrix: Tensor, shift: Tensor) -> Any:
        """Returns the latent of `M f + b` for M (C, C) and b (C,); logits of impossible classes stay."""
        raise LapwingError(
            f"Matrix scaling mixes all logits, and a {type(self).__name__} holds only some. Leave outputs= out of "
            "lw.Linearized(outputs=...)."
        )

    def compact(self: Any, covariances: bool) -> Any:
        """Returns a detached float64 copy; a `Latent` keeps its covariances, or only its variances."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: doubled(value.detach()) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def without_wide_factors(self: Any) -> Any:
        """Returns the latent with wide factors multiplied out. Most latents have none."""
        return self

    def __repr__(self: Any) -> str:
        return f"{type(self).__name__}(mean and variance {tuple(self.mean.shape)})"


def moved(values: Tensor, matrix: Tensor, shift: Tensor) -> Tensor:
    """Returns `M f + b` for outputs f (..., C). Logits of impossible classes stay, and enter no other logit."""
    mask = possible(values)
    return torch.where(mask, torch.where(mask, values, 0.0) @ matrix.T + shift, values)


@dataclass(frozen=True, repr=False)
class LatentAtPositions(Described):
    """`f_t(x) ~ N(mean, covariance)` for each position t, such as a token or a pixel."""

    rows: Latent | LatentDraws | LinearDraws  # of B T rows with C outputs each, as likelihoods and links read it
    places: Places  # positions of these rows in the outputs
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
    def centred_variance(self) -> Tensor:
        """Variances of the outputs minus their average at each position, in the shape of the outputs."""
        return self.places.whole(self.rows.centred_variance)

    @property
    def covariance(self) -> Tensor:
        """Covariances of the outputs at each position, such as (B, T, C, C) or (B, H, W, C, C)."""
        return self.places.whole(self.rows.covariance)

    @property
    def draws(self) -> Tensor | None:
        """Outputs under draws of the weights (S, ...), or None if the latent has no draws."""
        return None if self.rows.draws is None else self.places.whole(self.rows.draws, 1)

    @property
    def standard_error(self) -> Tensor:
        """Monte Carlo standard errors of the variances, in their shape, for `lw.Linearized(draws=...)`."""
        return self.places.whole(self.rows.standard_error)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws outputs (n, ...), independently per position unless the latent has draws. None means seed 0."""
        return self.places.whole(self.rows.sample(n, generator), 1)

    def scaled(self, factor: float) -> LatentAtPositions:
        return replace(self, rows=self.rows.scaled(factor))

    def tempered(self, temperature: float) -> LatentAtPositions:
        return replace(self, rows=self.rows.tempered(temperature))

    def mapped(self, matrix: Tensor, shift: Tensor) -> LatentAtPositions:
        return replace(self, rows=self.rows.mapped(matrix, shift))

    def compact(self, covariances: bool) -> LatentAtPositions:
        return replace(self, rows=self.rows.compact(covariances))

    def without_wide_factors(self) -> LatentAtPositions:
        return replace(self, rows=self.rows.without_wide_factors())

    def with_checks(self) -> LatentAtPositions:
        return replace(self, rows=self.rows.with_checks())

    @staticmethod
    def concatenate(parts: Sequence[LatentAtPositions]) -> LatentAtPositions:
        """Joins the latents of consecutive batches; raises if the batches have different positions."""
        first = parts[0]
        sizes = {part.places.sizes for part in parts}
        if len(sizes) > 1:
            raise LapwingError(
                f"The batches of the loader have outputs at {' and '.join(map(str, sorted(sizes)[:3]))} positions, "
                "so they do not form one tensor. Predict each batch with posterior.predict(x)."
            )
        kind: Any = type(first.rows)
        rows = kind.concatenate([part.rows for part in parts])
        places = replace(first.places, samples=sum(part.places.samples for part in parts))
        return LatentAtPositions(rows, places)
