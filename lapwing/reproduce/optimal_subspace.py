"""Ways to a subspace, compared (Faller and Martin 2025): Figures 1 to 5 and 7.

Every function returns plain numbers; `python -m benchmarks.papers` runs them on the tasks of `subspace_tasks.py` and
writes the results. The exact posterior is that of a subset of the training data, scaled to all of them, and so are all
approximations that are compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw

from ..covariance import Latent, Subspace
from ..covariance.output import Dense
from ..evaluation.measures import relative_error
from .loaders import Batches

WAYS: dict[str, Callable[[int], lw.Method]] = {
    "low rank, GGN": lambda rank: lw.OptimalSubspace(rank, lw.Full()),
    "low rank, KFAC": lambda rank: lw.OptimalSubspace(rank, lw.KFAC()),
    "low rank, EKFAC": lambda rank: lw.OptimalSubspace(rank, lw.EKFAC()),
    "low rank, diagonal": lambda rank: lw.OptimalSubspace(rank, lw.Diagonal()),
    "low rank, prior": lambda rank: lw.OptimalSubspace(rank, "prior"),
    "subset, magnitude": lambda rank: lw.SubsetOfWeights(rank, "magnitude"),
    "subset, diagonal": lambda rank: lw.SubsetOfWeights(rank, "diagonal"),
    "subset, random": lambda rank: lw.SubsetOfWeights(rank, "random"),
}
"""Name -> the method at a rank; "optimal" (Theorem 1 at the test inputs) is added to every comparison."""


@dataclass(frozen=True)
class Task:
    """A trained network and its data.

    Attributes:
        model: the network, in eval mode.
        train: the part of the training data that the posteriors sum over.
        data_size: N.
        likelihood: Categorical, or Gaussian with its noise variance.
        swag: a posterior from the end of training, or None.
    """

    model: nn.Module
    train: Batches
    data_size: int
    likelihood: lw.Likelihood
    swag: lw.Posterior | None = None

    def tuned_precision(self) -> float:
        """Returns the prior precision of the best evidence under KFAC."""
        found = lw.fit(
            self.model, self.train, lw.KFAC(), likelihood=self.likelihood, data_size=self.data_size, memory=2**33
        ).prior_precision
        assert isinstance(found, float)
        return found

    def fit(self, method: lw.Method, precision: float, seed: int) -> lw.Posterior:
        """Fits at a given prior precision."""
        return lw.fit(
            self.model, self.train, method, likelihood=self.likelihood, data_size=self.data_size, tune=None,
            prior_precision=precision, seed=seed, memory=2**33,
        )  # fmt: skip


def compare_subspaces(
    task: Task,
    inputs: Mapping[str, tuple[Tensor, Tensor]],
    ranks: Sequence[int],
    precision: float,
    seed: int,
    ways: Sequence[str] = tuple(WAYS),
    exact: bool = True,
) -> dict[str, Any]:
    """Measures every way to a subspace at several ranks.

    Args:
        task: network and data.
        inputs: name -> inputs and targets: the test set X, and foreign ones.
        ranks: s; each way is fitted once, at the largest.
        precision: λ.
        seed: of subsets and weights.
        ways: which of `WAYS`.
        exact: whether the full posterior can be had; without it there is the trace alone.

    Returns:
        input set -> way -> rank -> relative error (equation 20), trace (equation 25) and NLL (equation 30); way "full"
        has its trace and NLL, and MAP its NLL.
    """
    found: dict[str, Any] = {name: {} for name in inputs}
    reference = {}
    if exact:
        full = task.fit(lw.Full(), precision, seed)
        for name, (x, y) in inputs.items():
            sigma = _joint(full, x)
            reference[name] = sigma
            found[name]["full"] = _measures(full, x, y, sigma, None)
            values, vectors = torch.linalg.eigh(sigma)
            values, vectors = values.flip(0), vectors.flip(1)
            found[name]["optimal"] = {
                rank: {
                    "relative_error": float(values[rank:].norm() / values.norm()),
                    "trace": float(values[:rank].sum()),
                    "nll": _optimal_nll(full, x, y, (vectors[:, :rank] * values[:rank]) @ vectors[:, :rank].T),
                }
                for rank in ranks
            }
    methods = {name: WAYS[name](max(ranks)) for name in ways}
    if task.swag is not None:
        methods["subset, SWAG"] = lw.SubsetOfWeights(max(ranks), task.swag)
    for way, method in methods.items():
        posterior = task.fit(method, precision, seed)
        covariance = posterior.covariance
        assert isinstance(covariance, Subspace)
        for rank in ranks:
            shorter = replace(posterior, covariance=covariance.with_rank(rank))
            for name, (x, y) in inputs.items():
                row = found[name].setdefault(way, {})
                row[rank] = _measures(shorter, x, y, _joint(shorter, x), reference.get(name))
    return found


def _joint(posterior: lw.Posterior, x: Tensor) -> Tensor:
    """Returns the epistemic covariance of all outputs at all inputs (n C, n C), float64."""
    return posterior.latent(x, joint=True).covariance.flatten(0, 1).flatten(1).double()


def _measures(posterior: lw.Posterior, x: Tensor, y: Tensor, sigma: Tensor, exact: Tensor | None) -> dict[str, float]:
    found = {"trace": float(sigma.trace()), "nll": -float(posterior.predict(x).log_prob(y).double().mean())}
    if exact is not None:
        found["relative_error"] = float(relative_error(sigma, exact))
    return found


def _optimal_nll(posterior: lw.Posterior, x: Tensor, y: Tensor, sigma: Tensor) -> float:
    """Returns the NLL under a covariance of all outputs at all inputs."""
    with torch.no_grad():
        mean = posterior.tangent.outputs_of(x)
    count, width = mean.shape
    blocks = sigma.reshape(count, width, count, width).diagonal(dim1=0, dim2=2).movedim(-1, 0)  # (n, C, C)
    latent = Latent(mean, (Dense(blocks.to(mean.dtype)),))
    return -float(posterior.likelihood.predict(latent).log_prob(y).double().mean())
