"""Ways to a subspace, compared with the exact posterior: what Figures 1 to 4 and 7 have in common.

The exact posterior is that of a subset of the training data, scaled to all of them, and so are all approximations that
are compared with it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.covariance import Latent, Subspace
from lapwing.covariance.terms import DenseTerm
from papers.common import drawing
from papers.common import results as stored
from papers.common.data import Batches
from papers.common.measures import relative_error
from papers.common.tables import grid, shown
from papers.common.training import train


def low_rank(rank: int, curvature: Any) -> lw.OptimalSubspace:
    """Returns the method with directions from 1 000 rows of J, from more if the rank is larger (appendix A.3)."""
    return lw.OptimalSubspace(rank, curvature, rows=max(1000, rank))


WAYS: dict[str, Callable[[int], lw.Method]] = {
    "low rank, GGN": lambda rank: low_rank(rank, lw.Full()),
    "low rank, KFAC": lambda rank: low_rank(rank, lw.KFAC()),
    "low rank, EKFAC": lambda rank: low_rank(rank, lw.EKFAC()),
    "low rank, diagonal": lambda rank: low_rank(rank, lw.Diagonal()),
    "low rank, prior": lambda rank: low_rank(rank, "prior"),
    "subset, magnitude": lambda rank: lw.SubsetOfWeights(rank, "magnitude"),
    "subset, diagonal": lambda rank: lw.SubsetOfWeights(rank, "diagonal"),
    "subset, random": lambda rank: lw.SubsetOfWeights(rank, "random"),
}
"""Name -> the method at a rank; "optimal" (Theorem 1 at the test inputs) is added to every comparison."""


RANKS = (10, 50, 100, 200, 500, 1000)
WAYS_TUNED = tuple(way for way in WAYS if way not in ("low rank, EKFAC", "subset, random"))
TUNED = ", prior tuned"
MINUS_FULL = "NLL minus full Laplace's"


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
    latent = Latent(mean, (DenseTerm(blocks.to(mean.dtype)),))
    return -float(posterior.likelihood.predict(latent).log_prob(y).double().mean())


def swag_from(
    model: nn.Module, loader: Batches, loss: Callable[[Tensor, Tensor], Tensor], learning_rate: float, snapshots: int
) -> lw.Posterior:
    """Runs SGD on a copy of a trained network and returns SWAG of its snapshots, five batches apart."""
    walker = copy.deepcopy(model)
    optimiser = torch.optim.SGD(walker.parameters(), learning_rate, momentum=0.9)
    collector = lw.SWAG.collector(walker, rank=20)
    batches = itertools.cycle(loader)
    for _ in range(snapshots):
        for batch in itertools.islice(batches, 5):
            train(walker, batch, [slice(None)], optimiser, loss)
        collector.snapshot()
    return lw.SWAG.from_snapshots(collector, loader)


COLOURS = {
    "full": "#222222", "optimal": "#000000", "low rank, GGN": "#8c564b", "low rank, KFAC": "#d62728",
    "low rank, EKFAC": "#ff9896", "low rank, diagonal": "#1f77b4", "low rank, prior": "#2ca02c",
    "subset, magnitude": "#9467bd", "subset, diagonal": "#17becf", "subset, SWAG": "#bcbd22",
    "subset, random": "#7f7f7f", "network": "#222222", "one temperature": "#e377c2", "one noise variance": "#e377c2",
}  # fmt: skip
CONSTANT = {"full": ":", "network": "-.", "one temperature": "--", "one noise variance": "--"}
"""Row that does not depend on s -> style of its line."""


LABELS = {
    "relative_error": "relative error of the covariance",
    "trace": "trace of the covariance",
    "nll": "NLL (nats per sample)",
}
"""Measure -> label of an axis."""


def draw(results: Mapping[str, Any]) -> None:
    """Draws every measure over s for the tasks of all experiments; above with λ = 1, below with λ tuned.

    A task without full Laplace has the trace alone.
    """
    tasks: dict[str, Any] = dict(results["tasks"])
    minus_full: dict[str, Any] = {}
    sources = []
    for path in sorted((Path(__file__).parent / "results").glob("*.json")):
        found = stored.load(path)["results"]
        if "tasks" in found:
            tasks |= found["tasks"]
            minus_full |= found.get(MINUS_FULL, {})
            sources.append(str(Path(__file__).parent / f"{path.stem}.py"))
    plain = [task for task in tasks if not task.endswith(TUNED)]
    for measure in ("relative_error", "trace", "nll"):
        shown = [task for task in plain if measure == "trace" or "full" in tasks[task]]
        figure, axes = drawing.panels(2, len(shown), (8.7, 6.4))
        for column, task in enumerate(shown):
            for axis, name in zip(axes[:, column], (task, task + TUNED), strict=True):
                ways = (minus_full if measure == "nll" and name.endswith(TUNED) else tasks).get(name)
                if ways:
                    curves(axis, ways, measure)
                    axis.set_title(name, fontsize=10)
                else:
                    axis.set_axis_off()
        drawing.legend_below(figure, 5)
        axes[0, 0].set_ylabel(LABELS[measure])
        axes[1, 0].set_ylabel(f"{MINUS_FULL} (nats)" if measure == "nll" else LABELS[measure])
        figure.suptitle("prior precision 1 above, tuned below; means and standard errors of the seeds", fontsize=11)
        drawing.save(figure, __file__, measure, sources)


def curves(axis: Any, ways: Mapping[str, Any], measure: str) -> None:
    """Draws one measure of every way over s."""
    for way, ranks in ways.items():
        if way in CONSTANT:
            if measure in ranks:
                axis.axhline(ranks[measure]["mean"], color=COLOURS[way], linestyle=CONSTANT[way], label=way)
            continue
        if points := {rank: row[measure] for rank, row in ranks.items() if measure in row}:
            style = "--" if way.startswith("subset") else "-"
            drawing.curve(axis, points, fmt=f".{style}", color=COLOURS[way], label=way)
    axis.set(xscale="log", xlabel="s")
    if measure == "trace":
        axis.set(yscale="log", ylim=(1e-3, None))


def table(tasks: Mapping[str, Any], names: Sequence[str], measure: str, ranks: Sequence[int], digits: int = 3) -> str:
    """Returns one measure of every way at some s, a group of columns for each task."""
    rows: dict[str, list[str]] = {}
    for way in tasks[names[0]]:
        cells = []
        for name in names:
            of = tasks[name].get(way, {})
            at = [of] * len(ranks) if way in CONSTANT else [of.get(str(rank), {}) for rank in ranks]
            cells += [shown(row.get(measure), digits) for row in at]
        if any(cells):
            rows[way] = cells
    return grid([f"{name}, s = {rank}" for name in names for rank in ranks], rows)
