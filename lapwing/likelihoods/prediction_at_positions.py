"""Predictions of outputs with positions: the prediction of a likelihood at each position, in the outputs' shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributions as dist

from ..covariance.latent_at_positions import LatentAtPositions
from ..data.frames import as_targets
from .predictions import Prediction


class PredictionAtPositions(Prediction):
    """The distribution of y at every position of B inputs, such as tokens or pixels.

    It has the attributes of the prediction at one position, in the shape of the outputs or of their positions: `probs`
    (B, T, C) or (B, C, H, W), `confidence`, `classes`, `entropy()` and `mutual_information()` (B, T) or (B, H, W); for
    a regression `mean`, `variance`, `std`, `interval()`, `quantile()`, `pit()`, `crps()` in the shape of the outputs.
    Positions are predicted separately, without covariances between positions, as the `rows` of one prediction.
    """

    def __init__(self, rows: Prediction, latent: LatentAtPositions) -> None:
        self.rows, self.latent = rows, latent

    def __getattr__(self, name: str) -> Any:
        """Returns the attribute of the rows' prediction, in the shape of the positions."""
        if name.startswith("_") or name in ("rows", "latent"):
            raise AttributeError(name)
        value = getattr(self.rows, name)
        if name in ("pit", "crps"):
            return lambda targets: self._whole(value(self._rows_of(targets)))
        if callable(value):
            return lambda *args, **options: self._whole(value(*args, **options))
        return self._whole(value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in dir(self.rows) if not name.startswith("_"))})

    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns the log probability or density of the targets at every position, (B, T) or (B, H, W).

        Labels that do not count get 0. There is one target for each position, or targets have the shape of the outputs.
        """
        return self.latent.places.whole(self.rows.log_prob(self._rows_of(targets)))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws y n times at every position, independently, (n, *shape of the targets)."""
        return self.latent.places.whole(self.rows.sample(n, generator), 1)

    def distribution(self) -> dist.Distribution:
        """Returns the prediction of all B T positions as a `torch.distributions` object with batch shape (B T,)."""
        return self.rows.distribution()

    @property
    def point(self) -> Tensor:
        return self._whole(self.rows.point)

    def uncertainty(self, score: str = "entropy") -> Tensor:
        return self._whole(self.rows.uncertainty(score))

    def summary(self) -> dict[str, Tensor]:
        return {name: self._whole(value) for name, value in self.rows.summary().items()}

    def pseudo_row(self, outputs: Tensor) -> Tensor | None:
        return self.rows.pseudo_row(self.latent.rows.mean)

    def for_metrics(self, targets: Tensor) -> dict[str, Tensor]:
        """Returns the tensors for metrics by name, with one row for each position that counts."""
        values, count = self.rows.for_metrics(self._rows_of(targets)), self.latent.places.count
        return values | {name: values[name] // count for name in ("sample", "entry") if name in values}

    def _rows_of(self, targets: Tensor) -> Tensor:
        targets = as_targets(targets, self.latent.rows.mean.device)
        return self.latent.places.targets(targets, self.latent.rows.mean.shape[-1])

    def _whole(self, value: Any) -> Any:
        """Returns rows in the shape of the positions, also inside tuples and predictions; other values unchanged."""
        if isinstance(value, tuple):
            return tuple(map(self._whole, value))
        if isinstance(value, Prediction):  # from scaled()
            return PredictionAtPositions(value, self.latent)
        has_rows = isinstance(value, Tensor) and value.shape[:1] == self.latent.rows.mean.shape[:1]
        return self.latent.places.whole(value) if has_rows else value

    def __repr__(self) -> str:
        shape = self.latent.places.shape(self.latent.rows.mean.shape[-1])
        return f"PredictionAtPositions(outputs {tuple(shape)}, {self.rows!r})"
