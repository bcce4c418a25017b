"""Training of VaLLA's tanh MLPs, and a tuning that tunes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.tuning import Training, Tuning
from papers.common.data import Part
from papers.common.networks import mlp
from papers.common.training import Recipe, kept, seeded


def root_mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the RMSE of a batch, what the paper's regression networks minimise (appendix H.1)."""
    return F.mse_loss(outputs, targets).sqrt()


TOY = Recipe(root_mean_square, 12_000, batch=0)
TABLE = Recipe(F.mse_loss, 6000, decay=1e-4)
IMAGES = Recipe(F.cross_entropy, 6000, decay=1e-3)
"""Appendix H.1 has 20 000 steps, and for tables a rate and decay of 1e-2, under which kin40k's network is constant."""


def trained(widths: Sequence[int], data: Part, recipe: Recipe, seed: int, name: str) -> nn.Sequential:
    """Returns a trained tanh MLP, or one that was kept under the name of the data; it has the dtype of the inputs."""
    with seeded(seed):
        model = mlp(*widths).to(data[0].dtype)
    path = f"{name}_{'_'.join(map(str, widths))}_{recipe.steps}_{seed}"
    return kept(model, path, lambda: recipe.train(model, data, seed))


class Untuned(Tuning):
    """Tunes nothing, and has the evidence's bound made ready: tunings are compared on one fit."""

    def tune(self, posterior: lw.Posterior, training: Training = Training()) -> lw.Posterior:  # noqa: B008 (frozen)
        """Returns the posterior as it is."""
        return posterior
