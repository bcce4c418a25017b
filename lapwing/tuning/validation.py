"""Tuning on held-out data: the prior precision, and the rank, with the best log likelihood there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..network import batches
from ..network.eager import outside_modes
from ..posterior import Posterior
from .base import Training, Tuning
from .evidence import Evidence
from .held_out import Grid, best_of, with_ranks


@dataclass(frozen=True)
class Validation(Tuning):
    """Chooses one scalar δ, and σ², by the mean log likelihood of held-out data, linearised and with the default link.

    All candidates are scored from one contraction of each batch: a candidate costs next to nothing. The best
    point of the grid is refined by a parabola through its neighbours. Where the noise variance is None, all pairs
    (δ, σ²) are compared, within three decades of the evidence's σ².

    Args:
        loader: held-out (inputs, targets) batches, not the training data.
        decades: the range of log10 δ.
        points: candidates.
        ranks: for subspaces, numbers of leading directions to choose among beside all of them.

    Raises:
        LapwingError: for a range or number that makes no grid.

    Cost: one pass over the loader: one record and contraction a batch, and `points` variances (or Gram matrices, if
    the link reads covariances) an output.

    Example:
        >>> import torch, lapwing as lw
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(64, 4), torch.arange(64) % 3
        >>> model, held_out = torch.nn.Linear(4, 3).eval(), [(x[32:], y[32:])]
        >>> posterior = lw.fit(model, [(x[:32], y[:32])], lw.KFAC(), tune=lw.Validation(held_out))
        >>> 1e-5 <= posterior.prior_precision <= 1e7
        True
    """

    loader: Iterable[Any]
    decades: tuple[float, float] = (-5.0, 7.0)
    points: int = 25
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Checks loader and grid."""
        batches.check_loader(self.loader, "Validation")
        Grid(self.decades, self.points).check("Validation")

    def reads_evidence(self, prior_open: bool, noise_open: bool) -> bool:
        """For an open noise variance alone, whose search starts there."""
        return noise_open

    @outside_modes
    def tune(self, posterior: Posterior, training: Training = Training()) -> Posterior:  # noqa: B008 (frozen)
        """Returns the posterior at the best δ and rank."""
        if posterior.tuned and not self.ranks:
            return posterior
        start = posterior if posterior.noise_fixed else Evidence().tune(posterior)
        return best_of(with_ranks(start, self.ranks), Grid(self.decades, self.points), self.loader)
